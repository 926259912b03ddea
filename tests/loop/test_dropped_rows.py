"""Rows that have ended leave the batch, and nobody but the clock can tell.

The oracle of a row is the row alone. The rows that go on stay in the storage of all, the target is
given no others, and everything that a row reports carries its number in the batch.
"""

from contextlib import contextmanager

import pytest
import torch
from architectures import VOCAB, build
from diagonal import case, first
from drafter_table import MODEL, ONE_OF_EACH, make
from drafting import ragged_prompts
from hypothesis import given
from hypothesis import strategies as st
from state_tensors import addresses
from transformers import LogitsProcessorList

from specdec import NoDrafter, SpeculativeGenerator
from specdec.graphs.owned import owned_tensors
from specdec.graphs.rows import keep_rows, rows_to_keep
from specdec.graphs.tree import tables
from specdec.targets.view import wrap_forward

LENGTHS = [3, 9, 1, 6, 9, 4]
IDS, MASK = ragged_prompts(VOCAB, *LENGTHS)
ROWS = list(range(len(LENGTHS)))
EOS, NUM_NEW = 34, 24
SETTINGS = {
    "temperature": [0.7, 1.0, 0.0, 1.3, 0.9, 0.0],
    "top_k": [0, 5, 3, 0, 40, 0],
    "top_p": [1.0, 0.9, 0.5, 0.8, 1.0, 1.0],
    "min_p": [0.0, 0.0, 0.1, 0.05, 0.02, 0.0],
    "seed": [11, 2**64 - 1, 7, 0, 12, 5],
}


def drafter_of(name):
    return NoDrafter() if name == "none" else make(name)


def stop_at_sum(input_ids, scores, **kwargs):
    """Met where the ids add up to a multiple of 23, which padding with 0 does not change."""
    return input_ids.sum(dim=1) % 23 == 0


OPTIONS = {
    "max_new_tokens": NUM_NEW,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "stopping_criteria": [stop_at_sum],
}


def settings_of(rows, **changed) -> dict:
    """Of each row its own; greedy rows beside sampled ones."""
    own = {name: [values[row] for row in rows] for name, values in SETTINGS.items()}
    return OPTIONS | own | {"do_sample": True} | changed


def account(result) -> list:
    """All that a result tells of each row."""
    steps = [[vars(step) for step in row] for row in result.trace]
    return list(zip(steps, result.lengths, result.finish_reasons, strict=True))


def generate(generator, rows, **changed) -> list:
    options = settings_of(rows, trace=True, **changed)
    return account(generator.generate(IDS[rows], MASK[rows], **options))


def alone(generator, row: int, seed: int) -> tuple:
    """The account of a row without neighbours and padding."""
    ids, mask = (x[row : row + 1, -LENGTHS[row] :] for x in (IDS, MASK))
    options = settings_of([row], trace=True, seed=seed)
    return account(generator.generate(ids, mask, **options))[0]


masks = st.lists(st.booleans(), min_size=1, max_size=12)


@given(masks, st.integers(1, 3))
def test_kept_rows_are_the_live_ones_in_the_storage_of_all_and_few_move(is_live, num_dims):
    rows = rows_to_keep(is_live)
    assert sorted(rows) == [row for row, lives in enumerate(is_live) if lives]
    for place, row in enumerate(rows):
        assert row == place or (row >= len(rows) and not is_live[place])
    table = torch.arange(len(is_live) * 6).view(len(is_live), 2, 3)
    while table.dim() > num_dims:
        table = table[..., 0]  # rows that do not lie side by side
    expected = table[rows]
    for _ in range(2 * bool(rows)):  # tables may share storage
        kept = keep_rows(table, rows)
        assert torch.equal(kept, expected)
        assert kept.data_ptr() == table.data_ptr()


