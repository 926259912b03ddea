"""The bets along a text: worlds of known tables, in which everything can be summed.

Legend: V tokens, D directions.
"""

import itertools
import math

import pytest
import torch

from specdec.certify.generator.directions import DIRECTIONS, Directions, accept_effect
from specdec.certify.generator.martingale import NUM_BETS, Wealth, needed_score
from specdec.types import Draft

V, D = 5, len(DIRECTIONS)


def tables(seed, *shape):
    """Distributions over V tokens, some of them far from even, float64."""
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(*shape, V, generator=generator, dtype=torch.float64)).softmax(dim=-1)


def gains_of(texts, target, draft, tokens=None, loop=None):
    """`[B, 2, D]` and variances, along texts `[B, 2]` after one token, 0; the tables of the second
    token depend on the first one.
    """
    ids = torch.cat(
        [torch.zeros(len(texts), 1).long(), texts, torch.zeros(len(texts), 1).long()], 1
    )
    directions = Directions(ids, torch.ones(len(texts), dtype=torch.long))
    found = []
    for index in range(2):
        row = torch.zeros(len(texts), dtype=torch.long) if index == 0 else 1 + texts[:, 0]
        drafted = torch.zeros(len(texts), 2).long() if tokens is None else tokens[row]
        probs = None if draft is None else draft[row][:, None].expand(-1, 2, -1)
        own = None if loop is None else loop[row]
        found.append(directions.step(target[row], Draft(drafted, probs), own))
    return [torch.stack([getattr(f, name) for f in found], 1) for name in ("gains", "variances")]


TEXTS = torch.tensor(list(itertools.product(range(V), repeat=2)))


def weights(table):
    """`[V^2]` probabilities of all texts of two tokens."""
    return table[0][TEXTS[:, 0]] * table[1 + TEXTS[:, 0], TEXTS[:, 1]]


@pytest.mark.parametrize("is_point", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_gains_have_mean_zero_and_the_variance_that_is_said(seed, is_point):
    target, draft, loop = (tables(seed + n, 1 + V) for n in (0, 10, 20))
    tokens = torch.randint(V, (1 + V, 2), generator=torch.Generator().manual_seed(seed))
    gains, variances = gains_of(TEXTS, target, None if is_point else draft, tokens, loop)
    assert gains.abs().max() <= 2
    mass = weights(target)[:, None, None]
    assert (mass * gains).sum(dim=0).abs().max() < 1e-12
    both = ((mass * gains**2).sum(dim=0), (mass * variances).sum(dim=0))
    assert torch.allclose(*both, atol=1e-12)
    moving = variances.sum(dim=(0, 1)) > 0
    still = {name for name, moves in zip(DIRECTIONS, moving.tolist(), strict=True) if not moves}
    assert still <= {"impossible", "top 8"}  # V is 5, and nothing is truncated


def mean_wealth(law, gains, tolerance=0.0):
    """The exact mean of the wealth after two texts, which are drawn from a law one by one."""
    mean = 0.0
    for one, other in itertools.product(range(len(TEXTS)), repeat=2):
        wealth = Wealth(D, tolerance=tolerance)
        wealth.add(gains[one])
        wealth.add(gains[other])
        mean += (law[one] * law[other]).item() * wealth.e_value
    return mean


def test_the_wealth_is_a_martingale_and_grows_where_the_law_is_another():
    target, draft, other = (tables(seed, 1 + V) for seed in (5, 6, 7))
    gains, _ = gains_of(TEXTS, target, draft)
    law = weights(target)
    assert mean_wealth(law, gains) == pytest.approx(1, abs=1e-12)
    assert mean_wealth(weights(other), gains) > 1.005
    for shift in (0.1, -0.1):  # of all directions, which is what a tolerance is for
        assert mean_wealth(law, gains + shift) > 1 + 1e-5
        assert mean_wealth(law, gains + shift, tolerance=0.1) <= 1 + 1e-12


def test_a_sound_generator_is_rarely_rich():
    generator, alarms = torch.Generator().manual_seed(0), 0
    for _ in range(300):
        wealth = Wealth(1)
        for _ in range(30):
            coins = torch.rand(24, 1, generator=generator, dtype=torch.float64) < 0.3
            wealth.add(coins.double() - 0.3)
        alarms += wealth.log_peak >= math.log(10)
    assert alarms <= 300 * 0.1


@pytest.mark.parametrize("share", [1.0, 0.02])
def test_a_bias_of_the_size_that_is_said_is_found(share):
    """In all rows, at the size that 95 of 100 runs find; in one row of 50, at any size."""
    generator, found, texts, length = torch.Generator().manual_seed(1), 0, 200, 50
    bias = needed_score(1, 1e-3) * 0.5 / math.sqrt(texts * length)
    bias = bias if share == 1 else 0.4
    for _ in range(60):
        wealth = Wealth(1)
        for text in range(texts):
            moved = bias if share == 1 or text % 50 == 7 else 0.0
            coins = torch.rand(length, 1, generator=generator, dtype=torch.float64) < 0.5 + moved
            wealth.add(coins.double() - 0.5)
        found += wealth.p_value <= 1e-3
    assert found >= 48  # 57 are expected; 48 have a chance below 1e-3


def test_p_values_never_rise_again():
    wealth, values = Wealth(2), []
    for sign in (1, 1, 1, -1, -1, -1, -1):
        wealth.add(torch.full((20, 2), 0.5 * sign, dtype=torch.float64))
        values.append((wealth.p_value, wealth.e_value))
    assert [p for p, _ in values] == sorted((p for p, _ in values), reverse=True)
    assert values[-1][1] < values[2][1]
    assert NUM_BETS == 42


@pytest.mark.parametrize("factor", [0.9, 0.98, 1.05])
def test_the_effect_of_accept_draws_is_that_of_the_rule(factor):
    p, q = tables(7)[None], tables(8)[None]
    accepts = (p / (factor * q)).clamp(max=1)[0]
    residual = (p - q).clamp(min=0)[0]
    expected = torch.zeros(V, dtype=torch.float64)
    for token in range(V):  # what was drafted
        expected[token] += q[0, token] * accepts[token]
        expected += q[0, token] * (1 - accepts[token]) * residual / residual.sum()
    found = p[0] * (1 + (1 - factor) * accept_effect(p, q, factor)[0])
    assert torch.allclose(found, expected, atol=1e-14)


def test_what_cannot_be_bet_on_is_refused():
    with pytest.raises(ValueError, match="num_directions"):
        Wealth(0)
    with pytest.raises(ValueError, match="tolerance"):
        Wealth(1, tolerance=-1.0)
    with pytest.raises(ValueError, match="gains"):
        Wealth(2).add(torch.zeros(4, 3, dtype=torch.float64))
