"""What HF's `generate` is asked for: settings that specdec applies, leaves to HF's processors or
does not support, processors that keep no state, and what a call was given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import PrefixConstrainedLogitsProcessor, logits_process, utils

FILTERS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
"""Settings of HF that `LogitsFilter` applies, with the value that does nothing."""

BESIDE_FILTERS = {
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "watermarking_config": None,
    "renormalize_logits": False,
}
"""Settings that HF applies between or after these four."""

BEFORE_FILTERS = {
    "sequence_bias": None,
    "encoder_repetition_penalty": 1.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "remove_invalid_values": False,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
"""Settings that HF applies before them, also in greedy decoding."""

STATELESS = {
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.MinPLogitsWarper,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.NoRepeatNGramLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopHLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.WatermarkLogitsProcessor,  # seeds its generator anew from the ids of every call
}
"""Logits processors for text whose scores depend on their arguments alone. Their subclasses are not
among them.
"""

_SEARCH = (
    "specdec decodes greedily or samples, with num_return_sequences=n for several samples of a "
    "prompt; use HF generate for beam or contrastive search and for constraints"
)
_ONLY_HF = (
    "no result holds them (a drafter's feature_layers read hidden states in the loop); leave it "
    "out, or use HF generate"
)
_ASSISTED = (
    "it belongs to HF's assisted generation; leave it out: the generator's drafter drafts, with "
    "num_draft_tokens of its own"
)
HEALING = (
    "it changes the prompts, which a result holds as they were passed; heal them first, with "
    "input_ids = model.heal_tokens(input_ids, tokenizer), and leave token_healing out"
)
"""Why `token_healing` is no option, and what to do."""
_CACHES = "a generator keeps keys and values in caches of its own; leave it out"
UNSUPPORTED = {
    "num_beams": ((1,), _SEARCH),
    "penalty_alpha": ((0,), _SEARCH),
    "dola_layers": ((0,), _SEARCH),
    "constraints": ((), _SEARCH),
    "force_words_ids": ((), _SEARCH),
    "output_attentions": ((False,), _ONLY_HF),
    "output_hidden_states": ((False,), _ONLY_HF),
    "use_mtp": ((False,), _ASSISTED),
    "prompt_lookup_num_tokens": ((0,), _ASSISTED),
    "assistant_early_exit": ((0,), _ASSISTED),
    "num_assistant_tokens": ((20,), _ASSISTED),
    "num_assistant_tokens_schedule": (("constant", "heuristic"), _ASSISTED),
    "assistant_confidence_threshold": ((0.4,), _ASSISTED),
    "assistant_lookbehind": ((10,), _ASSISTED),
    "target_lookbehind": ((10,), _ASSISTED),
    "assistant_ensemble_weight": ((), _ASSISTED),
    "speculation_type": ((), _ASSISTED),
    "is_assistant": ((False,), _ASSISTED),
    "guidance_scale": (
        (1,),
        "it reads a second text, without the prompt, beside every token; leave it out, or use HF "
        "generate",
    ),
}
"""Settings of other searches, HF's defaults of them, and why nothing else may be asked for."""

UNUSED = {
    "cache_implementation": (("hybrid",), _CACHES),
    "cache_config": ((), _CACHES),
    "max_cache_len": ((), _CACHES),
    "prefill_chunk_size": ((), "SpeculativeGenerator(prefill_chunk_size=) sets it; leave it out"),
    "compile_config": ((), "SpeculativeGenerator(graphs=) says what is captured; leave it out"),
}
"""Settings of how HF computes, which change nothing here, values that HF ignores, too, and why."""


SAMPLE, PREFILL = "_sample", "_prefill"
"""Methods by which HF's `generate` reads prompts and chooses tokens. The self-test of
a model type whose prompts are pictures raises ValueError where they have other names.
"""


def processors_of(model: PreTrainedModel, config: GenerationConfig, **call: Any) -> Any:
    """The logits processors that HF makes of a configuration for a call; private in HF, and as
    needed as `generate`: without it, an AttributeError names it.
    """
    return model._get_logits_processor(config, **call)


def speculative_sampling() -> Callable:
    """HF's rule of assisted generation, which `certify` tries; needed nowhere else."""
    return utils._speculative_sampling


def prefix_function(processor: PrefixConstrainedLogitsProcessor) -> Any:
    """What says which tokens may follow; the processor itself where the name is another, which is
    then taken for one that may keep state.
    """
    return getattr(processor, "_prefix_allowed_tokens_fn", processor)


def call_of_generate() -> dict[str, Any]:
    """What HF's `generate` was given, in the call that this one comes from; empty if there is none.
    It can only be seen in the frames: `generate` itself, and the wrapper around it, which still has
    the keywords that HF has taken out.
    """
    of_hf = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not of_hf:
        frame = frame.f_back
    if frame is None:
        return {}
    given = {} if frame.f_back is None else frame.f_back.f_locals.get("kwargs", {})
    return {**(given if isinstance(given, dict) else {}), **frame.f_locals}
