"""Which target features a head reads: every producer's numbering, turned into hidden states.

Hidden state b, HF's `hidden_states[b]`, is the residual stream after b decoder layers; the output
of layer o (from 0) is hidden state o + 1. Reading one for the other is the field's most frequent
silent fault: such a head still runs, and hardly anything that it drafts is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from specdec.checkpoints.config_fields import ConfigFields
from specdec.types import FeatureLayer

Convention = Literal["hidden_state", "layer_output"]

_WORDS = {"hidden_state": "hidden states", "layer_output": "outputs of layers (from 0)"}
CONVENTIONS = tuple(_WORDS)
NAME_THEM = "pass feature_layers=(...) with the hidden states that are meant"
_MAX_LAYER = 4096


class LayerIds(NamedTuple):
    """What stands under a key, how the readers of that key usually take it, and the lowest id that
    it may hold (-1 as a layer's output are the embeddings).
    """

    key: str
    ids: object
    usual: Convention
    least: int = 0


def read_layer_ids(
    found: Sequence[LayerIds],
    fields: ConfigFields,
    num_layers: int | None,
    *,
    producer: str,
    convention: Convention | None = None,
) -> tuple[FeatureLayer, ...]:
    """Hidden states of the ids that were `found`, ascending: all producers join features in the
    order of layers. Without any, 2, N // 2 and N - 3, which all producers take for granted,
    symbolic where the target's N is not known. The notes of `fields` say what was decided.

    Args:
        found: explicit ids, by the usual convention of `producer`.
        fields: the configuration.
        num_layers: N.
        producer: for the notes.
        convention: how to take the ids, whatever the producer usually means.
    """
    if not found:
        return _default_hidden_states(fields, num_layers)
    why = "as asked for" if convention else f"by the convention of {producer}"
    hidden_states = {}
    for entry in found:
        key, ids, read_as = entry.key, entry.ids, convention or entry.usual
        hidden_states[key] = _hidden_states(entry, read_as, num_layers)
        note = f"{key} {ids} are {_WORDS[read_as]}, {why}: hidden states {list(hidden_states[key])}"
        if ids != sorted(ids):
            note += "; features are joined in the order of layers, not of the list"
        fields.notes.append(note)
    if len(set(hidden_states.values())) > 1:
        readings = "; ".join(f"{key}: hidden states {list(b)}" for key, b in hidden_states.items())
        raise ValueError(
            f"{fields.origin} names layers more than once and not the same ones: {readings}; "
            f"{NAME_THEM}"
        )
    return hidden_states[key]


def _hidden_states(
    entry: LayerIds, convention: Convention, num_layers: int | None
) -> tuple[int, ...]:
    key, ids = entry.key, entry.ids
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise ValueError(f"{key} must be a list of layer numbers, got {str(ids)[:80]}")
    if len(set(ids)) < len(ids):
        raise ValueError(f"{key} names a layer twice: {ids}")
    limit = _MAX_LAYER if num_layers is None else num_layers
    hidden_states = tuple(sorted(i + (convention == "layer_output") for i in ids))
    if min(ids) < entry.least or hidden_states[0] < 0 or hidden_states[-1] > limit:
        target = "" if num_layers is None else f" of the target's {num_layers} layers"
        raise ValueError(
            f"{key} {str(ids)[:80]}, read as {_WORDS[convention]}, names hidden states "
            f"{hidden_states[0]}..{hidden_states[-1]} outside of 0..{limit}{target}; "
            "layer_convention= chooses the other reading"
        )
    return hidden_states


def _default_hidden_states(
    fields: ConfigFields, num_layers: int | None
) -> tuple[FeatureLayer, ...]:
    layers = (2, "N//2", "N-3") if num_layers is None else _usual(num_layers)
    if len(layers) < 3 or layers[0] < 0:
        raise ValueError(
            f"{fields.origin} names no layer ids, and of the default hidden states 2, N//2, N-3 "
            f"some coincide for a target of N = {num_layers} layers; pass feature_layers=(...)"
        )
    shown = "2, N//2 and N-3" if num_layers is None else list(layers)
    fields.notes.append(f"no layer ids: the default hidden states {shown}")
    return layers


def evenly_spaced(count: int, num_layers: int) -> tuple[int, ...]:
    """The hidden states that DFlash's readers take where a checkpoint names none: the outputs of
    `count` layers, evenly spaced from 1 to N - 3; of layer N / 2 for one.
    """
    if count == 1:
        return (num_layers // 2 + 1,)
    step = (num_layers - 4) / (count - 1)
    return tuple(round(1 + i * step) + 1 for i in range(count))


def _usual(num_layers: int) -> tuple[int, ...]:
    return tuple(sorted({2, num_layers // 2, num_layers - 3}))


def check_layers(name: str, layers: Any, num_layers: int | None = None) -> tuple[FeatureLayer, ...]:
    """A caller's hidden states (or `"final"`), distinct ones that the target has."""
    if not isinstance(layers, list | tuple):
        raise TypeError(f"{name} must be a tuple of hidden states, got {str(layers)[:80]!r}")
    for layer in layers:
        is_index = type(layer) is int and layer >= 0
        if layer != "final" and not (is_index and layer <= (num_layers or layer)):
            raise ValueError(
                f"{name} {list(layers)} must be hidden states 0..{num_layers or 'N'} or 'final'"
            )
    if not layers or len(set(layers)) < len(layers):
        raise ValueError(f"{name} {list(layers)} must name at least one, and none twice")
    return tuple(layers)


def other_hidden_states(
    layers: tuple[FeatureLayer, ...], num_layers: int
) -> Iterator[tuple[str, tuple[FeatureLayer, ...]]]:
    """Misreadings of feature layers, each as name and hidden states: off by one, the other side of
    the final norm, the defaults.
    """
    others = {
        f"{word}: hidden states {', '.join(map(str, ids))}": ids
        for word, shift in (("one layer lower", -1), ("one layer higher", 1))
        if (ids := tuple(b if b == "final" else b + shift for b in layers)) != layers
    }
    if layers[-1] == "final":
        others["before the final norm"] = (*layers[:-1], num_layers)
    elif layers[-1] == num_layers:
        others["the last after the final norm"] = (*layers[:-1], "final")
    usual = _usual(num_layers)
    if len(usual) == len(layers) and layers != usual:
        others[f"the default hidden states {', '.join(map(str, usual))}"] = usual
    for name, ids in others.items():
        if all(b == "final" or 0 <= b <= num_layers for b in ids):
            yield name, ids
