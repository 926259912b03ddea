"""`shift_window` against lists of rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.heads.shift_window import PastRows, shift_window
from specdec.types import PAD_TOKEN, Context

TRASH = 64
seeds = st.integers(0, 2**32 - 1)


def shift_case(num_rows, num_columns, num_past, num_features, *, seed):
    """Arguments of `shift_window`: texts that begin, go on, have ended or ended before the chunk.
    What must not be read is -1 among tokens and NaN among features.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high, *shape):
        return torch.randint(low, high + 1, shape, generator=generator)

    num_new = integers(-1, num_columns, num_rows)
    start = integers(0, num_past + 3, num_rows)
    tokens = integers(1, 99, num_rows, num_columns + 1)
    features = torch.randn(num_rows, num_columns, num_features, generator=generator)
    is_new = torch.arange(num_columns) < num_new[:, None]
    tokens[:, 1:][~is_new] = PAD_TOKEN
    features[~is_new] = torch.nan
    old_tokens = integers(1, 99, num_rows, num_past)
    old_features = torch.randn(num_rows, num_past, num_features, generator=generator)
    is_before = start[:, None] - num_past + torch.arange(num_past) < 0
    old_tokens[is_before] = PAD_TOKEN
    old_features[is_before] = torch.nan
    context = Context(tokens, features, start, num_new, num_attended=32)
    return context, PastRows(old_tokens, old_features)


def expected_row(case, b, width, num_later):
    """One text's window, from lists: what was remembered, then what is new."""
    context, past = case
    start, count = int(context.start[b]), max(0, int(context.num_new[b]))
    num_past = past.tokens.shape[1]
    rows = [
        (start - num_past + h, int(past.tokens[b, h]), past.features[b, h].tolist())
        for h in range(num_past)
    ]
    rows += [
        (start + j, int(context.tokens[b, 1 + j]), context.features[b, j].tolist())
        for j in range(count)
    ]
    rows = [row for row in rows if row[0] >= 0][-width:]
    missing = width - len(rows)
    slots = [TRASH] * missing + [slot for slot, *_ in rows]
    slots += [start + count + m for m in range(num_later)]
    if count == 0:
        slots = [TRASH] * len(slots)
    nothing = [0.0] * past.features.shape[2]
    return (
        [0] * missing + [token for _, token, _ in rows],
        [nothing] * missing + [feature for *_, feature in rows],
        slots,
    )


sizes = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(0, 4), st.integers(1, 5))


@settings(max_examples=40)
@given(seeds, sizes, st.integers(0, 3), st.integers(0, 3))
def test_a_window_is_the_end_of_the_rows_of_a_text(seed, size, extra, num_later):
    num_rows, num_columns, num_past, num_features = size
    case = shift_case(num_rows, num_columns, num_past, num_features, seed=seed)
    width = max(num_columns, num_past) + extra
    window = shift_window(*case, width, trash=TRASH, num_later=num_later)
    for b in range(num_rows):
        tokens, features, slots = expected_row(case, b, width, num_later)
        assert window.tokens[b].tolist() == tokens
        assert window.features[b].tolist() == features
        assert window.slots[b].tolist() == slots
    kept = window.past(num_past)
    for new, old, window_part in zip(kept, case[1], window, strict=False):
        assert new.equal(window_part[:, width - num_past :])
        ended = case[0].num_new <= 0
        is_row = (case[0].start[:, None] - num_past + torch.arange(num_past)) >= 0
        keeps = (is_row & ended[:, None]).view(*is_row.shape, *[1] * (new.dim() - 2))
        assert torch.where(keeps, new, 0).equal(torch.where(keeps, old, 0))


def test_widths_that_do_not_fit_are_refused():
    context, past = shift_case(2, 3, 4, 5, seed=0)
    narrow = PastRows(past.tokens, past.features[..., :4])
    bare = Context(context.tokens, None, context.start, context.num_new, 20)
    for *inputs, width in ((context, past, 3), (context, narrow, 4), (bare, past, 4)):
        with pytest.raises(ValueError, match=r"window of 3|4 wide|context with features"):
            shift_window(*inputs, width, trash=TRASH)
