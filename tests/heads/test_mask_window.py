"""The window of a parallel drafter against lists.

The oracle builds every row as a Python list, one token after the other. So it sees four faults
of public engines: rows of rejected tokens that count, positions past the end that wrap to 0, slots
past the end that are written, and buffers for less than the worst case.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.heads.mask_token import ROWS
from specdec.heads.mask_window import WindowSpec, expand_window

GARBAGE = -(10**6)
MASK, TRASH = 777, 10**5
sizes = {
    "seed": st.integers(0, 2**32 - 1),
    "limit": st.integers(1, 40),
    "rows": st.integers(1, 5),
    "num_new": st.integers(1, 17),
    "num_draft_tokens": st.sampled_from([0, 1, 2, 5, 16]),
    "alignment": st.sampled_from(sorted(ROWS)),
    "more": st.integers(0, 3),
}


def spec_of(alignment, num_draft_tokens, *, more=0, max_positions=10**4):
    """A window as drafters ask for it; blocks may have more rows than K needs."""
    rows = ROWS[alignment]
    num_later = rows.first_row + num_draft_tokens + (more if rows.opens_with_last else 0)
    num_later = num_later if num_draft_tokens else 0
    where = {"mask_token": MASK, "max_positions": max_positions, "trash": TRASH}
    return WindowSpec(
        *(rows.shift, num_later, rows.opens_with_last, rows.first_row, num_draft_tokens), **where
    )


def contexts(rows, num_new, seed, *, limit=10**4):
    """Ragged contexts: garbage after each row's own tokens; rows of nothing, full rows, and rows
    about the limit.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(low, high):
        return torch.randint(low, high + 1, (rows,), generator=generator)

    counts = integers(-1, num_new)
    start = integers(0, 40)
    near = integers(0, 1).bool()
    start = torch.where(near, (limit - integers(0, 20)).clamp(min=0), start)
    tokens = torch.randint(0, 700, (rows, num_new + 1), generator=generator)
    tokens[torch.arange(num_new + 1) > counts.clamp(min=0)[:, None]] = GARBAGE
    return tokens, start, counts


def expected_row(tokens, start, count, spec):
    """(tokens, slots, sampled, num_valid, first_later) of one row, token by token."""
    width = len(tokens) - spec.shift
    ids, places = [], []
    committed = max(count + 1 - spec.shift, 0)
    for j in range(width):
        ids.append(tokens[j + spec.shift] if j < committed else 0)
        places.append(start + j if j < committed else None)
    after = start + (count + 1 - spec.shift)
    for i in range(spec.num_later):
        leads = spec.opens_with_last and i == 0
        ids.append(tokens[max(count, 0)] if leads else MASK)
        places.append(after + i if committed else None)
    slots = [p if p is not None and p < spec.max_positions else TRASH for p in places]
    sampled = []
    for i in range(spec.num_draft_tokens):
        row = spec.first_row + i
        sampled.append(width + row if row >= 0 else max(committed - 1, 0))
    num_valid = 0
    while num_valid < spec.num_draft_tokens and slots[sampled[num_valid]] != TRASH and committed:
        num_valid += 1
    return ids, slots, sampled, num_valid, after


@given(**sizes)
def test_a_window_is_what_lists_say(seed, limit, rows, num_new, num_draft_tokens, alignment, more):
    spec = spec_of(alignment, num_draft_tokens, more=more, max_positions=limit)
    case = contexts(rows, num_new, seed, limit=limit)
    (tokens, start, counts), window = case, expand_window(*case, spec)
    for b, count in enumerate(counts.tolist()):
        expected = expected_row(tokens[b].tolist(), int(start[b]), count, spec)
        assert [field[b].tolist() for field in window] == list(expected), b
