"""Plots show the numbers that they were given."""

import numpy as np
import pytest
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts

from specdec import ModelDrafter, SpeculativeGenerator
from specdec.lab.evaluation import evaluate, plots
from specdec.lab.trace import Trace

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("agg")

TARGET = build("llama")
GENERATOR = SpeculativeGenerator(TARGET, ModelDrafter(perturbed(TARGET), 4))
IDS, MASK = ragged_prompts(VOCAB, 3, 7, 5, 4, 6, 8, 2)
PROMPTS = [row[mask.bool()].tolist() for row, mask in zip(IDS, MASK, strict=True)]
OPTIONS = {"max_new_tokens": 12, "temperature": 0.8}


@pytest.fixture(autouse=True)
def _closed_figures():
    yield
    matplotlib.pyplot.close("all")


def lines_of(ax) -> dict[str, np.ndarray]:
    return {line.get_label(): line.get_ydata() for line in ax.get_lines()}


def test_acceptance_by_position():
    evaluation = evaluate(GENERATOR, PROMPTS, **OPTIONS)
    ax = plots.acceptance_by_position({"draft": evaluation})
    assert lines_of(ax)["draft"].tolist() == pytest.approx(evaluation.stats.conditional_rates)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["draft"]


def test_the_intervals_of_several_lines_stand_side_by_side():
    evaluation = evaluate(GENERATOR, PROMPTS * 2, **OPTIONS)
    ax = plots.acceptance_by_position({name: evaluation for name in "abc"})
    firsts = [line.get_xdata()[0] for line in ax.get_lines()]
    assert firsts[0] < firsts[1] == 1 < firsts[2]
    for line, bars in zip(ax.get_lines(), ax.collections, strict=True):
        for i, ((x, low), (_, high)) in enumerate(bars.get_segments()):
            estimate = evaluation.estimates[f"conditional_rate_{i + 1}"]
            assert (low, high) == pytest.approx((estimate.low, estimate.high), nan_ok=True)
            assert x == line.get_xdata()[i]


def test_a_timeline_has_every_part_of_every_step():
    trace = GENERATOR.generate(IDS, MASK, max_new_tokens=9, trace=True).trace
    ax = plots.timeline(trace, row=2)
    widths = [patch.get_width() for patch in ax.patches]
    assert sum(widths) == pytest.approx(sum(taken.total_ms for taken in trace.times))
    gained = [int(text.get_text()) for text in ax.texts]
    assert sum(gained) == 9
    assert len(gained) == len(trace.times)
    long = Trace(trace.steps, trace.numbers, trace.times * 41, trace.prompts)
    assert not plots.timeline(long).texts  # they would overlap
