"""Steps of a generator that captures them, on a CPU: the same function under the same checks.

The oracle is a generator that captures nothing.
"""

import gc
import itertools
import random
import weakref

import pytest
import torch
from architectures import VOCAB, build
from diagonal import case
from drafter_table import MODEL, ONE_OF_EACH, PATHS, TREES, make
from drafting import perturbed, ragged_prompts
from steps import account, texts_beside_poison, texts_by_many_lengths
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from specdec import EnsembleSampler, ModelDrafter, PromptLookupDrafter, SpeculativeGenerator
from specdec.graphs import Captured, no_host_sync
from specdec.graphs.capture import CaptureError
from specdec.graphs.owned import owned_tensors
from specdec.graphs.storage import StorageMovedError, stable_storage
from specdec.loop import new_storage
from specdec.loop.check import ReplayMismatchError
from specdec.loop.replay import NUM_EAGER
from specdec.loop.state import TokenBuffer

IDS, MASK = ragged_prompts(VOCAB, 5, 1, 9)
SAMPLERS = ["block", "rejection", "coupling", EnsembleSampler(0.8), "typical"]
SAMPLED = {
    "do_sample": True,
    "temperature": [0.0, 0.8, 1.3],
    "top_k": [0, 7, 7],
    "top_p": [1.0, 0.9, 0.8],
    "seed": [1, 2, 3],
}
OTHER = {**SAMPLED, "temperature": [0.6, 0.0, 2.0], "top_p": [0.5, 1.0, 0.9], "seed": [9, 8, 7]}
OTHER["top_k"] = [7, 5, 0]
LONG = {"max_new_tokens": 18, "eos_token_id": None, "pad_token_id": 0}
ROOM = LONG | {"max_new_tokens": 4 * (NUM_EAGER + 3) + 1}  # for so many steps, all accepted

PAIRS = [*zip(("none", *ONE_OF_EACH, "lilicorr", *TREES), itertools.cycle(SAMPLERS), strict=False)]
PAIRS += zip(PATHS, ("gbv", "spectr", "gbv"), strict=True)
"""Every drafter with one sampler, every sampler with chains and a tree."""
QUICK = [*PAIRS[:-3:4], PAIRS[-1]]
"""By default every sampler with some drafter, a tree and paths."""


def capturing(drafter="model", sampler="auto", *, graphs=True, **options):
    part = None if drafter == "none" else make(drafter, 3)
    return SpeculativeGenerator(MODEL, part, sampler, graphs=graphs, **options)


def eager(drafter="model", sampler="auto"):
    return capturing(drafter, sampler, graphs=False)


@pytest.mark.parametrize(
    ("drafter", "sampler"), [case([*pair], pair in QUICK) for pair in PAIRS], ids=str
)
def test_a_step_waits_for_nothing_moves_nothing_and_replays_alike(drafter, sampler):
    """Eager and captured steps in the same tensors over two different calls."""
    generator = capturing(drafter, sampler)
    seen = []
    for seed, options in enumerate((SAMPLED, OTHER)):
        prompts = ragged_prompts(VOCAB, 5, 3, 9, seed=seed)
        generation = generator.start(*prompts, **ROOM, **options)
        watched = stable_storage(generation.storage.state)
        for _ in range(NUM_EAGER + 3):
            before = generation.lengths
            with no_host_sync():
                generator.step(generation)
            watched.check()
            assert bool((generation.lengths > before).all())
        assert len(watched.names) >= 12
        seen.append([x.data_ptr() for x in owned_tensors(generation.storage.state).values()])
        assert generation.storage.replay.graphs[generation.num_draft_tokens].num_calls >= 3
        generation.close()
        assert list(generator._storages) == [generation.storage]
    assert seen[0] == seen[1]
    found = generator.generate(*prompts, **ROOM, **OTHER, check=True)
    expected = eager(drafter, sampler).generate(*prompts, **ROOM, **OTHER)
    assert account(found) == account(expected)


