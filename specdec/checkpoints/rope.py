"""The rotary embedding of a head, from the keys that all producers share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from specdec.arguments import check_number
from specdec.checkpoints.config_fields import ConfigFields
from specdec.checkpoints.family import Misreading
from specdec.heads.config import HeadConfig, LayerConfig
from specdec.heads.rotary import rotary_table

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


def read_rope(fields: ConfigFields) -> dict:
    """HF's `rope_parameters`, from its new or its old keys.

    Raises:
        ValueError: an unknown scaling, one that lacks a number, or a partial rotary embedding.
    """
    section = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    given = fields.section(section)
    origin = given.origin
    rope = {key: given.get(key) for key in given.raw if given.get(key) is not None}
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)
    if kind == "mrope":  # on text its three positions are one
        rope.pop("mrope_section", None)
        kind = "default"
        fields.notes.append("rope type mrope is the default one on text")
    known = ROPE_KEYS.keys() & {"default", *ROPE_INIT_FUNCTIONS}
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f"{origin}: not supported: rope type {kind!r}; known: {sorted(ROPE_KEYS)}")
    missing = [key for key in ROPE_KEYS[kind] if key not in rope]
    if missing:
        raise ValueError(f"{origin}: rope type {kind!r} lacks {', '.join(missing)}")
    partial = rope.pop("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"{origin}: not supported: partial_rotary_factor {partial!r}")
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


def with_theta(layer: LayerConfig, theta: object) -> LayerConfig:
    """The layer with another base; `ValueError` if that is no positive number."""
    check_number("rope_theta", theta, above=0)
    return replace(layer, rope={**layer.rope, "rope_theta": float(theta)})


def settle_rope(layer: LayerConfig, options: Mapping, notes: list[str]) -> LayerConfig:
    """The layer with the option `rope_theta` in the place of what the file says.

    Raises:
        ValueError: no positive number, or a rope whose angles HF cannot compute.
    """
    if "rope_theta" in options:
        layer = with_theta(layer, options["rope_theta"])
        notes.append(f"as asked for: rope_theta = {layer.rope['rope_theta']:g}")
    check_rope(layer)
    return layer


def check_rope(layer: LayerConfig) -> None:
    """Raises `ValueError` where HF cannot compute angles of the rope that the layer names."""
    try:
        angles = rotary_table(layer, 2, dtype=torch.float32)
    except Exception as error:  # of any kind: numbers that HF's formulas do not take
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"rope {layer.rope} cannot be used: {reason}") from error
    if not angles.isfinite().all():
        raise ValueError(f"rope {layer.rope} leads to angles that are not finite")


def misread_bases(config: HeadConfig, target: PreTrainedModel) -> Iterator[Misreading]:
    """The producers' default base, and the target's."""
    text, layer = target.config.get_text_config(), config.layer
    theirs = (getattr(text, "rope_parameters", None) or {}).get("rope_theta")
    for base in dict.fromkeys((DEFAULT_ROPE_THETA, theirs)):
        if base and base != layer.rope["rope_theta"]:
            whose = ", the target's" if base == theirs else ""
            other = replace(config, layer=with_theta(layer, base))
            yield Misreading(f"rope base {base:g}{whose}", other, f"rope_theta={base:g}")
