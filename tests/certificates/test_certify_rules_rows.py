"""`certify(rule)` finds rules that look at the place of a row in its batch, that keep something
between calls, or that drop rare tokens; and does not accuse those that do not.
"""

import pytest
import torch

from specdec import BlockSampler, CouplingSampler, RejectionSampler, Sampler, certify
from specdec.kernels import draw
from specdec.samplers import Stream
from specdec.types import Verdict

FEW = ((3, 1, 4), (2, 2, 4))


class Sharpened(RejectionSampler):
    """The logits of some rows are sharpened."""

    def accept(self, draft, target_logits, logits_filter, noise):
        return super().accept(draft, self.changed(target_logits), logits_filter, noise)


class OneRow(Sharpened):
    def changed(self, logits):
        logits = logits.clone()
        logits[3:4] *= 1.3
        return logits


class Alone(Sharpened):
    def changed(self, logits):
        return logits * 1.3 if len(logits) == 1 else logits


class Beside(Sharpened):
    """By what the next row has."""

    def changed(self, logits):
        return logits + 0.3 * logits.softmax(dim=-1).roll(1, 0)


class Frozen(Sampler):
    """Draws every extra token by the numbers of the first call."""

    lossless = True
    numbers = None

    def accept(self, draft, target_logits, logits_filter, noise):
        numbers = noise.uniform(Stream.RESAMPLE)[:, 0]
        if self.numbers is None or len(self.numbers) != len(numbers):
            self.numbers = numbers.clone()
        tokens = draw(logits_filter(target_logits[:, :1])[:, 0], self.numbers)[:, None]
        accepted = torch.zeros(len(tokens), dtype=torch.long)
        width = draft.tokens.shape[1]
        return Verdict(
            torch.nn.functional.pad(tokens, (0, width), value=-1), accepted, draft.num_valid
        )


@pytest.mark.parametrize("rule", [OneRow, Alone, Beside, Frozen])
def test_a_rule_that_looks_beside_its_row_fails(rule):
    report = certify(rule(), sizes=FEW, num_draws=64)
    assert "rows" in {failure.kind for failure in report.failures}
    assert "a row is not decided on by what it has alone" in str(report)


class OwnNumbers(RejectionSampler):
    """Sound, with numbers besides those of its noise."""

    def accept(self, draft, target_logits, logits_filter, noise):
        tokens = torch.multinomial(logits_filter(target_logits[:, :1])[:, 0], 1)
        accepted = torch.zeros(len(tokens), dtype=torch.long)
        width = draft.tokens.shape[1]
        return Verdict(
            torch.nn.functional.pad(tokens, (0, width), value=-1), accepted, draft.num_valid
        )


@pytest.mark.parametrize("rule", [BlockSampler, RejectionSampler, CouplingSampler, OwnNumbers])
def test_a_sound_one_does_not(rule):
    torch.manual_seed(0)
    report = certify(rule(), sizes=FEW, num_draws=64)
    assert report.passed
    assert ("tokens down to" in " ".join(str(report).split())) == report.is_exact


class Drops(RejectionSampler):
    """Tokens below some probability."""

    def __init__(self, least):
        super().__init__()
        self.least = least

    def accept(self, draft, target_logits, logits_filter, noise):
        rare = target_logits.softmax(dim=-1) < self.least
        kept = target_logits.masked_fill(rare, -torch.inf)
        return super().accept(draft, kept, logits_filter, noise)


@pytest.mark.parametrize("least", [1e-2, 1e-4, 1e-8])
def test_a_rule_that_drops_rare_tokens_fails(least):
    report = certify(Drops(least), sizes=((3, 1, 18),))
    assert {failure.kind for failure in report.failures} == {"law"}
    assert least == 1e-2 or "soft drafts of rare tokens" in str(report)  # others show it, too
    assert report.deviation < least
