"""The rows of `examples/ablate.py` as a Markdown table, the fastest cell of each drafter in bold.

python docs/grid.py grid.jsonl
"""

import json
import sys
from pathlib import Path

from specdec.evaluation import Estimate, Table


def main(path: str) -> None:
    """Prints the table."""
    rows = [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    best: dict[tuple, float] = {}
    for row in rows:
        key = row["cell"]["drafter"], row["cell"]["temperature"]
        best[key] = max(best.get(key, 0.0), row["tokens_per_second"]["value"])
    cells = []
    for row in rows:
        cell, speed = row["cell"], row["tokens_per_second"]["value"]
        is_best = speed == best[cell["drafter"], cell["temperature"]]
        names = [str(cell[name]) for name in ("num_draft_tokens", "temperature", "sampler")]
        found = {name: _estimate(row[name]) for name in ("acceptance_length", "tokens_per_second")}
        shown = format(found["tokens_per_second"], ".0f")
        speed_cell = f"**{shown}**" if is_best else shown
        cells.append([cell["drafter"], *names, str(found["acceptance_length"]), speed_cell])
    header = ["drafter", "K", "temperature", "sampler", "acceptance length", "tokens/s"]
    print(Table(header, cells).markdown())


def _estimate(saved: dict) -> Estimate:
    return Estimate(
        **{name: float("nan") if value is None else value for name, value in saved.items()}
    )


if __name__ == "__main__":
    main(sys.argv[1])
