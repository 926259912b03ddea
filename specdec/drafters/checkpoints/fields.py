"""Sizes, rotary embedding and vocabulary of a head, from keys that all producers share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specdec.drafters.checkpoints.numbers import ConfigFields
from specdec.drafters.checkpoints.producers import Source
from specdec.drafters.eagle_config import EagleConfig
from specdec.drafters.rotary import rotary_table

LAYER_CLASSES = {"llama": LlamaConfig, "qwen3": Qwen3Config}
"""Decoder layers that speculators builds EAGLE-3 heads of, by their `model_type`."""

DEFAULT_ROPE_THETA = 10000.0

ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}
"""Rotary scalings that are read, and the keys that each must have."""


_INERT = {
    *("torch_dtype", "dtype", "transformers_version", "architectures", "model_type"),
    *("max_window_layers", "sliding_window", "use_sliding_window", "layer_types"),
    *("speculators_version", "speculators_config", "embed_requires_grad", "max_sequence_length"),
    *("ttt_length", "step_loss_decay", "num_target_layers", "target_model_name_or_path"),
    *("draft_num_hidden_layers", "eagle_config.parallel_draft_heads_num_layers"),
}


def inert_keys() -> set[str]:
    """Keys that say nothing about how a head is wired: of training, of files, of any HF model."""
    return _INERT.union(*(kind().to_dict() for kind in LAYER_CLASSES.values()))


def fill_speculators(fields: ConfigFields) -> ConfigFields:
    """Completes `transformer_layer_config`, stored as a difference to HF's defaults.

    Args:
        fields: config.json.

    Returns:
        Fields of the layers and of the top level side by side.

    Raises:
        ValueError: a layer type that speculators' EAGLE-3 does not have, or impossible values.
    """
    layers = fields.section("transformer_layer_config")
    kind = layers.text("model_type", "qwen3")
    if kind not in LAYER_CLASSES:
        raise ValueError(
            f"{layers.origin}: not supported: model_type {kind!r} (expected llama or qwen3)"
        )
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        layers.integer(name, 1)  # bounded before HF's class allocates by them
    known = LAYER_CLASSES[kind]().to_dict().keys() | {"rope_theta", "rope_scaling"}
    given = {k: v for k, v in layers.raw.items() if k in known and k != "model_type"}
    try:
        filled = LAYER_CLASSES[kind](**given).to_dict()
    except Exception as error:  # HF raises errors of many kinds for values it cannot take
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{layers.origin}: {type(error).__name__}: {reason}") from error
    others = {k: v for k, v in layers.raw.items() if k not in known}
    top = {k: v for k, v in fields.raw.items() if k != "transformer_layer_config"}
    own = {k: v for k, v in (others | filled).items() if v is not None}
    return ConfigFields(top | own, fields.origin)


def read_sizes(
    fields: ConfigFields, source: Source, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[EagleConfig, list[str]]:
    """Everything of a head but its wiring: a config to complete, and notes.

    Args:
        fields: config.json, a speculators file filled in.
        source: who wrote it.
        shapes: canonical names and shapes of the tensors in the file; own embedding and head,
            norms of queries and keys, and the bias of the output projection are told from them.

    Raises:
        ValueError: a value of a wrong type or size.
    """
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads, target_hidden = (
        fields.integer("num_key_value_heads", heads),
        fields.integer("target_hidden_size", hidden),
    )
    if heads % kv_heads or (fields.get("head_dim") is None and hidden % heads):
        raise ValueError(
            f"{fields.origin}: {heads} query heads, {kv_heads} key/value heads and a width of "
            f"{hidden} do not divide evenly"
        )
    activation = fields.text("hidden_act", "silu")
    if activation not in ACT2FN:
        raise ValueError(f"{fields.origin}: hidden_act {activation!r} is not one of HF's")
    vocab_size = fields.integer("vocab_size")
    draft_vocab_size, notes = _draft_vocab_size(fields, vocab_size, source)
    rope, rope_notes = read_rope(fields)
    # The head's own modules are of its width; the target's serve only where that is the same.
    is_other_width = hidden != target_hidden
    has_bias = fields.flag("attention_bias")
    follows_hf = source.producer in ("speculators", "NVIDIA", "DeepSpec")
    is_qwen3 = source.producer == "DeepSpec" or (
        source.producer == "speculators" and fields.get("model_type") == "qwen3"
    )
    config = EagleConfig(
        fusion=source.fusion,
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=fields.integer("num_hidden_layers", 1),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields.integer("head_dim", hidden // heads),
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        feature_layers=("final",),
        target_hidden_size=target_hidden,
        attention_bias=has_bias or fields.flag("qkv_bias"),
        attention_output_bias=has_bias
        and (follows_hf or "layers.0.self_attn.o_proj.bias" in shapes),
        has_qk_norm=is_qwen3 or "layers.0.self_attn.q_norm.weight" in shapes,
        has_embed_tokens=is_other_width or "embed_tokens.weight" in shapes,
        has_lm_head=is_other_width or "lm_head.weight" in shapes or draft_vocab_size < vocab_size,
        logit_scale=fields.number("logit_scale", 1.0),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        hidden_act=activation,
        rope=rope,
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
    )
    return config, [*notes, *rope_notes]


def _draft_vocab_size(
    fields: ConfigFields, vocab_size: int, source: Source
) -> tuple[int, list[str]]:
    names = ("draft_vocab_size", "truncated_vocab_size")
    sizes = {fields.integer(name) for name in names if fields.get(name) is not None}
    if len(sizes) > 1:
        raise ValueError(f"{fields.origin}: {' and '.join(names)} differ: {sorted(sizes)}")
    notes = []
    if not sizes:
        is_speculators = source.producer == "speculators" and names[0] not in fields.raw
        sizes = {32000 if is_speculators else vocab_size}
        if source.fusion == "attention":
            default = "32000, speculators' default" if is_speculators else "the full vocabulary"
            notes.append(f"no draft_vocab_size: {default}")
    size = sizes.pop()
    if size > vocab_size:
        raise ValueError(
            f"{fields.origin}: {size} draft ids are more than the vocabulary's {vocab_size}"
        )
    return size, notes


def read_rope(fields: ConfigFields) -> tuple[dict, list[str]]:
    """The rotary embedding as HF's `rope_parameters`, from its new or its old keys; and notes.

    Raises:
        ValueError: an unknown scaling, one that lacks a number, or a partial rotary embedding.
    """
    section = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    given = fields.section(section)
    origin = given.origin
    rope = {key: given.get(key) for key in given.raw if given.get(key) is not None}
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    notes = []
    if kind == "mrope":  # on text its three positions are one
        rope.pop("mrope_section", None)
        kind, notes = "default", ["rope type mrope is the default one on text"]
    if not isinstance(kind, str) or kind not in ROPE_KEYS.keys() & {
        "default",
        *ROPE_INIT_FUNCTIONS,
    }:
        raise ValueError(f"{origin}: not supported: rope type {kind!r}; known: {sorted(ROPE_KEYS)}")
    missing = [key for key in ROPE_KEYS[kind] if key not in rope]
    if missing:
        raise ValueError(f"{origin}: rope type {kind!r} lacks {', '.join(missing)}")
    partial = rope.pop("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"{origin}: not supported: partial_rotary_factor {partial!r}")
    inner = given.number("rope_theta")
    outer = fields.number("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        notes.append(f"rope_theta {outer:g} beside {section}'s {inner:g}: the latter counts")
    if inner is None and outer is None:
        notes.append(
            f"no rope_theta: base {DEFAULT_ROPE_THETA:g}, the producers' default, whatever the "
            "target's is"
        )
    for key, value in rope.items():
        numbers = value if isinstance(value, list) else [value]
        if not all(isinstance(number, int | float) for number in numbers):
            raise ValueError(f"{origin}: {key} must be a number or a list of them, got {value!r}")
    return {**rope, "rope_type": kind, "rope_theta": inner or outer or DEFAULT_ROPE_THETA}, notes


def check_rope(config: EagleConfig) -> None:
    """Raises `ValueError` where HF cannot make angles of the rope that the config names."""
    try:
        angles = rotary_table(config, 2, dtype=torch.float32)
    except Exception as error:  # of any kind: numbers that HF's formulas do not take
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"rope {config.rope} cannot be used: {reason}") from error
    if not angles.isfinite().all():
        raise ValueError(f"rope {config.rope} leads to angles that are not finite")
