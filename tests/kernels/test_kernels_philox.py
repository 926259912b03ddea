"""Philox in a kernel makes the bits of its definition: run by Triton's interpreter.

That the definition is Philox 4x32-10 is in `test_noise`.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux only")

import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import interpreted

from specdec.kernels.philox.reference import philox, step_uniforms, to_uniforms
from specdec.kernels.philox.triton import step_uniforms as made_in_a_kernel
from specdec.kernels.philox.triton import token_uniforms

pytestmark = interpreted


@triton.jit
def _write_uniforms(key, position, stream, out, block: tl.constexpr):
    row, chunk = tl.program_id(0), tl.program_id(1)
    ids = chunk * block + tl.arange(0, block)
    values = token_uniforms(key, row, tl.load(position + row), stream, chunk, block)
    tl.store(out + row * tl.num_programs(1) * block + ids, values)


def test_noise_made_in_a_kernel_is_that_of_philox_to_the_bit():
    key = torch.tensor([[0, 0], [7, 2**31], [2**32 - 1, 2**32 - 1]])
    position = torch.tensor([0, 2**31, 2**32 - 1])
    out = torch.empty(3, 32, dtype=torch.float64)
    _write_uniforms[(3, 2)](key, position, 3, out, block=16)
    counter = torch.zeros(3, 16, 4, dtype=torch.long)
    counter[..., 0], counter[..., 1], counter[..., 2] = position[:, None], torch.arange(16), 3
    words = philox(counter, key[:, None])
    assert torch.equal(out, to_uniforms(words[..., 0::2], words[..., 1::2]).flatten(1))


words = st.sampled_from([0, 1, 7, 2**31, 2**32 - 1])


@settings(max_examples=12)
@given(st.lists(st.tuples(words, words, words), max_size=3), st.integers(1, 4), st.integers(0, 9))
def test_the_uniforms_of_a_step_are_those_of_the_definition_to_the_bit(rows, num_streams, width):
    table = torch.tensor(rows, dtype=torch.long).view(-1, 3)
    key, position = table[:, :2], table[:, 2]  # neither is contiguous
    expected = step_uniforms(key, position, num_streams, width)
    found = made_in_a_kernel(key, position, num_streams, width)
    assert found.dtype == torch.float64
    assert torch.equal(found, expected)
