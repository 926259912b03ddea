"""What the loop finds wrong with a verdict and its inputs."""

import torch
from torch import Tensor

from specdec.loop.outcome import Outcome, find_faults
from specdec.loop.step import numbers_to_check
from specdec.types import Draft, Verdict


def faults_of(draft: Draft, logits: Tensor, verdict: Verdict) -> list[int]:
    """Of each row, a sum of `Fault` values, as a step's host finds them."""
    none, vocab_size = torch.zeros_like(verdict.num_accepted), logits.shape[-1]
    checked = numbers_to_check(draft, logits)
    outcome = Outcome(draft, verdict, logits, none, none > 0, vocab_size, checked)
    return find_faults(outcome.fetch().columns, vocab_size).tolist()
