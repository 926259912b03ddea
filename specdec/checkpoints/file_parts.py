"""Parts of `config.json` that are more than one key with the value of one field: (what is written)
-> keys, those of a section as `section.key`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import LlamaConfig, Qwen3Config

from specdec.checkpoints.correction import CONVOLUTION, part_of
from specdec.checkpoints.layers import layer_keys
from specdec.checkpoints.layout import Written
from specdec.drafters.head.feature_config import FeatureHeadConfig

Part = Callable[[Written], dict[str, Any]]

SCALINGS = ("linear", "dynamic")
"""Rotary scalings that SafeAILab's code knows; it wants exactly `type` and `factor`, a float."""


def model(name: str, kind: str) -> Part:
    """An HF configuration: architecture, layers, rope in its new and its old form."""

    def keys(what: Written) -> dict[str, Any]:
        config, rope = what.config, what.config.layer.rope
        scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
        return {
            "architectures": [name],
            "model_type": kind,
            **layer_keys(config.layer, config.num_layers, config.vocab_size),
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
            "torch_dtype": what.dtype,
        }

    return keys


def model_of_safeailab(name: str) -> Part:
    """The same, with scalings of the rope under the reference's older names."""

    def keys(what: Written) -> dict[str, Any]:
        found = model(name, "llama")(what)
        scaling = found["rope_scaling"]
        if scaling is not None and scaling["rope_type"] in SCALINGS:
            scaling = {"type": scaling["rope_type"], "factor": float(scaling["factor"])}
        elif scaling is not None:
            scaling = scaling | {"type": scaling["rope_type"]}
        return found | {"rope_scaling": scaling}

    return keys


def language_model(what: Written) -> dict[str, Any]:
    """The language model of HF's that has such layers."""
    layer, name = what.config.layer, "Llama"
    if layer.has_qk_norm:
        name = "Qwen3"
    elif layer.attention_bias and not layer.attention_output_bias:
        name = "Qwen2"
    keys = model(f"{name}ForCausalLM", name.lower())(what)
    return keys | {"attention_bias": layer.attention_output_bias}


def window_keys(config: FeatureHeadConfig) -> dict[str, Any]:
    """Which layers have a sliding window, in HF's words."""
    windows = config.layer.windows or (None,) * config.num_layers
    types = ["sliding_attention" if window else "full_attention" for window in windows]
    if not any(windows):
        return {"layer_types": types}
    size = max(window or 0 for window in windows)
    return {"layer_types": types, "use_sliding_window": True, "sliding_window": size}


def causal_windows(config: FeatureHeadConfig) -> dict[str, Any]:
    """vLLM makes every layer causal where the key is false
    (transformers_utils/configs/speculators/algos.py, update_dflash).
    """
    is_causal = bool(config.layer.windows and config.layer.is_window_causal)
    return {"sliding_window_non_causal": not is_causal}


def number_of_features(what: Written) -> dict[str, Any]:
    """Keys that vLLM reads where it reads those of the layers: in `transformer_layer_config` of a
    speculators file, since its reader keeps hardly any other (0.32.0,
    `transformers_utils/configs/speculators/algos.py`), and without them builds a head of three
    features, a P-EAGLE head without norms of each.
    """
    config = what.config
    return {"num_aux_hidden_states": len(config.feature_layers), "fc_norm": config.fc_norm}


def corrected(*, is_always: bool = False) -> Part:
    """Keys of a correction and of convolutions; without one, if always, that there is none."""

    def keys(what: Written) -> dict[str, Any]:
        correction, convolution = what.config.correction, what.config.layer.convolution
        if correction is None:
            return {"markov_rank": 0} if is_always else {}
        found = part_of(correction).keys(Written(correction))
        return found if convolution is None else found | CONVOLUTION.keys(Written(convolution))

    return keys


def confidence(what: Written) -> dict[str, Any]:
    """Whether there is a confidence head, and what it reads."""
    return {
        "enable_confidence_head": what.config.confidence is not None,
        "confidence_head_with_markov": what.config.confidence == "markov",
    }


def types(what: Written) -> dict[str, Any]:
    """Of weights and tables, in a speculators file."""
    return {"dtype": what.dtype, "tie_word_embeddings": False}


def speculators(kind: str, name: str) -> Part:
    """How a speculators file begins."""
    return lambda what: {
        "architectures": [f"{name}DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.0.0",
        "draft_vocab_size": what.config.draft_vocab_size,
        "target_hidden_size": what.config.target_hidden_size,
    }


def end_of_speculators(kind: str, *, counts_features: bool) -> Part:
    """How it ends: its layers, as a difference to HF's defaults, and what it proposes."""

    def keys(what: Written) -> dict[str, Any]:
        config, layer = what.config, what.config.layer
        if not what.verifier:  # speculators would ask the hub for "None"
            raise ValueError(
                "a speculators file names its target: pass verifier=, a Hugging Face id or folder"
            )
        filled = (Qwen3Config if layer.has_qk_norm else LlamaConfig)(
            **layer_keys(layer, config.num_layers, config.vocab_size),
            **(window_keys(config) if layer.windows else {}),
            attention_bias=layer.attention_bias,
            rope_parameters=dict(layer.rope),
            dtype=what.dtype,
        )
        proposal = {
            "proposal_type": "greedy",
            "speculative_tokens": what.num_draft_tokens,
            "verifier_accept_k": 1,
            "accept_tolerance": 0.0,
        }
        return {
            "transformer_layer_config": filled.to_diff_dict()
            | (number_of_features(what) if counts_features else {}),
            "speculators_config": {
                "algorithm": kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": what.verifier, "architectures": []},
            },
        }

    return keys
