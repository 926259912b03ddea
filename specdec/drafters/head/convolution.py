"""Convolutions of DFlash 2 around the two halves of a layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.drafters.head.layer_config import Convolution


class BlockConvolution(nn.Module):
    """Two causal convolutions over the rows of a block: of the input of a half of a layer, and of
    its output. Their kernels are a fixed part and one that is made from the input of each row; rows
    before the block count as zeros.

    Reference: Z Lab, DFlash 2; speculators 0.9.0, `models/dflash2/model_definitions.py`.
    """

    def __init__(self, width: int, sizes: Convolution):
        super().__init__()
        self.group, self.taps = sizes.group, sizes.taps
        self.base_kernel = nn.Parameter(torch.zeros(2, sizes.taps, width))
        self.base_kernel.data[:, 0] = 1
        kernels = 2 * sizes.taps * (width // sizes.group)
        self.kernel_projection = nn.Linear(width, kernels, bias=False)

    def forward(self, x: Tensor, half: Callable[[Tensor], Tensor]) -> Tensor:
        """`[B, M, H]` to `[B, M, H]`, around a half of a layer."""
        own = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        own = own.repeat_interleave(self.group, dim=-1)  # [B, M, 2, taps, H]
        before, after = (own + self.base_kernel.to(own.dtype)).unbind(dim=2)
        return self._convolve(half(self._convolve(x, before)), after)

    def _convolve(self, x: Tensor, kernel: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, self.taps - 1, 0))
        count, out = x.shape[1], 0
        for tap in range(self.taps):  # tap t reads the row t earlier
            out = out + padded.narrow(1, self.taps - 1 - tap, count) * kernel[:, :, tap]
        return out
