"""`ModelDrafter` of a model that remembers, for a target that does: texts, eager and captured, and
what a state that is ahead would cost. Law 9, of what any history of drafts leaves behind, is with
all drafters' in `test_laws.py`, proposals against forwards without a cache in
`test_model_drafter.py`.
"""

from functools import cache

import pytest
from architectures import VOCAB, build
from diagonal import case, first
from drafter_table import RECURRENT
from drafting import perturbed, ragged_prompts

from specdec import ModelDrafter, SpeculativeGenerator
from specdec.samplers import BlockSampler
from specdec.targets.edits.memory import Memory

NUM_NEW, LENGTHS = 16, (9, 1, 6)
IDS, MASK = ragged_prompts(VOCAB, *LENGTHS)
SCALES = {"qwen3_5": 0.01, "bamba": 0.05, "mamba": 0.1}
OPEN = Memory.open
model_of = cache(build)


def drafter_of(name, width):
    """Right often enough, and wrong often enough, for a target of the same name."""
    return ModelDrafter(perturbed(model_of(name), scale=SCALES[name]), width)


def text_of(name, row):
    """HF's greedy text of a row alone: recurrent layers of HF read padding on the left."""
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
    return model_of(name).generate(IDS[row : row + 1, -LENGTHS[row] :], **options)[0].tolist()


@pytest.mark.parametrize(
    ("name", "width"), [("qwen3_5", 1), ("bamba", 4), case(["mamba", 4], False)]
)
def test_greedy_text_is_hfs_where_both_models_remember(name, width):
    generator = SpeculativeGenerator(model_of(name), drafter_of(name, width), prefill_chunk_size=3)
    result = generator.generate(IDS, MASK, max_new_tokens=NUM_NEW)
    assert 0.05 < result.stats.acceptance_rate < 0.95
    counts = [[step.num_accepted for step in row] for row in result.steps]
    assert any(len(set(of_step)) > 1 for of_step in zip(*counts, strict=False))
    for row, length in enumerate(LENGTHS):
        assert result.sequences[row, -length - NUM_NEW :].tolist() == text_of(name, row)
        alone = generator.generate(IDS[row : row + 1, -length:], max_new_tokens=NUM_NEW)
        assert [vars(step) for step in alone.steps[0]] == [vars(step) for step in result.steps[row]]


@pytest.mark.parametrize("name", first(RECURRENT.values(), ["qwen3_5"]))
def test_captured_steps_are_the_eager_ones_while_rows_end(name):
    options = {"do_sample": True, "temperature": [0.0, 0.8, 1.3], "top_p": [1.0, 0.9, 0.8]}
    options |= {"seed": [1, 2, 3], "eos_token_id": list(range(0, VOCAB, 11))}
    results = []
    for graphs in (False, True):
        parts = model_of(name), drafter_of(name, 3), BlockSampler()
        generator = SpeculativeGenerator(*parts, graphs=graphs)
        for _ in range(1 + graphs):  # over used storage as well
            result = generator.generate(IDS, MASK, check=graphs, max_new_tokens=24, **options)
            results.append((result.sequences.tolist(), result.stats.to_dict()))
    assert "replays" in generator.explain()
    assert all(result == results[0] for result in results)
    assert len(set(result.lengths)) > 1


def one_token_more(memory, *args, **kwargs):
    OPEN(memory, *args, **kwargs)
    memory.kept.add_(1)


@pytest.mark.parametrize("name", RECURRENT.values())
def test_a_state_that_is_ahead_is_rejected(name, monkeypatch):
    """The negative control of law 7: a model as its own drafter accepts all, but not ahead."""
    drafter = ModelDrafter(model_of(name), 3)
    generator = SpeculativeGenerator(model_of(name), drafter)
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": None}
    assert generator.generate(IDS, MASK, **options).stats.acceptance_rate == 1
    propose = drafter.propose

    def ahead(*args):
        with monkeypatch.context() as patch:
            patch.setattr(Memory, "open", one_token_more)
            return propose(*args)

    monkeypatch.setattr(drafter, "propose", ahead)
    assert generator.generate(IDS, MASK, **options).stats.acceptance_rate < 0.9
