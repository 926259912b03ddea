"""`shift_window`: the window that repairs the depths of a multi-token prediction head.

Legend: B rows, N new tokens of a context, H remembered rows, W window, M later passes, F feature
width, D depths, K draft tokens. A *row t* of a head is the pair (token t + 1, feature of position
t); it sits in slot t.

*What is stale.* Tokens x_0 .. x_p are committed; x_p is the root. Depth d (0-based) reads at
index i token x_{i+d+1} and the feature of position i, or the output of depth d - 1 at index i. So
an entry depends on committed tokens only if i + d + 1 <= p. The newest d entries of depth d were
computed from draft tokens, and are right only if those tokens are accepted.

Let the next step commit c tokens: c - 1 accepted ones and one recovered or bonus token, which makes
the root p' = p + c. Depth d must then compute the indices min(p, p' - d - 1) .. p' - 1, which are
max(c, d + 1): c new ones, the others stale. This relies on the loop: all new tokens but the last
are the draft tokens that the depths have read. Tokens of a prompt are not, and its windows are
c + D - 1 wide.

*Why K + 1 rows suffice.* 1 <= c <= K + 1 and d + 1 <= D. So if D <= K + 1, max(c, d + 1) <= K + 1:
a step that rejects much has many stale rows, but few new ones. The window is aligned at its right
end:

    columns     0 ............. W - c - 1 | W - c ......... W - 1
    rows        remembered, the newest    | the c new ones
    index       p' - W ....... p - 1      | p ....... p' - 1

The newest row is in the last column for every text, so depth d finds its tokens by a static slice:
the window's tokens without the first d, and d draft tokens after them. Since c >= 1, at most D - 1
remembered rows are needed, whatever K was; columns before them are final at every depth, and are
padding. A remembered row is a committed token and the *target's* feature, never an output of a
depth, so computing the chain again from it repairs every depth. The last D - 1 rows of a window are
what the next one has to remember.

*Other cases are values of the same formulas.* K > D: the last depth runs again in slots p',
p' + 1, ..., which the next window overwrites, since c <= W. A drafter made for K < D has its first
K depths only; a single call for fewer tokens has W = max(K + 1, D) and runs all D, so that none has
a hole. After a prompt the newest d entries of depth d were computed from an unknown token; the
first step has c = 1 and computes max(1, d + 1) indices. `num_new` of 0 or -1: c = 0, so the
remembered rows stay, and all slots are padding, since with -1 the root is another text's padding.

Reference: Gloeckle et al., arXiv:2404.19737; DeepSeek-AI, arXiv:2412.19437, section 2.2. The
problem and a first fix: vllm-project/vllm#33561.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.types import Context


class PastRows(NamedTuple):
    """The last H rows of each text that end at its root, the newest last.

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
            row; the padding slot where there is no row, and everywhere for a text without new
            tokens.
    """

    tokens: Tensor
    features: Tensor
    slots: Tensor

    def past(self, count: int) -> PastRows:
        """Its last `count` rows: what the next window has to remember."""
        first = self.tokens.shape[1] - count
        return PastRows(self.tokens[:, first:], self.features[:, first:])


def shift_window(
    context: Context, past: PastRows, width: int, *, padding_slot: int, num_later: int = 0
) -> ShiftedWindow:
    """Shifts the new rows of a context to the right end of a window of fixed width, and fills the
    vacated front with remembered rows.

    The newest row of every text is in the last column, however many tokens were accepted. Nothing
    is written in place: the inputs may be views of the outputs of an earlier call.

    Args:
        context: N new tokens per row and the features beside them. Columns at or beyond `num_new`
            are not read; a text with `num_new` of 0 or less keeps its remembered rows.
        past: H rows that end at the context's root. Rows before a text's start are not read.
        width: W, at least H, so that the window holds what the next call has to remember.
        padding_slot: the slot of tokens to forget.
        num_later: M.

    Raises:
        ValueError: a window that is too narrow, or a context without features.

    Example:
        >>> one = torch.tensor([1])
        >>> rows = torch.arange(4.0).view(1, 4, 1)
        >>> context = Context(torch.tensor([[6, 7, -1]]), rows[:, 2:], 2 * one, one)
        >>> past = PastRows(torch.tensor([[5, 6]]), rows[:, :2])
        >>> window = shift_window(context, past, 3, padding_slot=16, num_later=1)
        >>> window.tokens, window.slots
        (tensor([[5, 6, 7]]), tensor([[0, 1, 2, 3]]))
    """
    _check_widths(context, past, width)
    tokens = torch.cat([past.tokens, context.tokens[:, 1:]], dim=1)  # [B, H + N]
    features = torch.cat([past.features, context.features], dim=1)  # [B, H + N, F]
    num_past, num_columns = past.tokens.shape[1], context.tokens.shape[1] - 1
    count = context.num_new.clamp(0, num_columns)[:, None]  # the one clamp; all below follows
    offsets = torch.arange(width + num_later, device=tokens.device) - width
    index = count + offsets  # [B, W + M]: among the new rows; negative among the remembered
    slots = context.start[:, None] + index
    is_row = (index >= -num_past) & (slots >= 0)
    slots = torch.where(is_row & (count > 0), slots, padding_slot)
    is_row, source = is_row[:, :width], (index[:, :width] + num_past).clamp(min=0)
    wide = source[..., None].expand(-1, -1, features.shape[2])
    return ShiftedWindow(
        tokens=torch.where(is_row, tokens.gather(1, source), 0),
        features=torch.where(is_row[..., None], features.gather(1, wide), 0),
        slots=slots,
    )


def _check_widths(context: Context, past: PastRows, width: int) -> None:
    """Raises `ValueError` for inputs of shapes that do not fit together."""
    if context.features is None:
        raise ValueError("shift_window needs a context with features")
    num_past = past.tokens.shape[1]
    if width < num_past:
        raise ValueError(
            f"a window of {width} rows cannot hold the {num_past} rows to remember; make it wider"
        )
    if past.features.shape[2] != context.features.shape[2]:
        raise ValueError(
            f"remembered features are {past.features.shape[2]} wide and the context's "
            f"{context.features.shape[2]}; both must be of one target"
        )
