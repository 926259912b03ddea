"""`copy_from_host`: many small tensors of the host into tensors of a device, by one transfer."""

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 8
"""Bytes at whose multiples every tensor of a transfer begins."""


def copy_from_host(into: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Copies each tensor into the one in its place, of the same shape and data type.

    A copy from ordinary memory makes the host wait until the device has done all that it was given
    before. Here one copy from pinned memory brings them all, and nobody waits for it: torch's
    allocator gives the pinned memory to nobody else before the device has read it.

    Args:
        into: tensors of one device.
        source: their new values, all of one device; those of a host are sent together.

    Example:
        >>> lengths, temperature = torch.zeros(2, dtype=torch.long), torch.zeros(2)
        >>> copy_from_host([lengths, temperature], [torch.tensor([3, 4]), torch.tensor([0.5, 1.0])])
        >>> lengths, temperature
        (tensor([3, 4]), tensor([0.5000, 1.0000]))
    """
    if into[0].is_cuda and not any(tensor.is_cuda for tensor in source):
        source = sent(source, into[0].device)
    for mine, theirs in zip(into, source, strict=True):
        mine.copy_(theirs)


def sent(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of the host on a device, where they share one buffer."""
    sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors]

    def parts(buffer: Tensor) -> list[Tensor]:
        pairs = zip(buffer.split(sizes), tensors, strict=True)
        return [part[: t.nbytes].view(t.dtype).view(t.shape) for part, t in pairs]

    buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, tensor in zip(parts(buffer), tensors, strict=True):
        part.copy_(tensor)
    return parts(buffer.to(device, non_blocking=True))