@pytest.mark.parametrize(("count", "bucket"), [(1, 1), (3, 4), (9, 16)])
def test_rows_that_fill_a_bucket_are_never_read_and_never_emitted(count, bucket):
    prompts = ragged_prompts(VOCAB, *[(3 * i) % 7 + 1 for i in range(count)])
    options = LONG | {"do_sample": True, "seed": list(range(count)), "top_p": 0.9}
    generator = capturing("eagle3")
    expected = eager("eagle3").generate(*prompts, **options)
    assert texts_beside_poison(generator, prompts, **options) == expected.new_tokens.tolist()
    (storage,) = generator._storages
    assert storage.state.signature.batch_size == bucket


def test_all_rows_stay_in_a_captured_batch():
    generator = capturing("model")
    generation = generator.start(IDS, MASK, **LONG)
    generation.end_rows([1])
    generation.drop_ended()
    assert generation.rows == [0, 1, 2]
    assert generator.step(generation).num_new[1] == 0


@pytest.mark.smoke
@pytest.mark.parametrize("drafter", ["none", "model"])
def test_the_draft_length_may_change_from_step_to_step(drafter):
    """Greedy text does not depend on it."""
    options = LONG | {"max_new_tokens": 60}
    texts = texts_by_many_lengths(capturing(drafter), (IDS, MASK), 24, **options)
    expected = eager(drafter).generate(IDS, MASK, **options)
    for text, row in zip(texts, expected.new_tokens.tolist(), strict=True):
        assert text == row[: len(text)]
        assert len(text) >= 24


def captures_of(generator) -> dict[str, int]:
    """How many captures of each kind the generator keeps: steps, and prompt chunks."""
    lines = [line for line in generator.explain().splitlines() if " captured in " in line]
    chunks = sum("prompt chunks" in line for line in lines)
    return {
        "storages": len(list(generator._storages)),
        "steps": len(lines) - chunks,
        "chunks": chunks,
    }


ROOMY = build("llama", max_position_embeddings=512)


def test_calls_of_any_length_run_in_one_storage_with_one_graph_for_each_set_of_options(monkeypatch):
    """The oracle of each call is a generator that captures nothing and keeps nothing."""
    made = []
    capture = Captured.__init__

    def counting(self, *args, **kwargs):
        made.append(self)
        capture(self, *args, **kwargs)

    monkeypatch.setattr(Captured, "__init__", counting)
    monkeypatch.setattr("specdec.loop.new_storage.FIRST_TOKENS", 64)
    draws, drafter = random.Random(3), ModelDrafter(perturbed(ROOMY), 3)
    generator = SpeculativeGenerator(ROOMY, drafter, graphs=True, prefill_chunk_size=70)
    fresh = SpeculativeGenerator(ROOMY, drafter, graphs=False, kept_bytes=0)
    sizes = set()
    num_calls = 9
    for index in range(num_calls):
        longest, room = (draws.randint(1, 150), draws.randint(1, 60)) if index else (9, 20)
        prompt, _ = ragged_prompts(VOCAB, longest, seed=index)
        options = {"max_new_tokens": room, "eos_token_id": None}
        # The last two calls are one of each kind, so that the last storage has both graphs.
        sampled = draws.random() < 0.6
        if index >= num_calls - 2:
            sampled = index == num_calls - 1
        if sampled:
            temperature = draws.choice([0.5, 0.8, 1.7])
            options |= {"do_sample": True, "temperature": temperature, "top_k": 0, "seed": index}
        found = generator.generate(prompt, **options)
        assert account(found) == account(fresh.generate(prompt, **options))
        (storage,) = generator._storages
        sizes.add(storage.num_slots)
    assert 1 < len(sizes) <= 3  # of 64, 128, 256
    # Greedy steps, sampled steps, and chunks of 64 tokens, the first ones and later ones.
    assert len(made) <= 4 * len(sizes)
    assert captures_of(generator) == {"storages": 1, "steps": 2, "chunks": 2}


@pytest.mark.parametrize("graphs", [False, True])
def test_a_closed_generation_is_not_stepped_over_the_tensors_of_another_call(graphs):
    generator = SpeculativeGenerator(ROOMY, "lookup", graphs=graphs)
    ids = ROOMY.dummy_inputs["input_ids"][:1]
    closed = generator.start(ids, max_new_tokens=8)
    closed.close()
    other = generator.start(ids, max_new_tokens=8)
    with pytest.raises(ValueError, match="this generation was closed"):
        generator.step(closed)
    generator.step(other)


