"""Law 4, coupling: with `CouplingSampler` the text is that of plain decoding with the same seeds,
token for token, for every drafter and every K; drafts only decide how fast it comes.

Float32 on a CPU; rows of unequal length, with their own settings, one of them greedy.
"""

import pytest
import scipy.stats
import torch
from architectures import VOCAB
from drafter_table import MODEL, make
from drafting import ConstantDrafter, WrongDrafter, perturbed, ragged_prompts

from specdec import (
    CouplingSampler,
    ModelDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculativeGenerator,
)
from specdec.kernels.race.reference import exponentials
from specdec.types import Draft

IDS, MASK = ragged_prompts(VOCAB, 3, 9, 1, 6, 9)
NUM_NEW = 14
SETTINGS = {
    "temperature": [0.7, 1.0, 0.0, 1.3, 0.9],
    "top_k": [0, 5, 3, 0, 40],
    "top_p": [1.0, 0.9, 0.5, 0.8, 1.0],
    "min_p": [0.0, 0.0, 0.1, 0.05, 0.02],
    "seed": [11, 2**64 - 1, 7, 0, 11],
}
GREEDY_ROW = 2


class WrongAndRagged(ModelDrafter):
    """Tokens that are not what the drafter drew, so that acceptance is rare."""

    def propose(self, context, state, drawing) -> Draft:
        """The next id, with fewer tokens in some rows."""
        draft = super().propose(context, state, drawing)
        num_valid = context.start % (drawing.num_draft_tokens + 1)
        return Draft((draft.tokens + 1) % VOCAB, None, num_valid)


DRAFTERS = {
    "itself": lambda k: ModelDrafter(MODEL, k),
    "itself, argmax": lambda k: ModelDrafter(MODEL, k, proposal="argmax"),
    "itself, hotter": lambda k: ModelDrafter(MODEL, k, draft_temperature=1.5),
    "perturbed": lambda k: ModelDrafter(perturbed(MODEL), k),
    "perturbed, argmax": lambda k: ModelDrafter(perturbed(MODEL), k, proposal="argmax"),
    "lookup": lambda k: PromptLookupDrafter(k),
    "lookup or eagle3": lambda k: make("lookup or eagle3", k),
    "wrong": lambda k: WrongDrafter(MODEL, k),
    "wrong and ragged": lambda k: WrongAndRagged(MODEL, k),
    "constant": lambda k: ConstantDrafter(5, k),
}


def generate(drafter, sampler=None, **settings):
    generator = SpeculativeGenerator(MODEL, drafter, sampler or CouplingSampler())
    settings = SETTINGS | settings
    return generator.generate(IDS, MASK, max_new_tokens=NUM_NEW, do_sample=True, **settings)


@pytest.fixture(scope="module", name="plain")
def _plain():
    return generate(None)


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("name", "num_draft_tokens"),
    [*((name, 3) for name in DRAFTERS), *(("perturbed", k) for k in (1, 8))],
)
def test_the_text_is_that_of_plain_decoding(name, num_draft_tokens, plain):
    result = generate(DRAFTERS[name](num_draft_tokens))
    assert torch.equal(result.sequences, plain.sequences)
    if name == "itself":  # the same law at the same position has the same winner
        assert result.stats.acceptance_rate == 1.0
    if name == "wrong":
        assert result.stats.acceptance_rate < 0.3
    if name == "perturbed":  # hiding the draft probabilities changes nothing
        hidden = generate(DRAFTERS[name](num_draft_tokens), draft_probs=False)
        assert torch.equal(hidden.sequences, plain.sequences)


def test_a_sampler_with_other_noise_writes_another_text(plain):
    result = generate(DRAFTERS["perturbed"](4), RejectionSampler())
    assert not torch.equal(result.sequences, plain.sequences)
    assert torch.equal(result.sequences[GREEDY_ROW], plain.sequences[GREEDY_ROW])


def test_another_seed_writes_another_text_except_in_the_greedy_row(plain):
    result = generate(DRAFTERS["perturbed"](4), seed=[1, 2, 3, 4, 5])
    same = (result.sequences == plain.sequences).all(dim=1)
    assert same.tolist() == [row == GREEDY_ROW for row in range(5)]


def test_the_exponentials_of_a_race_are_exponential_and_differ_everywhere():
    """Kolmogorov-Smirnov, false-alarm rate 1e-9; draws that are too long by a fifth fail."""
    key = torch.tensor([[3, 0], [4, 0]])
    position = torch.arange(40).expand(2, -1)
    draws = exponentials(key, position, 3, 61)
    assert draws.shape == (2, 40, 61)
    assert len(draws.flatten().unique()) == draws.numel()
    assert scipy.stats.kstest(draws.flatten().numpy(), "expon").pvalue > 1e-9
    assert scipy.stats.kstest(1.2 * draws.flatten().numpy(), "expon").pvalue < 1e-9
    again = exponentials(key[1:], position[1:, 7:9], 3, 61)
    assert torch.equal(again[0], draws[1, 7:9])  # a draw belongs to its position
