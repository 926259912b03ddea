"""The Triton kernels of `find_cutoff` keep what its definition keeps: run by Triton's interpreter.

Chunks, samples and lists are so small that rows of a few dozen tokens have many chunks, a sample
that is not the row, and more tokens to list than there is memory for.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import (
    DTYPES,
    assert_cutoff_near,
    few,
    interpreted,
    quiet,
    random_logits,
    random_truncation,
    seeds,
)

from specdec.kernels import Truncation
from specdec.kernels.truncate import triton
from specdec.kernels.truncate.reference import find_cutoff, is_kept, scale

pytestmark = [quiet, interpreted]
SMALL = {"block": 16, "num_warps": 1, "samples": 16, "part": 16, "held": 16}
capacities = st.sampled_from([1, 8, 64])


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def kept_of(logits: torch.Tensor, temperature, truncation: Truncation, **options) -> tuple:
    """Which possible tokens the kernel keeps, and which the definition keeps."""
    cutoffs = (
        triton.find_cutoff(logits, temperature, truncation, **(SMALL | options)),
        find_cutoff(logits, temperature, truncation),
    )
    scaled = scale(logits, temperature)
    return tuple(is_kept(scaled, cutoff) & (scaled > -torch.inf) for cutoff in cutoffs)


@few
@given(
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 70),
    st.sampled_from(DTYPES),
    capacities,
    seeds,
)
def test_a_cutoff_keeps_what_the_definitions_keeps(rows, width, vocab, dtype, capacity, seed):
    logits = random_logits(rows, width, vocab, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    temperature = torch.rand(rows, generator=generator).double() + 0.3 if seed % 2 else None
    truncation, options = random_truncation(rows, seed), {**SMALL, "capacity": capacity}
    assert_cutoff_near(logits, temperature, truncation, **options)
    for alone in (0, 1, 2):
        kept = [value if i == alone else None for i, value in enumerate(truncation[:3])]
        truncation_of_one = Truncation(*kept, truncation.max_top_k)
        assert_cutoff_near(logits[:, 0], temperature, truncation_of_one, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@few
@given(st.integers(0, 6), st.integers(0, 64), st.integers(0, 40), capacities, seeds)
def test_of_equal_logits_at_the_edge_of_top_p_the_lowest_ids_are_dropped(
    dtype, log_count, dropped, top_k, capacity, seed
):
    """Masses and their sums are exact, so the cutoffs must be equal."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.full((1, 70), -torch.inf)
    logits[0, torch.randperm(70, generator=generator)[: 2**log_count]] = float(seed % 3 - 1)
    truncation = Truncation(torch.tensor([top_k]), doubles(1 - dropped / 64), None, top_k or 1)
    kept, expected = kept_of(logits.to(dtype), None, truncation, capacity=capacity)
    assert torch.equal(kept, expected)


@pytest.mark.parametrize("capacity", [8, 200])
@pytest.mark.parametrize("sampled", [-9.0, 9.0])
def test_a_sample_that_misleads_costs_time_only(sampled, capacity):
    """The sample holds every twelfth token; these are unlike the others."""
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(0))
    logits[0, torch.arange(200) % 12 == 0] += sampled
    for top_k, top_p in ((0, 0.9), (0, 0.01), (1, 1.0), (5, 0.5), (150, 0.9), (999, 0.7)):
        truncation = Truncation(torch.tensor([top_k]), doubles(top_p), None, min(top_k, 200) or 1)
        kept, expected = kept_of(logits, doubles(0.7), truncation, capacity=capacity, part=64)
        assert torch.equal(kept, expected), (top_k, top_p)


def test_a_list_that_holds_the_cutoff_is_all_that_is_searched(monkeypatch):
    """The whole row is searched only where the list is of no use: here it is gone by then."""
    search = triton._search_kernel
    logits = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0)) * 3
    truncation = Truncation(torch.tensor([0, 7]), doubles(0.9, 0.6), None, 7)
    expected = find_cutoff(logits, None, truncation)

    class WithoutLogits:
        def __getitem__(self, grid):
            logits.fill_(torch.nan)
            return search[grid]

    monkeypatch.setattr(triton, "_search_kernel", WithoutLogits())
    options = {"block": 512, "samples": 512, "part": 128}
    cutoff = triton.find_cutoff(logits, None, truncation, **options)
    assert torch.equal(cutoff.logits, expected.logits)
    assert torch.equal(cutoff.ids, expected.ids)


@pytest.mark.parametrize("capacity", [4, 99])
def test_rows_of_one_batch_are_truncated_each_in_its_way(capacity):
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(8, 2, 90, generator=generator) * 8).round() / 4
    truncation = Truncation(
        torch.tensor([0, 3, 0, 0, 40, 0, 90, 1]),
        doubles(1, 1, 0.8, 1, 0.7, 0.1, 0.6, 0.6),
        doubles(0, 0, 0, 0.05, 0.01, 0, 0.4, 0),
        90,
    )
    temperature = doubles(1, 1, 1, 1, 2, 0.5, 1, 1)
    kept, expected = kept_of(logits, temperature, truncation, capacity=capacity, part=64)
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
def test_rows_that_have_no_distribution_end_and_harm_no_other_row(value):
    logits = random_logits(3, 2, 40, seed=4, dtype=torch.float32)
    truncation = Truncation(torch.tensor([3, 0, 0]), doubles(0.5, 0.8, 0.6), None, 3)
    expected = triton.find_cutoff(logits, None, truncation, **SMALL)
    logits[:2] = value
    cutoff = triton.find_cutoff(logits, None, truncation, **SMALL)
    assert cutoff.ids.shape == (3, 2)
    assert torch.equal(cutoff.ids[2], expected.ids[2])
    assert torch.equal(cutoff.logits[2], expected.logits[2])
