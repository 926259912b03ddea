"""`scaled_linear` on a GPU: every weight is read once, as the byte it is.

Legend: M tokens, I inputs, O outputs, S shares of the inputs.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

OUTPUTS, INPUTS, SUMS = 64, 128, 512
"""Of a tile of weights; results that a program of `_sum_kernel` adds."""


class Layer(NamedTuple):
    """Of the kernels; `bias` may be None."""

    weight: Tensor  # [O, I]
    scale: Tensor  # [O]
    bias: Tensor | None  # [O]
    num_outputs: int
    num_inputs: int


def scaled_linear(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """As the definition, with sums in float32; at most 64 tokens are one tile."""
    x, shape = x.reshape(-1, x.shape[-1]).contiguous(), x.shape[:-1]
    count, (num_outputs, num_inputs) = len(x), weight.shape
    y = torch.empty(*shape, num_outputs, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    layer = Layer(weight.contiguous(), scale.contiguous(), bias, num_outputs, num_inputs)
    shares = max(1, min(4, 2**16 // num_outputs))
    rows = min(64, max(16, triton.next_power_of_2(count)))
    grid = triton.cdiv(num_outputs, OUTPUTS), triton.cdiv(count, rows), shares
    sums = y
    if shares > 1:
        sums = torch.empty(shares, count, num_outputs, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        tile = {"rows": rows, "outputs": OUTPUTS, "inputs": INPUTS, "shares": shares}
        _product_kernel[grid](x, layer, sums, count, **tile, num_warps=4, num_stages=4)
        if shares > 1:
            chunks = triton.cdiv(y.numel(), SUMS)
            _sum_kernel[(chunks,)](sums, layer, y, y.numel(), shares=shares, block=SUMS)
    return y


@triton.jit
def _finish(sums, layer, output, is_output):
    """What a layer makes of sums, at these outputs."""
    sums *= tl.load(layer.scale + output, is_output, 0.0).to(tl.float32)
    if layer.bias is not None:
        sums += tl.load(layer.bias + output, is_output, 0.0).to(tl.float32)
    return sums


@triton.jit
def _product_kernel(
    x,
    layer,
    y,
    count,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    inputs: tl.constexpr,
    shares: tl.constexpr,
):
    output = tl.program_id(0) * outputs + tl.arange(0, outputs)
    row, share = tl.program_id(1) * rows + tl.arange(0, rows), tl.program_id(2)
    is_output, is_row = output < layer.num_outputs, row < count
    tokens = x + row[:, None].to(tl.int64) * layer.num_inputs
    weights = layer.weight + output[None].to(tl.int64) * layer.num_inputs
    length = tl.cdiv(tl.cdiv(layer.num_inputs, shares), inputs) * inputs
    end = tl.minimum((share + 1) * length, layer.num_inputs)
    sums = tl.zeros((rows, outputs), tl.float32)
    for start in range(share * length, end, inputs):
        at = start + tl.arange(0, inputs)
        token = tl.load(tokens + at[None], is_row[:, None] & (at < end)[None], 0.0)
        tile = tl.load(weights + at[:, None], is_output[None] & (at < end)[:, None], 0.0)
        sums = tl.dot(token, tile.to(token.dtype), sums, input_precision="ieee")
    if shares == 1:
        sums = _finish(sums, layer, output[None], is_output[None])
    place = (share.to(tl.int64) * count + row[:, None]) * layer.num_outputs + output[None]
    tl.store(y + place, sums.to(y.dtype.element_ty), is_row[:, None] & is_output[None])


@triton.jit
def _sum_kernel(parts, layer, y, size, shares: tl.constexpr, block: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    is_result, sums = at < size, tl.zeros((block,), tl.float32)
    for share in tl.static_range(shares):
        sums += tl.load(parts + share * tl.cast(size, tl.int64) + at, is_result, 0.0)
    sums = _finish(sums, layer, at % layer.num_outputs, is_result)
    tl.store(y + at, sums.to(y.dtype.element_ty), is_result)
