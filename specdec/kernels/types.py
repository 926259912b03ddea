"""What the operations take and return, for their definitions and their Triton kernels alike; and
which tensors the kernels take.

Legend: B rows, N window indices or new tokens of a context, K draft tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_WINDOW = 64
"""Queries of a window with a mask of its own: a kernel holds a row of the mask in one integer."""
SUM_TOLERANCE = 1e-3
"""How far the sum of draft probabilities may be from 1: float32 rounding of a wide row, and no
more."""


def suits_kernels(tensor: Tensor) -> bool:
    """On a GPU, float64, as oracles have, and tensors with gradients use the definition. Callers
    ask `tensor.is_cuda` first, so that on a CPU no call is made for the answer.
    """
    return tensor.dtype != torch.float64 and not tensor.requires_grad


class Cutoff(NamedTuple):
    """Token v of a row is kept iff (scaled logit of v, v) >= (logits, ids), compared in this order.

    Args:
        logits: `[B]` or `[B, N]`, in units of the scaled logits.
        ids: int64 of the same shape.
    """

    logits: Tensor
    ids: Tensor


class WarpParams(NamedTuple):
    """How logits become probabilities.

    Args:
        temperature: `[B]` > 0, divides the logits; `None` is 1 in every row.
        is_greedy: `[B]` bool, rows whose distribution is one-hot on the largest logit, the lowest
            id among equals; `None` is no row.
        cutoff: tokens below it have probability 0; `None` keeps all.
    """

    temperature: Tensor | None = None
    is_greedy: Tensor | None = None
    cutoff: Cutoff | None = None


class Truncation(NamedTuple):
    """What to keep; each field is `None` where no row uses it, at least one is given.

    Args:
        top_k: `[B]` int64, 0 keeps all.
        top_p: `[B]` float64 in 0..1, 1 keeps all.
        min_p: `[B]` float64 in 0..1, 0 keeps all.
        max_top_k: the largest `top_k`, a number on the host.
    """

    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    max_top_k: int = 0


class VerifyUniforms(NamedTuple):
    """The random numbers of a rule.

    Args:
        accept: `[B, K]` float64 in [0, 1).
        resample: `[B]` float64 in [0, 1).
    """

    accept: Tensor
    resample: Tensor


class AttentionOptions(NamedTuple):
    """How scores become weights, and who sees whom.

    Args:
        scale: factor of the scores; `None` is `D ** -0.5`.
        softcap: scores become `softcap * tanh(scores / softcap)`; `None` leaves them.
        sinks: `[Hq]`, one extra score per head that takes weight and has no value; `None` for none.
        sliding_window: a query in slot q sees slots after `q - sliding_window`; `None` sees all.
        window_visible: `[B, N, N]` bool. Entry (i, j) is whether query i sees slot `first + j`,
            where `first` is the row's smallest query slot: the ancestors of a tree's nodes, or a
            block that sees itself in both directions. It is all that counts for these slots, also
            beside a sliding window. `None` is causal.
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    sliding_window: int | None = None
    window_visible: Tensor | None = None


CAUSAL = AttentionOptions()
"""Plain causal attention."""


class WindowSpec(NamedTuple):
    """What a window is made of: numbers of the host, the same for every row of a batch.

    Args:
        shift: 1: committed rows are the N new tokens, each one position before its own (where its
            feature is from). 0: they are the anchor and the new tokens, each at its own position.
        num_later: M.
        opens_with_last: the first of the M rows is the last committed token; the others are masks.
        first_row: which of the M rows predicts the first draft token, the next ones the next; -1
            is the last committed row.
        num_draft_tokens: K <= M - first_row.
        mask_token: id of the masks.
        max_positions: rows at this position and after are not written.
        trash: the slot of rows that are not to be written.
    """

    shift: int
    num_later: int
    opens_with_last: bool
    first_row: int
    num_draft_tokens: int
    mask_token: int
    max_positions: int
    trash: int

    def num_committed(self, num_new: int) -> int:
        """R, given N."""
        return num_new + 1 - self.shift


class MaskWindow(NamedTuple):
    """The rows of one pass. A row's slot is its position, unless it is the trash slot.

    Args:
        tokens: `[B, R + M]` int64; 0 for committed rows beyond a row's own.
        slots: `[B, R + M]` int64.
        sampled: `[B, K]` int64, index of the row that predicts each draft token.
        num_valid: `[B]` int64, how many of them are predicted by rows that are written.
        first_later: `[B]` int64, position of the first of the M rows.
    """

    tokens: Tensor
    slots: Tensor
    sampled: Tensor
    num_valid: Tensor
    first_later: Tensor


class PastRows(NamedTuple):
    """The last H rows of each text that end at its anchor, the newest last.

    Args:
        tokens: `[B, H]` int64.
        features: `[B, H, F]`.
    """

    tokens: Tensor
    features: Tensor


class ShiftedWindow(NamedTuple):
    """The last W rows of each text, the newest last.

    Args:
        tokens: `[B, W]` int64; 0 where there is no row.
        features: `[B, W, F]`; 0 where there is no row.
        slots: `[B, W + M]` int64: the slot of each row, then the M slots that follow the newest
            row; the trash slot where there is no row, and everywhere for a text without new tokens.
    """

    tokens: Tensor
    features: Tensor
    slots: Tensor

    def past(self, count: int) -> PastRows:
        """Its last `count` rows: what the next window has to remember."""
        first = self.tokens.shape[1] - count
        return PastRows(self.tokens[:, first:], self.features[:, first:])
