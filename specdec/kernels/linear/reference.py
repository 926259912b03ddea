"""Scaled linear: a linear layer over weights of one byte, for few tokens. See README.md.

Legend: M tokens, I inputs, O outputs.
"""

import torch.nn.functional as F
from torch import Tensor

MAX_ROWS = 64
"""Tokens of a launch."""


def scaled_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiplies tokens with weights of one byte.

    Args:
        x: `[..., I]`, floating point.
        weight: `[O, I]` int8 or float8.
        scale: `[O]`, what the weights of an output are multiplied by.
        bias: `[O]`.

    Returns:
        `[..., O]` of the data type of `x`.

    Example:
        >>> import torch
        >>> weight = torch.tensor([[1, 2], [-3, 4]], dtype=torch.int8)
        >>> scaled_linear(torch.ones(1, 2), weight, torch.tensor([0.5, 2.0]))
        tensor([[1.5000, 2.0000]])
    """
    if x.is_cuda and x.dtype.itemsize == 2 and x.numel() <= MAX_ROWS * x.shape[-1]:
        from specdec.kernels.linear import triton

        return triton.scaled_linear(x, weight, scale, bias)
    y = F.linear(x, weight.to(x.dtype)) * scale
    return (y if bias is None else y + bias).to(x.dtype)
