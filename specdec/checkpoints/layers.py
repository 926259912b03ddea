"""Decoder layers of a head, from the keys that all producers share: sizes, activation, rope."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaConfig, Qwen3Config
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specdec.arguments import check_number, shown
from specdec.checkpoints.config_fields import ConfigFields
from specdec.checkpoints.keys import unknown_keys
from specdec.drafters.head.layer_config import LayerConfig
from specdec.drafters.head.rotary import INTERLEAVED, SECTIONS
from specdec.lab.show.text import one_line

LAYER_CLASSES = {"llama": LlamaConfig, "qwen3": Qwen3Config}
"""Decoder layers that speculators builds heads of, by their `model_type`."""

DEFAULT_ROPE_THETA = 10000.0

ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}
"""Rotary scalings that are read, and the keys that each must have. HF does not miss all of them: it
takes `max_position_embeddings` for the original one.
"""
_ROPE_KEYS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", SECTIONS, INTERLEAVED),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *(key for keys in ROPE_KEYS.values() for key in keys),
}
"""All keys of such a section that HF's ropes compute with."""
_PAIRS = {
    **{"rope_is_neox_style": False, "is_neox_style": False, "rope_traditional": True},
    **{"rope_interleaved": True, "rope_interleave": True},
}
"""Words for rotary pairs, and the value of each that says that channels 2i and 2i + 1 are one."""


def has_neighbours(fields: ConfigFields) -> bool:
    """Whether the rope turns pairs of channels (2i, 2i + 1), and not (i, i + R / 2) as the layers
    of heads do.
    """
    places = fields, *map(fields.section, ("dflash_config", "rope_parameters", "rope_scaling"))
    said = {
        f"{place.origin}: {word}": place.flag(word) == value
        for place in places
        for word, value in _PAIRS.items()
        if place.get(word) is not None
    }
    if len(set(said.values())) > 1:
        raise ValueError(f"{fields.origin} says two things of rotary pairs: {', '.join(said)}")
    return any(said.values())


def fill_speculators(fields: ConfigFields) -> ConfigFields:
    """Completes `transformer_layer_config`, stored as a difference to HF's defaults: fields of the
    layers and of the top level side by side.
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
        raise ValueError(f"{layers.origin}: {type(error).__name__}: {one_line(error)}") from error
    others = {k: v for k, v in layers.raw.items() if k not in known}
    own = {k: v for k, v in (others | filled).items() if v is not None}
    top = {k: v for k, v in fields.raw.items() if k != "transformer_layer_config"}
    hidden = {k: top[k] for k in top.keys() & own.keys() if top[k] not in (None, own[k])}
    if hidden := unknown_keys(ConfigFields(hidden, fields.origin)):
        raise ValueError(
            f"{fields.origin} names other values at the top than transformer_layer_config: "
            f"{hidden}; keep one of them"
        )
    return ConfigFields(top | own, fields.origin)


def read_layer(fields: ConfigFields, **said: Any) -> LayerConfig:
    """The decoder layers of a head with a Llama's or Qwen3's keys.

    Args:
        fields: of the configuration.
        said: fields of `LayerConfig` that producers express each in its own way
            (`attention_bias`, `has_qk_norm`, ...), and sizes that stand under other keys.
    """

    def of(name: str, read: Callable[[], Any]) -> Any:
        return said[name] if name in said else read()

    hidden = of("hidden_size", lambda: fields.integer("hidden_size"))
    heads = of("num_heads", lambda: fields.integer("num_attention_heads"))
    kv_heads = of("num_kv_heads", lambda: fields.integer("num_key_value_heads", heads))
    has_width = "head_dim" in said or fields.get("head_dim") is not None
    if heads % kv_heads or (not has_width and hidden % heads):
        raise ValueError(
            f"{fields.origin}: {heads} query heads, {kv_heads} key/value heads and a width of "
            f"{hidden} do not divide evenly"
        )
    activation = of("hidden_act", lambda: fields.text("hidden_act", "silu"))
    if activation not in ACT2FN:
        raise ValueError(f"{fields.origin}: hidden_act {activation!r} is not one of HF's")
    read = {
        "hidden_size": lambda: hidden,
        "intermediate_size": lambda: fields.integer("intermediate_size"),
        "num_heads": lambda: heads,
        "num_kv_heads": lambda: kv_heads,
        "head_dim": lambda: fields.integer("head_dim", hidden // heads, high=2**13),
        "rms_norm_eps": lambda: fields.number("rms_norm_eps", 1e-6),
        "hidden_act": lambda: activation,
        "rope": lambda: _read_rope(fields),
        "max_position_embeddings": lambda: fields.integer("max_position_embeddings", 2048),
    }
    sizes = {name: of(name, value) for name, value in read.items()}
    return _check_rope(LayerConfig(**sizes | said))


def layer_keys(layer: LayerConfig, num_layers: int, vocab_size: int) -> dict[str, Any]:
    """Keys of an HF configuration of a head's decoder layers."""
    return {
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": layer.hidden_act,
        "rms_norm_eps": layer.rms_norm_eps,
        "max_position_embeddings": layer.max_position_embeddings,
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
    }


