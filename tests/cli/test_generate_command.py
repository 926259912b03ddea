"""`specdec generate` reads prompts and drafts trees."""

import io
import re

import pytest

from specdec import zoo
from specdec.cli import main

ARGUMENTS = ["generate", "--target", str(zoo.WEIGHTS_DIR / "target"), "--prompt", "def main():"]


def test_a_prompt_is_read_from_standard_input(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("def g(é):\n"))
    assert main([*ARGUMENTS[:-1], "-", "--drafter", "none", "--max-new-tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("def g(é):\n")


@pytest.mark.parametrize("drafter", ["zoo:eagle3", "lookup"])
def test_trees_are_drafted_where_they_are_asked_for(drafter, capsys):
    command = ["generate", "--target", "zoo", "--prompt", "a b a b a", "--max-new-tokens", "24"]
    assert main([*command, "--drafter", drafter, "--tree", "6x3"]) == 0
    out = capsys.readouterr().out
    positions = re.findall(r"^ +(\d+) +(\d+) ", out, re.MULTILINE)
    assert [int(position) for position, _ in positions] == [1, 2, 3]
    accepted = float(re.search(r"acceptance length ([\d.]+)", out)[1]) - 1
    drafted = accepted / float(re.search(r"acceptance rate ([\d.]+)", out)[1])
    assert 3.5 < drafted <= 6.5  # nodes per step