def test_storage_is_no_larger_than_needed_where_there_is_no_memory_for_more(monkeypatch):
    allocate, asked = new_storage.allocated, []

    def scarce(signature, num_slots, *args):
        asked.append(num_slots)
        if num_slots > 64:
            raise torch.OutOfMemoryError("as on a GPU")
        return allocate(signature, num_slots, *args)

    monkeypatch.setattr(new_storage, "allocated", scarce)
    generator = SpeculativeGenerator(ROOMY, "lookup", graphs=True)
    found = generator.generate(IDS[1:2, -1:], max_new_tokens=20, eos_token_id=None)
    assert found.new_tokens.shape == (1, 20)
    assert asked == [576, 64]
    with pytest.raises(torch.OutOfMemoryError):
        generator.generate(IDS[1:2, -1:], max_new_tokens=90, eos_token_id=None)


def test_what_is_kept_is_bounded_in_bytes_and_release_frees_it():
    generator = capturing("model")
    for rows in (1, 2, 1):
        generator.generate(IDS[:rows], MASK[:rows], **LONG)
    assert captures_of(generator) == {"storages": 2, "steps": 2, "chunks": 1}
    one, two = (storage.size_bytes for storage in generator._storages)
    assert "kept for later calls" in generator.explain()
    generator.release()
    assert not list(generator._storages)
    few = capturing("model", kept_bytes=max(one, two))
    for rows in (1, 2, 1):
        few.generate(IDS[:rows], MASK[:rows], **LONG)
        (storage,) = few._storages
        assert storage.state.signature.batch_size == rows
    none = capturing("model", kept_bytes=0)
    none.generate(IDS, MASK, **LONG)
    assert not list(none._storages)


def test_a_generation_that_nobody_holds_any_more_gives_its_storage_back():
    generator = capturing("model")
    generation = generator.start(IDS, MASK, **LONG)
    storage = generation.storage
    for _ in range(NUM_EAGER + 2):
        generator.step(generation)
    assert not list(generator._storages)
    del generation
    assert list(generator._storages) == [storage]
    found = generator.generate(IDS, MASK, **LONG)
    assert list(generator._storages) == [storage]
    assert account(found) == account(eager("model").generate(IDS, MASK, **LONG))
    stream = generator.stream(IDS, MASK, **LONG)
    next(stream)
    stream.close()
    del stream
    assert list(generator._storages) == [storage]


def test_weights_that_moved_and_settings_that_changed_are_captured_anew():
    model, drafter, sampler = build("llama"), PromptLookupDrafter(3), EnsembleSampler(0.9)
    generator = SpeculativeGenerator(model, drafter, sampler, graphs=True)

    def runner():
        generator.generate(IDS, MASK, **LONG | SAMPLED)
        return list(generator._storages)[-1]

    first = runner()
    model.lm_head.weight.data.mul_(1.01)  # in place: it counts at once
    assert runner() is runner() is first
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    second = runner()
    sampler.target_weight = 0.5
    third = runner()
    drafter.min_ngram = 2
    assert len({first, second, third, runner()}) == 4


def test_explain_says_what_is_captured_and_what_is_not_and_why():
    assert "target is on a CPU" in SpeculativeGenerator(MODEL, None).explain()
    assert "graphs=False" in eager().explain()
    generator = capturing("model")
    generator.generate(IDS, MASK, **LONG)
    assert "batch of 4, K = 3, 192 slots: 3 draft tokens captured" in generator.explain()
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.2)])
    expected = eager("model").generate(IDS, MASK, **LONG, logits_processor=processors)
    found = generator.generate(IDS, MASK, **LONG, logits_processor=processors)
    assert account(found) == account(expected)
    assert "the last call was eager" in generator.explain()
    assert "RepetitionPenaltyLogitsProcessor" in generator.explain()


class WaitingDrafter(PromptLookupDrafter):
    """Looks at a number on the host."""

    def propose(self, context, state, drawing):
        self.last_start = context.start.max().item()
        return super().propose(context, state, drawing)


