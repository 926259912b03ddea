"""Philox inside a kernel: the bits of `philox.reference`, made in registers where they are used."""

import torch
import triton
import triton.language as tl
from torch import Tensor


def step_uniforms(key: Tensor, position: Tensor, num_streams: int, width: int) -> Tensor:
    """As the definition, in one launch."""
    rows, count = len(position), num_streams * width
    out = torch.empty(rows, num_streams, width, dtype=torch.float64, device=position.device)
    if out.numel():
        block = triton.next_power_of_2(count)
        with torch.cuda.device_of(position):
            _step_kernel[(rows,)](key.contiguous(), position.contiguous(), out, count, width, block)
    return out


@triton.jit
def _step_kernel(key, position, out, count, width, block: tl.constexpr):
    row, entry = tl.program_id(0), tl.arange(0, block)
    seed = tl.load(key + 2 * row) | (tl.load(key + 2 * row + 1) << 32)
    index, stream = (entry % width).to(tl.uint32), (entry // width).to(tl.uint32)
    zero = index * 0
    words = tl.philox(seed, zero + tl.load(position + row).to(tl.uint32), index, stream, zero)
    tl.store(out + row * count + entry, to_uniforms(words[0], words[1]), entry < count)


@triton.jit
def to_uniforms(high, low):
    """float64 in [0, 1) from two 32-bit words each, of which 52 bits are used."""
    bits = (high.to(tl.uint64) << 20) | (low >> 12).to(tl.uint64)
    return bits.to(tl.float64) * 2.220446049250313e-16  # 2**-52


@triton.jit
def token_uniforms(key, row, position, stream, chunk, block: tl.constexpr):
    """`[block]` float64 uniforms of the tokens from `chunk * block` on, where `block` is even. The
    counter is (position, token // 2, stream, 0), whose four words serve two tokens.
    """
    seed = tl.load(key + 2 * row) | (tl.load(key + 2 * row + 1) << 32)
    pair = (chunk * (block // 2) + tl.arange(0, block // 2)).to(tl.uint32)
    zero = pair * 0
    words = tl.philox(seed, zero + position.to(tl.uint32), pair, zero + stream, zero)
    even, odd = to_uniforms(words[0], words[1]), to_uniforms(words[2], words[3])
    return tl.interleave(even, odd)
