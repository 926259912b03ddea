"""The prompts of a call: a padded batch, which is checked, and every row moved to column 0."""

from __future__ import annotations

import torch
from torch import Tensor

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
    padding id raises ValueError: it may be right padding, or a token.

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
