"""A `Reading` becomes a configuration, whatever family its files are of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields as fields_of
from typing import Any

from specdec.checkpoints.layout import Reading


def check_supported(reading: Reading) -> None:
    """`ValueError` with all that no head of the library has."""
    pairs = (pair for refuse in reading.layout.refuse for pair in refuse(reading))
    if found := [text for is_so, text in pairs if is_so]:
        raise ValueError(f"{reading.fields.origin}: not supported: {'; '.join(found)}")


def read_config(reading: Reading) -> Any:
    """Every convention resolved, for a target if there is one; where the caller does not know
    better, as the layout says.
    """
    layout = reading.layout
    own = {field.name for field in fields_of(layout.config)}
    if given := sorted(_without_meaning(reading, own)):
        raise ValueError(f"{', '.join(given)}: {layout.kind} heads have none; drop it")
    said = [name for name in layout.fields if not name.startswith("layer.")]
    values = {name: reading[name] for name in said}
    return layout.config(**{name: value for name, value in values.items() if name in own})


def _without_meaning(reading: Reading, own: Iterable[str]) -> set[str]:
    """Options of a caller about fields that heads of the layout do not have."""
    options, fields = reading.options.keys(), reading.layout.fields
    found = (options & own) - fields.keys()
    has_layers = fields.get("feature_layers") != ()
    return found if has_layers else found | (options & {"feature_layers", "layer_convention"})
