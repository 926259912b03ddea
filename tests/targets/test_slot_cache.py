"""Laws 10 and 13, `SlotCache`: committed slots are a list of lists, all else is invisible.

A state machine compares the cache with plain Python lists. Poison (NaN and 1e30 where nobody may
look) must leave the target's logits unchanged bit for bit.
"""

import os

import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specdec import ModelDrafter, SpeculativeGenerator, Target
from specdec.graphs.owned import size_bytes
from specdec.graphs.rows import keep_rows, rows_to_keep
from specdec.graphs.tree import fill
from specdec.slots.attention import window_mask
from specdec.slots.cache import SlotCache, Window, narrowed, round_up
from specdec.slots.copies import copy_slots
from specdec.slots.layout import KeyValueShape
from specdec.slots.room import check_room
from specdec.types import Draft

LAYERS, HEADS, KEY_WIDTH, VALUE_WIDTH = 2, 2, 3, 1
SHAPE = KeyValueShape(HEADS, KEY_WIDTH, VALUE_WIDTH, torch.float32, torch.device("cpu"))
SHAPES = dict.fromkeys(range(LAYERS), SHAPE)


def states(serials, layer, width, sign):
    """`[B, H, N, width]` numbers that tell token, layer, head and channel apart."""
    parts = torch.arange(HEADS * width).view(HEADS, 1, width) + HEADS * width * layer
    return sign * (torch.tensor(serials).float()[:, None, :, None] * 100 + parts + 1)


class CacheAgainstLists(RuleBasedStateMachine):
    """`committed[b]` is row b's list; `slots[b]` everything ever written, garbage included."""

    @initialize(rows=st.integers(1, 4), num_slots=st.integers(5, 20))
    def begin(self, rows, num_slots):
        self.whole = self.cache = SlotCache(rows, num_slots, SHAPES, extra_slots=0)
        self.forget(rows)
        self.serial = 0

    def forget(self, rows):
        self.committed = [[] for _ in range(rows)]
        self.slots = [[None] * self.cache.num_slots for _ in range(rows)]
        self.window = [[] for _ in range(rows)]

    @rule(data=st.data(), width=st.integers(1, 4), slack=st.integers(0, 20))
    def write_a_window(self, data, width, slack):
        """Row b's first `real[b]` tokens go behind its committed ones, the others nowhere."""
        cache, rows = self.cache, len(self.committed)
        room = [min(width, cache.num_slots - len(row)) for row in self.committed]
        real = [data.draw(st.integers(0, most)) for most in room]
        serials = [[self.serial + b * width + i for i in range(width)] for b in range(rows)]
        self.serial += rows * width
        slots = [
            [
                len(self.committed[b]) + i if i < real[b] else cache.padding_slot
                for i in range(width)
            ]
            for b in range(rows)
        ]
        reach = max((s + 1 for row in slots for s in row if s < cache.padding_slot), default=1)
        with narrowed([cache], reach + slack):
            cache.open_window(torch.tensor(slots))
        addresses = self.addresses()
        for layer in range(LAYERS):
            keys, values = cache.update(
                states(serials, layer, KEY_WIDTH, 1), states(serials, layer, VALUE_WIDTH, -1), layer
            )
            seen = min(round_up(reach + slack), cache.num_slots)
            assert keys.shape == (rows, HEADS, seen, KEY_WIDTH)
            assert values.shape == (rows, HEADS, seen, VALUE_WIDTH)
            assert torch.equal(keys, cache.keys[layer][:, :seen].transpose(1, 2))
            assert torch.equal(values, cache.values[layer][:, :seen].transpose(1, 2))
        assert addresses == self.addresses()
        for b in range(rows):
            self.window[b] = serials[b][: real[b]]
            for i, serial in enumerate(self.window[b]):
                self.slots[b][len(self.committed[b]) + i] = serial

    def addresses(self):
        return [b.data_ptr() for b in (*self.cache.keys.values(), *self.cache.values.values())]

    @rule(data=st.data())
    def commit_some_of_the_window(self, data):
        kept = [data.draw(st.integers(0, len(window))) for window in self.window]
        for b, count in enumerate(kept):
            self.committed[b] += self.window[b][:count]
            self.window[b] = []

    @rule(data=st.data())
    def keep_rows(self, data):
        count = len(self.committed)
        is_live = st.lists(st.booleans(), min_size=count, max_size=count)
        rows = rows_to_keep(data.draw(is_live.filter(any)))
        addresses = self.addresses()
        self.cache = keep_rows(self.cache, rows)
        assert addresses == self.addresses()
        self.committed = [self.committed[row] for row in rows]
        self.slots = [self.slots[row] for row in rows]
        self.window = [self.window[row] for row in rows]

    @precondition(lambda self: any(self.committed))
    @rule()
    def reset(self):
        """The whole cache is what is emptied and used again, however few rows were kept."""
        addresses = self.addresses()
        fill(self.whole, 0)
        self.cache = self.whole
        self.forget(self.cache.num_rows)
        assert addresses == self.addresses()

    @invariant()
    def the_cache_holds_what_the_lists_hold(self):
        cache, committed, slots = self.cache, self.committed, self.slots
        assert [row[: len(c)] for row, c in zip(slots, committed, strict=True)] == committed
        is_written = torch.tensor([[s is not None for s in row] for row in slots])
        serials = [[s or 0 for s in row] for row in slots]
        for layer in range(LAYERS):
            for buffer, width, sign in (
                (cache.keys[layer], KEY_WIDTH, 1),
                (cache.values[layer], VALUE_WIDTH, -1),
            ):
                expected = states(serials, layer, width, sign).transpose(1, 2)
                expected = expected * is_written[:, :, None, None]  # never written is still zero
                assert torch.equal(buffer[:, : cache.num_slots], expected)


