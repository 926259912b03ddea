"""Tensors of a host arrive in a device's tensors as they are, whatever stands beside them."""

import pytest
import torch

from specdec.graphs.sending import sent
from specdec.graphs.tree import copy_from_host

KINDS = torch.bool, torch.int64, torch.float64, torch.float32, torch.bfloat16, torch.uint8


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3,), (5, 7)])
def test_what_is_sent_together_arrives_bit_by_bit(shape):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-128, 128, (*shape, 8), dtype=torch.int8, generator=generator)
    tensors = [
        bits[..., 0] > 0 if kind is torch.bool else bits.view(kind)[..., 0] for kind in KINDS
    ]
    tensors += [t.expand(2, *t.shape).transpose(0, -1) for t in tensors]  # not contiguous
    arrived = sent(tensors, torch.device("cpu"))
    for before, after in zip(tensors, arrived, strict=True):
        assert (before.dtype, before.shape) == (after.dtype, after.shape)
        tables = (t.clone(memory_format=torch.contiguous_format) for t in (before, after))
        assert torch.equal(*(t.view(-1).view(torch.uint8) for t in tables))  # of NaN, too


def test_copies_are_made_in_place():
    into = [torch.zeros(2, dtype=torch.long), torch.zeros(3)]
    places = [tensor.data_ptr() for tensor in into]
    copy_from_host(into, [torch.tensor([1, 2]), torch.tensor([0.5, 1.0, 1.5])])
    assert [t.tolist() for t in into] == [[1, 2], [0.5, 1.0, 1.5]]
    assert [tensor.data_ptr() for tensor in into] == places
