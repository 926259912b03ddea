"""`specdec generate` with an EAGLE head."""

import re

import pytest

from specdec import zoo
from specdec.cli import main

ARGUMENTS = ["generate", "--target", str(zoo.WEIGHTS_DIR / "target"), "--prompt", "def main():"]


def test_an_eagle_head_is_named_by_its_folder(capsys):
    head = f"eagle:{zoo.WEIGHTS_DIR / 'eagle3'}"
    options = ["--drafter", head, "--max-new-tokens", "12", "--dtype", "float32"]
    assert main([*ARGUMENTS, *options]) == 0
    assert "acceptance length" in capsys.readouterr().out


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


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--tree", "6x3", "--num-draft-tokens", "3"], "num_draft_tokens belongs to chains"),
        (["--tree", "6x3", "--drafter", "none"], "tree belongs to a drafter"),
        (["--tree", "7x3", "--drafter", "lookup"], "a multiple of 3 nodes, 6x3 for instance"),
        (["--tree", "2x3"], "Tree.nodes must be an integer >= 3, got 2"),
    ],
)
def test_a_tree_that_cannot_be_is_refused_before_anything_is_loaded(options, named, capsys):
    assert main([*ARGUMENTS, *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("specdec: ")
    assert named in line


def test_a_tree_is_nodes_and_depth(capsys):
    with pytest.raises(SystemExit):
        main([*ARGUMENTS, "--tree", "32"])
    assert "must be nodes and depth like 32x6, got 32" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["target", "nowhere"])
def test_what_is_no_head_is_one_line_and_exit_status_2(capsys, folder):
    assert main([*ARGUMENTS, "--drafter", f"eagle:{zoo.WEIGHTS_DIR / folder}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    *progress, message = captured.err.strip().splitlines()
    assert message.startswith("specdec: ")
    assert all("Loading weights" in line for line in progress)