TestCacheAgainstLists = CacheAgainstLists.TestCase
TestCacheAgainstLists.settings = settings(max_examples=20, stateful_step_count=25)


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("widths", [(3, 1), (4, 8)])  # in words of eight bytes, and not
def test_slots_are_taken_from_another_cache_by_row_layer_and_head(dtype, widths, by_head):
    shape = KeyValueShape(HEADS, *widths, dtype, torch.device("cpu"))
    whole, part = (SlotCache(3, n, dict.fromkeys(range(LAYERS), shape)) for n in (40, 16))
    generator = torch.Generator().manual_seed(0)
    for store in (*whole.stores, *part.stores):
        store.copy_(torch.randint(-99, 99, store.shape, generator=generator))
    whole, part = keep_rows(whole, [0, 2]), keep_rows(part, [0, 2])
    before = part.keys[0].clone()
    size = 2, part.num_slots + 1, *[HEADS][:by_head]
    slots = torch.randint(0, 40, size, generator=generator)
    copy_slots(part, whole, {1: slots})
    for mine, theirs in ((part.keys[1], whole.keys[1]), (part.values[1], whole.values[1])):
        for row in range(2):
            for slot in range(part.num_slots + 1):
                for head in range(HEADS):
                    source = slots[row, slot, head] if by_head else slots[row, slot]
                    assert mine[row, slot, head].equal(theirs[row, source, head])
    assert part.keys[0].equal(before)


def test_size_is_that_of_keys_and_values_with_one_spare_slot():
    shape = KeyValueShape(2, 4, 6, torch.bfloat16, torch.device("cpu"))
    cache = SlotCache(3, 33, {0: shape, 5: shape})
    assert cache.num_slots == cache.padding_slot == 48
    assert size_bytes(cache) == 2 * 2 * 3 * (48 + 1) * 2 * (4 + 6)


NUM_READ = torch.tensor([2, 7, 4])  # tokens behind which each row verifies
NUM_DRAFT_TOKENS, NUM_SLOTS = 3, 32
NUM_ATTENDED = 16


