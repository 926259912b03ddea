"""Reads Hugging Face generation options the way HF reads them: HF itself resolves them.

`model.generate` accepts a decoding function (`custom_generate`) and hands it everything that it has
resolved from arguments, `generation_config` and the model's defaults. A function that only
keeps its arguments receives exactly what plain `generate` would use, including every logits
processor and stopping criterion of a configuration.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from specdec.request.hook import with_stop_strings
from specdec.request.sampling import BESIDE_WARPS, Sampling, with_config

_WARPERS = {  # in HF's order, with the attribute that holds the value
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


@dataclass(frozen=True, eq=False)
class Options:
    """What a generation was asked to do.

    Args:
        sampling: the record of what is drawn from.
        warp: keyword arguments of `Warp`; every value a scalar or one per row.
        processors: logits processors that need the tokens so far, applied before the warp; as HF
            builds them for the padded batch.
        processors_alone: returns those that HF builds for one row's prompt `[1, t]` without its
            padding; `None` where processors see the padded batch.
        criteria: stopping criteria other than length and end of sequence, asked by the host.
        eos: token ids that end a row.
        pad: fills a row after its end.
        max_length: tokens of a row's padded prompt and its new tokens together.
        padding_id: the id that stands for padding in prompts passed without a mask, where HF would
            take it so.
        draft_probs: the sampler gets the probabilities that draft tokens were drawn from.
        num_draft_tokens: of each step; `None` for the drafter's own K.
        num_sequences: rows of each prompt.
        keeps_scores: the result holds the logits that every token was sampled from.
        keeps_logits: likewise the target's own, before processors.
        tokenizer: of the target, where the caller named it.
    """

    sampling: Sampling = field(default_factory=Sampling)
    warp: dict = field(default_factory=dict)
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    processors_alone: Callable[[Tensor], LogitsProcessorList] | None = None
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    eos: tuple[int, ...] = ()
    pad: int = 0
    max_length: int = 0
    padding_id: int | None = None
    draft_probs: bool = True
    num_draft_tokens: int | None = None
    num_sequences: int = 1
    keeps_scores: bool = False
    keeps_logits: bool = False
    tokenizer: PreTrainedTokenizerBase | None = None

    @classmethod
    def from_resolved(
        cls,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> "Options":
        """Takes what HF hands to a decoding function.

        Args:
            processors: HF's list, warpers last when sampling.
            criteria: HF's list, length and end of sequence included.
            config: the resolved configuration.
            tokenizer: see `Options`.

        Raises:
            ValueError: the configuration asks for something that specdec does not do.
        """
        _refuse_unsupported(config)
        eos = [
            e for c in criteria if isinstance(c, EosTokenCriteria) for e in c.eos_token_id.tolist()
        ]
        limits = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
        others = [c for c in criteria if not isinstance(c, EosTokenCriteria | MaxLengthCriteria)]
        padding_id = config.pad_token_id
        pad = padding_id if padding_id is not None else next(iter(eos), 0)
        history, warp = _split_warpers(processors, config)
        return cls(
            sampling=Sampling.resolved(config, eos),
            warp={"temperature": 1.0 if config.do_sample else 0.0} | warp,
            processors=LogitsProcessorList(history),
            criteria=StoppingCriteriaList(others),
            eos=tuple(eos),
            pad=pad,
            max_length=min(limits),
            padding_id=None if padding_id in eos else padding_id,
            num_sequences=config.num_return_sequences or 1,
            keeps_scores=bool(config.output_scores),
            keeps_logits=bool(config.output_logits),
            tokenizer=tokenizer,
        )

    def check_sampling(self, given: dict) -> None:
        """Raises `ValueError` for sampling values that were given to greedy options."""
        if given and self.is_greedy:
            name, value = next(iter(given.items()))
            raise ValueError(
                f"{name}={value!r} has no effect without sampling; pass do_sample=True with it, or "
                "leave it out"
            )

    @property
    def is_greedy(self) -> bool:
        """HF decodes greedily with these options."""
        return self.warp == {"temperature": 0.0}

    def with_warp(self, own_warpers: list[str], **values) -> "Options":
        """These options with sampling values of specdec's own in place: one per row, or 0.

        Args:
            own_warpers: names of the warpers among the processors that the user passed.
            values: arguments of `Warp`.

        Raises:
            ValueError: the options are greedy and a value is not, or other warpers are in use; HF
                applies those in an order that values of one's own cannot join.
        """
        if not values:
            return self
        if self.is_greedy:
            self.check_sampling({n: v for n, v in values.items() if not _is_zero(v)})
            return self
        others = [*(n for n in self.sampling.settings if n in BESIDE_WARPS), *own_warpers]
        if others:
            raise ValueError(
                f"{', '.join(values)} cannot be set per row beside {', '.join(others)}, which HF "
                "applies in an order of its own; give one value for all rows, or leave the others "
                "out"
            )
        listed = {n: list(v) if isinstance(v, tuple) else v for n, v in values.items()}
        sampling = replace(self.sampling, **listed)
        return replace(self, warp=self.warp | values, sampling=sampling)


def num_sequences(model: PreTrainedModel, options: dict) -> int:
    """Number of sequences per prompt, of the call or of its configuration."""
    configs = options.get("generation_config"), model.generation_config
    values = [getattr(config, "num_return_sequences", None) for config in configs]
    return next((n for n in (options.get("num_return_sequences"), *values) if n is not None), 1)


def resolve_options(model: PreTrainedModel, input_ids: Tensor, **options) -> Options:
    """What `model.generate(input_ids, **options)` would do.

    Args:
        model: the target.
        input_ids: `[B, T]` the padded prompts.
        options: keyword arguments of HF's `generate`; those that are `None` are left out.

    Raises:
        TypeError, ValueError: HF refuses an option, or the options ask for something that specdec
            does not do.
    """
    notes = []
    given = {name: value for name, value in options.items() if value is not None}
    tokenizer = given.pop("tokenizer", None)
    given, shell = _take_stop_strings(model, given, tokenizer)
    given, shell = _take_no_ends(shell, given)
    kept = {name: given.pop(name) for name in ("output_scores", "output_logits") if name in given}

    def take_notes(model, input_ids, logits_processor, stopping_criteria, generation_config, **_):
        generation_config.update(**kept)
        resolved = logits_processor, stopping_criteria, generation_config
        taken = Options.from_resolved(*resolved, tokenizer)

        def alone(ids: Tensor) -> LogitsProcessorList:
            own = LogitsProcessorList(given.get("logits_processor") or ())
            return _processors_alone(model, generation_config, own, ids, input_ids.shape[1])

        notes.append(replace(taken, processors_alone=alone))
        return input_ids

    # The padding is ours to handle: an all-ones mask keeps HF from warning about it.
    shell.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), custom_generate=take_notes, **given
    )
    return notes[0]


def _processors_alone(
    model: PreTrainedModel,
    config: GenerationConfig,
    own: LogitsProcessorList,
    ids: Tensor,
    width: int,
) -> LogitsProcessorList:
    """What HF makes of a configuration for a prompt `[1, t]` of a batch of this width: its row gets
    as many new tokens, and all that is counted from the prompt is counted from its own.
    """
    config, missing = copy.copy(config), width - ids.shape[1]
    config.max_length -= missing
    if config.min_new_tokens is not None:  # HF has made a min_length of it
        config.min_length -= missing
    processors = model._get_logits_processor(
        config,
        input_ids_seq_length=ids.shape[1],
        encoder_input_ids=ids,
        logits_processor=own,
        device=ids.device,
        model_kwargs={"attention_mask": torch.ones_like(ids)},
    )
    return LogitsProcessorList(_split_warpers(processors, config)[0])


def _take_stop_strings(
    model: PreTrainedModel, options: dict, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[dict, PreTrainedModel]:
    """Options with stop strings as a criterion, and the model to resolve them with: HF keeps the
    tokenizer from decoding functions and then misses it, so it must not see stop strings, not even
    those of the model's own configuration.
    """
    config, own, options = options.get("generation_config"), model.generation_config, dict(options)
    sources = options.pop("stop_strings", None), config and config.stop_strings, own.stop_strings
    strings = next((found for found in sources if found is not None), None)
    if strings is None:
        return options, model
    options["stopping_criteria"] = with_stop_strings(
        options.get("stopping_criteria"), strings, tokenizer
    )
    shell = with_config(model, copy.deepcopy(own))
    shell.generation_config.stop_strings = None
    if config is not None:
        options["generation_config"] = config = copy.deepcopy(config)
        config.stop_strings = None
    return options, shell


def _take_no_ends(model: PreTrainedModel, options: dict) -> tuple[dict, PreTrainedModel]:
    """Options and model with no end-of-sequence id, where `eos_token_id` is an empty list: HF takes
    `None` for the id of its configuration.
    """
    ids = options.get("eos_token_id")
    if not (isinstance(ids, list | tuple) and len(ids) == 0):
        return options, model
    options, shell = dict(options), with_config(model, copy.deepcopy(model.generation_config))
    del options["eos_token_id"]
    shell.generation_config.eos_token_id = None
    if (config := options.get("generation_config")) is not None:
        options["generation_config"] = config = copy.deepcopy(config)
        config.eos_token_id = None
    return options, shell


def is_warper(processor: LogitsProcessor) -> bool:
    """Whether a processor is one of the four that `Warp` stands for."""
    return type(processor) in _WARPERS


def _is_zero(value) -> bool:
    return isinstance(value, int | float) and value == 0


def _split_warpers(
    processors: LogitsProcessorList, config: GenerationConfig
) -> tuple[list[LogitsProcessor], dict]:
    """History-dependent processors, and the values of the four warpers if these close the list in
    HF's order and the configuration samples.

    Another order, or another warper after them, gives other probabilities: then the whole list is
    applied as it stands.
    """
    if not config.do_sample:
        return list(processors), {}
    split = len(processors)
    while split and is_warper(processors[split - 1]):
        split -= 1
    tail = processors[split:]
    ranks = [list(_WARPERS).index(type(warper)) for warper in tail]
    if ranks != sorted(set(ranks)):
        return list(processors), {}
    values = {_WARPERS[type(warper)]: getattr(warper, _WARPERS[type(warper)]) for warper in tail}
    return list(processors[:split]), values


_ASSISTANT_SETTINGS = {  # of HF's assisted generation, with HF's own defaults
    "num_assistant_tokens": (20,),
    "num_assistant_tokens_schedule": ("constant", "heuristic"),
    "assistant_confidence_threshold": (0.4,),
    "assistant_lookbehind": (10,),
    "target_lookbehind": (10,),
    "assistant_ensemble_weight": (),
    "speculation_type": (),
}


def _refuse_unsupported(config: GenerationConfig) -> None:
    wanted = {"num_beams": 1, "penalty_alpha": 0, "dola_layers": 0}
    for name, usual in wanted.items():
        value = getattr(config, name, None)
        is_more = isinstance(value, str) or (value is not None and value > usual)
        if is_more:
            raise ValueError(
                f"{name}={value} is not supported: specdec decodes greedily or samples, with "
                "num_return_sequences=n for several samples of a prompt; use HF generate for beam "
                "or contrastive search"
            )
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise ValueError(
                f"{name}=True is not supported by specdec; leave it out, or use HF generate"
            )
    for name in ("constraints", "force_words_ids"):
        if getattr(config, name, None) is not None:
            raise ValueError(
                f"{name} asks for constrained beam search, which specdec does not do; use HF "
                "generate"
            )
    for name in ("use_mtp", "prompt_lookup_num_tokens", "assistant_early_exit"):
        if getattr(config, name, None):
            raise ValueError(
                f"{name} asks for HF's assisted generation; leave it out, here the generator's "
                "drafter drafts"
            )
    for name, defaults in _ASSISTANT_SETTINGS.items():
        value = getattr(config, name, None)
        if value is not None and value not in defaults:
            raise ValueError(
                f"{name}={value!r} is a setting of HF's assisted generation and has no effect "
                "here; leave it out and set the drafter's own num_draft_tokens"
            )
