"""The Triton kernels of `sample` are its definition: run by Triton's interpreter.

Chunks are as small as 16 tokens, so that rows of a few dozen tokens have many chunks and a ragged
last one. `test_kernels_gpu` makes the same checks with compiled kernels.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is there on Linux only")

from kernel_cases import (
    DTYPES,
    LARGEST_UNIFORM,
    assert_sample_near,
    random_logits,
    random_params,
    sample_by_kernel,
)

from specdec.kernels import WarpParams, warp_probs
from specdec.kernels.triton_common import rows_of, softmax_partials

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, at 0 / 0 and the like
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="here kernels are compiled; see test_kernels_gpu"
    ),
]
SMALL = {"block": 16, "num_warps": 2}
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=6)


@few
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 70), st.sampled_from(DTYPES), seeds)
def test_a_sample_and_its_probabilities_are_the_definitions(rows, width, vocab, dtype, seed):
    logits = random_logits(rows, width, vocab, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand(rows, width, generator=generator, dtype=torch.float64)
    params = random_params(logits, seed) if seed % 2 else WarpParams()
    assert_sample_near(logits, params, uniforms, **SMALL)
    row = random_logits(rows, vocab, seed=seed, dtype=dtype)
    assert_sample_near(row, WarpParams(*params[:2]), uniforms[:, 0], **SMALL)


def test_a_greedy_row_samples_its_largest_logit_also_beside_others_and_where_it_is_infinite():
    logits = torch.tensor([[0.0, torch.inf, 1.0], [3.0, 0.0, 0.0]])
    params = WarpParams(None, torch.tensor([True, False]))
    token, probs = sample_by_kernel(logits, params, torch.zeros(2).double(), **SMALL)
    assert token.tolist() == [1, 0]
    torch.testing.assert_close(probs, warp_probs(logits, params), rtol=1e-6, atol=0)


@pytest.mark.parametrize("u", [0.0, 0.5, LARGEST_UNIFORM])
def test_masses_below_the_normal_floats_are_never_drawn_where_they_round_to_zero(u):
    logits = torch.full((1, 1, 64), -104.0)  # exp(-104) is 0 in float32, and 64 of them are not
    logits[0, 0, 40], logits[0, 0, 41] = 0.0, -90.0  # the latter is subnormal
    uniforms = torch.tensor([[u]], dtype=torch.float64)
    token, probs = sample_by_kernel(logits, WarpParams(), uniforms, **SMALL)
    assert probs[0, 0, token.item()] > 0
    assert token.item() == 40


def test_no_rows_have_samples_of_no_rows():
    logits = torch.zeros(0, 3, 40)
    tokens, probs = sample_by_kernel(logits, WarpParams(), torch.zeros(0, 3).double(), **SMALL)
    assert tokens.shape == (0, 3)
    assert probs.shape == (0, 3, 40)


def test_partials_of_indices_that_are_not_drafted_are_not_written():
    """In tests fresh memory of kernels is NaN, so what reads them shows."""
    rows = rows_of(torch.zeros(2, 3, 20), WarpParams())
    partials = softmax_partials(rows, num_valid=torch.tensor([0, 1]), **SMALL)
    expected = torch.tensor([[False, True, True], [False, False, True]])[..., None].expand(
        -1, -1, 2
    )
    assert torch.equal(partials.row_max.isnan(), expected)
    assert torch.equal(partials.row_sum.isnan(), expected)
