"""What a step says of itself: one table, of what drafter and sampler returned."""

import pytest
import torch
from architectures import VOCAB
from drafter_table import MODEL, PATHS, TREE, make, own_target
from drafting import ragged_prompts
from torch.utils._python_dispatch import TorchDispatchMode

from specdec import Draft, NoDrafter, SpeculativeGenerator
from specdec.graphs.rows import map_tensors
from specdec.loop.outcome import Fault

PROMPTS = ragged_prompts(VOCAB, 5, 2, 9)
OPTIONS = {"do_sample": True, "seed": [1, 2, 3], "max_new_tokens": 40, "eos_token_id": None}
KINDS = ["model", "lookup", "eagle3", "model, tree", "dspark, rnn", PATHS[0]]
IS_NO_COPY = "view", "slice", "select", "unsqueeze", "alias", "detach", "expand"


class Operations(TorchDispatchMode):
    """Names of all operations but views, and the data types of what they read."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.overloadpacket.__name__
        if name not in IS_NO_COPY:
            tensors = args[0] if isinstance(args[0], list | tuple) else args[:1]
            self.seen.append((name, {tensor.dtype for tensor in tensors}))
        return operation(*args, **(kwargs or {}))


def generator_of(name, **options):
    options |= {"sampler": "gbv"} if name in PATHS else {}
    return SpeculativeGenerator(own_target(), make(name), **options)


@pytest.mark.parametrize("name", KINDS)
@torch.inference_mode()
def test_an_outcome_is_fetched_by_one_launch_and_one_copy(name):
    """On a GPU a table of several data types would take a launch for each of its columns."""
    generator = generator_of(name, graphs=False)
    generation = generator.start(*PROMPTS, **OPTIONS)
    for length in (generation.num_draft_tokens, 1, 0):
        generation.num_draft_tokens = length
        outcome = generator.step(generation)
        with Operations() as found:
            outcome.fetch()
        assert found.seen == [("cat", {torch.long}), ("clone", {torch.long})]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("graphs", [False, True])
@torch.inference_mode()
def test_what_was_fetched_stays_when_later_steps_overwrite_the_outcome(name, graphs):
    generator = generator_of(name, graphs=graphs)
    generation, pending, wanted = generator.start(*PROMPTS, **OPTIONS), [], []
    for _ in range(6):
        outcome = generator.step(generation)
        pending.append(outcome.fetch())
        kept = map_tensors(torch.clone, outcome)
        wanted.append(
            [kept.num_new, kept.verdict.num_accepted, kept.draft.tokens, kept.verdict.tokens]
        )
    for late, (num_new, accepted, drafted, emitted) in zip(pending, wanted, strict=True):
        for b, row in enumerate(late.read()):
            assert row.num_accepted == accepted[b]
            assert row.draft_tokens == drafted[b, : len(row.draft_tokens)].tolist()
            assert row.new_tokens == emitted[b, : num_new[b]].tolist()
            assert (row.faults, row.num_sound) == (0, None)


class TooMany(NoDrafter):
    """Proposes ids beyond the vocabulary in the second row, and more of them than there are."""

    num_draft_tokens = 3

    def propose(self, context, state, drawing):
        tokens = context.tokens[:, :1].clamp(min=0).repeat(1, drawing.num_draft_tokens)
        tokens[1] = VOCAB + 5
        return Draft(tokens, None, torch.tensor([3, 3, 7]))


@torch.inference_mode()
def test_a_step_runs_on_ids_in_range_and_reports_those_that_came():
    generator = SpeculativeGenerator(MODEL, TooMany(), "rejection", graphs=False)
    outcome = generator.step(generator.start(*PROMPTS, **OPTIONS))
    assert outcome.draft.tokens[1].tolist() == [VOCAB - 1] * 3
    assert outcome.draft.num_valid.tolist() == [3, 3, 3]
    assert outcome.draft.proposed.tokens[1].tolist() == [VOCAB + 5] * 3
    assert outcome.draft.proposed.num_valid.tolist() == [3, 3, 7]
    sound, unknown, many = outcome.fetch().read()
    assert (sound.faults, unknown.faults, many.faults) == (0, Fault.DRAFT_ID, Fault.NUM_VALID)
    assert (unknown.num_sound, many.num_sound) == (0, 0)


@torch.inference_mode()
def test_the_step_of_a_tree_reports_the_path_that_was_accepted():
    generator = SpeculativeGenerator(own_target(), make("itself", tree=TREE), graphs=False)
    generation = generator.start(*PROMPTS, **OPTIONS | {"do_sample": False})
    for _ in range(4):
        for row in generator.step(generation).fetch().read():
            assert not row.is_chain
            assert row.num_accepted == len(row.path) > 0
            assert [row.parents[node] for node in row.path] == [-1, *row.path[:-1]]
            assert [row.draft_tokens[node] for node in row.path] == row.new_tokens[:-1]


@pytest.mark.parametrize("graphs", [False, True])
def test_a_row_that_ends_inside_a_block_ends_by_its_last_token(graphs):
    """The device says whether a row has ended, and the host sees it by the token."""
    free = generator_of("model").generate(*PROMPTS, **OPTIONS)
    eos = sorted({int(row[len(row) // 2]) for row in free.new_tokens})
    generator = generator_of("model", graphs=graphs)
    result = generator.generate(*PROMPTS, **OPTIONS | {"eos_token_id": eos})
    generation, ended = generator.start(*PROMPTS, **OPTIONS | {"eos_token_id": eos}), [False] * 3
    while not generation.has_ended.all():
        outcome = generator.step(generation)
        for b, (row, is_eos) in enumerate(zip(outcome.fetch().read(), outcome.is_eos, strict=True)):
            assert bool(is_eos) == (row.new_tokens[-1:] in [[token] for token in eos])
            ended[b] |= bool(is_eos)
    assert result.finish_reasons == ["eos" if is_eos else "length" for is_eos in ended]
    assert "eos" in result.finish_reasons
