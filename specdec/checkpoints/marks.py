"""`Clues`: what files of heads are recognised by. Its methods return what was found, in words. Keys
that they look at do not count as read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property

from specdec.checkpoints.files import CheckpointFolder

_EAGLE_NAMES = {
    *("fc.weight", "mask_hidden"),
    *("layers.0.hidden_norm.weight", "layers.0.self_attn.q_proj.weight"),
}


class Clues:
    """What a checkpoint shows before it is read; `canonical` is (a tensor's name) -> the head's."""

    def __init__(self, folder: CheckpointFolder, canonical: Callable[[str], str]):
        self.folder, self.fields, self.canonical = folder, folder.fields, canonical
        self.architectures = folder.fields.strings("architectures")

    @cached_property
    def eagle(self) -> set[str]:
        """Names that EAGLE heads are recognised by, as in the file and in the head's terms. A
        target's own files may hold more tensors than are read at once.
        """
        found = self.folder.tensors(
            lambda name: "midlayer." in name or self.canonical(name) in _EAGLE_NAMES
        )
        return {*found, *(self.canonical(name) for name in found)}

    @property
    def has_midlayer(self) -> bool:
        """The first layer is called so."""
        return any("midlayer." in name for name in self.eagle)

    def key(self, *names: str) -> str:
        """One of some keys, `section.key` where it is nested."""
        found = [name for name in names if self._value(name) is not None]
        return f"config.json has {found[0]}" if found else ""

    def value(self, key: str, wanted: str) -> str:
        """A key with a value."""
        name = key.rpartition(".")[2]
        return f"{name} {wanted!r}" if self._value(key) == wanted else ""

    def _value(self, key: str) -> object:
        place, name = self.fields.at(key)
        return place.raw.get(name)

    def architecture(self, pattern: str) -> str:
        """An architecture whose name begins so."""
        found = [name for name in self.architectures if re.match(pattern, name)]
        return f"architecture {found[0]}" if found else ""

    def tensor(self, pattern: str) -> str:
        """A tensor of such a name, a regular expression."""
        found = self.folder.tensors(lambda name: re.fullmatch(pattern, name) is not None)
        return f"tensor {next(iter(found))}" if found else ""

    def has_tensors(self, *ends: str) -> bool:
        """Tensors whose names end in each of these ways."""
        found = self.folder.tensors(lambda name: name.endswith(ends))
        return all(any(name.endswith(end) for name in found) for end in ends)