def verified_logits(target, poison):
    """Logits of a ragged window, with the cache poisoned between prefill and verification."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (3, 8 + NUM_DRAFT_TOKENS), generator=generator)
    cache = target.init_cache(3, NUM_SLOTS, extra_slots=0)
    target.prefill(cache, tokens[:, :7], NUM_READ, offset=0)
    slots = torch.arange(NUM_SLOTS + 1)
    windows_end = NUM_READ[:, None] + 1 + NUM_DRAFT_TOKENS
    places = {
        "committed": slots < NUM_READ[:, None],
        "not attended": (slots >= NUM_ATTENDED).expand(3, -1),
        "under the window": (slots >= NUM_READ[:, None]) & (slots < windows_end),
        "behind the window": (slots >= windows_end) & (slots < NUM_ATTENDED),
    }
    for buffer in [*cache.keys.values(), *cache.values.values()]:
        for place, value in poison.items():
            buffer[places[place]] = value
    draft = Draft(tokens[:, 8:])
    end = int(NUM_READ.max()) + 1 + NUM_DRAFT_TOKENS
    with narrowed([cache], end):
        return target.verify(cache, NUM_READ, tokens[:, 7], draft).logits


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["llama", "mistral_sliding", "gemma2", "gpt_oss", "mpt"])
@torch.no_grad()
def test_poison_where_nobody_may_look_changes_no_logit(name):
    target = Target(build(name))
    clean = verified_logits(target, {})
    assert bool(clean.isfinite().all())
    for poison in (
        {"not attended": float("nan")},  # the spare slot is one of these
        {"under the window": float("nan")},
        {"behind the window": 1e30},
        {"behind the window": -1e30},
    ):
        assert torch.equal(verified_logits(target, poison), clean), poison


@torch.no_grad()
def test_the_poison_check_fails_where_attention_does_look(monkeypatch):
    target = Target(build("llama"))
    clean = verified_logits(target, {})
    assert not torch.equal(verified_logits(target, {"committed": 0.0}), clean)

    def sees_one_slot_too_many(window, *args):
        return window_mask(Window(window.slots + 1, window.num_attended), *args)

    monkeypatch.setattr("specdec.slots.attention.window_mask", sees_one_slot_too_many)
    clean = verified_logits(target, {})
    assert not torch.equal(verified_logits(target, {"behind the window": 1e30}), clean)


def test_slots_that_no_window_has_covered_are_still_zero_after_a_ragged_generation():
    model = build("llama")
    drafter = ModelDrafter(perturbed(model), num_draft_tokens=3)
    generator = SpeculativeGenerator(model, drafter)
    generation = generator.start(
        *ragged_prompts(VOCAB, 1, 9, 4), max_new_tokens=12, do_sample=True, seed=5
    )
    state, read = generation.state, generation.state.buffer.root_position
    covered = read.clone()  # the prompts' slots, and later the windows'
    slots = torch.arange(state.cache.num_slots)
    for _ in range(6):
        covered = torch.maximum(covered, read + drafter.num_draft_tokens + 1)
        generator.step(generation)
        for cache in (state.cache, state.drafter_state.cache):
            for buffer in (*cache.keys.values(), *cache.values.values()):
                untouched = buffer[:, :-1][slots >= covered[:, None]]
                assert untouched.numel() > 0
                assert not bool(untouched.any())


def test_a_cache_larger_than_the_memory_is_refused_before_it_is_allocated():
    shape = KeyValueShape(8, 128, 128, torch.float32, torch.device("cpu"))
    row_bytes = 1024 * 8 * 256 * 4
    with pytest.raises(ValueError, match=r"keys and values of 100000000 rows of 1024 tokens take "):
        check_room(10**8, 1024, {0: shape})
    check_room(4, 1024, {0: shape})
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    check_room(there // row_bytes, 1024, {0: shape})
    with pytest.raises(ValueError, match=f"generate at most {there // row_bytes // 2} rows"):
        check_room(there // row_bytes // 2 + 1, 1024, {0: shape, 1: shape})
