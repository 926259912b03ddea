"""Costs of steps by size."""

from architectures import build
from drafting import perturbed

from specdec import ModelDrafter, SpeculativeGenerator
from specdec.lab.evaluation import costs
from specdec.lab.evaluation.costs import CostCurve
from specdec.loop.lengths import AutoLength

TARGET = build("llama")
GENERATOR = SpeculativeGenerator(TARGET, ModelDrafter(perturbed(TARGET), 3))
STEADY = CostCurve([10.0] * 4, {0: [10.0] * 4, 1: [11.0] * 4, 4: [14.0] * 4})
NOISY = CostCurve([10.0] * 4, {0: [10.0] * 4, 1: [9.0, 13.0, 9.5, 13.5], 4: [50.0] * 4})


def test_costs_are_measured_at_every_size_and_are_what_auto_length_takes():
    curves = costs(GENERATOR, batch_sizes=[1, 2], contexts=[8, 4], num_steps=1, rounds=2)
    assert list(curves) == [(1, 8), (1, 4), (2, 8), (2, 4)]
    assert all(len(curve.records()) == 4 * 2 for curve in curves.values())
    choose = AutoLength({size: curve.step_ms for size, curve in curves.items()})
    assert set(choose.costs) == set(curves)


def test_lengths_that_the_rounds_do_not_rank_are_named():
    assert STEADY.unranked == []
    assert NOISY.unranked == [(0, 1)]
    assert "vary too much to rank K = 0 and 1; pass more rounds" in str(NOISY)
    assert "0.33" in str(NOISY)  # of K = 1: (13.125 - 9.375) / 11.25
    assert "rank" not in str(STEADY)
    assert CostCurve([1.0], {0: [1.0], 1: [9.0]}).unranked == [(0, 1)]  # one round shows nothing
