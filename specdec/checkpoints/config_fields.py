"""`ConfigFields`: a checkpoint's configuration, read field by field with types and bounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

LIMITS = {"num_hidden_layers": 64, "max_position_embeddings": 2**31}
"""Largest values that are accepted; larger ones would only exhaust the memory."""
MAX_SIZE = 2**23
"""The largest of all other numbers."""


class ConfigFields:
    """Fields of a configuration; `null` means absent, as in Hugging Face's own configurations.
    `origin` is its name in messages, and `notes` are what readers decided and why.

    Every method that names a type raises `ValueError`, with file, key and value, where it finds
    something else.
    """

    def __init__(self, raw: Mapping[str, Any], origin: str):
        self.raw = raw
        self.origin = origin
        self.notes: list[str] = []
        self._read: set[str] = set()
        self._whole: set[str] = set()
        self._sections: dict[str, ConfigFields] = {}

    @property
    def unread(self) -> dict[str, Any]:
        """Keys that no call has looked up, with their values; those of sections as `section.key`.
        Null and what is empty say nothing.
        """
        found: dict[str, Any] = {}
        for name, value in self.raw.items():
            if name in self._whole:
                continue
            if isinstance(value, dict):
                inner = self.section(name).unread
                found |= {f"{name}.{key}": value for key, value in inner.items()}
            elif name not in self._read and value not in (None, []):
                found[name] = value
        return found

    def accept(self, names: Iterable[str]) -> None:
        """Some keys count as read, sections with all that is in them."""
        for place, name in map(self.at, names):
            place._whole.add(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of any type, or `default` where it is absent or null."""
        self._read.add(name)
        value = self.raw.get(name)
        return default if value is None else value

    def integer(
        self, name: str, default: int | None = None, *, low: int = 1, high: int | None = None
    ) -> int:
        """An integer in `low..high`; `high` is by default that of `LIMITS`."""
        value, high = self.get(name, default), high or LIMITS.get(name, MAX_SIZE)
        if value is None:
            raise ValueError(f"{self.origin} lacks {name}")
        fits = type(value) is int and low <= value <= high
        return self._checked(name, value, fits, f"an integer in {low}..{high}")

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false."""
        value = self.get(name, default)
        return self._checked(name, value, type(value) is bool, "true or false")

    def number(
        self, name: str, default: float | None = None, *, is_needed: bool = False
    ) -> float | None:
        """A positive finite number, or `default`."""
        value = self.get(name, default)
        if value is None and is_needed:
            raise ValueError(f"{self.origin} lacks {name}")
        fits = value is None or (type(value) in (int, float) and 0 < value < math.inf)
        self._checked(name, value, fits, "a positive number")
        return value if value is None else float(value)

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self.get(name, default)
        return self._checked(name, value, isinstance(value, str), "a string")

    def strings(self, name: str) -> list[str]:
        """A list of strings; empty where it is absent."""
        value = self.get(name, [])
        fits = isinstance(value, list) and all(isinstance(entry, str) for entry in value)
        return self._checked(name, value, fits, "a list of strings")

    def section(self, name: str) -> ConfigFields:
        """A nested object; empty where it is absent."""
        value = self.get(name, {})
        self._checked(name, value, isinstance(value, dict), "an object")
        return self._sections.setdefault(name, ConfigFields(value, f"{self.origin}: {name}"))

    def at(self, key: str) -> tuple[ConfigFields, str]:
        """Where `section.key` stands, and its name there; a plain key stands here."""
        section, _, name = key.rpartition(".")
        return (self.section(section) if section else self), name

    def with_section(self, name: str, **other_names: str) -> ConfigFields:
        """Keys that may stand at the top or in a section, some of them under other names there."""
        return _TwoPlaces(self, name, other_names)

    def _checked(self, name: str, value: Any, fits: bool, expected: str) -> Any:
        if not fits:
            raise ValueError(f"{self.origin}: {name} must be {expected}, got {repr(value)[:80]}")
        return value


class _TwoPlaces(ConfigFields):
    """See `with_section`. A key that has one value at the top and another one in the section raises
    `ValueError`: readers disagree about which of them counts.
    """

    def __init__(self, top: ConfigFields, name: str, other_names: Mapping[str, str]):
        super().__init__(top.raw, top.origin)
        self._top, self._name, self._other_names = top, name, other_names

    def get(self, name: str, default: Any = None) -> Any:
        """See `ConfigFields.get`."""
        inner = self._other_names.get(name, name)
        first, second = self._top.get(name), self._top.section(self._name).get(inner)
        if None not in (first, second) and first != second:
            raise ValueError(
                f"{self.origin} names two values of {name}: {repr(first)[:80]} at the top and "
                f"{repr(second)[:80]} as {self._name}.{inner}; keep one of them"
            )
        return next((value for value in (first, second) if value is not None), default)

    def section(self, name: str) -> ConfigFields:
        """See `ConfigFields.section`."""
        return self._top.section(name)
