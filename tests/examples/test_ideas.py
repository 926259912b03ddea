"""The gallery of ideas runs, and its own rules are what they say."""

import subprocess
import sys
from pathlib import Path

import pytest

from examples import ideas
from examples.fuzzy import FuzzySampler
from specdec import certify

ROOT = Path(__file__).parents[2]
SMALL = {"sizes": ((3, 2, 3),), "paths": ()}


def test_fuzzy_acceptance_is_the_rejection_rule_at_a_threshold_of_0_and_lossy_above():
    exact = certify(FuzzySampler(0.0), **SMALL)
    assert exact.passed, str(exact)
    report = certify(FuzzySampler(0.3), **SMALL)
    assert not report.passed
    assert str(report).startswith("LOSSY")


@pytest.mark.slow
@pytest.mark.parametrize("name", ideas.IDEAS)
def test_every_idea_has_a_line(name):
    options = ["--steps", "2", "--prompts", "6", "--samples", "2"]
    command = [sys.executable, "examples/ideas.py", name, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    cells = [cell.strip() for cell in done.stdout.splitlines()[-1].strip("|").split("|")]
    assert cells[0] == ideas.IDEAS[name].what
    assert "FAIL" not in cells[-1]


def test_the_page_has_every_idea():
    page = (ROOT / "docs" / "ideas.md").read_text(encoding="utf-8")
    assert [idea.what for idea in ideas.IDEAS.values() if f"| {idea.what} |" not in page] == []
