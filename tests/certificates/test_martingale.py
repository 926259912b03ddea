"""The bets along a text: problems of known tables, in which everything can be summed.

Legend: V tokens, D directions.
"""

import copy
import itertools
import math

import pytest
import torch

from specdec.lab.certificates.generator.alternatives import (
    ALTERNATIVES,
    AlternativeBets,
    Ratios,
    ratios_of,
)
from specdec.lab.certificates.generator.directions import DIRECTIONS, Directions, accept_effect
from specdec.lab.certificates.generator.learned import Learned
from specdec.lab.certificates.generator.martingale import Wealth, needed_score
from specdec.types import Draft

V, D = 3, len(DIRECTIONS)
OF_DRAFT = torch.tensor([each.is_of_draft for each in DIRECTIONS.values()])


def tables(seed, *shape, size=V):
    """Distributions over tokens, some of them far from even, float64."""
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(*shape, size, generator=generator, dtype=torch.float64)).softmax(dim=-1)


def gains_of(texts, target, draft=None, tokens=None, loop=None, learned=None, drafted=None):
    """`[B, 2, D]`, variances, bets on the loop `[B, 2]`, and `[B, 2, A]` ratios and spreads, of
    texts `[B, 2]` that are drawn side by side after the token 0; the tables of the second token
    depend on the first one. Draft tokens are of a table, and nothing is bet on them, or `drafted`
    of each column.
    """
    directions = Directions([[0]] * len(texts), texts.tolist(), learned=learned)
    found = []
    for index in range(2):
        row = torch.zeros(len(texts), dtype=torch.long) if index == 0 else 1 + texts[:, 0]
        proposed = torch.zeros(len(texts), 2).long() if tokens is None else tokens[row]
        proposed = proposed if drafted is None else torch.tensor([[drafted[index], 0]])
        probs = None if draft is None else draft[row][:, None].expand(-1, 2, -1)
        own = None if loop is None else loop[row]
        found.append(directions.step(target[row], Draft(proposed, probs), own))
    found = [torch.stack([getattr(f, name) for f in found], 1) for name in NAMES]
    return (
        found
        if drafted is not None
        else [*(each.where(~OF_DRAFT, 0) for each in found[:2]), *found[2:]]
    )


NAMES = "gains", "variances", "loop_bets", "ratios", "spreads"
TEXTS = torch.tensor(list(itertools.product(range(V), repeat=2)))
LENGTHS = torch.tensor([2, 2])


def weights(table):
    """`[V^2]` probabilities of all texts of two tokens."""
    return table[0][TEXTS[:, 0]] * table[1 + TEXTS[:, 0], TEXTS[:, 1]]


def pairs(law):
    """All pairs of rows `[2, 2]`, with their probabilities."""
    for one, other in itertools.product(range(len(TEXTS)), repeat=2):
        yield TEXTS[[one, other]], (law[one] * law[other]).item()


def learned_before(target):
    """From texts that are not the target's."""
    learned = Learned()
    texts = torch.randint(V, (40, 2), generator=torch.Generator().manual_seed(9))
    gains_of(texts, target, learned=learned)
    return learned


@pytest.mark.parametrize(("seed", "is_point"), [(0, False), (1, True)])
def test_gains_have_mean_zero_and_the_variance_that_is_said(seed, is_point):
    target, draft, loop = (tables(seed + n, 1 + V) for n in (0, 10, 20))
    tokens = torch.randint(V, (1 + V, 2), generator=torch.Generator().manual_seed(seed))
    learned, means, squares, variances = learned_before(target), 0.0, 0.0, 0.0
    ratios = 0.0
    for texts, mass in pairs(weights(target)):
        probs = None if is_point else draft
        found = gains_of(texts, target, probs, tokens, loop, copy.deepcopy(learned))
        assert found[0].abs().max() <= 2
        means = means + mass * found[0]
        squares = squares + mass * found[0] ** 2
        variances = variances + mass * found[1]
        ratios = ratios + mass * found[3].exp()
        assert ((found[3].exp() - 1).abs() <= found[4] + 1e-12).all()
    assert means.abs().max() < 1e-12  # `[2, 2, D]`: of each row and column
    assert torch.allclose(ratios, torch.ones_like(ratios), atol=1e-12)
    assert torch.allclose(squares, variances, atol=1e-12)
    moving = (variances.sum(dim=(0, 1)) > 0) | OF_DRAFT
    still = {name for name, moves in zip(DIRECTIONS, moving.tolist(), strict=True) if not moves}
    assert still <= {"impossible", "top 8"}  # V is 3, and nothing is truncated