def test_a_step_that_waits_is_refused_by_name_and_auto_goes_on_eagerly(monkeypatch):
    generator = SpeculativeGenerator(MODEL, WaitingDrafter(3), graphs=True)
    with pytest.raises(CaptureError, match=r"test_captured_steps.py.*context.start.max\(\)"):
        generator.generate(IDS, MASK, **LONG)
    generator = SpeculativeGenerator(MODEL, WaitingDrafter(3))
    monkeypatch.setattr(generator._storages, "reason", None)  # as on a GPU
    expected = SpeculativeGenerator(MODEL, PromptLookupDrafter(3)).generate(IDS, MASK, **LONG)
    for _ in range(2):
        assert account(generator.generate(IDS, MASK, **LONG)) == account(expected)
    assert "eager, because" in generator.explain()
    assert "WaitingDrafter" in generator.explain() or "test_captured_steps" in generator.explain()


def test_check_refuses_to_compare_eager_steps_with_themselves():
    for generator in (eager(), SpeculativeGenerator(MODEL, None)):
        with pytest.raises(ValueError, match="no replay to compare"):
            generator.generate(IDS, MASK, **LONG, check=True)


def test_check_catches_a_tensor_that_is_bound_to_a_new_one(monkeypatch):
    commit = TokenBuffer.commit

    def reassigning(self, tokens, num_accepted):
        self.root_position = self.root_position.clone()
        return commit(self, tokens, num_accepted)

    monkeypatch.setattr(TokenBuffer, "commit", reassigning)
    for options in ({"check": True}, {}):  # without a check the step that is captured shows it
        with pytest.raises(StorageMovedError, match=r"\.buffer\.root_position was replaced"):
            capturing().generate(IDS, MASK, **LONG, **options)


def once_captured(generator, fault):
    """Plants a fault in the captured step, as a replay would show it: the eager twin is sound."""
    run = generator._storages.__class__.take

    def take(self, *args, **options):
        storage = run(self, *args, **options)
        if storage.replay.graphs:
            captured = storage.replay.graphs[3]
            sound = captured._function
            captured._function = lambda: fault(storage.state, sound)
        return storage

    generator._storages.take = take.__get__(generator._storages)
    generator.generate(IDS, MASK, **LONG)


def not_advanced(state, step):
    before = state.buffer.root_position.clone()
    outcome = step()
    state.buffer.root_position.copy_(before)
    return outcome


FIRST_SLOTS = {}


def stale_slots(state, step):
    cache, open_window = state.cache, type(state.cache).open_window

    def stale(slots, **options):
        first = FIRST_SLOTS.setdefault(tuple(slots.shape), slots.clone())
        return open_window(cache, first, **options)

    cache.open_window = stale
    try:
        return step()
    finally:
        del cache.open_window


def lower_acceptance(state, step):
    """Nothing but acceptance changes: the target corrects every token of a worse draft."""
    state.features.zero_()
    return step()


FAULTS = {
    "not advanced": ("model", not_advanced, "position are"),
    "stale slots": ("model", stale_slots, "num_accepted are"),
    "worse features": ("eagle3", lower_acceptance, "tokens are"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_check_catches_a_replay_that_does_something_else(name):
    drafter, fault, message = FAULTS[name]
    generator = capturing(drafter)
    once_captured(generator, fault)
    with pytest.raises(ReplayMismatchError, match=message):
        generator.generate(IDS, MASK, **LONG, check=True)


def test_rows_that_a_stopping_criterion_ends_are_ended_on_both_sides():
    options = LONG | {"stopping_criteria": [lambda ids, scores, **_: int(ids.sum()) % 5 == 0]}
    found = capturing("model").generate(IDS, MASK, **options, check=True)
    assert account(found) == account(eager("model").generate(IDS, MASK, **options))
    assert "stop" in found.finish_reasons


@pytest.mark.parametrize("drafter", ["lookup", "mtp"])
def test_graphs_are_freed_with_their_generator_without_garbage_collection(drafter):
    generator = capturing(drafter, prefill_chunk_size=64)
    for _ in range(NUM_EAGER):  # the chunks of prompts, too
        generator.generate(*ragged_prompts(VOCAB, 80, 5), **LONG)
    replays = [storage.replay for storage in generator._storages]
    graphs = [weakref.ref(graph) for replay in replays for graph in replay.all_graphs]
    del replays
    assert len(graphs) >= 2
    gc.collect()
    gc.disable()
    try:
        del generator
        assert [graph() for graph in graphs] == [None] * len(graphs)
    finally:
        gc.enable()
