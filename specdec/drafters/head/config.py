"""`HeadConfig`: what heads declare, and how such records are checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Protocol

from specdec.arguments import shown
from specdec.types import FeatureLayer


class HeadConfig(Protocol):
    """What the configuration of a head has, in every family; a frozen dataclass.

    A head with decoder layers has `layer`, a `LayerConfig` or `HFLayerConfig`, and `num_layers` as
    well: its drafter keeps keys and values. `max_draft_tokens` bounds the tokens of a path, where
    there is one.

    Attributes:
        hidden_size: H of the head.
        vocab_size: V of the target.
        draft_vocab_size: Vd, how many ids the head can propose; V for all.
        feature_layers: target features that it reads, as hidden states or `"final"`.
        target_hidden_size: width of each feature.
        has_embed_tokens: the head has an embedding table of its own; else it reads the target's.
        has_lm_head: the head has a vocabulary head of its own; else it uses the target's.
    """

    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    feature_layers: tuple[FeatureLayer, ...]
    target_hidden_size: int
    has_embed_tokens: bool
    has_lm_head: bool


def check_fields(config: Any) -> None:
    """Raises `TypeError` for a flag that is no bool, since "false" would count as true, and for a
    size that is no integer.
    """
    for part in fields(config):
        kind, value = {"bool": bool, "int": int}.get(part.type), getattr(config, part.name)
        if kind is not None and type(value) is not kind:
            expected = "True or False" if kind is bool else "an integer"
            name = f"{type(config).__name__}.{part.name}"
            raise TypeError(f"{name} must be {expected}, got {shown(value)}")


def refuse(contradictions: Iterable[tuple[bool, str]]) -> None:
    """Raises `ValueError` with the message of the first pair (condition, message) that holds."""
    for is_wrong, message in contradictions:
        if is_wrong:
            raise ValueError(message)
