"""Lets mkdocstrings show the `Example:` of a docstring as code; it knows `Examples:` only."""

import re

import griffe


class ExamplesAreCode(griffe.Extension):
    """Renames the section before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Of every module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"(?m)^Example:$", "Examples:", obj.docstring.value)
