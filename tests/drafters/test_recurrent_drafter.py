"""`ModelDrafter` of a model that remembers: texts, what a window leaves behind, and captured steps.
Laws that all drafters share are in `test_laws.py`, proposals against forwards without any cache in
`test_model_drafter.py`.
"""

from functools import cache

import pytest
import torch
from architectures import VOCAB, build
from drafter_table import RECURRENT, commit_some, fresh_state, loop_of, propose, random_texts
from drafting import perturbed, ragged_prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import ModelDrafter, SpeculativeGenerator
from specdec.samplers import BlockSampler
from specdec.target.memory import Memory

NUM_NEW = 24
LENGTHS = (9, 1, 6, 4)
IDS, MASK = ragged_prompts(VOCAB, *LENGTHS)
NAMES = list(RECURRENT.values())
model_of = cache(build)
SCALES = {"qwen3_5": 0.01, "bamba": 0.05, "mamba": 0.1}


@cache
def draft_model_of(name):
    """Right often enough, and wrong often enough, for a target of the same name."""
    return perturbed(model_of(name), scale=SCALES[name])


@cache
def texts_of(name):
    """HF's greedy text of each row alone: recurrent layers of HF read padding on the left."""
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
    rows = (ids[None, -length:] for ids, length in zip(IDS, LENGTHS, strict=True))
    return [model_of(name).generate(ids, **options)[0].tolist() for ids in rows]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [1, 4])
def test_greedy_text_is_hfs_where_both_models_remember(name, width):
    drafter = ModelDrafter(draft_model_of(name), width)
    generator = SpeculativeGenerator(model_of(name), drafter, prefill_chunk_size=3)
    result = generator.generate(IDS, MASK, max_new_tokens=NUM_NEW)
    found = [r[-n - NUM_NEW :].tolist() for r, n in zip(result.sequences, LENGTHS, strict=True)]
    assert found == texts_of(name)
    assert 0.05 < result.stats.acceptance_rate < 0.95
    counts = [[step.num_accepted for step in row] for row in result.steps]
    assert any(len(set(of_step)) > 1 for of_step in zip(*counts, strict=False))
    for row, length in enumerate(LENGTHS):
        alone = generator.generate(IDS[row : row + 1, -length:], max_new_tokens=NUM_NEW)
        assert alone.sequences[0].tolist() == texts_of(name)[row]
        assert [vars(step) for step in alone.steps[0]] == [vars(step) for step in result.steps[row]]


@pytest.mark.parametrize("name", NAMES)
def test_captured_steps_are_the_eager_ones_while_rows_end(name):
    options = {
        "do_sample": True,
        "temperature": [0.0, 0.8, 1.3, 1.0],
        "top_p": [1.0, 0.9, 0.8, 1.0],
        "seed": [1, 2, 3, 4],
        "max_new_tokens": NUM_NEW,
        "eos_token_id": list(range(0, VOCAB, 11)),
    }
    results = []
    for graphs in (False, True):
        drafter = ModelDrafter(draft_model_of(name), 3)
        generator = SpeculativeGenerator(model_of(name), drafter, BlockSampler(), graphs=graphs)
        for _ in range(2):  # over used storage as well
            result = generator.generate(IDS, MASK, check=graphs, **options)
            results.append((result.sequences.tolist(), result.stats.to_dict()))
    assert "replays" in generator.explain()
    assert all(result == results[0] for result in results)
    assert len(set(result.lengths)) > 1


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6)
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 4), min_size=2, max_size=6))
@torch.no_grad()
def test_the_state_is_that_of_the_text_before_the_last_two_tokens(name, seed, counts):
    """Whatever was drafted: a state that read just this text as a prompt is the same."""
    prompts, integer = random_texts(seed, VOCAB - 1)
    drafter = ModelDrafter(model_of(name), 4)
    loop, state = loop_of(drafter, prompts), fresh_state(drafter, 3)
    loop.prefill(drafter, state, 3)
    for count in counts:
        draft, _ = propose(drafter, loop, state, {}, count=count)
        remembered = state.cache.memory
        is_new = torch.tensor(loop.num_new).clamp(max=1)
        lengths = torch.tensor([len(row) for row in loop.rows])
        assert remembered.start.equal(lengths - 1 - is_new)
        for row, length in enumerate(remembered.start.tolist()):
            fresh = drafter.init_state(1, 60, vocab_size=VOCAB, device=torch.device("cpu"))
            text = loop_of(drafter, [[*loop.rows[row][:length], 0, 0]])
            text.prefill(drafter, fresh, 60)
            for place, expected in fresh.cache.memory.states.items():
                found = remembered.states[place][row]
                torch.testing.assert_close(found, expected[0], rtol=1e-4, atol=1e-5)
        commit_some(loop, draft, count, integer, VOCAB - 1)


def one_token_more(memory, *args, **kwargs):
    OPEN(memory, *args, **kwargs)
    memory.kept.add_(1)


OPEN = Memory.open


@pytest.mark.parametrize("name", NAMES)
def test_a_state_that_is_ahead_is_rejected(name, monkeypatch):
    """The negative control of law 7: a model as its own drafter accepts all, but not ahead."""
    target, drafter = model_of(name), ModelDrafter(model_of(name), 3)
    generator = SpeculativeGenerator(target, drafter)
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": None}
    assert generator.generate(IDS, MASK, **options).stats.acceptance_rate == 1
    propose = drafter.propose

    def ahead(*args):
        with monkeypatch.context() as patch:
            patch.setattr(Memory, "open", one_token_more)
            return propose(*args)

    monkeypatch.setattr(drafter, "propose", ahead)
    assert generator.generate(IDS, MASK, **options).stats.acceptance_rate < 0.9
