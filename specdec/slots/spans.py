"""Spans of a text that a layer's tokens see, in place of a sliding window's number of positions."""

from typing import NamedTuple


class Chunk(NamedTuple):
    """A query sees keys of its own chunk of `size` positions, which begin at multiples of it
    (Llama 4).
    """

    size: int


class Near(NamedTuple):
    """A query sees the last `recent` positions, its own among them, and the first `sinks` of its
    text. A whole cache may have one, that of a draft.
    """

    recent: int
    sinks: int
