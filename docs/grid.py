"""The rows of `examples/ablate.py` as a Markdown table with a column for each K.

    python docs/grid.py grid.jsonl
    python docs/grid.py grid.jsonl --value tokens_per_second

The best cell of a temperature and K is bold where its interval lies above those of all others.
"""

import argparse
import sys
from pathlib import Path

from specdec.evaluation import Estimate, Table
from specdec.evaluation.run_file import read_rows

Line = tuple[str, float, str]
"""Drafter, temperature and sampler."""


def main(path: Path, value: str) -> None:
    """Prints the table."""
    lines: dict[Line, dict[int, Estimate]] = {}
    for number, row in read_rows(path):
        try:
            cell, found = row["cell"], _estimate(row[value])
            line = cell["drafter"].removeprefix("zoo:"), cell["temperature"], cell["sampler"]
            lines.setdefault(line, {})[cell["num_draft_tokens"]] = found
        except (KeyError, TypeError, AttributeError) as error:
            sys.exit(f"error: {path}, line {number} is no row of a grid with {value!r}: {error!r}")
    ks = sorted({k for found in lines.values() for k in found})
    drafters = list(dict.fromkeys(drafter for drafter, _, _ in lines))
    spec = ".0f" if value == "tokens_per_second" else ".2f"
    best = _best(lines)
    cells = [
        [drafter, f"{temperature:g}", sampler]
        + [
            _shown(found.get(k), spec, is_best=((drafter, temperature, sampler), k) in best)
            for k in ks
        ]
        for (drafter, temperature, sampler), found in sorted(
            lines.items(), key=lambda item: (drafters.index(item[0][0]), *item[0][1:])
        )
    ]
    print(Table(["drafter", "temperature", "sampler", *(f"K = {k}" for k in ks)], cells).markdown())


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


def _shown(estimate: Estimate | None, spec: str, *, is_best: bool) -> str:
    if estimate is None:
        return ""
    text = format(estimate, spec)
    return f"**{text}**" if is_best else text


def _estimate(saved: dict) -> Estimate:
    return Estimate(
        **{name: float("nan") if value is None else value for name, value in saved.items()}
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="JSONL file of examples/ablate.py")
    parser.add_argument(
        "--value",
        default="acceptance_length",
        help="an estimate of its rows (default: acceptance_length)",
    )
    arguments = parser.parse_args()
    main(arguments.path, arguments.value)