def test_drafts_are_bet_on_against_their_own_probabilities():
    target, draft, law = tables(3, 1 + V), tables(13, 1 + V), weights(tables(3, 1 + V))
    learned = Learned()  # a draft that is always the last token but one
    gains_of(TEXTS[:1], target, draft, learned=learned, drafted=(2, 2))
    means, squares, variances, wealth = 0.0, 0.0, 0.0, 0.0
    for text, drafts in itertools.product(range(len(TEXTS)), itertools.product(range(V), repeat=2)):
        first, second = drafts
        mass = (law[text] * draft[0, first] * draft[1 + TEXTS[text, 0], second]).item()
        options = {"learned": copy.deepcopy(learned), "drafted": drafts}
        gains, variance, *_ = gains_of(TEXTS[[text]], target, draft, **options)
        means, squares = means + mass * gains, squares + mass * gains**2
        variances = variances + mass * variance
        one = Wealth(D)
        one.add(gains, LENGTHS[:1])
        wealth += mass * one.e_value
    assert means.abs().max() < 1e-12
    assert torch.allclose(squares, variances, atol=1e-12)
    assert (variances[0, :, OF_DRAFT] > 0).all()
    assert wealth == pytest.approx(1, abs=1e-12)


def gains_of_pairs(target, draft, loop=None):
    """What `Wealth.add` is given for each of `pairs`, whatever they are drawn from."""
    learned, found = learned_before(target), []
    for texts, _ in pairs(weights(target)):
        options = {"loop": loop, "learned": copy.deepcopy(learned)}
        gains, _, bets, *ratios = gains_of(texts, target, draft, **options)
        found.append((gains, LENGTHS, None if loop is None else bets, Ratios(*ratios)))
    return found


def mean_wealth(law, found, shift=0.0, tolerance=0.0):
    """The exact mean of the wealth after two texts, which are drawn from a law side by side; the
    means of all gains are moved.
    """
    mean = 0.0
    for (_, mass), (gains, *others) in zip(pairs(law), found, strict=True):
        wealth = Wealth(D, tolerance=tolerance, alternatives=True)
        wealth.add(gains + shift, *others)
        mean += mass * wealth.e_value
    return mean


def test_the_wealth_is_a_martingale_and_grows_where_the_law_is_another():
    target, draft, other = (tables(seed, 1 + V) for seed in (5, 6, 7))
    law, found = weights(target), gains_of_pairs(target, draft)
    assert mean_wealth(law, found) == pytest.approx(1, abs=1e-12)
    assert mean_wealth(weights(other), found) > 1.005
    for shift in (0.1, -0.1):  # of all directions, which is what a tolerance is for
        assert mean_wealth(law, found, shift) > 1 + 1e-5
        assert mean_wealth(law, found, shift, tolerance=0.1) <= 1 + 1e-12


def test_ratios_of_a_rounded_p_stay_fair_by_their_tolerance():
    """Tokens are draws from p, and the ratios are those of a p that is off."""
    p, q = tables(5, 6, size=8), tables(6, 6, size=8)
    off = p * (1 + 0.02 * tables(7, 6, size=8))
    off = off / off.sum(dim=-1, keepdim=True)
    logs, spreads = zip(
        *(ratios_of(off, q, torch.full((6, 1), token)) for token in range(8)), strict=True
    )
    logs, spreads = torch.stack(logs), spreads[0]  # [V, 6, A]
    means = (p.T[..., None] * logs.exp()).sum(dim=0)
    assert means.max() > 1 + 1e-5
    tolerance = (off - p).abs().sum(dim=-1).max()  # of a function with values in -1..1
    assert (means / (1 + spreads * tolerance)).max() <= 1


def test_places_are_the_tokens_that_they_say():
    """Of what is won at some tokens, the bets on other places win nothing."""
    names = {
        "of first tokens": ([0], range(70)),
        "of positions": (range(3, 5), range(70)),
        "of all positions from one on": (range(7, 16), range(70)),
        "of rows modulo 64": (range(16), [5, 69]),
        "of rows modulo 8": (range(16), range(3, 70, 8)),
    }
    for name, (columns, rows) in names.items():
        bets, logs = AlternativeBets(), torch.full((70, 16, len(ALTERNATIVES)), -1.0).double()
        for row in rows:
            logs[row, list(columns), 3] = 1.0
        bets.add(logs)
        best = bets.best
        assert best.alternative is ALTERNATIVES[3]
        shares = bets._shares[name]
        count = len(list(columns)) * len(list(rows))
        assert best.log_e == pytest.approx(shares.max().item())
        won = shares - AlternativeBets()._shares[name]
        assert won.max().item() == pytest.approx(count)


