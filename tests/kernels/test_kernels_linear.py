"""`scaled_linear` is a linear layer over dequantised weights: definition, and Triton kernel run by
Triton's interpreter.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import interpreted, seeds

from specdec.kernels.linear import triton
from specdec.kernels.linear.reference import scaled_linear


def linear_case(count, num_inputs, num_outputs, kind, dtype, seed, device="cpu"):
    """Tokens, weights, scales and a bias."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, num_inputs, generator=generator).to(dtype)
    weight = torch.randn(num_outputs, num_inputs, generator=generator) * 40
    weight = (weight.round().clamp(-127, 127) if kind == torch.int8 else weight).to(kind)
    scale, bias = torch.rand(2, num_outputs, generator=generator) + 0.1
    return tuple(tensor.to(device) for tensor in (x, weight, scale, bias))


def assert_is_linear(y, x, weight, scale, bias):
    """Against float64. An error of the sum, in float32, of its rounding and of the bias's."""
    wide = weight.to(torch.float32).double() * scale.double()[:, None]
    expected = x.double() @ wide.T + (0 if bias is None else bias.double())
    size = x.double().abs() @ wide.abs().T + (0 if bias is None else bias.double().abs())
    limit = 4 * torch.finfo(y.dtype).eps * expected.abs() + 1e-5 * size
    assert y.dtype == x.dtype
    assert ((y.double() - expected).abs() <= limit).all()


@interpreted
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
@settings(max_examples=4)
@given(
    st.sampled_from([1, 3, 16, 17, 65]),
    st.sampled_from([8, 130, 600]),
    st.sampled_from([1, 70]),
    st.booleans(),
    seeds,
)
def test_the_kernel_is_a_linear_layer_over_dequantised_weights(
    kind, count, num_inputs, num_outputs, has_bias, seed
):
    x, weight, scale, bias = linear_case(count, num_inputs, num_outputs, kind, torch.float16, seed)
    bias = bias if has_bias else None
    y = triton.scaled_linear(x, weight, scale, bias)
    assert_is_linear(y, x, weight, scale, bias)


@interpreted
@pytest.mark.slow
def test_a_wide_layer_needs_one_share():
    case = linear_case(1, 8, 2**15 + 3, torch.int8, torch.float16, 0)
    assert_is_linear(triton.scaled_linear(*case), *case)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_definition_is_one_too(kind, dtype):
    x, weight, scale, bias = linear_case(5, 30, 7, kind, dtype, 0)
    assert_is_linear(scaled_linear(x, weight, scale, bias), x, weight, scale, bias)
    y = scaled_linear(x.view(1, 5, 30), weight, scale)
    assert_is_linear(y[0], x, weight, scale, None)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(4, 4096, 14336), (1, 14336, 4096), (64, 1000, 2**17)], ids=str)
def test_the_compiled_kernel_is_one(shape, dtype, kind):
    count, *sizes = shape
    case = linear_case(count, *sizes, kind, dtype, 0, "cuda")
    assert_is_linear(scaled_linear(*case), *case)
    assert_is_linear(scaled_linear(*case[:3]), *case[:3], None)
