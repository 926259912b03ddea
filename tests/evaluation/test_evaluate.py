"""An evaluation is a generation: its numbers are the generation's own."""

import statistics

import pytest
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts

from specdec import ModelDrafter, SpeculativeGenerator
from specdec.lab.evaluation import evaluate

TARGET = build("llama")
GENERATOR = SpeculativeGenerator(TARGET, ModelDrafter(perturbed(TARGET), 3))
IDS, MASK = ragged_prompts(VOCAB, 3, 7, 5)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_is_what_generate_gives_greedily_or_with_seeds_0_1_2(temperature):
    done = evaluate(GENERATOR, IDS, MASK, max_new_tokens=20, temperature=temperature)
    sampling = {"do_sample": True, "temperature": temperature, "seed": [0, 1, 2]}
    options = {"neutral": True} | (sampling if temperature else {"do_sample": False})
    expected = GENERATOR.generate(IDS, MASK, max_new_tokens=20, trace=True, **options)
    texts = [row[:n] for row, n in zip(expected.new_tokens.tolist(), expected.lengths, strict=True)]
    assert [row.new_tokens for row in done.rows] == texts
    assert done.stats.to_dict() == expected.stats.to_dict()
    accepted = [step.num_accepted for row in expected.trace for step in row]
    assert done.stats.acceptance_length == pytest.approx(1 + statistics.mean(accepted))
    error = statistics.pstdev(accepted) / len(accepted) ** 0.5
    assert done.acceptance_error == pytest.approx(error)
    assert done.seconds > 0
