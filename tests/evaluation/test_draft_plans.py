"""Cost tables by size, and plans that say which K."""

import numpy as np
import pytest
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts

from specdec import ModelDrafter, SpeculativeGenerator, Tree
from specdec.cli import main
from specdec.evaluation import CostCurve, CostTable, costs, plan_drafts, plots
from specdec.evaluation.draft_plan import _speedup
from specdec.loop.lengths import AutoLength

TARGET = build("llama")
GENERATOR = SpeculativeGenerator(TARGET, ModelDrafter(perturbed(TARGET), 3))
STEADY = CostCurve([10.0] * 4, {0: [10.0] * 4, 1: [11.0] * 4, 4: [14.0] * 4})
NOISY = CostCurve([10.0] * 4, {0: [10.0] * 4, 1: [9.0, 13.0, 9.5, 13.5], 4: [50.0] * 4})


def test_costs_are_measured_at_every_size_and_are_what_auto_length_takes():
    table = costs(GENERATOR, batch_sizes=[1, 2], contexts=[8, 4], num_steps=1, rounds=2)
    assert list(table.curves) == [(1, 8), (1, 4), (2, 8), (2, 4)]
    assert len(table.records()) == 4 * 4 * 2
    assert {"rows", "tokens", "num_draft_tokens", "step_ms"} <= table.records()[0].keys()
    assert set(AutoLength(table.step_ms).costs) == set(table.curves)
    assert "rows  tokens  K" in str(table)


def test_lengths_that_the_rounds_do_not_rank_are_named():
    assert STEADY.unranked == []
    assert NOISY.unranked == [(0, 1)]
    assert "vary too much to rank K = 0 and 1; pass more rounds" in str(NOISY)
    assert "0.33" in str(NOISY)  # of K = 1: (13.125 - 9.375) / 11.25
    assert "rank" not in str(STEADY)
    assert CostCurve([1.0], {0: [1.0], 1: [9.0]}).unranked == [(0, 1)]  # one round shows nothing


def test_the_best_k_is_that_of_most_tokens_per_millisecond_and_is_marked():
    pytest.importorskip("matplotlib").use("agg")
    table = CostTable({(1, 64): STEADY, (8, 64): NOISY})
    rates = [0.9, 0.8, 0.7, 0.6]
    assert table.best(rates) == {(1, 64): 4, (8, 64): 1}
    assert table.best([0.05] * 4) == {(1, 64): 0, (8, 64): 0}
    ax = plots.cost_by_length(table, rates)
    stars = [line for line in ax.get_lines() if line.get_marker() == "*"]
    assert [line.get_ydata()[0] for line in stars] == [14.0, 11.25]
    assert not [
        line for line in plots.cost_by_length(table).get_lines() if line.get_marker() == "*"
    ]


def test_a_prediction_is_the_time_of_the_counted_steps():
    counts = np.array([[8, 2], [8, 4], [4, 4]])  # plain steps and ours, of three prompts
    times = np.array([[[10.0] * 3, [12.0] * 3], [[16.0] * 3, [30.0] * 3]])  # one row, then two
    # Two rows, then the last one alone, 6 ms to read each batch.
    plain = 8 * 16 + 4 * 10 + 2 * 6
    ours = 2 * 30 + 2 * 12 + 4 * 12 + 2 * 7
    found = _speedup(counts, 2, times, [6.0, 7.0])
    assert found.value == pytest.approx(plain / ours)
    assert not found.has_interval
    many = _speedup(np.tile(counts[:2], (8, 1)), 1, times, [0.0, 0.0])
    assert many.value == pytest.approx(64 * 10 / (24 * 12))
    assert many.low < many.value < many.high


def test_a_plan_predicts_every_draft_and_measures_the_best():
    ids, mask = ragged_prompts(VOCAB, 3, 7, 5, 4, 6, 8)
    prompts = [row[m.bool()].tolist() for row, m in zip(ids, mask, strict=True)]
    trees = SpeculativeGenerator(TARGET, ModelDrafter(perturbed(TARGET), tree=Tree(4, 2)))
    short = {"batch_sizes": [2, 1], "max_new_tokens": 8, "rounds": 1}
    plan = plan_drafts([GENERATOR, trees], prompts, **short)
    drafts = ["K = 1", "K = 2", "K = 3", "tree 3x2", "tree 4x2"]
    assert set(plan.predicted) == {(b, draft) for b in (1, 2) for draft in drafts}
    assert list(plan.measured) == [(b, plan.best(b)) for b in (2, 1)]
    assert [r["is_best"] for r in plan.records()].count(True) == 2
    assert set(plan.step_ms) == {(b, draft) for b in (1, 2) for draft in (None, *drafts)}
    assert "ms with 2 rows" in str(plan)
    with pytest.raises(ValueError, match="batches of 8 rows need as many prompts, got 6"):
        plan_drafts(GENERATOR, prompts)


def test_the_command_prints_a_plan(capsys):
    arguments = ["plan", "--drafter", "lookup", "--num-draft-tokens", "2", "--batch-sizes", "1"]
    arguments += ["--tree", "4x2", "--max-new-tokens", "4", "--rounds", "1"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    drafts = ["K = 1", "K = 2", "tree 3x2", "tree 4x2"]
    assert all(draft in line for draft, line in zip(drafts, lines[1:5], strict=True))
    assert main(["plan", "--drafter", "none"]) == 2
    assert "plan compares lengths of drafts" in capsys.readouterr().err
