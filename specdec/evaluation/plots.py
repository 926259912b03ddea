"""Plots of what `evaluate`, `replay`, `measure_costs` and traces return.

Every function draws on the matplotlib axes `ax`, or on new ones, and returns them. They need
matplotlib: `pip install 'specdec-torch[plots]'`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from specdec.evaluation.costs import CostCurve, CostTable
from specdec.evaluation.evaluation import Evaluation
from specdec.evaluation.intervals import Estimate
from specdec.evaluation.replay import Replay
from specdec.show.table import need
from specdec.trace import Trace

_PARTS = {"draft": "#4dae4d", "verify": "#3b6fb6", "sample": "#d98c3f", "host": "#b0b0b0"}
_MOST_NUMBERS = 40


def acceptance_by_position(evaluations: Mapping[str, Evaluation], *, ax: Any = None) -> Any:
    """Conditional acceptance rate at each draft position, with intervals.

    Args:
        evaluations: by the name of their line.

    Example:
        >>> import torch
        >>> from specdec import PromptLookupDrafter, SpeculativeGenerator, evaluate, zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), PromptLookupDrafter(2))
        >>> evaluation = evaluate(generator, torch.tensor([[7, 8, 7, 8]]), max_new_tokens=4)
        >>> axes = acceptance_by_position({"lookup": evaluation})  # doctest: +SKIP
    """
    lines = {
        name: {i: e.estimates[f"conditional_rate_{i}"] for i in range(1, e.stats.depth + 1)}
        for name, e in evaluations.items()
    }
    ax, _ = _lines(ax, lines)
    ax.set(xlabel="draft position", ylabel="accepted, given all before", ylim=(0, 1.02))
    return _finish(ax, integers=True)


def acceptance_by_temperature(
    lines: Mapping[str, Mapping[float, Evaluation]], *, ax: Any = None
) -> Any:
    """Acceptance length against the target's temperature, with intervals.

    Args:
        lines: by name, evaluations by temperature.
    """
    return _finish(_acceptance(lines, "temperature", ax))


def time_per_token(
    lines: Mapping[str, tuple[Sequence[Replay], CostCurve]], *, ax: Any = None
) -> Any:
    """Predicted milliseconds per token against K, and plain decoding as a level.

    Args:
        lines: by name, replays at several K and the cost curve of their generator.
    """
    plain = {name: costs.medians(0)[0] for name, (_, costs) in lines.items()}
    times: dict[str, dict[int, Estimate]] = {name: {} for name in lines}
    for name, (replays, costs) in lines.items():
        for found in replays:
            ends = found.speedup(costs)
            ms = (plain[name] / speed for speed in (ends.value, ends.high, ends.low))
            times[name][found.num_draft_tokens] = Estimate(*ms)
    ax, drawn = _lines(ax, times)
    for name, line in drawn.items():
        ax.axhline(plain[name], color=line.get_color(), linestyle=":", linewidth=1)
    ax.set(xlabel="K, draft tokens per step", ylabel="ms per token (dotted: plain)")
    ax.set_ylim(bottom=0)
    return _finish(ax, integers=True)


def cost_roof(replays: Sequence[Replay], costs: CostCurve, *, ax: Any = None) -> Any:
    """What a step yields against what it costs, in units of a plain step.

    Three lines over K: what a perfect drafter would yield (K + 1), what this one yields (acceptance
    length), and what a step costs (step / plain step), which is the acceptance length at which
    drafting breaks even. The speed-up is the quotient of the last two.

    Args:
        replays: at several K.
        costs: of the same generator.
    """
    lengths = {found.num_draft_tokens: found.acceptance_length for found in replays}
    ks = sorted(lengths)
    plain, table = costs.medians(ks[-1])
    ax, _ = _lines(ax, {"acceptance length": lengths})
    ax.plot(ks, [k + 1 for k in ks], color="0.6", linestyle="--", label="everything accepted")
    ax.plot(ks, [table[k] / plain for k in ks], marker="s", label="cost of a step: break-even")
    ax.set(xlabel="K, draft tokens per step", ylabel="plain steps")
    ax.set_ylim(bottom=0)
    return _finish(ax, integers=True)


def cost_by_length(
    table: CostTable, rates: Sequence[float] | None = None, *, ax: Any = None
) -> Any:
    """Milliseconds of a step against K, a line for each size with the quarter and three quarters of
    its rounds, and a star at the K of most tokens per millisecond.

    Args:
        table: from `costs`.
        rates: conditional acceptance by position, `evaluation.stats.conditional_rates` for
            instance; without them there are no stars.
    """
    lines = {}
    for (rows, tokens), curve in table.curves.items():
        ends = {k: np.quantile(ms, [0.5, 0.25, 0.75]) for k, ms in curve.step_ms.items()}
        lines[f"{rows} x {tokens} tokens"] = {k: Estimate(*each) for k, each in ends.items()}
    ax, drawn = _lines(ax, lines)
    best = table.best(rates) if rates is not None else {}
    for line, k in zip(drawn.values(), best.values(), strict=False):
        index = sorted(next(iter(lines.values()))).index(k)
        x, y = line.get_xdata()[index], line.get_ydata()[index]
        ax.plot([x], [y], marker="*", markersize=14, color=line.get_color())
    ax.set(xlabel="K, draft tokens per step", ylabel="ms per step")
    ax.set_ylim(bottom=0)
    return _finish(ax, integers=True)


def timeline(trace: Trace, *, row: int = 0, ax: Any = None) -> Any:
    """The steps of a generation one after the other, by their parts, with the number of tokens that
    a row got from each (left out above 40 steps, where the numbers would overlap).

    Args:
        trace: of the generation.
        row: whose tokens are counted.
    """
    ax = _axes(ax, size=(9, 2.2))
    gained = {
        numbers.step: len(step.new_tokens)
        for step, numbers in zip(trace.steps[row], trace.numbers[row], strict=True)
    }
    start = 0.0
    for index, taken in enumerate(trace.times):
        for part, colour in _PARTS.items():
            width = getattr(taken, f"{part}_ms")
            label = part if index == 0 else None
            ax.barh(0, width, left=start, height=0.6, color=colour, label=label)
            start += width
        if len(trace.times) <= _MOST_NUMBERS:
            middle, count = start - taken.total_ms / 2, gained.get(index, 0)
            ax.text(middle, 0.34, f"+{count}", ha="center", va="bottom", fontsize=8)
    ax.set(xlabel="ms since the first step", yticks=[], ylim=(-0.4, 0.75), xlim=(0, start))
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.legend(ncols=4, loc="lower right", bbox_to_anchor=(1.0, 0.95), frameon=False)
    ax.figure.tight_layout()
    return ax


def acceptance_by_length(lines: Mapping[str, Mapping[int, Evaluation]], *, ax: Any = None) -> Any:
    """Acceptance length against K, with intervals.

    Args:
        lines: by name, evaluations by K.
    """
    return _finish(_acceptance(lines, "draft tokens (K)", ax), integers=True)


def _acceptance(lines: Mapping[str, Mapping[float, Evaluation]], label: str, ax: Any) -> Any:
    """The axes with a line of acceptance lengths per name."""
    estimates = {
        name: {x: found.estimates["acceptance_length"] for x, found in by_x.items()}
        for name, by_x in lines.items()
    }
    ax, _ = _lines(ax, estimates)
    ax.set(xlabel=label, ylabel="acceptance length")
    return ax


def _axes(ax: Any, size: tuple[float, float] = (7.2, 3.6)) -> Any:
    return ax or need("matplotlib.pyplot", "plots").subplots(figsize=size)[1]


def _lines(ax: Any, lines: Mapping[str, Mapping[float, Estimate]]) -> tuple[Any, dict[str, Any]]:
    """The axes with a line per name through values at x, and intervals as bars; and the lines.
    Those of several names are shifted along x, so that their intervals stand side by side.
    """
    ax, drawn = _axes(ax), {}
    every = sorted({x for estimates in lines.values() for x in estimates})
    gap = min((b - a for a, b in pairwise(every)), default=1)
    for number, (name, estimates) in enumerate(lines.items()):
        shift = (number - (len(lines) - 1) / 2) * 0.06 * gap
        xs = [x + shift for x in sorted(estimates)]
        found = [estimates[x] for x in sorted(estimates)]
        style = {"marker": "o", "markersize": 4.5, "label": name}
        (drawn[name],) = ax.plot(xs, [e.value for e in found], **style)
        ends = [e.low for e in found], [e.high for e in found]
        ax.vlines(xs, *ends, color=drawn[name].get_color(), alpha=0.6)
    return ax, drawn


def _finish(ax: Any, *, integers: bool = False) -> Any:
    if integers:
        ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(alpha=0.25)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    # Beside the axes, where no line can run through it.
    ax.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    ax.figure.tight_layout()
    return ax
