"""Wide rows on a CPU: the cutoff of top-p is that of its definition however it is found, and the
probabilities are those of `filtered_probs` to the last bit.

The definition, in whole numbers: sort by (logit, id), add up masses of 2**-52 rounded down, drop
while the sum, as a float32, is at most the float32 of 1 - top_p. `few` and `samples` are forced so
small that rows of a few tokens take several rounds.
"""

from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from kernel_cases import seeds

from specdec.graphs import no_host_sync
from specdec.graphs.sync import HostSyncError
from specdec.kernels import FilterParams, draw, filtered_probs
from specdec.kernels.truncate import cpu, reference
from specdec.kernels.truncate.reference import find_cutoff, is_kept, is_wide, scale
from specdec.kernels.types import Cutoff, Truncation
from specdec.samplers import LogitsFilter

top_ps = st.sampled_from([0.0, 1e-9, 0.2, 0.5, 0.75, 0.9, 0.95, 0.999, 1 - 2.0**-40])
settings = st.tuples(st.sampled_from([1, 2, 7, 64]), st.sampled_from([1, 2, 5, 33, 512]))


def normal(shape, generator):
    return torch.randn(shape, generator=generator) * 3


def with_ties(shape, generator):
    return torch.randint(-8, 9, shape, generator=generator) / 4


def forbidden(shape, generator):
    """Most tokens at -inf, not the last."""
    logits = normal(shape, generator)
    is_out = torch.rand(shape, generator=generator) < 0.8
    is_out[..., -1] = False
    return logits.masked_fill(is_out, -torch.inf)


def one_hot(shape, generator):
    best = torch.randint(0, shape[-1], (*shape[:-1], 1), generator=generator)
    return torch.full(shape, -torch.inf).scatter(-1, best, 1.5)


