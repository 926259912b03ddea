"""Rows that have ended leave the batch, and nobody but the clock can tell.

The oracle of a row is the row alone. The rows that go on stay in the storage of all, the target is
given no others, and everything that a row reports carries its number in the batch.
"""

import mask_heads
import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from eagle_heads import head_for, informed
from hypothesis import given
from hypothesis import strategies as st
from mtp_heads import informed as informed_mtp
from state_tensors import addresses, tensors_of
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from specdec import (
    EagleDrafter,
    MaskTokenDrafter,
    ModelDrafter,
    MTPDrafter,
    PromptLookupDrafter,
    SpeculativeGenerator,
)
from specdec.drafters.base import NoState
from specdec.samplers import BlockSampler, CouplingSampler
from specdec.types import keep_rows, rows_to_keep

MODEL = build("llama")
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
WIDE = {"hidden_size": 128, "intermediate_size": 256, "has_embed_tokens": True}
EAGLE_HEAD = head_for(MODEL, **WIDE)
WIDE["has_lm_head"] = True
DRAFTERS = {
    "none": None,
    "model": ModelDrafter(perturbed(MODEL), 4),
    "lookup": PromptLookupDrafter(3, max_ngram=2),
    "eagle": EagleDrafter(informed(MODEL, EAGLE_HEAD), MODEL, 4, draft_temperature=0.6),
    "mtp": MTPDrafter(informed_mtp(MODEL), MODEL, 3, draft_temperature=0.6),
    "mtp, looped": MTPDrafter(informed_mtp(MODEL, semantics="target"), MODEL, 5),
    **{
        name: MaskTokenDrafter(
            mask_heads.informed(MODEL, mask_heads.head_for(MODEL, name, **WIDE), 4),
            MODEL,
            4,
            proposal="sample",
        )
        for name in ("p-eagle",)
    },
}


