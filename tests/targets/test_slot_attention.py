"""`slot_attention` and the definition of `ragged_attention` are softmax attention, row by row, over
the slots that each token may see.

The oracle loops over rows, heads and tokens in float64 and cuts the visible slots out, so it has no
mask. Slots nobody may see hold 1e30 and change nothing bit for bit.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.kernels import AttentionOptions
from specdec.slots.attention import window_mask
from specdec.slots.cache import SlotCache, Window
from specdec.slots.ragged import attend_to_filled
from specdec.slots.spans import Near
from specdec.targets.attention import slot_attention
from specdec.targets.trial.probe import probe_attention

options = st.fixed_dictionaries(
    {
        "scaling": st.sampled_from([None, 0.3]),
        "sliding_window": st.sampled_from([None, 1, 3, 50]),
        "near": st.sampled_from([None, Near(1, 0), Near(3, 2), Near(60, 4)]),
        "softcap": st.sampled_from([None, 2.0]),
        "has_sinks": st.booleans(),
    }
)
sizes = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 3),
        "width": st.integers(1, 4),
        "heads": st.integers(1, 2),
        "groups": st.integers(1, 3),
        "channels": st.integers(1, 5),
        "value_channels": st.integers(1, 5),
        "num_slots": st.sampled_from([16, 32]),
    }
)
seeds = st.integers(0, 2**32 - 1)
LAYER = torch.nn.Module()
LAYER.layer_idx = 2


def open_window(slots, num_slots, sliding_window=None, near=None):
    """The window of a forward over `[B, N]` slots that attends over all of a cache."""
    windows = {LAYER.layer_idx: sliding_window}
    cache = SlotCache(len(slots), num_slots, {})
    return cache.open_window(slots, layer_windows=windows, near=near)


def random_case(size, seed, dtype=torch.float64):
    """Queries, keys, values, ragged window slots, and sinks."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    rows, heads, slots = size["rows"], size["heads"], size["num_slots"]
    query = normal(rows, heads * size["groups"], size["width"], size["channels"])
    key = normal(rows, heads, slots, size["channels"])
    value = normal(rows, heads, slots, size["value_channels"])
    lengths = torch.randint(0, slots - size["width"] + 1, (rows, 1), generator=generator)
    window_slots = lengths + torch.arange(size["width"])
    return query, key, value, window_slots, normal(heads * size["groups"])


def attention(case, option):
    query, key, value, slots, sinks = case
    named = {
        "slot_window": open_window(slots, key.shape[2], option["sliding_window"], option["near"]),
        "s_aux": sinks if option["has_sinks"] else None,
        "scaling": option["scaling"],
        "softcap": option["softcap"],
    }
    out, weights = slot_attention(LAYER, query, key, value, None, **named)
    assert weights is None
    return out


def seen_slots(slot, option):
    """Those that a token in a slot sees."""
    recent, sinks = option["near"] or (slot + 1, 0)
    if option["sliding_window"] is not None:
        recent, sinks = min(option["sliding_window"], recent + sinks), 0
    return [s for s in range(slot + 1) if s < sinks or s > slot - recent]