CASES = [case([name, 6, "block"], name == "none") for name in ("none", "dflash", "mtp, looped")]
CASES += [pytest.param(n, 6, "block", marks=pytest.mark.slow) for n in ("lookup", "suffix")]
CASES += [("suffix, prompts", 6, "block"), ("eagle3", 6, "coupling"), ("model", 6, "block")]
CASES += [pytest.param("model", 20, "block", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("name", "count", "sampler"), CASES)
def test_a_row_of_a_batch_that_shrinks_is_the_row_alone(name, count, sampler):
    generator = SpeculativeGenerator(MODEL, drafter_of(name), sampler)
    reasons = set()
    for shift in (0, 2):
        rows = [(row + shift) % len(ROWS) for row in range(count)]
        seeds = [100 * shift + i for i in range(count)]
        accounts = generate(generator, rows, seed=seeds)
        for row, seed, found in zip(rows, seeds, accounts, strict=True):
            assert found == alone(generator, row, seed)
        assert len({len(steps) for steps, *_ in accounts}) > 2  # they end one after the other
        reasons |= {reason for *_, reason in accounts}
    assert len(reasons) > 1


@contextmanager
def counted_rows(model):
    """How many rows each forward of a model is given."""
    counts: list[int] = []

    def count(module, args, kwargs):
        if module is not model:  # a view of it; HF's own code reads a few tokens before a call
            counts.append(len(kwargs["input_ids"]))

    handle = model.register_forward_pre_hook(count, with_kwargs=True)
    yield counts
    handle.remove()


@pytest.mark.parametrize("name", ["none", "model"])
def test_the_target_and_a_draft_model_are_given_the_rows_that_have_not_ended(name):
    drafter = drafter_of(name)
    draft = getattr(drafter, "model", None) or torch.nn.Linear(1, 1)
    generator = SpeculativeGenerator(MODEL, drafter)
    with counted_rows(MODEL) as counts, counted_rows(draft) as of_draft:
        for _ in range(2):  # the first call tries its sizes, since hooks are users' code
            counts.clear(), of_draft.clear()
            result = generator.generate(IDS, MASK, **settings_of(ROWS))
    steps = result.stats.steps
    left = [sum(count > index for count in steps) for index in range(max(steps))]
    assert counts[1:] == left  # the first reads the prompts
    assert counts[1] == len(ROWS) > counts[-1]
    assert of_draft[1:] in ([], [n for n in left for _ in range(4)])


class SeesAllRows:
    """A logits processor that changes nothing."""

    is_stateless = True  # of what it counts nobody asks in a step

    def __init__(self):
        self.counts: set[tuple[int, int]] = set()

    def __call__(self, input_ids, scores):
        self.counts.add((len(input_ids), len(scores)))
        return scores


@pytest.mark.parametrize("name", ["none", "eagle3"])
def test_no_row_leaves_beside_processors_while_a_step_is_under_way_or_by_hand(name):
    drafter, processor = drafter_of(name), SeesAllRows()
    generator = SpeculativeGenerator(MODEL, drafter)
    late = SpeculativeGenerator(MODEL, drafter, steps_ahead=1)
    expected = generate(generator, ROWS)
    with counted_rows(MODEL) as counts:
        processors = LogitsProcessorList([processor])
        for _ in range(2):  # the first calls try their sizes, since hooks are users' code
            counts.clear()
            assert generate(generator, ROWS, logits_processor=processors) == expected
            assert generate(late, ROWS) == expected
    assert set(counts) == {len(ROWS)}
    assert processor.counts == {(1, 1)}  # each row alone
    generation = generator.start(IDS, MASK, **settings_of(ROWS))
    while not generation.has_ended.all():
        assert len(generator.step(generation).num_new) == len(ROWS)
    assert generation.rows == ROWS


@pytest.mark.parametrize(
    "name",
    first(
        ["none", *ONE_OF_EACH], ["none", "model", "suffix", "eagle3", "dflash", "own", "self, top"]
    ),
)
def test_rows_leave_in_their_storage_which_is_whole_again_in_the_next_call(name):
    generator = SpeculativeGenerator(MODEL, drafter_of(name))
    options = settings_of(ROWS, eos_token_id=list(range(1, VOCAB, 9)))
    generation = generator.start(IDS, MASK, **options)
    found, whole, sizes = addresses(generation.state), owned_tensors(generation.state), set()
    whole = {name: x.shape for name, x in whole.items()}
    views = generation.state.cache.keys, generation.state.cache.values
    at = addresses(views)
    generator.step(generation)
    while not generation.has_ended.all():
        generation.drop_ended()
        state = generation.state
        assert addresses(state) == found
        assert addresses((state.cache.keys, state.cache.values)) == at
        left = len(generation.rows)
        sizes.add(left)
        assert {len(table) for table in tables(state).values()} == {left}
        assert {len(table) for table in state.cache.keys.values()} == {left}
        assert state.cache.num_rows == left == state.signature.batch_size
        generator.step(generation)
    assert len(sizes) > 2
    generation.close()
    again = generator.start(IDS, MASK, **options)
    assert addresses(again.state) == found
    assert {name: x.shape for name, x in owned_tensors(again.state).items()} == whole
    again.close()
    fresh = SpeculativeGenerator(MODEL, drafter_of(name), kept_bytes=0)
    assert generate(generator, ROWS[::-1]) == generate(fresh, ROWS[::-1])


@pytest.mark.parametrize("kept_bytes", [0, None])
def test_a_stream_that_is_abandoned_harms_nobody(kept_bytes):
    generator = SpeculativeGenerator(MODEL, make("eagle3"), kept_bytes=kept_bytes)
    expected = generate(SpeculativeGenerator(MODEL, make("eagle3")), ROWS)
    for has_dropped in (True, False):
        stream = generator.stream(IDS, MASK, **settings_of(ROWS))
        while has_dropped and None not in next(stream).rows:
            pass
        next(stream)
        assert generate(generator, ROWS) == expected  # while the stream is open
        next(stream)
        stream.close()
        assert generate(generator, ROWS) == expected


@pytest.mark.parametrize("name", ["none", "eagle3"])
def test_a_stream_tells_the_rows_of_the_batch(name):
    generator = SpeculativeGenerator(MODEL, drafter_of(name))
    expected = [steps for steps, *_ in generate(generator, ROWS)]
    found = [[] for _ in ROWS]
    for record in generator.stream(IDS, MASK, **settings_of(ROWS)):
        assert len(record.rows) == len(ROWS)
        for row, step in enumerate(record.rows):
            assert (step is None) == (record.index >= len(expected[row]))
            found[row] += [vars(step)] if step else []
    assert found == expected


def test_a_fault_is_told_of_the_row_of_the_batch():
    model = build("llama")
    generator = SpeculativeGenerator(model, None)
    text = generator.generate(IDS[:3], MASK[:3], max_new_tokens=8).new_tokens.tolist()
    eos = text[0][1]
    assert eos not in text[1] + text[2]

    def break_the_first_place(forward, *args):
        logits = forward(*args)
        if len(logits) == 2:  # row 0 has ended after its second token, and the last row moved there
            logits[0] = float("nan")
        return logits

    wrap_forward(generator.target._views.step.lm_head, break_the_first_place)
    with pytest.raises(ValueError, match="in row 2 after 2 new tokens"):
        generator.generate(IDS[:3], MASK[:3], max_new_tokens=8, eos_token_id=eos)
