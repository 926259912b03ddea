"""What the operations ask before they choose between Triton kernels and definition.

Each asks `tensor.is_cuda` first, so that on a CPU no call is made for the answer. Triton is
imported by the first call on a GPU: machines without one do not need it.
"""

import torch
from torch import Tensor


def suits_kernels(tensor: Tensor) -> bool:
    """On a GPU, float64, as oracles have, and tensors with gradients use the definition."""
    return tensor.dtype != torch.float64 and not tensor.requires_grad