class StopAtSum(StoppingCriteria):
    """Met where the ids add up to a multiple of 23, which padding with 0 does not change."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.sum(dim=1) % 23 == 0


OPTIONS = {
    "max_new_tokens": NUM_NEW,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "stopping_criteria": StoppingCriteriaList([StopAtSum()]),
}


@pytest.fixture(params=DRAFTERS, name="drafter")
def _drafter(request):
    return DRAFTERS[request.param]


@pytest.fixture(params=["none", "eagle"], name="any_drafter")
def _any_drafter(request):
    """For what the host does, whatever drafts."""
    return DRAFTERS[request.param]


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


@given(masks)
def test_rows_to_keep_are_the_live_ones_and_few_move(is_live):
    rows = rows_to_keep(is_live)
    assert sorted(rows) == [row for row, lives in enumerate(is_live) if lives]
    for place, row in enumerate(rows):
        assert row == place or (row >= len(rows) and not is_live[place])


@given(masks.filter(any), st.integers(1, 3))
def test_kept_rows_are_the_rows_in_the_storage_of_all(is_live, num_dims):
    rows = rows_to_keep(is_live)
    table = torch.arange(len(is_live) * 6).view(len(is_live), 2, 3)
    while table.dim() > num_dims:
        table = table[..., 0]  # rows that do not lie side by side
    expected = table[rows]
    for _ in range(2):  # tables may share storage
        kept = keep_rows(table, rows)
        assert torch.equal(kept, expected)
        assert kept.data_ptr() == table.data_ptr()


CASES = [(name, 6, BlockSampler()) for name in DRAFTERS]
CASES += [("eagle", 6, CouplingSampler()), ("model", 20, BlockSampler())]


@pytest.mark.parametrize(("name", "count", "sampler"), CASES, ids=str)
def test_a_row_of_a_batch_that_shrinks_is_the_row_alone(name, count, sampler):
    drafter = DRAFTERS[name]
    generator = SpeculativeGenerator(MODEL, drafter, sampler)
    reasons = set()
    for shift in range(3):
        rows = [(row + shift) % len(ROWS) for row in range(count)]
        seeds = [100 * shift + i for i in range(count)]
        accounts = generate(generator, rows, seed=seeds)
        for row, seed, found in zip(rows, seeds, accounts, strict=True):
            assert found == alone(generator, row, seed)
        assert len({len(steps) for steps, *_ in accounts}) > 2  # they end one after the other
        reasons |= {reason for *_, reason in accounts}
    assert reasons == {"eos", "length", "stop"}


class RowCounter:
    """Writes down how many rows each forward of a model is given."""

    def __init__(self, model):
        self.counts: list[int] = []
        self._handle = model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, model, args, kwargs) -> None:
        self.counts.append(len(kwargs["input_ids"]))

    def __enter__(self) -> list[int]:
        return self.counts

    def __exit__(self, *exception) -> None:
        self._handle.remove()


def left_in_each_step(result) -> list[int]:
    """Rows that take part in step 0, 1, ..."""
    steps = result.stats.steps
    return [sum(count > index for count in steps) for index in range(max(steps))]


def test_the_target_and_a_draft_model_are_given_the_rows_that_have_not_ended(drafter):
    generator = SpeculativeGenerator(MODEL, drafter)
    draft = getattr(drafter, "model", None) or torch.nn.Linear(1, 1)
    with RowCounter(MODEL) as counts, RowCounter(draft) as of_draft:
        result = generator.generate(IDS, MASK, **settings_of(ROWS))
    left = left_in_each_step(result)
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


def test_beside_logits_processors_no_row_leaves(any_drafter):
    generator = SpeculativeGenerator(MODEL, any_drafter)
    processor = SeesAllRows()
    with RowCounter(MODEL) as counts:
        accounts = generate(generator, ROWS, logits_processor=LogitsProcessorList([processor]))
    assert set(counts) == {len(ROWS)}
    assert processor.counts == {(1, 1)}  # each row alone
    assert accounts == generate(generator, ROWS)


def test_no_row_leaves_while_a_step_is_under_way(any_drafter):
    expected = generate(SpeculativeGenerator(MODEL, any_drafter), ROWS)
    generator = SpeculativeGenerator(MODEL, any_drafter, steps_ahead=1)
    with RowCounter(MODEL) as counts:
        assert generate(generator, ROWS) == expected
    assert set(counts) == {len(ROWS)}


def test_whoever_steps_by_hand_keeps_all_rows(any_drafter):
    generator = SpeculativeGenerator(MODEL, any_drafter)
    state = generator.start(IDS, MASK, **settings_of(ROWS))
    while not state.has_ended.all():
        assert len(generator.step(state).num_new) == len(ROWS)
    assert state.rows == ROWS


def test_nothing_is_allocated_when_rows_leave(drafter):
    generator = SpeculativeGenerator(MODEL, drafter)
    options = settings_of(ROWS, eos_token_id=list(range(1, VOCAB, 9)))
    generation = generator.start(IDS, MASK, **options)
    found, sizes = addresses(generation.state), set()
    assert sum(".keys." in name for name in found) >= 3
    generator.step(generation)
    while not generation.has_ended.all():
        generation.drop_ended()
        state = generation.state
        assert addresses(state) == found
        left = len(generation.rows)
        sizes.add(left)
        per_row = [tensor for tensor in tensors_of(state.buffer).values() if tensor.dim() == 2]
        assert {len(table) for table in (*per_row, state.buffer.anchor_position)} == {left}
        assert {len(table) for table in state.cache.keys.values()} == {left}
        assert state.cache.num_rows == left == state.signature.batch_size
        generator.step(generation)
    assert len(sizes) > 2
    assert isinstance(generation.state.drafter_state, NoState) == (drafter is None)


def test_kept_storage_is_whole_again_in_the_next_call(drafter):
    generator = SpeculativeGenerator(MODEL, drafter)
    fresh = SpeculativeGenerator(MODEL, drafter, kept_bytes=0)
    places = []
    for shift in (0, 1, 3):
        rows = [(row + shift) % len(ROWS) for row in ROWS]
        with RowCounter(MODEL) as counts:
            found = generate(generator, rows)
        assert counts[1] == len(ROWS) > counts[-1]
        assert found == generate(fresh, rows)
        (runner,) = generator._runners
        state = runner.state
        assert state.cache.num_rows == len(state.buffer.anchor_position) == len(ROWS)
        places.append({name: (x.data_ptr(), x.shape) for name, x in tensors_of(state).items()})
    assert places[0] == places[1] == places[2]


@pytest.mark.parametrize("kept_bytes", [0, None])
def test_a_stream_that_is_abandoned_after_rows_have_left_harms_nobody(any_drafter, kept_bytes):
    generator = SpeculativeGenerator(MODEL, any_drafter, kept_bytes=kept_bytes)
    expected = generate(SpeculativeGenerator(MODEL, any_drafter), ROWS)
    for _ in range(2):
        stream = generator.stream(IDS, MASK, **settings_of(ROWS))
        while None not in next(stream).rows:
            pass
        next(stream)
        assert generate(generator, ROWS) == expected  # while the stream is open
        next(stream)
        stream.close()
        assert generate(generator, ROWS) == expected


def test_a_stream_tells_the_rows_of_the_batch(any_drafter):
    generator = SpeculativeGenerator(MODEL, any_drafter)
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

    def break_the_first_place(_, args, logits):
        if len(logits) == 2:  # row 0 has ended after its second token, and the last row moved there
            logits[0] = float("nan")

    model.lm_head.register_forward_hook(break_the_first_place)
    with pytest.raises(ValueError, match="in row 2 after 2 new tokens"):
        generator.generate(IDS[:3], MASK[:3], max_new_tokens=8, eos_token_id=eos)
