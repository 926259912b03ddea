"""What the operations take and return, for their definitions and their Triton kernels alike; and
which tensors the kernels take.

Legend: B rows, N window indices, K draft tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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


class FilterParams(NamedTuple):
    """How logits become probabilities.

    Args:
        temperature: `[B]` > 0, divides the logits; `None` is 1 in every row.
        is_greedy: `[B]` bool, rows whose distribution is one-hot on the largest logit, the lowest
            id among equals; `None` is no row.
        cutoff: tokens below it have probability 0; `None` keeps all.
        kept: of the logits' shape, these over the temperature and -inf where truncation drops them,
            in the place of a cutoff; only on a CPU. `None` where there is none.

    Example:
        >>> from specdec.kernels import filtered_probs
        >>> logits = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
        >>> params = FilterParams(torch.tensor([0.5, 1.0]), is_greedy=torch.tensor([False, True]))
        >>> filtered_probs(logits, params)
        tensor([[0.8808, 0.1192],
                [1.0000, 0.0000]])
    """

    temperature: Tensor | None = None
    is_greedy: Tensor | None = None
    cutoff: Cutoff | None = None
    kept: Tensor | None = None


class Truncation(NamedTuple):
    """What to keep; each field is `None` where no row uses it, at least one is given.

    Args:
        top_k: `[B]` int64, 0 keeps all.
        top_p: `[B]` float64 in 0..1, 1 keeps all.
        min_p: `[B]` float64 in 0..1, 0 keeps all.
        max_top_k: the largest `top_k`, a number on the host.
        lacks_top_k: 1 where some row keeps all, 0 where none does, likewise.
    """

    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    max_top_k: int = 0
    lacks_top_k: int = 0


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
        sliding_window: a query at position q sees slots after `q - sliding_window`; `None` sees
            all.
        window_visible: `[B, N, M]` bool, M >= N. Entry (i, j) is whether query i sees slot `first +
            j`, where `first` is M - N before the row's smallest query slot: the ancestors of a
            tree's nodes, or a block that sees itself in both directions. It is all that counts for
            these slots and those after them, also beside a sliding window. `None` is causal.
        positions: `[B, N]` int64 of the queries, for a sliding window; `None` for their slots.
        is_causal: queries see nothing after them, whatever the window's rows see in other layers;
            for `attend`, which leaves `window_visible` out.
        num_first: so many first slots are seen beside a sliding window; `None` for none.

    Example:
        >>> from specdec.kernels import ragged_attention
        >>> states, slots = torch.zeros(1, 1, 3, 2), torch.tensor([[0, 1, 2]])
        >>> values = torch.tensor([1.0, 3.0, 8.0]).view(1, 1, 3, 1)
        >>> options = AttentionOptions(sliding_window=2)
        >>> ragged_attention(states, states, values, slots, options).flatten().tolist()
        [1.0, 2.0, 5.5]
    """

    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    sliding_window: int | None = None
    window_visible: Tensor | None = None
    positions: Tensor | None = None
    is_causal: bool = False
    num_first: int | None = None


CAUSAL = AttentionOptions()
"""Plain causal attention."""
