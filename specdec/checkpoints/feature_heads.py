"""Reads checkpoints of heads over a target's features by their layouts; `family_of_layouts`: heads
that are described by records alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.checkpoints.config_fields import ConfigFields
from specdec.checkpoints.correction import CORRECTIONS
from specdec.checkpoints.family import Family, Source, Translation, recognise
from specdec.checkpoints.files import CheckpointFolder
from specdec.checkpoints.head_layouts import LAYOUTS
from specdec.checkpoints.layers import fill_speculators, has_neighbours
from specdec.checkpoints.layout import Layout, Reading, Tensors
from specdec.checkpoints.tensor_rules import (
    Ending,
    LaterNorms,
    Named,
    Prefixed,
    half_pairs,
    read_tensors,
)
from specdec.drafters.head.drafter import HeadDrafter

_STARTS = {
    theirs: ours
    for layout in (*LAYOUTS, *CORRECTIONS)
    for rule in layout.tensors
    if isinstance(rule, Named)
    for theirs, ours in rule.starts.items()
}
ANYBODYS = (
    Prefixed(also=("model.", "speculator.")),
    Ending(".self_attn.attention_sink_bias", ".self_attn.sinks"),
    Ending("_codebook.weight", "_codebook"),
    Named(_STARTS),
)
"""Names that say what a tensor is, whoever wrote it; a record's own come first."""


def canonical(name: str) -> str:
    """The head's name of a tensor by the layouts of the package."""
    for rule in ANYBODYS:
        name = rule.ours(name)
    return name


def translate(
    folder: CheckpointFolder,
    source: Source,
    target: PreTrainedModel | None,
    options: Mapping[str, Any],
) -> Translation:
    """Reads the whole configuration; see `Family`."""
    beside = {path.name for path in folder.path.iterdir()}
    given = {"options": options, "beside": beside, "target": target}
    reading = open_reading(source.layout, folder.fields, folder.tensors(), **given)
    reading.check_supported()
    config = reading.config()
    reading.check_joined(config)
    reading.accept_inert()
    if "layer" in source.layout.fields and has_neighbours(reading.fields):
        reading.tensors = half_pairs(reading.tensors, config.layer)
        reading.notes.append(
            "rotary pairs are neighbours (2i, 2i + 1) in the file: the rows of queries and keys "
            "are permuted"
        )
    return Translation(config, reading.tensors, reading.fields, reading.unused)


def open_reading(layout: Layout, fields: ConfigFields, tensors: Tensors, **given: Any) -> Reading:
    """A reading of files in a layout: its configuration whole, its tensors by the head's names.

    Args:
        layout, fields, given: as for `Reading`.
        tensors: by the names in the file.
    """
    if "transformer_layer_config" in fields.raw:  # stored as a difference
        fields = fill_speculators(fields)
    reading = Reading(layout, fields, {}, **given)
    anybodys = (*ANYBODYS, LaterNorms())
    reading.tensors = read_tensors(tensors, layout.tensors, reading, anybodys)
    return reading


def family_of_layouts(
    name: str,
    layouts: Sequence[Layout],
    drafter: type[HeadDrafter],
    head: Callable[[Any, Tensor | None], nn.Module],
    *,
    marks: str,
    **others: Any,
) -> Family:
    """A family whose files are recognised, read and written by records.

    Args:
        name, drafter, head, marks, others: as of `Family`.
        layouts: the records, in the order in which they are tried; their `config` is one class.

    Example:
        >>> from specdec.checkpoints.medusa_layouts import LAYOUTS
        >>> from specdec.drafters.medusa import MedusaDrafter, MedusaHead
        >>> family_of_layouts("Medusa", LAYOUTS, MedusaDrafter, MedusaHead, marks="...").config
        <class 'specdec.drafters.medusa.MedusaConfig'>
    """
    (config,) = {layout.config for layout in layouts}
    detect = partial(recognise, layouts=tuple(layouts), canonical=canonical)
    others = {"translate": translate, "config": config, "layouts": tuple(layouts)} | others
    return Family(name, marks, detect, drafter=drafter, head=head, **others)