def test_a_bet_on_what_the_loop_drew_from_is_fair_and_grows_where_it_did():
    """Fair but for what is cut, where the target's probability is less than an eighth."""
    target, draft = tables(5, 1 + V), tables(6, 1 + V)
    near = 0.5 * target + 0.5 * tables(7, 1 + V)
    near = torch.minimum(near, 3 * target)
    near = near / near.sum(dim=-1, keepdim=True)
    law = weights(target)
    assert mean_wealth(law, gains_of_pairs(target, draft, near)) == pytest.approx(1, abs=1e-12)
    far = tables(8, 1 + V)
    assert (far / target).max() > 8
    known, unknown = (gains_of_pairs(target, draft, p) for p in (far, None))
    assert 0.9 < mean_wealth(law, known) < 1
    known, unknown = (mean_wealth(weights(far), found) for found in (known, unknown))
    assert known - 1 > 2 * (unknown - 1) > 0


def coins(generator, rows, length, chance):
    """`[rows, length, 1]`: 1 with a chance, else 0."""
    drawn = torch.rand(rows, length, 1, generator=generator, dtype=torch.float64)
    return (drawn < chance).double(), torch.full((rows,), length)


def test_a_sound_generator_is_rarely_rich():
    generator, alarms = torch.Generator().manual_seed(0), 0
    for _ in range(300):
        wealth = Wealth(1)
        for _ in range(15):
            values, lengths = coins(generator, 1, 24, 0.3)
            wealth.add(values - 0.3, lengths)
        alarms += wealth.log_peak >= math.log(10)
    assert alarms <= 300 * 0.1


@pytest.mark.parametrize("share", [1.0, 0.02])
def test_a_bias_of_the_size_that_is_said_is_found(share):
    """In all rows, at the size that 95 of 100 runs find; in one row of 50, at any size."""
    generator, found, rows, length = torch.Generator().manual_seed(1), 0, 200, 50
    bias = needed_score(1, 1e-3) * 0.5 / math.sqrt(rows * length)
    moved = torch.full((rows, 1, 1), bias)
    if share < 1:
        moved = 0.4 * (torch.arange(rows)[:, None, None] % 50 == 7)
    for _ in range(60):
        wealth = Wealth(1)
        values, lengths = coins(generator, rows, length, 0.5 + moved)
        wealth.add(values - 0.5, lengths)
        found += wealth.p_value <= 1e-3
    assert found >= 48  # 57 are expected; 48 have a chance below 1e-3


def test_p_values_never_rise_again():
    wealth, values = Wealth(2), []
    for sign in (1, 1, 1, -1, -1, -1, -1):
        wealth.add(torch.full((1, 20, 2), 0.5 * sign, dtype=torch.float64), torch.tensor([20]))
        values.append((wealth.p_value, wealth.e_value))
    assert [p for p, _ in values] == sorted((p for p, _ in values), reverse=True)
    assert values[-1][1] < values[2][1]


def test_half_of_the_wealth_may_be_bet_on_the_last_direction():
    gains = torch.zeros(1, 40, 3, dtype=torch.float64)
    gains[..., 2] = 0.5
    found = {}
    for last in (None, 0.0, 0.5):
        wealth = Wealth(3, last=last)
        wealth.add(gains, torch.tensor([40]))
        found[last] = wealth.e_value - 1
    assert found[0.0] == pytest.approx(0, abs=1e-12)
    assert found[0.5] == pytest.approx(1.5 * found[None])


@pytest.mark.parametrize("factor", [0.9, 0.98, 1.05])
def test_the_effect_of_accept_draws_is_that_of_the_rule(factor):
    p, q = tables(7, size=5)[None], tables(8, size=5)[None]
    accepts = (p / (factor * q)).clamp(max=1)[0]
    residual = (p - q).clamp(min=0)[0]
    expected = torch.zeros(5, dtype=torch.float64)
    for token in range(5):  # what was drafted
        expected[token] += q[0, token] * accepts[token]
        expected += q[0, token] * (1 - accepts[token]) * residual / residual.sum()
    found = p[0] * (1 + (1 - factor) * accept_effect(p, q, factor)[0])
    assert torch.allclose(found, expected, atol=1e-14)


def test_what_cannot_be_bet_on_is_refused():
    with pytest.raises(ValueError, match="num_directions"):
        Wealth(0)
    with pytest.raises(ValueError, match="tolerance"):
        Wealth(1, tolerance=-1.0)
    with pytest.raises(ValueError, match="pass the ratios"):
        Wealth(2, alternatives=True).add(torch.zeros(1, 4, 2).double(), torch.tensor([4]))
    with pytest.raises(ValueError, match="gains"):
        Wealth(2).add(torch.zeros(1, 4, 3, dtype=torch.float64), torch.tensor([4]))
