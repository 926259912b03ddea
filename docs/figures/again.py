"""Measures again what needs one CPU core and minutes, and compares it with what the pages say.

    python docs/figures/again.py [which first evaluation coloured generate]

Acceptance is compared with the printed intervals, and a caption's sentence with the numbers that
its picture shows; a text in colours is written again. Prints what differs, and fails if anything
does. `.github/workflows/figures.yml` runs it every week.
"""

import re
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

import make
import pandas as pd

from specdec.lab.evaluation import Study, sweep
from specdec.lab.evaluation.sweep import read_study

DOCS = Path(__file__).parents[1]
CELL = re.compile(r"([\d.]+) \[([\d.]+), ([\d.]+)\]")


def study(file: str) -> Study:
    """Of a file, in a new folder."""
    with tempfile.TemporaryDirectory() as folder:
        return sweep(**read_study(DOCS / file), output=folder, progress=True)


def intervals() -> dict[tuple, tuple[float, float]]:
    """Those of `which-table.md`, by temperature, drafter, sampler and K."""
    found = {}
    for line in (DOCS / "which-table.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| T = "):
            temperature, drafter, sampler, *cells = line.strip("| ").split(" | ")
            key = float(temperature.removeprefix("T = ")), drafter, sampler
            for draft, cell in zip((2, 4, 6, 8), cells, strict=True):
                _, low, high = map(float, CELL.search(cell).groups())
                found[*key, draft] = low, high
    return found


def which() -> Iterator[str]:
    """The table, each cell; and the caption of its picture."""
    frame, printed = study("which.toml").to_frame(), intervals()
    for cell in frame.itertuples():
        sampler = "all" if cell.temperature == 0 else cell.sampler
        low, high = printed[key := (cell.temperature, cell.drafter, sampler, cell.draft)]
        if not low <= round(cell.acceptance_length, 2) <= high:
            yield f"which-table.md, {key}: {cell.acceptance_length:.2f} is not in [{low}, {high}]"
    by = ["temperature", "draft", "drafter"]
    lengths = frame.groupby(by).acceptance_length.mean().unstack()
    if set(lengths.loc[pd.IndexSlice[:, 4:], :].idxmax(axis=1)) != {"zoo:eagle3"}:
        yield "which.md: EAGLE-3 does not lead from K = 4 on"
    if lengths.loc[pd.IndexSlice[0.1:, :], "lookup"].max() >= 1.7:
        yield "which.md: prompt lookup does not stay below 1.7 above temperature 0"


def first() -> Iterator[str]:
    """Which drafter is fastest at each temperature; milliseconds are a machine's own."""
    times = (
        study("first.toml")
        .to_frame()
        .pivot(index="temperature", columns="drafter", values="ms_per_token")
    )
    if set(times.idxmin(axis=1)) != {"zoo:eagle3"}:
        yield f"README.md: EAGLE-3 is not the fastest at each temperature\n{times}"
    if times.lookup.loc[1.0] <= times.none.loc[1.0]:
        yield f"drafters.md: prompt lookup does not fall behind plain decoding\n{times}"


def evaluation() -> Iterator[str]:
    """The first and the last position of each head, as the caption states them."""
    found = study("figures/evaluation.toml")
    page = (DOCS / "evaluation.md").read_text(encoding="utf-8").replace("\n", " ")
    captions = {"eagle3": "EAGLE-3 head rises", "mask-token": "mask-token head falls"}
    for name, words in captions.items():
        stated = map(float, re.search(rf"{words} from ([\d.]+) to (\d\.\d+)", page).groups())
        cells = [cell["drafter"] for cell in found.cells]
        run = found.runs[cells.index(f"zoo:{name}")]
        for place, value in zip((1, run.stats.depth), stated, strict=True):
            estimate = run.estimates[f"conditional_rate_{place}"]
            if not estimate.low <= value <= estimate.high:
                yield f"evaluation.md: {name} accepts {estimate} at position {place}, not {value}"


def coloured(name: str = "coloured") -> Iterator[str]:
    """A text in colours."""
    kinds = tomllib.loads((make.FOLDER / "figures.toml").read_text(encoding="utf-8"))
    written = (make.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    if make.coloured(**kinds["coloured"][name]) != written:
        yield f"{name}.svg: another text, or other origins of its tokens"


def generate() -> Iterator[str]:
    """Two rows in colours."""
    return coloured("generate")


def main() -> int:
    """Compares those that are named, or all."""
    known = {part.__name__: part for part in (coloured, generate, evaluation, first, which)}
    different = []
    for name in sys.argv[1:] or known:
        different += (found := list(known[name]()))
        print(name, *(found or ["as the pages say"]), sep="\n    ", flush=True)
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
