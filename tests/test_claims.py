"""Numbers on the pages that code or a table of the same page has."""

import re
import tomllib
from pathlib import Path

import pytest
from architectures import RECURRENT
from mutants import FAULTS

ROOT = Path(__file__).parents[1]
ADAPTED = "eagle3", "mtp", "mask-token", "model"
"""Drafters of the table of adapters."""


def page(name: str) -> str:
    """A page's text, its lines joined."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def test_recurrent_configurations_are_as_many_as_are_tested():
    for name in ("README.md", "docs/models.md", "docs/peers.md"):
        assert f"{len(RECURRENT)} tested configurations" in page(name), name


def test_the_lead_of_the_page_of_models_has_the_numbers_of_the_census():
    counts = r"transformers (\S+), (\d+) types, \S+ \d+; "
    counts += r"(\d+) equal, (\d+) refused, (\d+) HF cannot"
    words = r"Of the (\d+) types of causal language models in transformers (\S+), (\d+) are equal "
    words += r"to HF and (\d+) raise ValueError. HF itself cannot generate with the other (\d+)."
    census = re.search(counts, page("docs/types.md"))
    lead = re.search(words, page("docs/models.md"))
    version, types, *found = census.groups()
    assert lead.groups() == (types, version, *found)
    assert sum(map(int, found)) == int(types)


def cells(path: str, first: str) -> list[str]:
    """Of the first row of a page's tables whose first cell is this."""
    text = (ROOT / path).read_text(encoding="utf-8")
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines())
    return next(row[1:] for row in rows if row[0] == first)


DRAFTERS = {
    "EAGLE-3 head": "specdec, EAGLE-3 head",
    "prompt lookup": "specdec, prompt lookup",
    "draft model": "specdec, draft LM",
    "none: plain decoding": "specdec, no drafter",
    "HF `generate`": "HF generate",
}
"""Rows of the README's first table, by what the benchmark calls them."""


@pytest.mark.parametrize("row", DRAFTERS)
def test_speed_ups_of_the_readme_are_those_of_the_benchmark(row):
    one, eight = (ROOT / "benchmarks/figures/cpu_speed.md").read_text().split("B = 8")
    shown = cells("README.md", row)
    for table, (speed, speed_up) in zip((one, eight), (shown[:2], shown[2:]), strict=True):
        found = dict(re.findall(r"^\| (.*?) \| (\d+) \|", table, re.MULTILINE))
        assert speed == found[DRAFTERS[row]]
        plain = int(found[DRAFTERS["none: plain decoding"]])
        assert speed_up == f"{int(speed) / plain:.2f}"


STEPS = {
    "specdec, no drafter": "specdec, no drafter",
    "specdec, EAGLE-3, K = 3": "specdec, EAGLE-3, K = 3",
    "specdec, DSpark's shape, K = 7": "specdec, DSpark's shape, K = 7",
    "HF `generate`, varies by 9 ms": "HF `generate`",
    "HF assisted, K = 3, varies by 9 ms": "HF assisted, draft model of one layer, K = 3",
    'loop over `torch.compile(mode="reduce-overhead")`': (
        'loop over `torch.compile(mode="reduce-overhead")`, static cache'
    ),
}
"""Rows of the README's second table, by what the benchmark calls them."""


@pytest.mark.parametrize("row", STEPS)
def test_costs_of_steps_in_the_readme_are_those_of_the_benchmark(row):
    ms, cost, break_even = cells("README.md", row)
    figures = "benchmarks/figures/gpu_first.md"
    found_ms, spread, found_cost, most, _ = cells(figures, STEPS[row])
    assert (ms, cost) == (found_ms, found_cost)
    if "varies" in row:  # HF's, whose steps are no multiple of specdec's plain step
        assert f"varies by {float(spread):.0f} ms" in row
        assert break_even == ""
    elif most != "1":
        assert break_even == f"{cost} of {most}"


def test_the_published_length_over_the_measured_cost_is_the_speed_that_the_readme_says():
    protocols = tomllib.loads((ROOT / "examples/protocols.toml").read_text(encoding="utf-8"))
    protocol = protocols["speculators-mt-bench"]
    (length,) = re.findall(r"^Llama-3.1-8B\S+ EAGLE-3 0 (\S+)$", protocol["figures"], re.MULTILINE)
    cost = cells("README.md", "specdec, EAGLE-3, K = 3")[1]
    assert (protocol["temperature"], protocol["num_draft_tokens"]) == (0, 3)
    assert f"acceptance length of {length} for Llama 3.1 8B" in page("README.md")
    speed = f"{float(length) / float(cost):.1f}"
    words = f"{length} divided by our step cost of {cost} is {speed} times plain decoding"
    assert words in page("README.md")


def test_losses_by_adapters_are_those_of_the_table():
    rows = [[*map(float, cells("docs/costs.md", f"`{name}`"))] for name in ADAPTED]
    losses = [1 - length / base for base, *others in rows for length in others]
    least, most = (f"{100 * loss:.0f}" for loss in (min(losses), max(losses)))
    assert f"lose {least} to {most} % of their acceptance length" in page("docs/adapters.md")


def test_planted_faults_are_as_many_as_the_page_says():
    assert f"`mutants/` has {len(FAULTS)} faults" in page("tests/README.md")


def test_ideas_with_a_paper_are_as_many_as_the_page_says():
    rows = re.findall(r"^\| (?!idea|-).*\|$", (ROOT / "docs/ideas.md").read_text(), re.MULTILINE)
    assert [len(rows), sum("arxiv.org" in row for row in rows)] == [9, 8]
    assert "Nine ideas over one target" in page("docs/ideas.md")
    assert "Eight have a paper" in page("docs/ideas.md")


def test_the_rounded_threshold_of_vllm_is_that_of_float32():
    import torch

    mass = torch.tensor(1.0) / 3
    rounded = mass + 1.0 - 1.0
    words = f"1/3 becomes {rounded:.8f}, and the threshold {mass / rounded:.8f}"
    assert words in page("docs/verdicts.md")
    assert mass / rounded < 1