def _read_rope(fields: ConfigFields) -> dict:
    """HF's `rope_parameters`, from its new or its old keys."""
    section = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    given = fields.section(section)
    origin = given.origin
    rope = {key: given.get(key) for key in _ROPE_KEYS if given.get(key) is not None}
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if kind == "mrope":
        kind = "default"
        fields.notes.append(
            "rope type mrope is the default one on text, whose tokens have one position; others "
            "have three"
        )
    known = ROPE_KEYS.keys() & {"default", *ROPE_INIT_FUNCTIONS}
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f"{origin}: not supported: rope type {kind!r}; known: {sorted(known)}")
    if missing := [key for key in ROPE_KEYS[kind] if key not in rope]:
        raise ValueError(f"{origin}: rope type {kind!r} lacks {', '.join(missing)}")
    partial = rope.pop("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        rope["partial_rotary_factor"] = partial
    inner, outer = given.number("rope_theta"), fields.number("rope_theta")
    if inner is not None and outer is not None and inner != outer:
        note = f"rope_theta {outer:g} beside {section}'s {inner:g}: the latter counts"
        fields.notes.append(note)
    if inner is None and outer is None:
        fields.notes.append(
            f"no rope_theta: base {DEFAULT_ROPE_THETA:g}, the producers' default, whatever the "
            "target's is"
        )
    for key, value in rope.items():
        numbers = value if isinstance(value, list) else [value]
        if not all(isinstance(number, int | float) for number in numbers):
            raise ValueError(f"{origin}: {key} must be a number or a list of them, got {value!r}")
    return {**rope, "rope_type": kind, "rope_theta": inner or outer or DEFAULT_ROPE_THETA}


def with_theta(layer: LayerConfig, theta: float) -> LayerConfig:
    """The layer with another base of its rope; `ValueError` if that is no positive number."""
    check_number("rope_theta", theta, above=0)
    return _check_rope(replace(layer, rope={**layer.rope, "rope_theta": float(theta)}))


def with_layer(layer: LayerConfig, given: Any) -> LayerConfig:
    """The layer with other fields of `LayerConfig`, as a caller names them."""
    if not isinstance(given, dict) or not given.keys() <= {f.name for f in dataclass_fields(layer)}:
        raise ValueError(f"layer must be a dict of fields of LayerConfig, got {shown(given)}")
    return _check_rope(replace(layer, **given))


def _check_rope(layer: LayerConfig) -> LayerConfig:
    """`ValueError` where HF cannot compute angles of the rope that the layer names."""
    try:
        angles, _ = layer.rotary_table(2, dtype=torch.float32), layer.axes
    except Exception as error:  # of any kind: numbers that HF's formulas do not take
        raise ValueError(
            f"rope {layer.rope} cannot be used: {type(error).__name__}: {one_line(error)}"
        ) from error
    if not angles.isfinite().all():
        raise ValueError(f"rope {layer.rope} leads to angles that are not finite")
    return layer