def oracle(case, option):
    query, key, value, slots, sinks = case
    rows, heads, width, channels = query.shape
    groups = heads // key.shape[1]
    scale = option["scaling"] or 1 / math.sqrt(channels)
    out = torch.empty(rows, width, heads, value.shape[-1], dtype=torch.float64)
    for b, n, h in itertools.product(range(rows), range(width), range(heads)):
        seen = seen_slots(int(slots[b, n]), option)
        scores = scale * key[b, h // groups, seen] @ query[b, h, n]
        if option["softcap"] is not None:
            scores = option["softcap"] * torch.tanh(scores / option["softcap"])
        sink = sinks[h].exp() if option["has_sinks"] else 0.0
        out[b, n, h] = scores.exp() / (scores.exp().sum() + sink) @ value[b, h // groups, seen]
    return out


@pytest.mark.smoke
@given(sizes, options, seeds)
def test_attention_is_a_softmax_over_the_visible_slots_of_each_row(size, option, seed):
    case = random_case(size, seed)
    expected = oracle(case, option)
    torch.testing.assert_close(attention(case, option), expected, rtol=0, atol=1e-12)
    sinks = case[4] if option["has_sinks"] else None
    names = option["scaling"], option["softcap"], sinks, option["sliding_window"]
    window = open_window(case[3], case[1].shape[2], near=option["near"])
    ragged = attend_to_filled(window, *case[:3], AttentionOptions(*names))
    torch.testing.assert_close(ragged, expected, rtol=0, atol=1e-6)


def mark_dead(case, option, value):
    """The case with `value` in every slot that no token of its row sees."""
    query, keys, values, slots, sinks = case
    is_dead = torch.ones(len(slots), keys.shape[2], dtype=torch.bool)
    for row, window in enumerate(slots.tolist()):
        is_dead[row, [s for slot in window for s in seen_slots(slot, option)]] = False
    is_dead = is_dead[:, None, :, None]
    return query, keys.masked_fill(is_dead, value), values.masked_fill(is_dead, value), slots, sinks


@given(sizes, options, seeds, st.sampled_from([1e30, -1e30]))
def test_garbage_in_slots_that_nobody_sees_changes_nothing_bit_for_bit(size, option, seed, garbage):
    case = random_case(size, seed, torch.float32)
    clean = attention(mark_dead(case, option, 0.0), option)
    assert torch.equal(attention(mark_dead(case, option, garbage), option), clean)


@given(sizes, seeds)
def test_garbage_in_a_slot_that_is_seen_changes_the_outcome(size, seed):
    option = dict.fromkeys(["scaling", "sliding_window", "softcap", "near"]) | {"has_sinks": False}
    query, keys, values, slots, sinks = random_case(size, seed, torch.float32)
    clean = attention((query, keys, values, slots, sinks), option)
    for b, last in enumerate(slots[:, -1].tolist()):
        values[b, :, last] = 1e30
    assert not torch.equal(attention((query, keys, values, slots, sinks), option), clean)


def test_the_mask_is_made_once_per_kind_of_layer_and_forward():
    window = Window(torch.tensor([[3, 4]]), 16)
    full, sliding = (window_mask(window, 2, torch.float32, size) for size in (None, 2))
    assert window_mask(window, 2, torch.float32) is full
    assert window_mask(window, 2, torch.float32, 2) is sliding
    visible = [[[[s <= q for s in range(16)] for q in (3, 4)]]]
    assert (full == 0).tolist() == visible
    assert (sliding == 0).tolist() == [[[[q - 2 < s <= q for s in range(16)] for q in (3, 4)]]]
    assert bool(full.isneginf().logical_or(full == 0).all())


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 70), st.integers(1, 100), seeds)
def test_every_row_of_a_mask_starts_where_every_backend_can_read_it(rows, width, room, bound, seed):
    """cuDNN's attention reads 16 bytes at a time, also of a half precision mask."""
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randint(0, room, (rows, width), generator=generator)
    window = SlotCache(rows, room, {}).open_window(slots)
    for dtype in (torch.bfloat16, torch.float32):
        mask = window_mask(window, width, dtype)
        assert mask.is_contiguous()
        assert mask.shape == (rows, 1, width, window.num_attended)
        strides = [stride * mask.element_size() for stride in mask.stride()[:-1]]
        assert all(address % 16 == 0 for address in (mask.data_ptr(), *strides))


def test_a_model_that_brings_a_mask_or_drops_the_window_is_refused():
    x, window = torch.zeros(1, 1, 1, 2), open_window(torch.zeros(1, 1, dtype=torch.long), 16)
    for attention in (slot_attention, probe_attention):
        with pytest.raises(ValueError, match="Module built an attention mask"):
            attention(LAYER, x, x, x, torch.zeros(1), slot_window=window)
        with pytest.raises(ValueError, match="without the window"):
            attention(LAYER, x, x, x, None, slot_window=None)
