"""A plan's passes attend to what their predicates say, through masks that any kernel can read.

The oracle knows every row's keys and values by slot, as a list, and attends row by row.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.drafters.head.window import WindowPlan
from specdec.slots.cache import SlotCache
from specdec.slots.layout import KeyValueShape

HEADS, KV_HEADS, SIZE = 4, 2, 6
seeds = st.integers(0, 2**32 - 1)


class Rows:
    """Keys and values of every row by slot, and attention over a visible set of them."""

    def __init__(self, count):
        self.slots = [{} for _ in range(count)]

    def write(self, slots, key, value, padding_slot):
        for b, row in enumerate(slots.tolist()):
            for i, slot in enumerate(row):
                if slot != padding_slot:
                    self.slots[b][slot] = key[b, :, i], value[b, :, i]

    def attend(self, b, query, visible):
        """`[Hq, D]` of one query `[Hq, D]` of row b."""
        group, out = HEADS // KV_HEADS, []
        for h, q in enumerate(query):
            keys = torch.stack([self.slots[b][slot][0][h // group] for slot in visible])
            values = torch.stack([self.slots[b][slot][1][h // group] for slot in visible])
            out.append((keys @ q / SIZE**0.5).softmax(0) @ values)
        return torch.stack(out)


SEES = {
    "causal": (False, lambda q, k, last: k <= q),
    "block": (True, lambda q, k, last: k <= last),
}


@pytest.fixture(params=["by dense masks", "raggedly"])
def way(request, monkeypatch):
    """How passes attend: by dense masks, or as on a GPU, with the definition of the kernel."""
    if request.param == "raggedly":
        monkeypatch.setattr("specdec.slots.cache.has_kernels", lambda devices: True)
        monkeypatch.setattr(
            "specdec.kernels.attention.reference.attends_raggedly", lambda *_, **__: True
        )
        monkeypatch.setattr("specdec.slots.attention.window_mask", no_mask)
    return request.param


def no_mask(*_):
    raise AssertionError("a dense mask was made that nobody needs")


@pytest.mark.parametrize("name", SEES)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seeds, st.integers(1, 3), st.integers(1, 5), st.integers(0, 3), st.integers(7, 40))
@torch.no_grad()
def test_every_pass_attends_to_what_its_predicate_shows(way, name, seed, rows, count, later, slack):
    """Ragged rows over a cache of garbage: each first pass has tokens to forget at its end."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    is_block, shows = SEES[name]
    shape = KeyValueShape(KV_HEADS, SIZE, SIZE, torch.float64, torch.device("cpu"))
    cache = SlotCache(rows, 10 + count + later + slack, {0: shape})
    oracle, num_slots = Rows(rows), cache.num_slots
    everywhere = torch.arange(num_slots).expand(rows, num_slots)
    table = noise(num_slots + 1, 2 * SIZE)
    start = torch.randint(0, 10, (rows,), generator=generator)
    real = torch.randint(1, count + 1, (rows,), generator=generator)
    garbage = noise(2, rows, KV_HEADS, num_slots, SIZE)
    known = torch.arange(num_slots) < start[:, None]
    oracle.write(torch.where(known, everywhere, -1), *garbage, padding_slot=-1)
    WindowPlan(cache, everywhere, table=table).open(0).attend(
        0, noise(rows, HEADS, num_slots, SIZE), *garbage
    )
    offsets = torch.arange(count + later)
    slots = torch.where(
        offsets[:count] < real[:, None], start[:, None] + offsets[:count], num_slots
    )
    slots = torch.cat([slots, (start + real)[:, None] + offsets[:later]], dim=1)
    last = start + real - 1
    visible = (slots[:, :count] < num_slots)[:, None] if is_block else None
    cache.in_use = int((start + real).max()) + later
    plan = WindowPlan(cache, slots, later, table=table, visible=visible)
    for i in range(1 + later):
        own = slots[:, :count] if i == 0 else slots[:, count + i - 1 : count + i]
        query = noise(rows, HEADS, own.shape[1], SIZE)
        key, value = noise(2, rows, KV_HEADS, own.shape[1], SIZE)
        step = plan.open(i)
        assert step.angles[:, 0].equal(table[own])
        out = step.attend(0, query, key, value)
        oracle.write(own, key, value, num_slots)
        for b in range(rows):
            for j, slot in enumerate(own[b].tolist()):
                if slot < num_slots:
                    end = last[b] if i == 0 else slot
                    seen = [k for k in oracle.slots[b] if shows(slot, k, end)]
                    expected = oracle.attend(b, query[b, :, j], seen)
                    torch.testing.assert_close(out[b, :, j], expected, rtol=0, atol=1e-12)
                else:
                    assert out[b, :, j].isfinite().all()


@pytest.mark.parametrize("num_silent", [2, 5])
@torch.no_grad()
def test_tokens_without_queries_bring_keys_and_values(num_silent):
    generator = torch.Generator().manual_seed(1)
    shape = KeyValueShape(KV_HEADS, SIZE, SIZE, torch.float64, torch.device("cpu"))
    slots = torch.tensor([[3, 4, 5, 6, 7], [0, 1, 2, 16, 16]])
    states = [torch.randn(2, h, 5, SIZE, generator=generator).double() for h in (HEADS, 2, 2)]
    outs, caches = [], []
    for silent in (0, num_silent):
        cache = SlotCache(2, 16, {0: shape})
        table = torch.zeros(17, 2 * SIZE).double()
        step = WindowPlan(cache, slots, table=table).open(0)
        outs.append(step.attend(0, states[0][:, :, silent:], *states[1:]))
        caches.append(cache.keys[0])
    assert outs[1].shape == (2, HEADS, 5 - num_silent, SIZE)
    torch.testing.assert_close(outs[1], outs[0][:, :, num_silent:], rtol=0, atol=1e-12)
    assert caches[0].equal(caches[1])
