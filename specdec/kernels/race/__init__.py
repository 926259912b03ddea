"""Race: a draw by an exponential race, with noise of the position in the text. See README.md."""

from functools import wraps

from torch import Tensor

from specdec.kernels.choice import suits_kernels
from specdec.kernels.race import reference
from specdec.kernels.race.reference import race_weights
from specdec.kernels.truncate.reference import WarpParams

__all__ = ["race", "race_weights"]


@wraps(reference.race)
def race(logits: Tensor, params: WarpParams, key: Tensor, position: Tensor, stream: int) -> Tensor:
    """`reference.race`, or its Triton kernels on a GPU."""
    if not (logits.is_cuda and suits_kernels(logits)):
        return reference.race(logits, params, key, position, stream)
    from specdec.kernels.race import triton

    return triton.race(logits, params, key, position, stream)
