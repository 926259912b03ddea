"""Faults at few tokens, which certificates of the zoo's pair find in 4 096 tokens or fewer."""

import pytest
import torch

from specdec import RejectionSampler, SpeculativeGenerator, certify, zoo
from specdec.samplers import LogitsFilter

pytestmark = pytest.mark.slow
PROMPT_TOKENS, ROWS = 10, 64
TOKENIZER, TARGET = zoo.load_tokenizer(), zoo.load_target()
PROMPTS = [TOKENIZER(text).input_ids[:PROMPT_TOKENS] for text in zoo.heldout_prompts(8)]


class Elsewhere(RejectionSampler):
    """The rule at another temperature at some places: of rows `[B, 1]` and new tokens `[B, N]`."""

    def __init__(self, where, temperature):
        super().__init__()
        self.where, self.temperature = where, temperature

    def accept(self, draft, target_logits, logits_filter, noise):
        rows, columns = (torch.arange(size) for size in target_logits.shape[:2])
        places = noise._start[:, None] + 1 + columns - PROMPT_TOKENS
        is_there = self.where(rows[:, None], places)[..., None]
        own = torch.where(is_there, target_logits / self.temperature, target_logits)
        return super().accept(draft, own, logits_filter, noise)


class Narrower(RejectionSampler):
    """The rule after a truncation that nobody asked for."""

    def accept(self, draft, target_logits, logits_filter, noise):
        return super().accept(
            draft, target_logits, LogitsFilter(logits_filter.batch_size, top_p=0.99), noise
        )


def first(rows, places):
    """The first token of each text."""
    return places == 0


def eighth(rows, places):
    """Every eighth row."""
    return (rows % 8 == 3).expand(places.shape)


def one_of_32(rows, places):
    """One row of 32."""
    return (rows == 5).expand(places.shape)


FIRST = "at the first token of each text"
FAULTS = {
    "first token at 0.5": (
        Elsewhere(first, 0.5),
        {"num_samples": 16, "max_new_tokens": 32},
        FIRST,
    ),
    "first token at 0.8, many short texts": (
        Elsewhere(first, 0.8),
        {"num_samples": 64, "max_new_tokens": 2},
        FIRST,
    ),
    "every eighth row at 0.8": (Elsewhere(eighth, 0.8), {}, "in row 3 modulo 8"),
    "one row of 32 at 0.5": (Elsewhere(one_of_32, 0.5), {"batch_size": 32}, "in row 5 modulo 64"),
    "top-p 0.99": (Narrower(), {}, "everywhere"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_at_few_tokens_is_found_and_its_place_is_named(name):
    rule, options, place = FAULTS[name]
    generator = SpeculativeGenerator(TARGET, zoo.load_drafter("model", TARGET), rule)
    options = {
        "num_samples": 8,
        "max_new_tokens": 64,
        "audit_tokens": 4,
        "batch_size": ROWS,
    } | options
    found = certify(generator, PROMPTS, **options).text
    assert found.num_tokens <= 4096
    assert not found.passed, found
    assert found.best_fit.place == place
    assert f"fits best: p {found.best_fit.alternative.what}, {place}, e-value" in str(found)
