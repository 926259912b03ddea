"""Padded prompts: every row's real tokens are moved to column 0."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.arguments import shown


def to_front(
    input_ids: Tensor, attention_mask: Tensor | None, padding_id: int | None
) -> tuple[Tensor, list[int], Tensor]:
    """Real tokens `[B, T']` from column 0 on, how many each row has, and where they stood, `[B, T]`
    bool.

    A mask marks one unbroken run of real tokens per row, padded left or right. Without a mask,
    padding ids before a row's first other token are padding and all others are tokens, as in
    batches that are padded for HF's `generate`. A batch without a mask in which a row ends in the
    padding id raises ValueError: it may be right padding, or a token.

    Args:
        input_ids: `[B, T]` on the host.
        attention_mask: `[B, T]`.
        padding_id: without a mask.
    """
    mask = attention_mask
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
    source = (first[:, None] + columns[: max(lengths)]).clamp(max=input_ids.shape[1] - 1)
    return input_ids.gather(1, source).long(), lengths, mask


def _mask_of(input_ids: Tensor, padding_id: int) -> Tensor:
    ends_in_padding = (input_ids[:, -1] == padding_id).tolist()
    if len(input_ids) > 1 and any(ends_in_padding):
        raise ValueError(
            f"row {ends_in_padding.index(True)} of the batch ends in the padding id {padding_id}, "
            "which may be padding or a token; pass the attention_mask"
        )
    return (input_ids != padding_id).cumsum(dim=1).clamp(max=1)
