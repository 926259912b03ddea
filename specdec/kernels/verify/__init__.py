"""Verify: which draft tokens are accepted, and the token after them. See README.md."""

from functools import wraps

from torch import Tensor

from specdec.kernels.choice import suits_kernels
from specdec.kernels.truncate.reference import WarpParams
from specdec.kernels.verify import reference
from specdec.kernels.verify.reference import VerifyUniforms
from specdec.types import Draft, Verdict


@wraps(reference.verify)
def verify(
    draft: Draft, logits: Tensor, params: WarpParams, uniforms: VerifyUniforms, *, by_block: bool
) -> Verdict:
    """`reference.verify`, or its Triton kernels on a GPU."""
    if not (logits.is_cuda and suits_kernels(logits)):
        return reference.verify(draft, logits, params, uniforms, by_block=by_block)
    from specdec.kernels.verify import triton

    return triton.verify(draft, logits, params, uniforms, by_block=by_block)
