"""The yardstick of the self-test is the data type: how far a state of a model moves when its input
is rounded once more. What differs by more, in all texts, is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

NOISE_FACTOR, FINE_NOISE_FACTOR = 8.0, 32.0
"""A state may differ by so many times its rounding, in half precision and in float32. Of 45
architectures none differed by more than 1.0 and 3.8 times; MPT, with biases of 2 000 keys, 17."""
MOST_ROUNDING = 64.0, 512.0
"""A layer enlarges one rounding of its input by so much at most, and all layers of a model one of
each of their inputs. Seen were 10 in attention layers, 53 in recurrent ones, 146 in all layers.
What moves by more does not move by rounding."""
STEPS_FACTOR = 100.0
"""HF's steps through recurrent layers sum exponents in another order than its forwards of a whole
text; up to 15 times the rounding of their inputs was seen."""


def unit_of(state: Tensor) -> float:
    """One rounding to the data type of its products, in parts of a state."""
    rounds_products = state.is_cuda and torch.backends.cuda.matmul.allow_tf32
    # HF computes softmax and rotary angles in float32 even where a model is in float64.
    unit = max(torch.finfo(dtype).eps for dtype in (state.dtype, torch.float32))
    return max(unit, 2.0**-10 if rounds_products else 0.0)


def distance(ours: Tensor, theirs: Tensor) -> Tensor:
    """`[2, N]`, how far states `[2, N, ...]` are from others, in rms over channels."""
    wide = torch.promote_types(ours.dtype, torch.float32)
    ours, theirs = ours.to(wide), theirs.to(ours.device, wide)
    error = torch.where(ours == theirs, 0.0, ours - theirs)  # of two infinities, too
    return error.flatten(2).square().mean(dim=-1).sqrt().float()


class Difference(NamedTuple):
    """Of a state of some tokens, `[B, N]` each (of a window two rows): how far it is from the plain
    run's, in rms over channels, and how far it may be.
    """

    found: Tensor
    allowed: Tensor

    @property
    def excess(self) -> Tensor:
        """Above 1 where it cannot be rounding, as NaN cannot."""
        ratio = self.found / self.allowed
        return torch.where(self.found == 0, 0.0, ratio.nan_to_num(torch.inf)).cpu()


Differences = Mapping[str, Difference]


class Judge:
    """Says what is different in all texts so far, at the same place of the same window.

    Where there are experts, one token of one text may get another one by rounding. What is wrong,
    or depends on the place in a call, differs in every text.
    """

    def __init__(self):
        self._least: dict[tuple[int, str], Tensor] = {}

    def __call__(self, windows: Iterator[Differences]) -> str | None:
        """The complaint with the windows of another text."""
        complaint = None
        for index, differences in enumerate(windows):
            for name, difference in differences.items():
                excess = difference.excess
                excess = torch.minimum(excess, self._least.get((index, name), excess))
                self._least[index, name] = excess
                if complaint is None and bool((excess > 1).any()):
                    place = divmod(int(excess.argmax()), excess.shape[1])
                    found, allowed = (float(x[place]) for x in difference)
                    complaint = f"{name} by {found:.3g} in rms, where rounding is {allowed:.3g}"
        return complaint

    def of_anything(self, window: Callable[[], Differences]) -> str | None:
        """The same of one window; whatever a foreign model raises is a complaint, too."""
        try:
            return self(iter([window()]))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
