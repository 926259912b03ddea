"""The Triton kernels of `race` have the winners of its definition: run by Triton's interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is there on Linux only")

from kernel_cases import DTYPES, assert_race_near, random_logits, random_params

from specdec.kernels import WarpParams
from specdec.kernels.race import triton

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
def test_a_race_has_the_winner_of_the_definition(rows, width, vocab, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = random_logits(rows, width, vocab, seed=seed, dtype=dtype)
    params = random_params(logits, seed) if seed % 2 else WarpParams()
    key = torch.randint(0, 2**32, (rows, 2), generator=generator)
    position = torch.randint(0, 2**32, (rows, width), generator=generator)
    assert_race_near(logits, params, key, position, 3, **SMALL)


def test_a_race_with_another_stream_key_or_position_has_other_winners():
    logits = random_logits(2, 4, 30, seed=1, dtype=torch.float32, spread=0.5)
    key, position = torch.tensor([[1, 2]] * 2), torch.arange(8).view(2, 4)
    ours = assert_race_near(logits, WarpParams(), key, position, 3, **SMALL)
    for other in ((key, position, 2), (key + 1, position, 3), (key, position + 1, 3)):
        assert (triton.race(logits, WarpParams(), *other, **SMALL) != ours).sum() > 2


def test_logits_that_are_nan_give_a_token_of_the_vocabulary():
    logits, params = (
        torch.full((2, 3, 40), torch.nan),
        WarpParams(None, torch.tensor([True, False])),
    )
    key, position = torch.zeros(2, 2, dtype=torch.long), torch.zeros(2, 3, dtype=torch.long)
    tokens = triton.race(logits, params, key, position, 3, **SMALL)
    assert bool(((tokens >= 0) & (tokens < 40)).all())
