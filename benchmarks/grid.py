"""The runs of `examples/ablate.py` as a Markdown table with a column for each K.

    python benchmarks/grid.py grid
    python benchmarks/grid.py grid --value tokens_per_second

The best cell of a temperature and K is bold where its interval lies above those of all others.
"""

from __future__ import annotations

import argparse
from itertools import groupby
from pathlib import Path
from urllib.parse import unquote

from specdec.evaluation import Estimate, Evaluation, Table

Line = tuple[str, float, str]
"""Drafter, temperature and sampler."""


def main(folder: Path, value: str) -> None:
    """Prints the table."""
    lines: dict[Line, dict[int, Estimate]] = {}
    files = sorted(folder.glob("*/*.jsonl"))
    for (drafter, cell), shards in groupby(
        files, lambda f: (f.parent.name, f.name.rsplit(".", 2)[0])
    ):
        k, temperature, sampler = cell.split("-")
        evaluation = Evaluation.merged(map(Evaluation.load, shards))
        line = unquote(drafter).removeprefix("zoo:"), float(temperature), sampler
        lines.setdefault(line, {})[int(k)] = evaluation.estimates[value]
    print(table(lines, ".0f" if value == "tokens_per_second" else ".2f").markdown())


def table(lines: dict[Line, dict[int, Estimate]], spec: str) -> Table:
    """A line for each drafter, temperature and sampler."""
    ks = sorted({k for found in lines.values() for k in found})
    best = _best(lines)
    rows = []
    for line, found in sorted(lines.items()):
        drafter, temperature, sampler = line
        shown = {k: format(estimate, spec) for k, estimate in found.items()}
        shown |= {k: f"**{shown[k]}**" for k in ks if (line, k) in best}
        rows.append([drafter, f"{temperature:g}", sampler, *(shown.get(k, "") for k in ks)])
    return Table(["drafter", "temperature", "sampler", *(f"K = {k}" for k in ks)], rows)


def _best(lines: dict[Line, dict[int, Estimate]]) -> set[tuple[Line, int]]:
    """Cells whose interval lies above those of all others of their temperature and K."""
    groups: dict[tuple[float, int], list[tuple[Estimate, Line]]] = {}
    for line, found in lines.items():
        for k, estimate in found.items():
            groups.setdefault((line[1], k), []).append((estimate, line))
    best = set()
    for (_, k), group in groups.items():
        first, line = max(group, key=lambda item: item[0].value)
        others = [estimate for estimate, other in group if other != line]
        if others and not any(first.overlaps(other) for other in others):
            best.add((line, k))
    return best


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="what examples/ablate.py wrote")
    parser.add_argument("--value", default="acceptance_length", help="an estimate of the runs")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.value)
