"""The prompts of a call: a batch of ids, checked, every row from column 0 on."""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8


def read_batch(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    *,
    vocab_size: int,
    device: torch.device,
    padding_id: int | None = None,
) -> tuple[Tensor, Tensor, list[int]]:
    """Checks a batch `[B, T]` as HF users pass it; padded ones as `padding.to_front` reads them.

    Returns:
        The batch as it was passed, on the device, the rows' real tokens from column 0 on, on the
        host, which need not wait for the device at every question, and their lengths.
    """
    padded, ids = input_ids.to(device).long(), input_ids.cpu()
    if attention_mask is None and padding_id is None:
        tokens, lengths, mask = ids.long().clone(), [ids.shape[1]] * len(ids), True
    else:
        from specdec.request.padding import to_front

        tokens, lengths, mask = to_front(ids, attention_mask, padding_id)
    is_outside = mask & ((ids < 0) | (ids >= vocab_size))
    if is_outside.any():
        from specdec.request.refusals import refuse_vocabulary

        refuse_vocabulary(ids, is_outside, vocab_size)
    return padded, tokens, lengths


def check_ids(input_ids: Tensor) -> None:
    """Raises `TypeError` or `ValueError` for what is no batch `[B, T]` of token ids."""
    is_batch = isinstance(input_ids, Tensor) and input_ids.dim() == 2
    is_full = is_batch and input_ids.numel() > 0 and not input_ids.is_meta
    if not is_full or input_ids.dtype not in _INTEGERS:
        from specdec.request.refusals import refuse_ids

        refuse_ids(input_ids, _INTEGERS)
