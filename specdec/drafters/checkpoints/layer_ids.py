"""Which target features an EAGLE-3 head reads: every producer's numbering, turned into boundaries.

Boundary b is the residual stream after b decoder layers; the output of layer o (from 0) is boundary
o + 1. Reading one for the other is the field's most frequent silent fault: such a head still runs,
and hardly anything it drafts is accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from specdec.drafters.checkpoints.numbers import ConfigFields
from specdec.drafters.checkpoints.producers import Source
from specdec.target.features import FeatureLayer

Convention = Literal["boundary", "layer_output"]

DEFAULT_LAYERS = (2, "N//2", "N-3")
"""Boundaries of a head that names none, N being the target's layers: in all producers the same."""

MAX_LAYER = 4096

_TOP_LEVEL: dict[str, Convention] = {
    "eagle_aux_hidden_state_layer_ids": "boundary",
    "aux_hidden_state_layer_ids": "boundary",
    "target_layer_ids": "layer_output",
    "eagle3_layers_to_capture": "layer_output",
}


def read_feature_layers(
    fields: ConfigFields,
    source: Source,
    num_layers: int | None,
    convention: Convention | None,
) -> tuple[tuple[FeatureLayer, ...], list[str]]:
    """Finds the layer ids in a configuration.

    Args:
        fields: config.json.
        source: who wrote it.
        num_layers: N of the target, or `None` where no target is known.
        convention: how to take explicit ids, whatever the producer usually means.

    Returns:
        Boundaries, ascending (all producers join features in the order of layers), and notes.
        Without a target, default boundaries remain symbolic: `DEFAULT_LAYERS`.

    Raises:
        ValueError: ids that are present but no list of distinct layers of the target, or keys that
            contradict each other.
    """
    found, notes = {}, []
    for key, ids, usual in explicit_ids(fields, source):
        found[key] = _boundaries(key, ids, convention or usual, num_layers)
        notes.append(_note(key, ids, found[key], convention, usual, source, num_layers))
    if len(set(found.values())) > 1:
        readings = "; ".join(f"{key}: boundaries {list(b)}" for key, b in found.items())
        raise ValueError(
            f"{fields.origin} names layers more than once and not the same ones: {readings}. Pass "
            "feature_layers=(...) with the boundaries that are meant"
        )
    if found:
        return next(iter(found.values())), notes
    if num_layers is None:
        return DEFAULT_LAYERS, ["no layer ids: the default boundaries 2, N//2 and N-3"]
    layers = tuple(sorted({2, num_layers // 2, num_layers - 3}))
    if len(layers) < 3 or layers[0] < 0:
        raise ValueError(
            f"{fields.origin} names no layer ids, and of the default boundaries 2, N//2, N-3 some "
            f"coincide for a target of N = {num_layers} layers; pass feature_layers=(...)"
        )
    doubt = ""
    if source.producer == "NVIDIA":
        doubt = (
            "; NVIDIA's exporter writes the ids, so the defaults are a guess here "
            "(vllm-project/vllm#50170 measured 1 % acceptance on such a head): compare with others"
        )
    return layers, [f"no layer ids: the default boundaries {list(layers)}{doubt}"]


def explicit_ids(fields: ConfigFields, source: Source) -> list[tuple[str, object, Convention]]:
    """Every key under which ids stand, what stands there, and how its usual readers take it."""
    found = [(key, fields.get(key), usual) for key, usual in _TOP_LEVEL.items()]
    eagle = fields.section("eagle_config")
    # SpecForge's trainer hooks the outputs of layers. NVIDIA's heads are read as boundaries by
    # vLLM and, after measurement, by SGLang (sgl-project/sglang#32334).
    usual = "layer_output" if source.producer in ("SpecForge", "SafeAILab") else "boundary"
    key = "eagle_aux_hidden_state_layer_ids"
    found.append((f"eagle_config.{key}", eagle.get(key), usual))
    found.append(("eagle_config.layer_ids", eagle.get("layer_ids"), "boundary"))
    return [entry for entry in found if entry[1] is not None]


def _boundaries(
    key: str, ids: object, convention: Convention, num_layers: int | None
) -> tuple[int, ...]:
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise ValueError(f"{key} must be a list of layer numbers, got {str(ids)[:80]}")
    if len(set(ids)) < len(ids):
        raise ValueError(f"{key} names a layer twice: {ids}")
    shift = 1 if convention == "layer_output" else 0
    limit = MAX_LAYER if num_layers is None else num_layers
    boundaries = tuple(sorted(i + shift for i in ids))
    least = -1 if key == "target_layer_ids" else 0  # DeepSpec's -1: the embeddings
    if min(ids) < least or boundaries[0] < 0 or boundaries[-1] > limit:
        target = "" if num_layers is None else f" of the target's {num_layers} layers"
        raise ValueError(
            f"{key} {str(ids)[:80]}, read as {_words(convention)}, names boundaries "
            f"{boundaries[0]}..{boundaries[-1]} outside of 0..{limit}{target}; layer_convention= "
            "chooses the other reading"
        )
    return boundaries


def _note(
    key: str,
    ids: Sequence[int],
    boundaries: tuple[int, ...],
    chosen: Convention | None,
    usual: Convention,
    source: Source,
    num_layers: int | None,
) -> str:
    why = "as asked for" if chosen else f"by the convention of {source.producer}"
    note = f"{key} {list(ids)} are {_words(chosen or usual)}, {why}: boundaries {list(boundaries)}"
    if list(ids) != sorted(ids):
        note += "; features are joined in the order of layers, not of the list"
    if source.producer == "NVIDIA" and chosen is None:
        note += "; NVIDIA's training routes differ: compare with layer_convention='layer_output'"
    if source.producer == "DeepSpec" and boundaries[-1] == num_layers:
        note += f"; DeepSpec's trainer sees {num_layers} after the final norm: compare with 'final'"
    return note


def _words(convention: Convention) -> str:
    return {"boundary": "boundaries", "layer_output": "outputs of layers (from 0)"}[convention]
