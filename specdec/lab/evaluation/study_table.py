"""The printed table of a study: a column for each value of an axis, a line for all others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from specdec.lab.evaluation.cells import (
    CHOICES,
    FIGURES,
    Cell,
    axes_of,
    called,
    joined,
    lines_of,
    name_of,
)
from specdec.lab.evaluation.evaluation import SPEED_UNIT, Evaluation
from specdec.lab.evaluation.intervals import MIN_CLUSTERS, Estimate, counted, holm
from specdec.lab.evaluation.paired import p_values, quotient, value_of
from specdec.lab.evaluation.swaps import PairedTest, PairedTests
from specdec.lab.show.table import Table


def study_table(
    cells: Sequence[Cell],
    runs: Sequence[Evaluation],
    columns: str,
    of: str,
    *,
    tests: PairedTests | None = None,
    stars: Sequence[float] = (),
    notes: Sequence[str] = (),
) -> Table:
    """Bold is what is shown to be better than every other cell of its column and conditions, by
    paired tests that hold for all columns together (Holm). An interval is of its cell, or of its
    difference, alone.

    Args:
        cells, runs: of a study.
        columns: an axis.
        of: a key of `FIGURES`.
        tests: adds a column with their differences to each.
        stars: levels of their adjusted p-values, a star each.
        notes: further ones.
    """
    found: dict[int, list[PairedTest]] = {}  # several, where a run has several partners
    for test in tests.tests if tests else ():
        found.setdefault(id(runs[cells.index(test.cell)]), []).append(test)
    best = set() if tests else set(map(id, _best_of_columns(cells, runs, columns, of)))

    def shown(run: Evaluation | None) -> list[str]:
        if run is None:
            return ["", ""] if tests else [""]
        own = [format(run.estimates[of], FIGURES[of])]
        if len(found.get(id(run), ())) == 1:
            (test,) = found[id(run)]
            marks = "*" * sum(test.adjusted <= level for level in stars)
            own.append(format(test.difference, "+" + FIGURES[of]) + marks)
        return own + [""] * (bool(tests) + 1 - len(own))

    axes, lines = axes_of(cells), lines_of(cells, runs, columns)
    rows, bold, names = [], set(), list(lines[0].labels)
    for r, line in enumerate(lines):
        labels = [joined(name, those, axes[name]) for name, those in line.labels.items()]
        own = [line.runs.get(value) for value in axes[columns]]
        labels[-1] += " (lossy)" * any(run is not None and run.lossy for run in own)
        rows.append([*labels, *(text for run in own for text in shown(run))])
        bold |= {(r, len(names) + i) for i, run in enumerate(own) if id(run) in best}
    header = [name.replace("_", " ") for name in names]
    minus = ", ".join(called(n, v) for n, v in tests.first.items()) if tests else ""
    for value in axes[columns]:
        header += [called(columns, value)] + [f"minus {minus}"] * bool(tests)
    every = [_intervals(runs, of), *_shared(cells, runs)]
    if tests:
        marks = ", ".join(f"{'*' * i} p ≤ {level:g}" for i, level in enumerate(stars, start=1))
        every.append(tests.note() + f" {marks}." * bool(stars))
    every += [*notes, *_unlike(cells, runs)]
    return Table(header, rows, tuple(every), frozenset(bold), labels=len(names))


def speed_table(
    cells: Sequence[Cell], runs: Sequence[Evaluation], notes: Sequence[str] = ()
) -> Table:
    """A line for each drafter, with the speed over that of the first."""
    rows = []
    for cell, run in zip(cells, runs, strict=True):
        values = [run.estimates[name].value for name in ("acceptance_length", "ms_per_token")]
        texts = ["" if math.isnan(value) else f"{value:.2f}" for value in values]
        rows.append([str(cell["drafter"]), *texts, format(quotient(runs[0], run), ".2f")])
    header = ["", "acceptance length", "ms per token", "speed-up"]
    first = f"Speed-up over {cells[0]['drafter']}"
    every = (_intervals(runs, "tokens_per_second", title=first), *_shared(cells, runs))
    return Table(header, rows, (*every, *notes, *_unlike(cells, runs)))


def provenance_of(runs: Sequence[Evaluation]) -> str:
    """How many prompts, which seeds, what hardware and which commit, of runs that say it.

    Example:
        >>> from specdec.lab.evaluation import sweep
        >>> provenance_of(sweep(drafters=["lookup"], limit=2, max_new_tokens=2).runs)[:26]
        '2 prompts, 1 text of each,'
    """
    abouts = [run.about for run in runs if "run" in run.about]
    if not abouts:
        return ""
    plans = [about["run"]["plan"] for about in abouts]
    parts = [
        [counted(about["run"]["prompts"]["count"], "prompt") for about in abouts],
        [f"{counted(max(plan['samples'] for plan in plans), 'text')} of each"],
        [f"at most {plan['max_new_tokens']} tokens" for plan in plans],
        [f"seed {plan['seed']}" for plan in plans],
        [about["run"]["device"] for about in abouts],
        [about["run"]["dtype"] for about in abouts],
        [f"commit {(about.get('git_revision') or 'unknown')[:12]}" for about in abouts],
    ]
    return ", ".join(" and ".join(dict.fromkeys(each)) for each in parts) + "."


def rank(run: Evaluation, of: str) -> float:
    """Smaller is better; what is not known comes last."""
    value = value_of(run, of)
    return math.inf if math.isnan(value) else value if of == "ms_per_token" else -value


def ranked(cells: Sequence[Cell], runs: Sequence[Evaluation], of: str) -> dict[str, Estimate]:
    """The number of every run, the best first, by what is particular to it."""
    own: dict[int, list[Cell]] = {}
    for cell, run in zip(cells, runs, strict=True):
        own.setdefault(id(run), []).append(cell)
    found = {}
    for run in sorted({id(run): run for run in runs}.values(), key=lambda run: rank(run, of)):
        name = name_of(axes_of(own[id(run)]), cells) + " (lossy)" * bool(run.lossy)
        found[name] = run.estimates[of]
    return found


def _best_of_columns(
    cells: Sequence[Cell], runs: Sequence[Evaluation], columns: str, of: str
) -> Iterator[Evaluation]:
    """The runs that are better than all others of their column and conditions."""
    axes, groups = axes_of(cells), {}
    for cell, run in zip(cells, runs, strict=True):
        key = tuple(cell.get(n) for n in axes if n not in CHOICES or n == columns)
        groups.setdefault(key, {})[id(run)] = run
    leaders, chances = [], []
    for group in groups.values():
        ranked = sorted(group.values(), key=lambda run: rank(run, of))
        if len(ranked) > 1:  # the least certain of its differences counts
            leaders.append(ranked[0])
            chances.append(p_values(ranked, of)[0, 1:].max())
    held = zip(leaders, holm(chances), strict=True)
    return (run for run, p in held if p <= 1 - run.level)


def _intervals(runs: Sequence[Evaluation], of: str, title: str | None = None) -> str:
    """What is shown, and what brackets are."""
    title = title or f"{of[0].upper()}{of[1:]}".replace("_", " ")
    is_time = of in ("ms_per_token", "tokens_per_second")
    unit = SPEED_UNIT if is_time else "prompt"
    clusters = (run.separate_batches if is_time else run.stats_of_prompts for run in runs)
    fewest, level = min(map(len, clusters)), f"{100 * runs[0].level:g} %"
    if fewest < MIN_CLUSTERS:
        return f"{title}; no interval for {counted(fewest, unit)}, fewer than {MIN_CLUSTERS}."
    units = f"{unit}{'e' * is_time}s"
    return f"{title}; {level} intervals over {units}."


def _shared(cells: Sequence[Cell], runs: Sequence[Evaluation]) -> Iterator[str]:
    """Notes of cells that are one run, and of lossy ones."""
    drafting = [run for run in runs if run.num_draft_tokens != 0]
    if again := len(drafting) - len(set(map(id, drafting))):
        yield (
            f"{again} of {len(cells)} cells are one rule with another cell and did not run again: "
            "they share its line, or its number."
        )
    if any(run.lossy for run in runs):
        yield "Lossy rules: their texts are not the target's."


def _unlike(cells: Sequence[Cell], runs: Sequence[Evaluation]) -> Iterator[str]:
    """A note of greedy cells whose text is not that of the first cell of their conditions."""
    texts: dict[tuple, tuple[int, list]] = {}
    others: dict[int, list[int]] = {}
    axes, seen = axes_of(cells), set()
    for i, (cell, run) in enumerate(zip(cells, runs, strict=True)):
        if cell["temperature"] == 0 and id(run) not in seen:
            seen.add(id(run))
            key = tuple(cell.get(n) for n in axes if n not in CHOICES)
            own = [row.new_tokens for row in run.rows]
            first, theirs = texts.setdefault(key, (i, own))
            if own != theirs:
                others.setdefault(first, []).append(i)
    if others:
        named = [name_of({n: [v] for n, v in cell.items()}, cells) for cell in cells]
        first, *rest = (named[i] for one, those in others.items() for i in (one, *those))
        yield f"Greedy text differs from that of {first}: {'; '.join(rest)}."
