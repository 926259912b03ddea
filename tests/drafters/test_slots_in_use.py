"""How many slots forwards attend over: the loop says it to the caches, and nobody else has to."""

import pytest
import torch
from drafter_table import MODEL, OF_TEXTS, PATHS, make, own_target
from drafting import drawing, ragged_prompts

from specdec import Context, SpeculativeGenerator, Tree
from specdec.slots.cache import SlotCache, narrowed
from specdec.slots.layout import KeyValueShape

IDS, MASK = ragged_prompts(MODEL.config.vocab_size, 21, 1, 12)
WIDE = Tree(nodes=4, depth=3, top_k=4)
"""Its passes read more nodes than the target does."""
WIDE_TREES = ["model, wide tree", "eagle3, wide tree"]
OPTIONS = {"max_new_tokens": 40, "eos_token_id": None, "do_sample": False}


def generator_of(name, **options):
    """Eager steps, which are those that attend over few slots."""
    options |= {"sampler": "gbv"} if name in PATHS else {}
    if name in WIDE_TREES:
        drafter = make(name.removesuffix(", wide tree"), tree=WIDE)
    else:
        drafter = make(name)
    return SpeculativeGenerator(own_target(), drafter, graphs=False, **options)


@pytest.mark.parametrize("name", [*OF_TEXTS, *WIDE_TREES])
@torch.inference_mode()
def test_a_drafter_called_by_hand_drafts_what_it_drafts_in_the_loop(name):
    """A number of slots was believed: with 8 in place of 63 other tokens were drafted."""
    generator = generator_of(name)
    generation = generator.start(IDS, MASK, **OPTIONS)
    for _ in range(4):
        generator.step(generation)
    state, drafter = generation.state, generator.drafter
    buffer, given = state.buffer, state.context(generation.parts)
    known = buffer.recent, state.features, buffer.start, buffer.num_new
    context = Context(*known, target=given.target, row_inputs=given.row_inputs)
    noise = state.noise.at(buffer.root_position, drafter.num_draft_tokens + 1)
    told = drawing(drafter, state.logits_filter, noise, wants_probs=state.signature.wants_probs)
    by_hand = drafter.propose(context, state.drafter_state, told)
    draft = generator.step(generation).draft
    index = torch.arange(draft.tokens.shape[1])
    count = len(index) if draft.num_valid is None else draft.num_valid[:, None]
    is_valid = (index < count).expand_as(draft.tokens)
    assert by_hand.tokens[is_valid].equal(draft.tokens[is_valid])
    assert by_hand.window_parents[is_valid].equal(draft.window_parents[is_valid])


@pytest.mark.parametrize("name", [*OF_TEXTS, *WIDE_TREES])
def test_every_window_of_the_loop_lies_in_the_slots_in_use(name, monkeypatch):
    """A drafter that promises fewer `extra_slots` than it uses would draft other tokens."""
    seen, narrow = [], 0

    def open_window(cache, slots, **options):
        nonlocal narrow
        last = int(slots.masked_fill(slots == cache.padding_slot, 0).max())
        seen.append((last, cache.in_use))
        narrow += cache.in_use < cache.num_slots
        return opened(cache, slots, **options)

    opened, generator = SlotCache.open_window, generator_of(name, prefill_chunk_size=5)
    monkeypatch.setattr("specdec.slots.cache.SLOT_MULTIPLE", 1)  # a bound that is not rounded
    monkeypatch.setattr(SlotCache, "open_window", open_window)
    generation = generator.start(IDS, MASK, **OPTIONS)
    for number in range(12):
        most = generator.drafter.num_draft_tokens
        generation.num_draft_tokens = (most, 1, 0, max(most - 1, 0))[number % 4]
        generator.step(generation)
        generation.synchronize()  # the bound is exact, so one slot less would be too few
    assert all(last < in_use for last, in_use in seen)
    assert narrow >= 12  # the target's of every step


def test_caches_attend_over_all_slots_but_inside_of_narrowed():
    shape = KeyValueShape(1, 2, 2, torch.float32, torch.device("cpu"))
    exact, more, unknown = (
        SlotCache(1, 64, {0: shape}, extra_slots=extra) for extra in (0, 20, None)
    )
    caches = [exact, more, unknown]
    with narrowed(caches, 17):
        assert [cache.in_use for cache in caches] == [32, 48, 64]
        assert exact.open_window(torch.tensor([[16]])).num_attended == 32
    assert [cache.in_use for cache in caches] == [64, 64, 64]
    with pytest.raises(ValueError, match="invalid literal"), narrowed(caches, 17):
        int("no number")
    assert [cache.in_use for cache in caches] == [64, 64, 64]
    with narrowed(caches, 1000):
        assert [cache.in_use for cache in caches] == [64, 64, 64]
