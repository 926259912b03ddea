"""Decoder layers and vocabulary of a head, from the keys that all producers share."""

from __future__ import annotations

from transformers import LlamaConfig, Qwen3Config
from transformers.activations import ACT2FN

from specdec.checkpoints.config_fields import ConfigFields
from specdec.checkpoints.rope import read_rope
from specdec.heads.config import LayerConfig
from specdec.heads.features import FeatureHeadConfig

LAYER_CLASSES = {"llama": LlamaConfig, "qwen3": Qwen3Config}
"""Decoder layers that speculators builds heads of, by their `model_type`."""

_INERT = {
    *("torch_dtype", "dtype", "transformers_version", "architectures", "model_type"),
    *("max_window_layers", "sliding_window", "use_sliding_window", "layer_types"),
    *("speculators_version", "speculators_config", "embed_requires_grad", "max_sequence_length"),
    *("ttt_length", "step_loss_decay", "num_target_layers", "target_model_name_or_path"),
    *("draft_num_hidden_layers", "producer", "_torchspec_version"),
}


def inert_keys() -> set[str]:
    """Keys that say nothing about how a head is wired: of training, of files, of any HF model."""
    return _INERT.union(*(kind().to_dict() for kind in LAYER_CLASSES.values()))


def fill_speculators(fields: ConfigFields) -> ConfigFields:
    """Completes `transformer_layer_config`, stored as a difference to HF's defaults: fields of the
    layers and of the top level side by side.

    Raises:
        ValueError: a layer type that speculators' heads do not have, or impossible values.
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


def read_layer(fields: ConfigFields, **flags: bool) -> LayerConfig:
    """The decoder layers of a head with a Llama's or Qwen3's keys.

    Args:
        fields: config.json, a speculators file filled in.
        flags: fields of `LayerConfig` that producers express each in its own way
            (`attention_bias`, `attention_output_bias`, `has_qk_norm`).

    Raises:
        ValueError: a value of a wrong type or size.
    """
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads or (fields.get("head_dim") is None and hidden % heads):
        raise ValueError(
            f"{fields.origin}: {heads} query heads, {kv_heads} key/value heads and a width of "
            f"{hidden} do not divide evenly"
        )
    activation = fields.text("hidden_act", "silu")
    if activation not in ACT2FN:
        raise ValueError(f"{fields.origin}: hidden_act {activation!r} is not one of HF's")
    return LayerConfig(
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=fields.integer("head_dim", hidden // heads),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        hidden_act=activation,
        rope=read_rope(fields),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        **flags,
    )


def read_draft_vocab_size(fields: ConfigFields, *, is_speculators: bool) -> int:
    """How many ids the head can propose; an absent key may have speculators' default.

    Raises:
        ValueError: keys that contradict each other, or more ids than the vocabulary has.
    """
    names, vocab_size = ("draft_vocab_size", "truncated_vocab_size"), fields.integer("vocab_size")
    sizes = {fields.integer(name) for name in names if fields.get(name) is not None}
    if len(sizes) > 1:
        raise ValueError(f"{fields.origin}: {' and '.join(names)} differ: {sorted(sizes)}")
    if not sizes and is_speculators and names[0] not in fields.raw:
        sizes.add(32000)
        fields.notes.append("no draft_vocab_size: 32000, speculators' default")
    elif not sizes:
        sizes.add(vocab_size)
        fields.notes.append("no draft_vocab_size: the full vocabulary")
    size = sizes.pop()
    if size > vocab_size:
        raise ValueError(
            f"{fields.origin}: {size} draft ids are more than the vocabulary's {vocab_size}"
        )
    return size


def describe_layer(layer: LayerConfig, num_layers: int) -> dict[str, str]:
    """What `specdec inspect` prints of a head's layers: `"sizes"`, `"attention"` and `"rope"`."""
    biases = "queries, keys, values" if layer.attention_bias else "none"
    biases += ", output" if layer.attention_output_bias else ""
    return {
        "sizes": f"{num_layers} layer{'s' if num_layers > 1 else ''}, width {layer.hidden_size}, "
        f"MLP {layer.intermediate_size} ({layer.hidden_act}), {layer.num_heads} heads of "
        f"{layer.head_dim} ({layer.num_kv_heads} for keys and values)",
        "attention": f"biases: {biases}; queries and keys {'' if layer.has_qk_norm else 'not '}"
        "normed",
        "rope": ", ".join(f"{key} {value}" for key, value in sorted(layer.rope.items())),
    }


def describe_norms(config: FeatureHeadConfig, reads_both: bool, *further: str) -> str:
    """Where a head over joined features has norms.

    Args:
        config: of the head.
        reads_both: the first layer reads embeddings and features side by side.
        further: what else is to be said of them.
    """
    parts = ["before the vocabulary head" if config.output_norm else "none before the head"]
    if config.norm_before_fc:
        parts.append("one over all features before fc")
    if config.fc_norm:
        parts.append("one per feature before fc")
    if reads_both:
        residual = "normed" if config.norm_before_residual else "raw"
        parts.append(f"residual {residual} (norm_before_residual {config.norm_before_residual})")
    return f"{'; '.join([*parts, *further])}; eps {config.layer.rms_norm_eps:g}"
