"""The Triton kernels of `find_cutoff` keep what its definition keeps: run by Triton's interpreter.

Chunks, samples and lists are so small that rows of a few dozen tokens have many chunks, a sample
that is not the row, and more tokens to list than there is memory for.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import (
    DTYPES,
    assert_cutoff_near,
    interpreted,
    quiet,
    random_logits,
    random_truncation,
    seeds,
)

from specdec.kernels.truncate import triton
from specdec.kernels.truncate.reference import find_cutoff, is_kept, scale
from specdec.kernels.types import Truncation

pytestmark = [quiet, interpreted]
SMALL = {"block": 16, "num_warps": 1, "samples": 16, "part": 16, "held": 16}
capacities = st.sampled_from([1, 8, 64])
few = settings(max_examples=3)


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def kept_alike(logits: torch.Tensor, temperature, truncation: Truncation, **options):
    """The kernel keeps those possible tokens that the definition keeps; returns its cutoff."""
    cutoffs = (
        triton.find_cutoff(logits, temperature, truncation, **(SMALL | options)),
        find_cutoff(logits, temperature, truncation),
    )
    scaled = scale(logits, temperature)
    kept = [is_kept(scaled, cutoff) & (scaled > -torch.inf) for cutoff in cutoffs]
    assert torch.equal(*kept), truncation
    return cutoffs[0]


@few
@given(st.integers(1, 2), st.integers(1, 50), st.sampled_from(DTYPES), capacities, seeds)
def test_a_cutoff_keeps_what_the_definitions_keeps(rows, vocab, dtype, capacity, seed):
    logits = random_logits(rows, 2, vocab, seed=seed, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    temperature = torch.rand(rows, generator=generator).double() + 0.3 if seed % 2 else None
    truncation, options = random_truncation(rows, seed), {**SMALL, "capacity": capacity}
    assert_cutoff_near(logits, temperature, truncation, **options)
    kept = [value if i == seed % 3 else None for i, value in enumerate(truncation[:3])]
    alone = Truncation(*kept, truncation.max_top_k)
    assert_cutoff_near(logits[:, 0], temperature, alone, **options)


@settings(max_examples=4)
@given(
    st.sampled_from(DTYPES),
    st.integers(0, 6),
    st.integers(0, 64),
    st.sampled_from([0, 5, 40]),
    capacities,
    seeds,
)
def test_of_equal_logits_at_the_edge_of_top_p_the_lowest_ids_are_dropped(
    dtype, log_count, dropped, top_k, capacity, seed
):
    """Masses and their sums are exact, so the cutoffs must be equal."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.full((1, 70), -torch.inf)
    logits[0, torch.randperm(70, generator=generator)[: 2**log_count]] = float(seed % 3 - 1)
    truncation = Truncation(torch.tensor([top_k]), doubles(1 - dropped / 64), None, top_k or 1)
    kept_alike(logits.to(dtype), None, truncation, capacity=capacity)


@pytest.mark.parametrize(("sampled", "capacity"), [(-9.0, 8), (9.0, 200)])
def test_a_sample_that_misleads_costs_time_only(sampled, capacity):
    """The sample holds every twelfth token; these are unlike the others."""
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(0))
    logits[0, torch.arange(200) % 12 == 0] += sampled
    for top_k, top_p in ((0, 0.9), (150, 0.9)):
        truncation = Truncation(torch.tensor([top_k]), doubles(top_p), None, top_k or 1)
        kept_alike(logits, doubles(0.7), truncation, capacity=capacity, part=64)


def test_a_list_that_holds_the_cutoff_is_all_that_is_searched(monkeypatch):
    """The whole row is searched only where the list is of no use: here it is gone by then."""
    search = triton._search_kernel
    logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0)) * 3
    truncation = Truncation(torch.tensor([0, 7]), doubles(0.9, 0.6), None, 7)
    expected = find_cutoff(logits, None, truncation)

    class WithoutLogits:
        def __getitem__(self, grid):
            logits.fill_(torch.nan)
            return search[grid]

    monkeypatch.setattr(triton, "_search_kernel", WithoutLogits())
    options = {"block": 128, "samples": 256, "part": 128}
    cutoff = triton.find_cutoff(logits, None, truncation, **options)
    assert all(map(torch.equal, cutoff, expected))


def test_rows_of_one_batch_are_truncated_each_in_its_way():
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(8, 60, generator=generator) * 8).round() / 4
    truncation = Truncation(
        torch.tensor([0, 3, 0, 0, 40, 0, 60, 1]),
        doubles(1, 1, 0.8, 1, 0.7, 0.1, 0.6, 0.6),
        doubles(0, 0, 0, 0.05, 0.01, 0, 0.4, 0),
        60,
    )
    temperature = doubles(1, 1, 1, 1, 2, 0.5, 1, 1)
    cutoff = kept_alike(logits, temperature, truncation, capacity=9, part=64)
    assert bool(is_kept(scale(logits, temperature), cutoff)[0].all())


def test_scaled_logits_that_are_equal_are_ties_though_the_logits_differ():
    """Two neighbouring floats, the larger of lower id, have one quotient by 1.9."""
    temperature, one = torch.tensor(1.9), torch.tensor(1.95)
    logits = one.repeat(2)
    while logits[0] == logits[1] or logits[0] / temperature != logits[1] / temperature:
        logits[1] = logits[0]
        logits[0] = torch.nextafter(logits[0], torch.tensor(9.0))
    truncation = Truncation(None, doubles(0.5))
    kept_alike(logits[None], temperature[None].double(), truncation)


def test_rows_that_have_no_distribution_end_and_harm_no_other_row():
    logits = random_logits(4, 40, seed=4, dtype=torch.float32)
    truncation = Truncation(torch.tensor([3, 0, 5, 0]), doubles(0.5, 0.8, 0.6, 0.6), None, 5)
    expected = triton.find_cutoff(logits, None, truncation, **SMALL)
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        logits[row] = value
    cutoff = triton.find_cutoff(logits, None, truncation, **SMALL)
    assert torch.equal(cutoff.ids[3], expected.ids[3])
    assert torch.equal(cutoff.logits[3], expected.logits[3])
