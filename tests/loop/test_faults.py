"""What is wrong with the inputs of a verdict, entry by entry in plain Python."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from step_faults import faults_of

from specdec.kernels.verify.verdict import verify_points
from specdec.loop.outcome import Fault
from specdec.types import Draft, Verdict


def sound_draft(rows=3, width=2, vocab=5, *, num_valid=None):
    tokens = torch.arange(rows * width).view(rows, width) % vocab
    return Draft(tokens, torch.full((rows, width, vocab), 1 / vocab), num_valid)


def changed(draft, *entries):
    """With other probabilities of row 1, index 1, whose draft token is 3; `(token, value)` each."""
    probs = draft.probs.clone()
    for token, value in entries:
        probs[1, 1, token] = value
    return replace(draft, probs=probs)


def faults_of_draft(draft, num_drafted=None):
    """Where the logits are sound and nothing is accepted."""
    rows, width, vocab = draft.probs.shape
    tokens = torch.zeros(rows, width + 1, dtype=torch.long)
    verdict = Verdict(tokens, tokens[:, 0], num_drafted)
    return faults_of(draft, torch.zeros(rows, width + 1, vocab), verdict)


CHANGES = {
    "a negative entry": ([(0, -0.3), (1, 0.7)], Fault.DRAFT_PROBS),
    "a tiny negative entry": ([(0, -1e-30), (1, 0.4)], Fault.DRAFT_PROBS),
    "a sum of 1.01": ([(0, 0.21)], Fault.DRAFT_PROBS),
    "a sum of 0.99": ([(0, 0.19)], Fault.DRAFT_PROBS),
    "NaN": ([(0, torch.nan)], Fault.DRAFT_PROBS),
    "infinity": ([(0, torch.inf)], Fault.DRAFT_PROBS),
    "a token of probability 0": ([(3, 0.0), (0, 0.4)], Fault.DRAFT_TOKEN),
    "a token of probability NaN": ([(3, torch.nan)], Fault.DRAFT_PROBS | Fault.DRAFT_TOKEN),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("num_valid", [None, 2, 1, 0])
def test_draft_probabilities_that_cannot_be_right_are_found_where_they_are_valid(change, num_valid):
    draft = sound_draft(num_valid=None if num_valid is None else torch.full((3,), num_valid))
    assert faults_of_draft(draft) == [0, 0, 0]
    entries, fault = CHANGES[change]
    expected = fault if num_valid in (None, 2) else 0
    assert faults_of_draft(changed(draft, *entries)) == [0, expected, 0]


def test_probabilities_matter_of_tokens_that_were_up_for_decision():
    draft = changed(sound_draft(), (0, -0.3), (1, 0.7))
    for count, fault in ((2, Fault.DRAFT_PROBS), (1, 0), (0, 0)):
        assert faults_of_draft(draft, torch.full((3,), count)) == [0, fault, 0]


def test_rounding_of_a_sum_is_no_fault():
    draft = sound_draft()
    draft.probs.mul_(1 + 5e-4)
    assert faults_of_draft(draft) == [0, 0, 0]


@given(st.integers(1, 4), st.integers(0, 4), st.booleans(), st.integers(0, 2**32 - 1))
def test_target_logits_matter_up_to_the_extra_token(rows, width, is_ragged, seed):
    generator = torch.Generator().manual_seed(seed)
    drafted = torch.randint(0, 2, (rows, width), generator=generator)
    drawn = torch.randint(0, 2, (rows, width + 1), generator=generator)
    num_valid = torch.randint(0, width + 1, (rows,), generator=generator) if is_ragged else None
    kinds = torch.randint(0, 6, (rows, width + 1), generator=generator)
    largest = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1.0, -2.0])[kinds]
    draft, logits = Draft(drafted, None, num_valid), largest[..., None].expand(-1, -1, 2)
    verdict = verify_points(draft, drawn)
    faults = faults_of(draft, logits, verdict)
    for row, count in enumerate(verdict.num_accepted.tolist()):
        limit = width if num_valid is None else int(num_valid[row])
        expected = 0
        while expected < limit and drafted[row, expected] == drawn[row, expected]:
            expected += 1
        assert count == expected
        is_sound = all(map(math.isfinite, largest[row, : count + 1].tolist()))
        assert faults[row] == (0 if is_sound else Fault.TARGET_LOGITS)
