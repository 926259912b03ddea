"""Reads checkpoints of heads over a target's features by the table of their layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields as fields_of
from typing import Any

from transformers import PreTrainedModel

from specdec.checkpoints.family import Source, Translation, refuse_unsupported
from specdec.checkpoints.files import CheckpointFolder
from specdec.checkpoints.head_layouts import LAYOUTS
from specdec.checkpoints.layers import fill_speculators
from specdec.checkpoints.layout import HeadLayout, Reading
from specdec.checkpoints.marks import Clues
from specdec.checkpoints.tensor_names import canonical_names


def starts_of(layouts: Sequence[HeadLayout]) -> dict[str, str]:
    """How names of tensors begin that are not the head's, and how the head's do: of all layouts,
    since a name says what it is whoever wrote it.
    """
    return {start: ours for x in (*LAYOUTS, *layouts) for start, ours in x.tensors.items()}


def recognise(folder: CheckpointFolder, layouts: Sequence[HeadLayout]) -> Source | None:
    """Whose conventions the files follow, by the strongest mark that they have of a layout."""
    clues = Clues(folder, starts_of(layouts))
    marked = [(rank, find, layout) for layout in layouts for rank, find in layout.marks.items()]
    for _, find, layout in sorted(marked, key=lambda mark: mark[0]):
        if why := find(clues):
            return Source(layout.producer, layout.kind, why)
    return None


def translate(
    folder: CheckpointFolder,
    source: Source,
    target: PreTrainedModel | None,
    options: Mapping[str, Any],
    *,
    layouts: Sequence[HeadLayout] = LAYOUTS,
) -> Translation:
    """Reads the whole configuration; see `Family`."""
    layout = next(x for x in layouts if (x.producer, x.kind) == (source.producer, source.kind))
    fields, in_file = folder.fields, folder.tensors()
    if source.producer == "speculators" and "transformer_layer_config" in fields.raw:
        fields = fill_speculators(fields)
    tensors = {
        name: in_file[other] for name, other in canonical_names(in_file, starts_of(layouts)).items()
    }
    beside = {path.name for path in folder.path.iterdir()}
    reading = Reading(layout, fields, tensors, options, beside, target)
    refuse_unsupported(fields, layout.refuse(reading))
    config = read_config(reading)
    reading.check_joined(config)
    for key in layout.inert:
        place, name = (fields if "." in key else reading.either).at(key)
        place.get(name)
    unused = {
        tensor: why for tensor, (field, why) in layout.unused.items() if not reading.values[field]
    }
    return Translation(config, tensors, fields, unused)


def read_config(reading: Reading) -> Any:
    """Every convention resolved, for a target if there is one; field by field, as the layout says,
    where the caller does not know better.
    """
    layout, options, values = reading.layout, reading.options, reading.values
    if given := sorted(set(layout.no_options) & options.keys()):
        raise ValueError(f"{', '.join(given)}: a {layout.kind} head has none; drop it")
    for name, key in layout.keys.items():
        values[name] = reading.value_of(key)
        if name in options and name not in ("feature_layers", "layer"):
            values[name] = options[name]
    own = {field.name for field in fields_of(layout.config)}
    return layout.config(**{name: value for name, value in values.items() if name in own})
