"""`SpeculationStats` as a line, a text, a page and pandas frames."""

from collections.abc import Iterable
from typing import Any

from specdec.lab.show.table import Table, need
from specdec.lab.show.text import draft_size

_FIGURES = "acceptance_length", "acceptance_rate", "block_efficiency"


def line_of(stats: Any) -> str:
    """One line, for `repr`."""
    totals = stats.totals
    return (
        f"SpeculationStats(acceptance length {stats.acceptance_length:.2f}, rate "
        f"{stats.acceptance_rate:.2f}, {totals.emitted} tokens in {totals.steps} steps of "
        f"{len(stats.steps)} rows, {draft_size(stats.num_draft_tokens, stats.depth)}"
        + (f", {stats.wall_s:.2f} s)" if stats.wall_s is not None else ")")
    )


def text_of(stats: Any) -> str:
    """Rates, counts, and a table of the draft positions."""
    time = ""
    if stats.tokens_per_s is not None:
        time = f", {stats.wall_s:.2f} s, {stats.tokens_per_s:.1f} tokens/s"
    counts = f"{stats.totals.emitted} tokens, {stats.totals.steps} steps{time}"
    positions = [str(_positions(stats))] if stats.num_draft_tokens else []
    return "\n".join(["   ".join(_figures(stats)), counts, *positions])


def html_of(stats: Any) -> str:
    """Rates and the table, for notebooks."""
    return f"<p>{', '.join(_figures(stats))}</p>{_positions(stats).html()}"


def frame_of_positions(stats: Any):
    """See `SpeculationStats.to_frame`."""
    pandas = need("pandas", "to_frame()")
    columns = {
        "reached": stats.reached_at,
        "accepted": stats.accepted_at,
        "conditional_rate": stats.conditional_rates,
        "joint_rate": stats.joint_rates,
    }
    index = pandas.RangeIndex(1, stats.depth + 1, name="position")
    return pandas.DataFrame(columns, index=index)


def frame_of_rows(stats: Any, names: Iterable[str]):
    """See `SpeculationStats.to_frame_of_rows`; these are the names of the counts."""
    pandas = need("pandas", "to_frame_of_rows()")
    counts = {name: getattr(stats, name) for name in names}
    frame = pandas.DataFrame(counts, index=pandas.RangeIndex(len(stats.steps), name="row"))
    steps = frame.steps.where(frame.steps > 0)  # 0 / 0 is no rate
    frame["acceptance_length"] = 1 + frame.accepted / steps
    frame["acceptance_rate"] = frame.accepted / frame.drafted.where(frame.drafted > 0)
    frame["block_efficiency"] = frame.emitted / steps
    return frame


def _figures(stats: Any) -> list[str]:
    return [f"{name.replace('_', ' ')} {getattr(stats, name):.2f}" for name in _FIGURES]


def _positions(stats: Any) -> Table:
    columns = stats.reached_at, stats.accepted_at, stats.conditional_rates, stats.joint_rates
    rows = [
        [f"{i:>8}", str(reached), str(accepted), f"{conditional:.2f}", f"{joint:.2f}"]
        for i, (reached, accepted, conditional, joint) in enumerate(
            zip(*columns, strict=True), start=1
        )
    ]
    return Table(["position", "reached", "accepted", "conditional", "joint"], rows)
