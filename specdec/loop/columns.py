"""New tokens column by column, as plain decoding makes them: what streamers and criteria get."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

from specdec.arguments import shown


def num_ready(collector: Any, rows: Iterable[int]) -> int:
    """Columns that each of the rows of an `OutputCollector` has reached; one that has ended reaches
    all.
    """
    new, reasons = collector.new_tokens, collector.finish_reasons
    going = [len(new[row]) for row in rows if reasons[row] is None]
    return min(going, default=max(len(new[row]) for row in rows))


def column_of(collector: Any, rows: Iterable[int], column: int) -> list[int]:
    """The new token of each of the rows in a column, padding after a row's end."""
    pad, texts = collector.request.pad, [collector.new_tokens[row] for row in rows]
    return [new[column] if column < len(new) else pad for new in texts]


class Stream:
    """Hands each token once and in order to a streamer. It does not hold the call's
    `OutputCollector`, which holds it.

    Args:
        streamer: one of HF's.
    """

    def __init__(self, streamer: BaseStreamer):
        self._streamer = streamer
        self._num_streamed = 0

    def hand_over(self, collector: Any) -> None:
        """Hands over the columns that every row has reached, `[B]` tokens at a time."""
        rows = range(len(collector.new_tokens))
        ready = num_ready(collector, rows)
        for column in range(self._num_streamed, ready):
            tokens = column_of(collector, rows, column)
            self._streamer.put(torch.tensor(tokens, device="cpu"))
        self._num_streamed = ready


@contextmanager
def ending(streamer: BaseStreamer | None) -> Iterator[None]:
    """Ends a streamer if an error comes, so that nobody waits for the rest of the text.

    Raises:
        TypeError: it is no streamer.
    """
    is_one = all(callable(getattr(streamer, name, None)) for name in ("put", "end"))
    if isinstance(streamer, type) or not (streamer is None or is_one):
        got = shown(streamer)
        if isinstance(streamer, type):
            got = f"the class; pass {streamer.__name__}(tokenizer)"
        raise TypeError(f"streamer must be one of HF's, with put(tokens) and end(), got {got}")
    try:
        yield
    except BaseException:
        if streamer is not None:
            with suppress(Exception):  # the first error is the one to be seen
                streamer.end()
        raise
