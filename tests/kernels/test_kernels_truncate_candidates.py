"""Truncation of rows that share their top-k on a CPU keeps what the definition keeps, by the k
candidates alone.

Oracles are the definition over all V logits, which sorts them, and Hugging Face's own warpers.
"""

from unittest import mock

import pytest
import torch
from architectures import VOCAB, build
from drafting import ragged_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import seeds
from warpers import huggingface_law

from specdec import SpeculativeGenerator
from specdec.graphs import no_host_sync
from specdec.kernels import FilterParams, filtered_probs
from specdec.kernels.truncate import candidates
from specdec.kernels.truncate.reference import filter_params, filtered_logits, find_cutoff
from specdec.kernels.types import Truncation
from specdec.samplers import LogitsFilter

top_ks = st.sampled_from([1, 2, 3, 7, 20, 99])
top_ps = st.sampled_from([None, 0.0, 0.3, 0.5, 0.8, 0.95, 1.0])
min_ps = st.sampled_from([None, 0.0, 0.01, 0.3, 1.0])


def tied(shape, seed, *, forbidden=0.2):
    """Logits with many ties, also at the k-th, and some that are not possible."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-6, 7, shape, generator=generator) / 2.0
    is_out = torch.rand(shape, generator=generator) < forbidden
    is_out[..., seed % shape[-1]] = False
    return logits.masked_fill(is_out, -torch.inf)


def filled(values):
    return None if None in values else torch.tensor(values, dtype=torch.float64)


def shared(top_k, top_p, min_p, rows):
    values = filled([top_p] * rows), filled([min_p] * rows)
    return Truncation(torch.full((rows,), top_k), *values, top_k)


def is_close_call(row, top_k, top_p):
    """Whether some mass that top-p compares is within float32 rounding of the limit."""
    at = row.topk(min(top_k, len(row))).values[-1]
    masses = row.masked_fill(row < at, -torch.inf).double().sort().values.softmax(-1).cumsum(-1)
    return top_p is not None and bool(((masses - (1 - top_p)).abs() < 1e-6).any())


@given(top_ks, top_ps, min_ps, st.integers(1, 3), st.integers(1, 60), seeds)
def test_what_is_kept_is_what_the_definition_keeps_to_the_bit(
    top_k, top_p, min_p, rows, vocab, seed
):
    logits, temperature = tied((rows, 2, vocab), seed), torch.tensor([0.7, 1.0, 1.3]).double()
    truncation, temperature = shared(top_k, top_p, min_p, rows), temperature[:rows]
    expected = FilterParams(temperature, None, find_cutoff(logits, temperature, truncation))
    found = filter_params(logits, temperature, None, truncation)
    assert found.cutoff is None
    scores = filtered_logits(logits, expected)
    for index in (found.kept != scores).any(dim=-1).nonzero().tolist():
        row = logits[tuple(index)] / temperature[index[0]]
        assert is_close_call(row, top_k, top_p)
        found.kept[tuple(index)] = scores[tuple(index)]
    assert torch.equal(filtered_probs(logits, found), filtered_probs(logits, expected))


@settings(max_examples=20)
@given(top_ks, top_ps, min_ps, st.integers(1, 40), st.sampled_from([0.0, 1.0]), seeds)
def test_ties_at_the_kth_logit_stay_as_in_huggingface(top_k, top_p, min_p, vocab, spread, seed):
    """Also where all logits are equal, so that every one is a candidate."""
    logits = tied((1, vocab), seed, forbidden=0.5 * spread) * spread
    options = {"temperature": 1.0, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    neutral = {"top_p": 1.0, "min_p": 0.0}
    expected = huggingface_law(
        logits, {n: neutral[n] if value is None else value for n, value in options.items()}
    )
    found = LogitsFilter(1, **options)(logits)
    if not is_close_call(logits[0], top_k, top_p):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)


@given(
    st.lists(st.sampled_from([0, 1, 2, 3, 7, 20, 99]), min_size=4, max_size=4),
    st.sampled_from([[1.0, 1.0, 1.0, 1.0], [0.5, 0.9, 1.0, 0.9]]),
    st.integers(2, 40),
    seeds,
)
def test_a_row_keeps_what_it_keeps_alone(top_k, top_p, vocab, seed):
    """The ties of one row are candidates of all; rows of other top-ks, and of none, too."""
    generator = torch.Generator().manual_seed(seed)
    logits = [tied((vocab,), seed), torch.zeros(vocab), tied((vocab,), seed + 1)]
    logits = torch.stack([*logits, 3 * torch.randn(vocab, generator=generator)])
    together = LogitsFilter(4, top_k=top_k, top_p=top_p)(logits)
    rows = zip(logits, top_k, top_p, strict=True)
    alone = [LogitsFilter(1, top_k=k, top_p=p)(row[None]) for row, k, p in rows]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("top_p", [None, 0.9])
def test_calls_of_other_top_ks_that_share_a_storage_write_what_each_writes_alone(graphs, top_p):
    model, (ids, mask) = build("llama"), ragged_prompts(VOCAB, 7, 3)
    options = {"max_new_tokens": 8, "do_sample": True, "seed": [1, 2], "eos_token_id": []}
    options |= {"temperature": 3.0} | ({} if top_p is None else {"top_p": top_p})
    shared = SpeculativeGenerator(model, "lookup", graphs=graphs)
    for top_k in ([5, 5], [5, 0], [5, 2], [2, 5], [0, 5], [5, 5]):
        found = shared.generate(ids, mask, **options, top_k=top_k)
        fresh = SpeculativeGenerator(model, "lookup", graphs=graphs)
        assert found.sequences.equal(fresh.generate(ids, mask, **options, top_k=top_k).sequences)


def test_candidates_that_lack_a_tie_keep_something_else():
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.0, 2.0]])
    expected = LogitsFilter(1, top_k=3, top_p=0.99)(logits)
    assert bool((expected > 0).all())

    def without(table, top_k, most):
        return tuple(values.flip(1).numpy().copy() for values in table.topk(most, dim=1))

    with mock.patch.object(candidates, "_candidates", without):
        assert not torch.equal(LogitsFilter(1, top_k=3, top_p=0.99)(logits), expected)


def test_rows_without_top_k_and_float64_have_the_definition():
    for logits, top_k in ((torch.zeros(2, 9), 0), (torch.zeros(2, 9).double(), 3)):
        params = LogitsFilter(2, top_k=top_k, top_p=0.5).params(logits)
        assert params.kept is None
        assert params.cutoff is not None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_does_not_wait_and_is_one_operation_where_it_looks_at_data(mode):
    logits_filter = LogitsFilter(2, top_k=3, top_p=0.9, min_p=0.01)
    with no_host_sync() as seen, mode():
        logits_filter(tied((2, 3, 20), 0))
    assert "specdec.truncate_candidates.default" in dict(seen.shapes)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("tokens_of_it", [slice(0, 1), slice(None)])
def test_a_row_that_has_no_distribution_harms_no_other_row(bad, tokens_of_it):
    logits, uniforms = tied((2, 3, 20), 0), torch.full((2, 3), 0.37, dtype=torch.float64)
    logits_filter = LogitsFilter(2, top_k=3, top_p=0.9, min_p=0.1)
    expected, _ = logits_filter.draw(logits, uniforms)
    logits[1, 1, tokens_of_it] = bad
    tokens, _ = logits_filter.draw(logits, uniforms)
    assert bool(((tokens >= 0) & (tokens < 20)).all())
    is_other = torch.arange(6).view(2, 3) != 4
    assert torch.equal(tokens[is_other], expected[is_other])
