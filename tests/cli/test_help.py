"""Help names what there is, and every option says what it is and what it is without being given."""

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specdec import zoo
from specdec.cli import _parser, main
from specdec.cli.train import _parser as training_parser

ROOT = Path(__file__).parents[2]


def commands() -> dict[str, argparse.ArgumentParser]:
    (subparsers,) = _parser()._subparsers._group_actions
    found = {name: parser for name, parser in subparsers.choices.items() if name != "train"}
    return {**found, "train": training_parser("specdec train")}


@pytest.mark.parametrize("command", ["generate", "evaluate", "certify"])
def test_the_help_of_a_drafter_names_all_of_the_zoo(command):
    shown = " ".join(commands()[command].format_help().split())
    for name in zoo.DRAFTERS:
        assert f"zoo:{name}" in shown


@pytest.mark.parametrize("command", ["generate", "evaluate"])
def test_every_option_says_what_it_is_and_its_default(command):
    for action in commands()[command]._actions:
        assert action.help, action.option_strings
        default = f"{action.default:g}" if type(action.default) is float else str(action.default)
        if action.default not in (None, argparse.SUPPRESS):
            assert re.search(rf"default:? {re.escape(default)}\b|\(default\)", action.help), default
        elif not action.required and action.dest != "help":
            assert "default" in action.help or "of --sampler" in action.help, action.dest


def test_the_demo_says_what_its_ratio_is(capsys):
    assert main(["demo", "--prompts", "1", "--new-tokens", "8"]) == 0
    shown = capsys.readouterr().out
    rows = [line for line in shown.splitlines() if re.search(r"  [0-9.]+ x  ", line)]
    assert len(rows) == 2 + len(zoo.DRAFTERS)  # plain decoding and prompt lookup besides
    assert "\nx: median over the prompts of the ratio to plain decoding of the same prompt" in shown


def test_the_demo_drafts_trees_and_says_of_what_size(capsys):
    assert main(["demo", "--prompts", "1", "--new-tokens", "8", "--tree", "8x3"]) == 0
    shown = capsys.readouterr().out
    sizes = re.findall(r"^(.{15}) (K = \d|tree \dx\d) ", shown, re.MULTILINE)
    assert {name.strip(): size for name, size in sizes} == {
        "plain decoding": "K = 0",
        "prompt lookup": "tree 6x3",  # two continuations
        "draft LM": "tree 8x3",
        "EAGLE-3 head": "tree 8x3",
        "mask-token head": "tree 8x3",
        "MTP modules": "K = 4",
    }


def test_a_notebook_that_is_not_there_is_one_line():
    pytest.importorskip("nbclient")
    command = [sys.executable, str(ROOT / "notebooks" / "run.py"), "notebooks/9_nothing.ipynb"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: there is no notebook '9_nothing'; expected one of 1_accept_rule")
