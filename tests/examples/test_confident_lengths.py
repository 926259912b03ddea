"""Drafts that end by their own confidence keep the target's distribution, and what is learned of
acceptance is a logistic regression's gradient.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from architectures import VOCAB
from drafter_table import MODEL, make
from drafting import perturbed, ragged_prompts
from text_laws import ALPHA, TARGET, p_values_of_texts, sample, tiny

from examples.confident_lengths import BIAS, SLOPE, Confidence, ConfidentDrafter
from specdec import Draft, ModelDrafter, SpeculativeGenerator, Verdict, Verified
from specdec.types import TargetOutput

ROOT = Path(__file__).parents[2]
IDS, MASK = ragged_prompts(VOCAB, 5, 1, 9)


@pytest.mark.parametrize("sampler", ["auto", "rejection"])
def test_texts_have_the_targets_distribution(sampler):
    drafter = ConfidentDrafter(ModelDrafter(perturbed(tiny(TARGET)), 2), 0.2)
    result = sample(drafter, sampler, "plain", 2500)
    lengths = {len(step.draft_tokens) for row in result.steps for step in row}
    assert len(lengths) > 1
    assert min(p_values_of_texts(result, "plain").values()) > ALPHA


@pytest.mark.parametrize("name", ["model", "eagle3", "p-eagle"])
def test_greedy_text_is_the_targets_and_a_captured_step_is_the_eager_one(name):
    options = {"max_new_tokens": 16, "eos_token_id": None}
    plain = SpeculativeGenerator(MODEL, None).generate(IDS, MASK, **options)
    generator = SpeculativeGenerator(MODEL, ConfidentDrafter(make(name), 0.2), graphs=True)
    result = generator.generate(IDS, MASK, check=True, **options)
    assert result.sequences.equal(plain.sequences)


def test_a_step_of_learning_is_that_of_the_logistic_loss():
    drafter, log_odds = ConfidentDrafter(make("model", 3), 0.5, rate=0.1), torch.randn(2, 3)
    state = Confidence(None, torch.zeros(2, 2), log_odds)
    draft = Draft(torch.tensor([[1, 2, 3], [1, 2, 3]]), num_valid=torch.tensor([3, 1]))
    verdict = Verdict(torch.tensor([[1, 9, -1, -1], [1, 9, -1, -1]]), torch.tensor([1, 1]))
    output = TargetOutput(torch.zeros(2, 4, VOCAB))
    ends = torch.tensor([2, 2]), torch.tensor([5, 5])
    drafter.learn(Verified(draft, output, verdict, *ends), state)
    weights = torch.tensor([[SLOPE, BIAS]] * 2, requires_grad=True)
    logits = weights[:, :1] * log_odds + weights[:, 1:]
    loss = torch.nn.functional.softplus(-logits[:, 0]).sum()  # both accepted the first one
    loss = loss + torch.nn.functional.softplus(logits[0, 1])  # one rejected the second one
    loss.backward()
    torch.testing.assert_close(state.learned, -0.1 * weights.grad)


@pytest.mark.slow
def test_the_table_of_the_page_is_one_command():
    options = ["--drafters", "eagle3", "--temperatures", "0", "--prompts", "1", "--longest", "3"]
    command = [sys.executable, "examples/confident_lengths.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| eagle3 | 0 | estimator, 0.1 |" in done.stdout
