"""Tensors of the host that are sent to a device together."""

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 8
"""Bytes at whose multiples every tensor of a transfer begins."""


def sent(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the host on a device, where they share one buffer."""
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]

    def parts(buffer: Tensor) -> list[Tensor]:
        pairs = zip(buffer.split(sizes), tensors, strict=True)
        return [part[: t.nbytes].view(t.dtype).view(t.shape) for part, t in pairs]

    buffer = torch.empty(
        sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda", device="cpu"
    )
    for part, tensor in zip(parts(buffer), tensors, strict=True):
        part.copy_(tensor)
    return parts(buffer.to(device, non_blocking=True))
