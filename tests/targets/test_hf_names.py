"""What `specdec.hf` takes from transformers, held against the installed version: what is new there
is named, so that somebody decides what it means before users meet it.
"""

import inspect

import pytest
from architectures import build
from transformers import GenerationConfig, GenerationMixin, LogitsProcessor, PreTrainedModel
from transformers.configuration_utils import ALLOWED_LAYER_TYPES
from transformers.generation import logits_process
from transformers.generation.utils import ALL_CACHE_NAMES

from specdec import Target
from specdec.hf import forward, generation, layers, lookups, versions

WITHOUT_A_CACHE = {"state", "mems", "past_buckets_states"}
"""Names of RWKV, XLNet and Reformer, whose memory is no `Cache`."""

NOT_OVER_SLOTS = {
    *("compressed_sparse_attention", "heavily_compressed_attention"),
    *("qwen_sparse_attention", "hybrid_sliding", "window_attention", "reference_sliding_attention"),
}
"""Kinds of layers that are refused by name."""

NOT_STATELESS = {
    "LogitsProcessor",  # the base class
    "PrefixConstrainedLogitsProcessor",  # as its function
    "SequenceBiasLogitsProcessor",
    *("GuidanceLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor"),
    *("HammingDiversityLogitsProcessor", "SynthIDTextWatermarkLogitsProcessor"),
    # Of speech and images.
    *("AlternatingCodebooksLogitsProcessor", "BarkEosPrioritizerLogitsProcessor"),
    *("ClassifierFreeGuidanceLogitsProcessor", "WhisperTimeStampLogitsProcessor"),
    *("WhisperNoSpeechDetection", "DiaClassifierFreeGuidanceLogitsProcessor"),
    *("DiaEOSChannelFilterLogitsProcessor", "DiaEOSDelayPatternLogitsProcessor"),
}
"""Logits processors that keep state, or are of no text."""

OTHER_SETTINGS = {
    # Read by specdec, or by HF before it calls a function that decodes.
    *("do_sample", "max_length", "max_new_tokens", "max_time", "stop_strings", "token_healing"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("num_return_sequences", "output_logits", "output_scores", "return_dict_in_generate"),
    # Without effect on what is drawn, or of searches that `num_beams` and its kin ask for.
    *("cache_config", "cache_implementation", "max_cache_len", "use_cache", "low_memory"),
    *("compile_config", "disable_compile", "continuous_batching_config", "prefill_chunk_size"),
    *("diversity_penalty", "early_stopping", "length_penalty", "num_beam_groups"),
    *("is_assistant", "max_matching_ngram_size", "transformers_version", "_from_model_config"),
}
"""Settings of a generation that `specdec.hf.generation` need not name."""


def test_no_name_of_a_cache_is_new():
    assert {*ALL_CACHE_NAMES} - WITHOUT_A_CACHE <= {*forward.CACHES}


def test_no_kind_of_layer_is_new():
    assert {*ALLOWED_LAYER_TYPES} <= layers.UNDERSTOOD_LAYERS | NOT_OVER_SLOTS
    assert layers.UNDERSTOOD_LAYERS - {*ALLOWED_LAYER_TYPES} <= {"mlp", *layers.INDEXED_LAYERS}


def test_no_logits_processor_is_new():
    found = {
        kind
        for _, kind in inspect.getmembers(logits_process, inspect.isclass)
        if issubclass(kind, LogitsProcessor) and kind.__module__ == logits_process.__name__
    }
    assert found >= generation.STATELESS
    assert {kind.__name__ for kind in found - generation.STATELESS} <= NOT_STATELESS


def test_no_setting_of_a_generation_is_new():
    known = {*generation.BEFORE_FILTERS, *generation.FILTERS, *generation.BESIDE_FILTERS}
    known |= {*generation.UNSUPPORTED}
    assert {*GenerationConfig().to_dict()} - known <= OTHER_SETTINGS


def test_private_attributes_are_there():
    model = build("qwen3_moe")
    assert {lookups.ATTENTION_FIELD, layers.EXPERTS_FIELD} <= {*vars(model.config)}
    assert {"_supports_sdpa", "_is_stateful"} <= {*dir(PreTrainedModel)}
    names = inspect.unwrap(GenerationMixin.generate).__code__.co_varnames
    assert {"streamer", "assistant_model", "synced_gpus"} <= {*names}
    built = model, build("llama"), build("phi3")
    first = [one.model.layers[0] for one in built]
    experts, mlp, joined = (layer.mlp for layer in first)
    assert all(hasattr(experts.experts, name) for name in layers.EXPERTS)
    assert all(hasattr(mlp, name) for name in (*layers.GATE_UP, layers.ACTIVATIONS[0]))
    assert all(hasattr(joined, name) for name in (layers.JOINED_GATE_UP, layers.ACTIVATIONS[1]))
    assert all(hasattr(first[1].self_attn, name) for name in layers.QKV)
    assert layers.ROTATE in vars(inspect.getmodule(type(first[1])))
    assert forward.cache_argument(model) in forward.CACHES


def test_a_version_that_is_newer_than_those_that_were_tried_is_named_in_refusals(monkeypatch):
    class Odd(type(build("llama"))):
        def forward(self, input_ids, past=None):
            """HF has renamed the cache once more."""

    model = build("llama")
    model.__class__ = Odd
    with pytest.raises(ValueError, match=r"Odd .*no argument for HF's cache \(cache, past_key_val"):
        Target(model)
    monkeypatch.setattr(versions.transformers, "__version__", "5.999.0")
    newest = versions.TRIED[1]
    words = rf"5.999.0 is newer than {newest}, the newest tried with this version of specdec"
    with pytest.raises(ValueError, match=words):
        Target(model)
    monkeypatch.setattr(versions.transformers, "__version__", "5.17.0")
    assert versions.newer_than_tried() == ""