def peaked(shape, generator):
    logits = normal(shape, generator)
    logits[..., shape[-1] // 2] += 20
    return logits


KINDS = {
    "normal": normal,
    "ties": with_ties,
    "half precision": lambda *args: normal(*args).bfloat16().float(),
    "forbidden": forbidden,
    "one-hot": one_hot,
    "peaked": peaked,
    "nearly flat": lambda *args: normal(*args) / 100,
    "flat": lambda shape, _: torch.zeros(shape),
    "zeros of both signs": lambda *args: normal(*args).sign() * 0.0,
}
kinds = st.sampled_from(sorted(KINDS))


def made(kind, shape, seed):
    return KINDS[kind](shape, torch.Generator().manual_seed(seed))


def as_float32(number):
    return torch.tensor(number, dtype=torch.float64).float().item()


def masses_of(row):
    return [int(mass) for mass in (row.softmax(-1) * 2.0**52).tolist()]


def first_kept(row, may_be_dropped):
    """The id of the least likely kept token of a row `[V]`, by the definition."""
    logits, masses, reached = row.tolist(), masses_of(row), 0
    *others, best = sorted(range(len(logits)), key=lambda v: (logits[v], v))
    for v in others:
        reached += masses[v]
        if not may_be_dropped(reached):
            return v
    return best


def plain_cutoff(row, top_p):
    droppable = as_float32(1 - top_p)
    token = first_kept(row, lambda mass: as_float32(mass / 2**52) <= droppable)
    return row[token].item(), token


def found_cutoff(row, top_p, few, samples):
    limit = cpu.largest_droppable(torch.tensor([1 - top_p], dtype=torch.float64))
    logits, ids = cpu.top_p_cutoff(row[None], limit, few, samples)
    return logits.item(), ids.item()


@given(kinds, st.integers(1, 60), top_ps, settings, seeds)
@example("nearly flat", 3000, 0.9, (1, 33), 0)
@example("ties", 3000, 0.5, (64, 5), 1)
@example("normal", 5000, 0.9, (1, 512), 2)
@example("flat", 2000, 0.9, (2, 33), 3)
def test_the_cutoff_is_that_of_the_definition_however_few_tokens_guide_to_it(
    kind, vocab, top_p, setting, seed
):
    row = made(kind, (vocab,), seed)
    assert found_cutoff(row, top_p, *setting) == plain_cutoff(row, top_p)


@given(kinds, st.integers(1, 40), settings, st.integers(0, 39), st.sampled_from([0, 1]), seeds)
def test_a_token_is_dropped_up_to_and_including_the_limit(kind, vocab, setting, count, less, seed):
    row = 2 * made(kind, (vocab,), seed)
    limit = max(sum(sorted(masses_of(row))[:count]) - less, 0)
    token = first_kept(row, lambda mass: mass <= limit)
    assert cpu._smallest_kept(row, float(limit), *setting)[1] == token


@given(st.integers(2**23, 2**24), st.integers(0, 20), st.integers(-2, 2))
def test_a_sum_is_droppable_iff_its_float32_is_at_most_that_of_the_limit(bits, exponent, offset):
    droppable = torch.tensor([bits * 2.0 ** (-24 - exponent)], dtype=torch.float64)
    largest = int(cpu.largest_droppable(droppable).item())
    mass = largest + offset
    assert (as_float32(mass / 2**52) <= as_float32(droppable.item())) == (mass <= largest)


@pytest.mark.parametrize(("sampled", "others"), [(0.0, 1.0), (1.0, 0.0), (-9.0, 3.0), (9.0, 3.0)])
@pytest.mark.parametrize("top_p", [0.1, 0.9])
def test_a_sample_that_misleads_costs_time_only(sampled, others, top_p):
    noise = torch.randn(4096, generator=torch.Generator().manual_seed(0)) / 100
    row = noise + others
    row[::16] += sampled - others  # all that a sample holds
    assert found_cutoff(row, top_p, 8, 256) == plain_cutoff(row, top_p)
    row[::256] = 4.0  # they have all the mass of the sample, and of the row nearly none
    assert found_cutoff(row, top_p, 8, 256) == plain_cutoff(row, top_p)


def test_a_mass_that_is_slightly_off_gives_another_cutoff():
    row = made("nearly flat", (4096,), 0)
    assert found_cutoff(row, 0.9, 8, 256) == plain_cutoff(row, 0.9)
    wrong = mock.patch.object(cpu, "_sum", side_effect=lambda masses: 0.95 * float(masses.sum()))
    with wrong:
        assert found_cutoff(row, 0.9, 8, 256) != plain_cutoff(row, 0.9)


rows_of_truncations = st.lists(
    st.tuples(
        st.sampled_from([0, 1, 3, 20]),
        st.sampled_from([0.0, 0.3, 0.8, 0.95, 1.0]),
        st.sampled_from([0.0, 0.01, 0.3]),
    ),
    min_size=1,
    max_size=3,
)


def truncation_of(rows, *, uses):
    top_ks, top_ps, min_ps = zip(*rows, strict=True)
    uses = uses - {"top_k"} if max(top_ks) == 0 else uses
    return Truncation(
        torch.tensor(top_ks) if "top_k" in uses else None,
        torch.tensor(top_ps).double() if "top_p" in uses or not uses else None,
        torch.tensor(min_ps).double() if "min_p" in uses else None,
        max(top_ks),
    )


def by_rows(operation, *args):
    """An operation on rows that all count as wide; the quickselect takes several rounds."""
    few = mock.patch.multiple(cpu, FEW=3, SAMPLES=9)
    with few, mock.patch.object(reference, "WIDE_TRUNCATE", 1):
        return operation(*args)


TEMPERATURES = torch.tensor([0.7, 1.0, 1.3]).double()
uses_some = st.sets(st.sampled_from(["top_k", "top_p", "min_p"]), min_size=1)


@given(kinds, rows_of_truncations, uses_some, st.integers(1, 50), seeds)
def test_rows_keep_what_the_definition_keeps_unless_a_mass_is_within_rounding_of_the_limit(
    kind, rows, uses, vocab, seed
):
    logits = made(kind, (len(rows), 2, vocab), seed)
    temperature = TEMPERATURES[: len(rows)]
    truncation = truncation_of(rows, uses=uses)
    cutoff = by_rows(find_cutoff, logits, temperature, truncation)
    scaled = scale(logits, temperature)
    kept = is_kept(scaled, cutoff)
    expected = is_kept(scaled, find_cutoff(logits, temperature, truncation))
    for index in (kept != expected).any(dim=-1).nonzero().tolist():
        assert is_close_call(scaled[tuple(index)], truncation, index[0])


def is_close_call(row, truncation, b):
    """Whether some mass that top-p compares is within float32 rounding of the limit."""
    one = Truncation(
        None if truncation.top_k is None else truncation.top_k[b : b + 1],
        max_top_k=truncation.max_top_k,
    )
    if one.top_k is not None:
        cutoff = find_cutoff(row[None], None, one)
        row = row.masked_fill(~is_kept(row[None], cutoff)[0], -torch.inf)
    masses = row.double().sort().values.softmax(-1).cumsum(-1)
    return bool(((masses - (1 - truncation.top_p[b])).abs() < 1e-6).any())


@given(kinds, rows_of_truncations, uses_some, st.booleans(), st.integers(1, 50), seeds)
def test_the_probabilities_of_wide_rows_are_those_of_the_definition_to_the_last_bit(
    kind, rows, uses, is_mixed, vocab, seed
):
    logits = made(kind, (len(rows), 2, vocab), seed)
    temperature = TEMPERATURES[: len(rows)]
    cutoff = find_cutoff(logits, temperature, truncation_of(rows, uses=uses))
    is_greedy = torch.arange(len(rows)) % 2 == 1 if is_mixed else None
    for params in (
        FilterParams(temperature, is_greedy, cutoff),
        FilterParams(None, is_greedy, None),
    ):
        expected = filtered_probs(logits, params)
        assert torch.equal(by_rows(filtered_probs, logits, params), expected)
        first = params.cutoff and Cutoff(*(values[:, 0] for values in cutoff))
        of_one = by_rows(filtered_probs, logits[:, 0], params._replace(cutoff=first))
        assert torch.equal(of_one, expected[:, 0])
        table = torch.full((len(rows), 3, 2, vocab), 7.0)
        by_rows(filtered_probs, logits, params, table[:, 1])
        assert torch.equal(table[:, 1], expected)
        assert bool((table[:, ::2] == 7).all())


WIDE = reference.WIDE_TRUNCATE + 37  # neither a multiple of 16 nor of a vector


def wide_logits(seed=0):
    return made("normal", (2, 3, WIDE), seed)


def test_only_wide_float_rows_on_a_cpu_without_gradients_take_this_path():
    logits = wide_logits()
    others = logits[..., : reference.WIDE_TRUNCATE - 1], logits.double(), logits.to("meta")
    assert is_wide(logits)
    assert is_wide(logits.bfloat16())
    assert not any(map(is_wide, (*others, logits.clone().requires_grad_())))


def drawn(logits_filter, logits):
    return logits_filter.draw(logits, torch.full(logits.shape[:-1], 0.37, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wide_draw_is_the_draw_of_the_definition(dtype):
    logits = wide_logits().to(dtype)
    logits_filter = LogitsFilter(
        2, temperature=[0.8, 1.2], top_k=[0, 3000], top_p=[0.9, 0.7], min_p=[0.0, 1e-6]
    )
    with mock.patch.object(reference, "WIDE_TRUNCATE", WIDE + 1):
        expected, probs = drawn(logits_filter, logits)
    tokens, wide_probs = drawn(logits_filter, logits)
    assert torch.equal(tokens, expected)
    assert torch.equal(wide_probs, probs)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_wide_draw_does_not_wait_and_is_one_operation_where_it_looks_at_data(mode):
    logits = wide_logits()
    logits_filter = LogitsFilter(2, top_k=[9, 0], top_p=0.9, min_p=0.01)
    with no_host_sync() as seen, mode():
        drawn(logits_filter, logits)
    assert "specdec.top_p_cutoff.default" in dict(seen.shapes)
    with pytest.raises(HostSyncError), no_host_sync(), mode():
        cpu._smallest_kept(logits[0, 0], 0.1 * cpu.UNITS, cpu.FEW, cpu.SAMPLES)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("tokens_of_it", [slice(0, 1), slice(None)])
def test_a_row_that_has_no_distribution_harms_no_other_row(bad, tokens_of_it):
    logits = wide_logits()
    logits_filter = LogitsFilter(2, top_k=[0, 9], top_p=0.9, min_p=[0.0, 0.1])
    expected, _ = drawn(logits_filter, logits)
    broken = logits.clone()
    broken[1, 1, tokens_of_it] = bad
    tokens, probs = drawn(logits_filter, broken)
    assert bool(((tokens >= 0) & (tokens < WIDE)).all())
    is_other = torch.arange(6).view(2, 3) != 4
    assert torch.equal(tokens[is_other], expected[is_other])
    assert bool(probs[is_other].isfinite().all())
    uniforms = torch.full((2, 3), 0.37, dtype=torch.float64)
    assert torch.equal(draw(probs, uniforms), tokens)
