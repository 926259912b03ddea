"""Traces on a GPU: the same text as captured steps, times from events: `pytest -m gpu`."""

import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts

from examples.replay import every_position, replay
from specdec import BlockSampler, ModelDrafter, RejectionSampler, SpeculativeGenerator
from specdec.lab.evaluation import measure_costs

pytestmark = pytest.mark.gpu
SEEDS = list(range(8))


@pytest.fixture(scope="module", name="generator")
def _generator():
    target = build("llama").to("cuda")
    draft = perturbed(target)
    return SpeculativeGenerator(target, ModelDrafter(draft, 3), RejectionSampler())


@pytest.fixture(scope="module", name="text")
def _text():
    ids, mask = ragged_prompts(VOCAB, 3, 7, 5, 4, 6, 2, 8, 3)
    return ids.to("cuda"), mask.to("cuda")


def test_a_traced_call_writes_the_text_of_a_captured_one_and_takes_times(generator, text):
    options = {"max_new_tokens": 40, "do_sample": True, "seed": SEEDS, "temperature": 0.8}
    captured = [generator.generate(*text, **options) for _ in range(2)][-1]
    traced = generator.generate(*text, trace=True, **options)
    assert traced.sequences.equal(captured.sequences)
    assert "a trace takes the time of every part" in generator.explain()
    assert len(traced.trace.times) == max(traced.stats.steps)
    for taken in traced.trace.times:
        assert min(taken.draft_ms, taken.verify_ms, taken.sample_ms) > 0
        assert taken.host_ms >= 0
    for row, numbers in zip(traced.trace, traced.trace.numbers, strict=True):
        for step, their in zip(row, numbers, strict=True):
            decisions = zip(their.accept_draws, their.draft_probs, their.target_probs, strict=True)
            kept = [u * q < p for u, q, p in decisions]
            assert [*kept, False].index(False) == step.num_accepted


def test_a_replay_on_a_gpu(generator, text):
    options = {"max_new_tokens": 40, "do_sample": True, "seed": SEEDS}
    whole = every_position(generator, generator.generate(*text, trace=True, **options).trace)
    found = replay(whole, num_draft_tokens=2, sampler=BlockSampler())
    assert 1 < found.acceptance_length.value < 3
    costs = measure_costs(generator, *text, num_steps=8, rounds=3)
    assert found.speedup(costs).value > 0
    assert torch.cuda.is_available()
