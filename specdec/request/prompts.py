"""What a call brings for each row: prompts, of which a padded batch is checked and every row moved
to column 0 (or a batch is made), and row inputs, named values that steps read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec.arguments import check_tensor, shown

_INTEGERS = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8


def read_batch(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    *,
    vocab_size: int,
    device: torch.device,
    padding_id: int | None = None,
) -> tuple[Tensor, Tensor, list[int]]:
    """Checks a batch `[B, T]` as HF users pass it.

    A mask marks one unbroken run of real tokens per row, padded left or right. Without a mask,
    padding ids before a row's first other token are padding and all others are tokens, as in
    batches that are padded for HF's `generate`. A batch without a mask in which a row ends in the
    padding id is refused: it may be right padding, or a token.

    Returns:
        The batch as it was passed, on the device, the rows' real tokens from column 0 on, on the
        host, which need not wait for the device at every question, and their lengths.
    """
    padded, input_ids, mask = input_ids.to(device).long(), input_ids.cpu(), attention_mask
    if mask is None:
        mask = _mask_of(input_ids, padding_id)
    if not isinstance(mask, Tensor) or mask.shape != input_ids.shape:
        wanted = f"attention_mask must have the shape of input_ids, {list(input_ids.shape)}"
        raise ValueError(f"{wanted}, got {shown(mask)}")
    if mask.is_meta:
        raise ValueError("attention_mask is on the meta device, where no tensor has values")
    mask = mask.cpu()
    is_odd = (mask != 0) & (mask != 1)
    if is_odd.any():
        raise ValueError(
            "attention_mask must hold 1 for real tokens and 0 for padding, got "
            f"{mask[is_odd][0].item()}; an additive mask (0 and -inf) is not one"
        )
    mask = mask != 0
    lengths = mask.sum(dim=1)
    first = mask.long().argmax(dim=1)
    columns = torch.arange(input_ids.shape[1], device="cpu")
    is_run = (columns >= first[:, None]) & (columns < (first + lengths)[:, None])
    outside = mask & ((input_ids < 0) | (input_ids >= vocab_size))
    lengths = lengths.tolist()
    if 0 in lengths:
        raise ValueError(
            f"row {lengths.index(0)} of the batch is all padding; every prompt needs at least "
            "one token"
        )
    if (wrong := (is_run != mask).any(dim=1)).any():
        raise ValueError(
            f"the attention_mask of row {int(wrong.long().argmax())} has holes; real tokens "
            "must be one unbroken run, with padding on the left or on the right only"
        )
    if outside.any():
        row, column = outside.nonzero()[0].tolist()
        raise ValueError(
            f"input_ids[{row}, {column}] is {int(input_ids[row, column])}, outside the "
            f"target's vocabulary of {vocab_size}; was the prompt encoded with the target's "
            "tokenizer?"
        )
    source = (first[:, None] + columns[: max(lengths)]).clamp(max=input_ids.shape[1] - 1)
    return padded, input_ids.gather(1, source).long(), lengths


def check_ids(input_ids: Tensor) -> None:
    """Raises `TypeError` or `ValueError` for what is no batch `[B, T]` of token ids."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        from specdec.request.hints import for_prompt

        expected = "input_ids must be a tensor [B, T] of token ids"
        kind = ValueError if isinstance(input_ids, Tensor) else TypeError
        raise kind(f"{expected}, got {shown(input_ids)}{for_prompt(input_ids)}")
    check_tensor("input_ids", input_ids, (None, None), _INTEGERS)
    if input_ids.is_meta:
        raise ValueError("input_ids are on the meta device, where no tensor has values")
    if input_ids.numel() == 0:
        raise ValueError(
            f"the prompt is empty (input_ids of shape {list(input_ids.shape)}); pass at least one "
            "token, for example the tokenizer's bos_token_id"
        )


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


def _mask_of(input_ids: Tensor, padding_id: int | None) -> Tensor:
    if padding_id is None:
        return torch.ones_like(input_ids)
    ends_in_padding = (input_ids[:, -1] == padding_id).tolist()
    if len(input_ids) > 1 and any(ends_in_padding):
        raise ValueError(
            f"row {ends_in_padding.index(True)} of the batch ends in the padding id {padding_id}, "
            "which may be padding or a token; pass the attention_mask"
        )
    return (input_ids != padding_id).cumsum(dim=1).clamp(max=1)


def read_row_inputs(given: Any, rows: int, copies: int = 1) -> dict[str, Tensor]:
    """Values as tensors `[B, ...]` of the host: int64, float32 or bool.

    Args:
        given: by name, tensors or sequences of B values, or of one for each prompt; `None` for no
            inputs.
        rows: B.
        copies: rows of each prompt.

    Raises:
        TypeError, ValueError: what is no such table; says which.

    Example:
        >>> read_row_inputs({"adapter": [0, 2]}, rows=4, copies=2)
        {'adapter': tensor([0, 0, 2, 2])}
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"row_inputs must be a dict of tensors by name, got {shown(given)}")
    found = {}
    for name, value in given.items():
        try:
            table = torch.as_tensor(value, device="cpu").detach()
            if table.is_floating_point():  # numbers of Python's would be of the default data type
                table = torch.as_tensor(value, dtype=torch.float32, device="cpu").detach()
        except (TypeError, ValueError, RuntimeError) as error:
            got = shown(value)
            raise TypeError(
                f"row_inputs[{name!r}] must be a tensor or a sequence of numbers, got {got}; "
                "nothing but 'adapter' has values that are names"
            ) from error
        if table.dim() and copies > 1 and len(table) * copies == rows:
            table = table.repeat_interleave(copies, dim=0)
        if table.dim() == 0 or len(table) != rows:
            raise ValueError(
                f"row_inputs[{name!r}] has shape {list(table.shape)} for a batch of {rows} rows; "
                "rows come first"
            )
        dtype = torch.float32 if table.is_floating_point() else torch.long
        found[name] = table if table.dtype == torch.bool else table.to(dtype)
    offset = found.get("position_offset")
    if offset is not None and (offset.dtype != torch.long or offset.dim() > 1 or offset.min() < 0):
        raise ValueError(
            f"row_inputs['position_offset'] must be an integer >= 0 for each row, got "
            f"{shown(given['position_offset'])}"
        )
    return found


def offsets_among(row_inputs: Mapping[str, Tensor]) -> Iterable[int]:
    """By how much the positions of each row are moved on: 0 where nothing says so."""
    offset = row_inputs.get("position_offset")
    return repeat(0) if offset is None else offset.tolist()


def refuse_unknown(names: Iterable[str], parts: Sequence[Any]) -> None:
    """Raises `TypeError` for a name of a row input that no part of a generator declares."""
    known = {name: part for part in reversed(parts) for name in part.row_inputs}
    for name in names:
        if name not in known:
            said = ", ".join(f"{n!r} ({type(part).__name__})" for n, part in known.items())
            raise TypeError(
                f"nobody reads row_inputs[{name!r}]; known are {said}. A drafter declares its own "
                "in Drafter.row_inputs, an edit in its attribute row_inputs"
            )
