"""Sample: a token from logits, by inverting the cumulative distribution. See README.md."""

from functools import wraps

import torch
from torch import Tensor

from specdec.kernels.choice import suits_kernels
from specdec.kernels.sample import reference
from specdec.kernels.truncate.reference import WarpParams


@wraps(reference.sample)
def sample(
    logits: Tensor, params: WarpParams, uniforms: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`reference.sample`, or its Triton kernels on a GPU."""
    if not (logits.is_cuda and suits_kernels(logits)):
        return reference.sample(logits, params, uniforms, out)
    from specdec.kernels.sample import triton

    if out is None:
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    return triton.sample(logits, params, uniforms, out), out


def sample_tokens(logits: Tensor, params: WarpParams, uniforms: Tensor) -> Tensor:
    """The tokens of `sample`; on a GPU no probabilities are written."""
    if not (logits.is_cuda and suits_kernels(logits)):
        return reference.sample(logits, params, uniforms)[0]
    from specdec.kernels.sample import triton

    return triton.sample(logits, params, uniforms, None)
