"""Plots of what `evaluate`, `replay`, `measure_costs` and traces return.

Every function draws on the matplotlib axes `ax`, or on new ones, and returns them. They need
matplotlib: `pip install 'specdec-torch[plots]'`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from specdec.evaluation.costs import CostCurve
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
    ax = _axes(ax)
    for shift, (name, evaluation) in _beside(evaluations, gap=1.0):
        positions = range(1, evaluation.num_draft_tokens + 1)
        found = [evaluation.estimates[f"conditional_rate_{i}"] for i in positions]
        _line(ax, [i + shift for i in positions], found, name)
    ax.set(xlabel="draft position", ylabel="accepted, given all before", ylim=(0, 1.02))
    return _finish(ax, integers=True)


def acceptance_by_temperature(
    lines: Mapping[str, Mapping[float, Evaluation]], *, ax: Any = None
) -> Any:
    """Acceptance length against the target's temperature, with intervals.

    Args:
        lines: by name, evaluations by temperature.
    """
    ax = _axes(ax)
    every = sorted({t for by_temperature in lines.values() for t in by_temperature})
    gap = min((b - a for a, b in pairwise(every)), default=1.0)
    for shift, (name, by_temperature) in _beside(lines, gap):
        temperatures = sorted(by_temperature)
        found = [by_temperature[t].estimates["acceptance_length"] for t in temperatures]
        _line(ax, [t + shift for t in temperatures], found, name)
    ax.set(xlabel="temperature", ylabel="acceptance length")
    return _finish(ax)


def time_per_token(
    lines: Mapping[str, tuple[Sequence[Replay], CostCurve]], *, ax: Any = None
) -> Any:
    """Predicted milliseconds per token against K, and plain decoding as a level.

    Args:
        lines: by name, replays at several K and the cost curve of their generator.
    """
    ax = _axes(ax)
    for shift, (name, (replays, costs)) in _beside(lines, gap=1.0):
        ordered = sorted(replays, key=lambda found: found.num_draft_tokens)
        plain, _ = costs.medians(0)
        speeds = [found.speedup(costs) for found in ordered]
        times = [Estimate(plain / s.value, plain / s.high, plain / s.low) for s in speeds]
        line = _line(ax, [found.num_draft_tokens + shift for found in ordered], times, name)
        ax.axhline(plain, color=line.get_color(), linestyle=":", linewidth=1)
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
    ax = _axes(ax)
    ordered = sorted(replays, key=lambda found: found.num_draft_tokens)
    ks = [found.num_draft_tokens for found in ordered]
    plain, table = costs.medians(max(ks))
    ax.plot(ks, [k + 1 for k in ks], color="0.6", linestyle="--", label="everything accepted")
    _line(ax, ks, [found.acceptance_length for found in ordered], "acceptance length")
    ax.plot(ks, [table[k] / plain for k in ks], marker="s", label="cost of a step: break-even")
    ax.set(xlabel="K, draft tokens per step", ylabel="plain steps")
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


def _axes(ax: Any, size: tuple[float, float] = (7.2, 3.6)) -> Any:
    return ax or need("matplotlib.pyplot", "plots").subplots(figsize=size)[1]


def _beside(lines: Mapping[str, Any], gap: float) -> Iterator[tuple[float, tuple[str, Any]]]:
    """The lines of a plot, each with a shift along x, of which neighbouring values are a gap apart,
    so that their intervals stand side by side.
    """
    middle = (len(lines) - 1) / 2
    return (((i - middle) * 0.06 * gap, line) for i, line in enumerate(lines.items()))


def _line(ax: Any, xs: list, found: list[Estimate], name: str) -> Any:
    """A line through values, and their intervals as bars."""
    (line,) = ax.plot(xs, [e.value for e in found], marker="o", markersize=4.5, label=name)
    ax.vlines(
        xs, [e.low for e in found], [e.high for e in found], color=line.get_color(), alpha=0.6
    )
    return line


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
