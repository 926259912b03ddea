"""The window that repairs the depths of a multi-token prediction head. See README.md.

Legend: B rows, N new tokens of a context, H remembered rows, W window, M later passes, F feature
width. A *row t* of a head is the pair (token t + 1, feature of position t); it sits in slot t.
"""

import torch

from specdec.kernels.types import PastRows, ShiftedWindow, suits_kernels
from specdec.types import Context


def shift_window(
    context: Context, past: PastRows, width: int, *, trash: int, num_later: int = 0
) -> ShiftedWindow:
    """Shifts the new rows of a context to the right end of a window of fixed width, and fills the
    vacated front with remembered rows.

    The newest row of every text is in the last column, however many tokens were accepted. Nothing
    is written in place: the inputs may be views of the outputs of an earlier call.

    Args:
        context: N new tokens per row and the features beside them. Columns at or beyond `num_new`
            are not read; a text with `num_new` of 0 or less keeps its remembered rows.
        past: H rows that end at the context's anchor. Rows before a text's start are not read.
        width: W, at least H, so that the window holds what the next call has to remember.
        trash: the slot of tokens to forget.
        num_later: M.

    Raises:
        ValueError: a window that is too narrow, or a context without features.

    Example:
        >>> one = torch.tensor([1])
        >>> rows = torch.arange(4.0).view(1, 4, 1)
        >>> context = Context(torch.tensor([[6, 7, -1]]), rows[:, 2:], 2 * one, one, 8)
        >>> past = PastRows(torch.tensor([[5, 6]]), rows[:, :2])
        >>> window = shift_window(context, past, 3, trash=16, num_later=1)
        >>> window.tokens, window.slots
        (tensor([[5, 6, 7]]), tensor([[0, 1, 2, 3]]))
    """
    check_widths(context, past, width)
    if context.features.is_cuda and suits_kernels(context.features):
        from specdec.kernels.mtp_shift import triton

        return triton.shift_window(context, past, width, trash=trash, num_later=num_later)
    tokens = torch.cat([past.tokens, context.tokens[:, 1:]], dim=1)  # [B, H + N]
    features = torch.cat([past.features, context.features], dim=1)  # [B, H + N, F]
    num_past, num_columns = past.tokens.shape[1], context.tokens.shape[1] - 1
    count = context.num_new.clamp(0, num_columns)[:, None]  # the one clamp; all below follows
    offsets = torch.arange(width + num_later, device=tokens.device) - width
    index = count + offsets  # [B, W + M]: among the new rows; negative among the remembered
    slots = context.start[:, None] + index
    is_row = (index >= -num_past) & (slots >= 0)
    slots = torch.where(is_row & (count > 0), slots, trash)
    is_row, source = is_row[:, :width], (index[:, :width] + num_past).clamp(min=0)
    wide = source[..., None].expand(-1, -1, features.shape[2])
    return ShiftedWindow(
        tokens=torch.where(is_row, tokens.gather(1, source), 0),
        features=torch.where(is_row[..., None], features.gather(1, wide), 0),
        slots=slots,
    )


def check_widths(context: Context, past: PastRows, width: int) -> None:
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
