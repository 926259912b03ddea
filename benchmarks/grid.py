"""The runs of `examples/ablate.py` as a table with a column for each K.

    python benchmarks/grid.py grid
    python benchmarks/grid.py grid --value tokens_per_second
    python benchmarks/grid.py grid --over eagle3,0,block          # paired differences
    python benchmarks/grid.py grid --latex
    python benchmarks/grid.py grid --plot grid.png

The best cell of a temperature and K is bold where it is better than each of the others beyond
chance: the interval of the difference, paired over prompts, lies above 0.
"""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path
from urllib.parse import unquote

from specdec.evaluation import Evaluation, Table, difference
from specdec.evaluation.plots import acceptance_by_length

Line = tuple[str, float, str]
"""Drafter, temperature, and sampler with what differs of the proposal."""
Grid = dict[Line, dict[int, Evaluation]]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what examples/ablate.py wrote")
    parser.add_argument("--value", default="acceptance_length", help="an estimate of the runs")
    parser.add_argument("--over", help="DRAFTER,TEMPERATURE,SAMPLER: differences to this line")
    parser.add_argument("--latex", action="store_true", help="for the package booktabs")
    parser.add_argument("--plot", type=Path, help="file of a picture of the acceptance lengths")
    arguments = parser.parse_args()
    grid = read(arguments.folder)
    if arguments.over is None:
        shown = table(grid, arguments.value)
    else:
        shown = differences(grid, arguments.over, arguments.value)
    print(shown.latex() if arguments.latex else shown.markdown())
    if arguments.plot is not None:
        named = {f"{d}, T = {t:g}, {s}": found for (d, t, s), found in grid.items()}
        acceptance_by_length(named).figure.savefig(arguments.plot, dpi=150)


def read(folder: Path) -> Grid:
    """Every run of a folder, its shards together."""
    grid: Grid = {}
    for (drafter, cell), shards in groupby(
        sorted(folder.glob("*/*.jsonl")), lambda f: (f.parent.name, f.name.rsplit(".", 2)[0])
    ):
        k, temperature, sampler = cell.split("-", 2)
        line = unquote(drafter).removeprefix("zoo:"), float(temperature), sampler
        grid.setdefault(line, {})[int(k)] = Evaluation.merged(map(Evaluation.load, shards))
    return grid


def table(grid: Grid, value: str) -> Table:
    """A line for each drafter, temperature and sampler."""
    best, spec = _best(grid, value), ".0f" if value == "tokens_per_second" else ".2f"
    cells = {}
    for line, found in grid.items():
        shown = {k: format(run.estimates[value], spec) for k, run in found.items()}
        cells[line] = {k: f"**{v}**" if (line, k) in best else v for k, v in shown.items()}
    return _table(cells)


def differences(grid: Grid, over: str, value: str) -> Table:
    """Every line minus one of them, of the same K, paired over prompts."""
    drafter, temperature, sampler = over.split(",")
    base = drafter, float(temperature), sampler
    if base not in grid:
        there = "; ".join(f"{d},{t:g},{s}" for d, t, s in sorted(grid))
        raise ValueError(f"there is no line {over!r}; there are {there}")
    spec = "+.0f" if value == "tokens_per_second" else "+.2f"
    cells = {
        line: {
            k: format(difference(grid[base][k], run, value), spec)
            for k, run in found.items()
            if k in grid[base]
        }
        for line, found in grid.items()
        if line != base
    }
    return _table(cells)


def _table(cells: dict[Line, dict[int, str]]) -> Table:
    ks = sorted({k for found in cells.values() for k in found})
    rows = [
        [drafter, f"{temperature:g}", sampler, *(found.get(k, "") for k in ks)]
        for (drafter, temperature, sampler), found in sorted(cells.items())
    ]
    return Table(["drafter", "temperature", "sampler", *(f"K = {k}" for k in ks)], rows)


def _best(grid: Grid, value: str) -> set[tuple[Line, int]]:
    """Cells that are better than all others of their temperature and K."""
    groups: dict[tuple[float, int], dict[Line, Evaluation]] = {}
    for line, found in grid.items():
        for k, run in found.items():
            groups.setdefault((line[1], k), {})[line] = run
    best = set()
    for (_, k), group in groups.items():
        line = max(group, key=lambda name: group[name].estimates[value].value)
        others = [run for name, run in group.items() if name != line]
        if others and all(difference(run, group[line], value).low > 0 for run in others):
            best.add((line, k))
    return best


if __name__ == "__main__":
    main()
