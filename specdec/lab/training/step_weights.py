"""How much each step of a draft weighs in its loss: fixed weights, D-PACE's and those of the
expected length.

Draft token m of a draft (its *step*) is of use only if those before it are accepted.

Legend: M steps; `...` the drafts: rows, and positions of a row where one starts.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.arguments import check_number
from specdec.lab.training.divergences import Loss, ce, tv


class StepWeights(ABC):
    """Weights of the steps of drafts, from what was measured at each. The loss is the sum over
    steps of the mean over drafts of weight times loss; weights have no gradient.
    """

    measure: Loss | None = None
    """What the weights depend on; `None`: nothing."""

    @abstractmethod
    def __call__(self, measured: Tensor) -> Tensor:
        """Weights `[M, ...]` of what was measured, `[M, ...]` without gradients; without a measure
        its shape alone is read.
        """

    def beside(self, loss: Loss) -> list[Loss]:
        """The losses that are computed for a loss of steps that weigh so: itself first, what the
        weights depend on last.
        """
        return [loss] if self.measure in (None, loss) else [loss, self.measure]


@dataclass(frozen=True)
class Decay(StepWeights):
    """A step weighs `rate` times the one before; all together 1.

    Example:
        >>> Decay(0.5)(torch.zeros(2, 1)).flatten()
        tensor([0.6667, 0.3333])
    """

    rate: float

    def __call__(self, measured: Tensor) -> Tensor:
        """As `StepWeights`."""
        powers = [self.rate**step for step in range(len(measured))]
        weights = measured.new_tensor(powers) / sum(powers)
        return weights.view(-1, *[1] * (measured.dim() - 1)).expand_as(measured)


@dataclass(frozen=True)
class DPace(StepWeights):
    """D-PACE: a step weighs what the draft is expected to gain from there on, by the probability q
    that the head gives to the target's likeliest token: `w_m = sum over j >= m of the product over
    i <= j of (1 - smoothing) q_i + smoothing`, over M.

    Args:
        smoothing: between the head's own confidence, 0, and none of it, 1.

    Example:
        >>> 2 * DPace(0.5)(-torch.tensor([[0.5], [0.2]]).log()).flatten()
        tensor([1.2000, 0.4500])

    Reference: Wu et al., arXiv:2605.18810, with the cross-entropy (`ce`) as its loss.
    """

    smoothing: float = 0.5
    measure = staticmethod(ce)

    def __post_init__(self):
        check_number("smoothing", self.smoothing, None, 1, above=0)

    def __call__(self, measured: Tensor) -> Tensor:
        """As `StepWeights`."""
        confidence = (1 - self.smoothing) * (-measured).exp() + self.smoothing
        return _sum_from_here(confidence.cumprod(dim=0)) / len(measured)


@dataclass(frozen=True)
class ExpectedLength(StepWeights):
    """Weights with which the loss `tv` has the gradient of minus the expected number of accepted
    draft tokens. Token i of a chain is accepted with probability `a_i = 1 - tv_i`, so that number
    is `E = sum over j of the product over i <= j of a_i`, and `w_m = dE / da_m`.

    Example:
        >>> ExpectedLength()(1 - torch.tensor([[0.5], [0.2]])).flatten()
        tensor([1.2000, 0.5000])

    Reference: Leviathan et al., arXiv:2211.17192, section 3.1, with a probability per token.
    """

    measure = staticmethod(tv)

    def __call__(self, measured: Tensor) -> Tensor:
        """As `StepWeights`."""
        accepted = 1 - measured
        # w_m = a_0 ... a_{m-1} (1 + a_{m+1} (1 + a_{m+2} (...))): no division by an a of 0.
        before = torch.cat([torch.ones_like(accepted[:1]), accepted[:-1]]).cumprod(dim=0)
        after, tail = [], torch.ones_like(accepted[0])
        for each in accepted.flip(0):
            after.append(tail)
            tail = 1 + each * tail
        return before * torch.stack(after).flip(0)


def _sum_from_here(values: Tensor) -> Tensor:
    """`[M, ...]`: the sum of a row and of those after it."""
    return values.flip(0).cumsum(dim=0).flip(0)


def weights_of(weights: float | StepWeights, name: str) -> StepWeights:
    """Weights themselves, or of a number the `Decay` by it."""
    return weights if isinstance(weights, StepWeights) else Decay(check_number(name, weights, 0))


def find_step_weights(text: str) -> StepWeights:
    """The weights of a text: a number, `dpace`, `dpace:0.5` or `length`.

    Raises:
        ValueError: any other text.

    Example:
        >>> find_step_weights("0.8"), find_step_weights("dpace:0.3"), find_step_weights("length")
        (Decay(rate=0.8), DPace(smoothing=0.3), ExpectedLength())
    """
    name, _, number = text.partition(":")
    try:
        if text == "length":
            return ExpectedLength()
        if name == "dpace":
            return DPace(float(number)) if number else DPace()
        if 0 <= (rate := float(text)) < math.inf:
            return Decay(rate)
    except ValueError:
        pass
    raise ValueError(
        "weights of steps must be a number from 0 on (of a step, as a multiple of the one before), "
        f"dpace, dpace:0.5 (a smoothing in 0..1) or length, got {text!r}"
    )
