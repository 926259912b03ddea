"""The rows of `examples/ablate.py` as a Markdown table with a column for each K.

python docs/grid.py grid.jsonl
python docs/grid.py grid.jsonl --value tokens_per_second
"""

import argparse
import json
from pathlib import Path

from specdec.evaluation import Estimate, Table


def main(path: Path, value: str) -> None:
    """Prints the table."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    ks = sorted({row["cell"]["num_draft_tokens"] for row in rows})
    lines: dict[tuple, dict[int, Estimate]] = {}
    for row in rows:
        cell = row["cell"]
        line = cell["drafter"], cell["temperature"], cell["sampler"]
        lines.setdefault(line, {})[cell["num_draft_tokens"]] = _estimate(row[value])
    drafters = list(dict.fromkeys(drafter for drafter, _, _ in lines))
    spec = ".0f" if value == "tokens_per_second" else ".2f"
    cells = [
        [drafter, f"{temperature:g}", sampler]
        + [format(found[k], spec) if k in found else "" for k in ks]
        for (drafter, temperature, sampler), found in sorted(
            lines.items(), key=lambda item: (drafters.index(item[0][0]), *item[0][1:])
        )
    ]
    print(Table(["drafter", "temperature", "sampler", *(f"K = {k}" for k in ks)], cells).markdown())


def _estimate(saved: dict) -> Estimate:
    return Estimate(
        **{name: float("nan") if value is None else value for name, value in saved.items()}
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="JSONL file of examples/ablate.py")
    parser.add_argument("--value", default="acceptance_length", help="an estimate of its rows")
    arguments = parser.parse_args()
    main(arguments.path, arguments.value)
