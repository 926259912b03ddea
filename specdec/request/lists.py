"""Prompts as lists of token ids, checked, and the padded batch of some."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def id_lists(name: str, rows: Any) -> list[list[int]]:
    """Token ids of each prompt as plain integers; one prompt at least, none of them empty.

    Raises:
        TypeError: what is no sequence of sequences of integers, such as text.
        ValueError: no prompt, or an empty one.

    Example:
        >>> id_lists("prompts", torch.tensor([[5, 6]]))
        [[5, 6]]
    """
    try:
        rows = [[index(token) for token in row] for row in rows]
    except TypeError as error:
        advice = "pass token ids, [tokenizer(text).input_ids for text in texts]"
        raise TypeError(f"{name} must be lists of integers: {error}; {advice}") from error
    if not rows or not all(rows):
        raise ValueError(
            f"there are no {name}, or one is empty; expected at least one prompt, and at least one "
            "token in each"
        )
    return rows


def left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask `[B, T]` of rows of token ids, padded on the left.

    Example:
        >>> left_padded([[5], [6, 7]], torch.device("cpu"))[0]
        tensor([[0, 5],
                [6, 7]])
    """
    ids = [torch.tensor(row, dtype=torch.long, device="cpu") for row in rows]
    both = ids, [torch.ones_like(row) for row in ids]
    ids, mask = (pad_sequence(table, batch_first=True, padding_side="left") for table in both)
    return ids.to(device), mask.to(device)
