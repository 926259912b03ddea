"""The Triton kernel of `find_floor` keeps what its definition keeps: run by Triton's interpreter.

Chunks, samples and lists are so small that rows of a few dozen tokens have many chunks, a sample
that is not the row, and more tokens to list than there is room for.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is there on Linux only")

from kernel_cases import DTYPES, assert_floor_near, random_logits, random_truncation

from specdec.kernels import gate as gates
from specdec.kernels import triton_floor
from specdec.kernels.gate import Truncation

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of numpy, at 0 / 0 and the like
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="here kernels are compiled; see test_gpu_kernels"
    ),
]
SMALL = {"block": 16, "num_warps": 1, "samples": 16, "part": 16, "lag": 2}
seeds = st.integers(0, 2**32 - 1)
few = settings(max_examples=6)
rooms = st.sampled_from([1, 8, 64])  # tokens that can be listed


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def kept_of(logits: torch.Tensor, temperature, truncation: Truncation, **options) -> tuple:
    """Which possible tokens the kernel keeps, and which the definition keeps."""
    floors = (
        triton_floor.find_floor(logits, temperature, truncation, **(SMALL | options)),
        gates.find_floor(logits, temperature, truncation),
    )
    scaled = gates.scale(logits, temperature)
    return tuple(gates.is_kept(scaled, floor) & (scaled > -torch.inf) for floor in floors)


@few
@given(
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 70),
    st.sampled_from(DTYPES),
    rooms,
    st.integers(1, 3),
    seeds,
)
def test_a_floor_keeps_what_the_definitions_keeps(rows, places, vocab, dtype, most, span, seed):
    logits = random_logits(rows, places, vocab, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    temperature = torch.rand(rows, generator=generator).double() + 0.3 if seed % 2 else None
    truncation, options = random_truncation(rows, seed), {**SMALL, "most": most, "span": span}
    assert_floor_near(logits, temperature, truncation, **options)
    for alone in (0, 1, 2):
        kept = [value if i == alone else None for i, value in enumerate(truncation[:3])]
        truncation_of_one = Truncation(*kept, truncation.largest_k)
        assert_floor_near(logits[:, 0], temperature, truncation_of_one, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@few
@given(st.integers(0, 6), st.integers(0, 64), st.integers(0, 40), rooms, seeds)
def test_of_equal_logits_at_the_edge_of_top_p_the_lowest_ids_go(
    dtype, log_count, gone, top_k, most, seed
):
    """Masses and their sums are exact, so the floors must be equal."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.full((1, 70), -torch.inf)
    logits[0, torch.randperm(70, generator=generator)[: 2**log_count]] = float(seed % 3 - 1)
    truncation = Truncation(torch.tensor([top_k]), doubles(gone / 64), None, top_k or 1)
    kept, expected = kept_of(logits.to(dtype), None, truncation, most=most)
    assert torch.equal(kept, expected)


@pytest.mark.parametrize("most", [8, 200])
@pytest.mark.parametrize("sampled", [-9.0, 9.0])
def test_a_sample_that_lies_costs_time_only(sampled, most):
    """What the sample sees, four neighbours in fifty, is unlike what the others are."""
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(0))
    logits[0, torch.arange(200) % 50 < 4] += sampled
    for top_k, tail in ((0, 0.1), (0, 0.99), (1, -1.0), (5, 0.5), (150, 0.1), (999, 0.3)):
        truncation = Truncation(torch.tensor([top_k]), doubles(tail), None, min(top_k, 200) or 1)
        kept, expected = kept_of(logits, doubles(0.7), truncation, most=most, part=64)
        assert torch.equal(kept, expected), (top_k, tail)


@pytest.mark.parametrize("most", [4, 99])
def test_rows_of_one_batch_are_truncated_each_in_its_way(most):
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(8, 2, 90, generator=generator) * 8).round() / 4
    truncation = Truncation(
        torch.tensor([0, 3, 0, 0, 40, 0, 90, 1]),
        doubles(-1, -1, 0.2, -1, 0.3, 0.9, 0.4, 0.4),
        doubles(0, 0, 0, 0.05, 0.01, 0, 0.4, 0),
        90,
    )
    temperature = doubles(1, 1, 1, 1, 2, 0.5, 1, 1)
    kept, expected = kept_of(logits, temperature, truncation, most=most, part=64)
    assert torch.equal(kept, expected)
    assert bool(kept[0].all())


def test_scaled_logits_that_are_equal_are_ties_though_the_logits_differ():
    """Two neighbouring floats, the larger of lower id, have one quotient by 1.9."""
    temperature, one = torch.tensor(1.9), torch.tensor(1.95)
    logits = one.repeat(2)
    while logits[0] == logits[1] or logits[0] / temperature != logits[1] / temperature:
        logits[1] = logits[0]
        logits[0] = torch.nextafter(logits[0], torch.tensor(9.0))
    truncation = Truncation(None, doubles(0.5))
    kept, expected = kept_of(logits[None], temperature[None].double(), truncation)
    assert kept.tolist() == expected.tolist() == [[False, True]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_have_no_law_end_and_harm_no_other_row(value):
    logits = random_logits(3, 2, 40, seed=4, dtype=torch.float32)
    truncation = Truncation(torch.tensor([3, 0, 0]), doubles(0.5, 0.2, 0.4), None, 3)
    expected = triton_floor.find_floor(logits, None, truncation, **SMALL)
    logits[:2] = value
    floor = triton_floor.find_floor(logits, None, truncation, **SMALL)
    assert floor.ids.shape == (3, 2)
    assert torch.equal(floor.ids[2], expected.ids[2])
    assert torch.equal(floor.logits[2], expected.logits[2])
