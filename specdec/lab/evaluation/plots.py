"""Plots of what `evaluate` and traces return, and of studies.

Every function draws on the matplotlib axes `ax`, or on new ones, and returns them. They need
matplotlib: `pip install 'specdec-torch[plots]'`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from specdec.arguments import shown
from specdec.lab.evaluation.cells import axes_of, lines_of, name_of
from specdec.lab.evaluation.evaluation import Evaluation
from specdec.lab.evaluation.intervals import Estimate
from specdec.lab.evaluation.study_table import ranked
from specdec.lab.show.table import need
from specdec.lab.trace import Trace

_PARTS = {"draft": "#4dae4d", "verify": "#3b6fb6", "sample": "#d98c3f", "host": "#b0b0b0"}
_DASHES = ("-", "--", ":", "-.")
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
    if not isinstance(evaluations, Mapping):
        raise TypeError(
            "evaluations must be a mapping by the name of a line, {'eagle3': evaluation}, got "
            f"{shown(evaluations)}"
        )
    lines = {
        name: {i: e.estimates[f"conditional_rate_{i}"] for i in range(1, e.stats.depth + 1)}
        for name, e in evaluations.items()
    }
    ax, _ = _lines(ax, lines)
    ax.set(xlabel="draft position", ylabel="accepted, given all before", ylim=(0, 1.02))
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


def study(panels: Mapping[str, Any], x: str, of: str, *, ax: Any = None) -> Any:
    """What `Study.plot` draws.

    Args:
        panels: a `Study` of each condition, by its title.
        x: an axis of the study; of numbers for lines, else the cells are ranked.
        of: the number that is shown.

    Returns:
        The figure.
    """
    if ax is not None and len(panels) > 1:
        raise ValueError(f"ax= has room for one of {len(panels)} panels: {', '.join(panels)}")
    pyplot = need("matplotlib.pyplot", "plots")
    is_line = all(_is_number(v) for found in panels.values() for v in axes_of(found.cells)[x])
    if ax is None:
        size = 4.6 * len(panels) + 1.4, 3.6 if is_line else 4.2
        options = {"figsize": size, "squeeze": False, "layout": "constrained"}
        axes = pyplot.subplots(1, len(panels), sharey=is_line, **options)[1][0]
    else:
        axes = [ax]
    for ax, (title, found) in zip(axes, panels.items(), strict=True):
        if is_line:
            own = lines_of(found.cells, found.runs, x)
            lines = {name_of(line.labels, found.cells): line for line in own}
            styles = {name: _style(found, line) for name, line in lines.items()}
            values = {
                n: {v: r.estimates[of] for v, r in line.runs.items()} for n, line in lines.items()
            }
            _lines(ax, values, styles)
            ax.set(xlabel="K, draft tokens per step" if x == "draft" else x.replace("_", " "))
            if x == "draft":
                ax.set_xticks(axes_of(found.cells)[x])
        else:
            _ranking(ax, ranked(found.cells, found.runs, of), of)
        ax.set_title(title, fontsize=10)
        ax.grid(alpha=0.25, axis="both" if is_line else "x")
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
    if is_line:
        axes[0].set_ylabel(of.replace("_", " "))
        shown: dict[str, dict[str, Any]] = {}  # colours of drafters, dashes of what else differs
        for found in panels.values():
            for line in lines_of(found.cells, found.runs, x):
                style = _style(found, line)
                drafter, _, others = name_of(line.labels, found.cells).partition(", ")
                shown.setdefault(drafter, {"color": style["color"]})
                if others:
                    shown.setdefault(others, {**style, "color": "0.4"})
        handles = [pyplot.Line2D([], [], label=name, **style) for name, style in shown.items()]
        axes[-1].legend(handles=handles, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return axes[0].figure


def _style(found: Any, line: Any) -> dict[str, Any]:
    """A colour for each drafter, a dash for each value of the next axis."""
    axes = axes_of(found.cells)
    places = {
        name: axes[name].index(values[0])
        for name, values in line.labels.items()
        if name == "drafter" or set(values) != set(axes[name])
    }
    colour = places.pop("drafter", 0)
    return {"color": f"C{colour % 10}", "linestyle": _DASHES[next(iter(places.values()), 0) % 4]}


def _ranking(ax: Any, ranked: Mapping[str, Estimate], of: str) -> None:
    """Bars from the best downwards, with intervals."""
    names, values = list(ranked), list(ranked.values())
    ends = np.nan_to_num([[e.value - e.low, e.high - e.value] for e in values]).T
    ax.barh(names, [e.value for e in values], xerr=ends, color=_PARTS["verify"], alpha=0.75)
    ax.invert_yaxis()
    ax.set_xlabel(of.replace("_", " "))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _axes(ax: Any, size: tuple[float, float] = (7.2, 3.6)) -> Any:
    return ax or need("matplotlib.pyplot", "plots").subplots(figsize=size)[1]


def _lines(
    ax: Any,
    lines: Mapping[str, Mapping[float, Estimate]],
    styles: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """The axes with a line per name through values at x, and intervals as bars; and the lines.
    Those of several names are shifted along x, so that their intervals stand side by side.
    """
    ax, drawn = _axes(ax), {}
    every = sorted({x for estimates in lines.values() for x in estimates})
    gap = min((b - a for a, b in pairwise(every)), default=1)
    for number, (name, estimates) in enumerate(lines.items()):
        shift = (number - (len(lines) - 1) / 2) * min(0.06, 0.2 / len(lines)) * gap
        xs = [x + shift for x in sorted(estimates)]
        found = [estimates[x] for x in sorted(estimates)]
        style = {"marker": "o", "markersize": 4.5, "label": name, **(styles or {}).get(name, {})}
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
