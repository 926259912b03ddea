"""Philox: random bits as a function of counter and key, without state. See README.md."""

from functools import wraps

from torch import Tensor

from specdec.kernels.philox import reference


@wraps(reference.step_uniforms)
def step_uniforms(key: Tensor, position: Tensor, num_streams: int, width: int) -> Tensor:
    """`reference.step_uniforms`, or its Triton kernels on a GPU."""
    if not position.is_cuda:
        return reference.step_uniforms(key, position, num_streams, width)
    from specdec.kernels.philox import triton

    return triton.step_uniforms(key, position, num_streams, width)
