"""Numbers on the pages that code or a table of the same page has."""

import re
from pathlib import Path

from architectures import RECURRENT
from mutants import FAULTS

ROOT = Path(__file__).parents[1]


def page(name: str) -> str:
    """A page's text, its lines joined."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def test_recurrent_configurations_are_as_many_as_are_tested():
    for name in ("README.md", "docs/models.md", "docs/peers.md"):
        assert f"{len(RECURRENT)} tested configurations" in page(name), name


def test_the_lead_of_the_page_of_models_has_the_numbers_of_its_census():
    text = page("docs/models.md")
    counts = r"transformers (\S+), (\d+) types, \S+ \d+; (\d+) equal, (\d+) refused"
    words = r"Of the (\d+) types of causal language models in transformers (\S+), (\d+) are equal "
    census, lead = re.search(counts, text), re.search(words + r"to HF and (\d+) are refused", text)
    version, types, equal, refused = census.groups()
    assert lead.groups() == (types, version, equal, refused)


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
