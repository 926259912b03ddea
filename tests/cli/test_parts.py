"""Prompts and parts of a user, a drafter and a rule of a file among them, work in every command."""

import io
import re
import sys

import pytest
import torch

from specdec.lab.cli import main

MINE = """
from specdec import PromptLookupDrafter, RejectionSampler

used = set()

class Mine(PromptLookupDrafter):
    def propose(self, *args):
        used.add("drafter")
        return super().propose(*args)

def make(target, num_draft_tokens, *, tree=None):
    return Mine(num_draft_tokens, num_continuations=1 if tree is None else 2)

class Rule(RejectionSampler):
    def accept(self, *args):
        used.add("rule")
        return super().accept(*args)
"""
SAMPLED = ["--max-new-tokens", "4", "--temperature", "1"]
SHORT = ["--prompts", "prompts.jsonl", *SAMPLED]
COMMANDS = {
    "generate": ["--target", "zoo", "--prompt", "a b a b a", *SAMPLED],
    "evaluate": [*SHORT, "--tree", "6x3"],
    "certify": ["--prompts", "1", "--samples", "2", "--max-new-tokens", "4", "--audit-tokens", "2"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_parts_of_a_file_draft_and_accept(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "prompts.jsonl").write_text('{"text": "a b a b a"}')
    parts = ["--drafter", "mine.py:make", "--sampler", "mine.py:Rule"]
    assert main([command, *COMMANDS[command], *parts]) == 0
    assert sys.modules[str(tmp_path / "mine.py")].used == {"drafter", "rule"}


@pytest.mark.parametrize("name", ["mine.py:make", "mine:make"])
def test_a_part_of_a_file_is_inspected(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(MINE)
    assert main(["inspect", name, "--num-draft-tokens", "5"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["drafter"] == "Mine"
    assert (lines["draft"], lines["features"], lines["max_ngram"]) == ("K = 5", "none", "3")


def test_heads_of_the_zoo_and_plain_decoding_have_names_everywhere(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"text": "def f(x):"}')
    assert main(["inspect", "zoo:eagle3", "--max-new-tokens", "4", "--prompt", "import os"]) == 0
    shown = capsys.readouterr().out
    assert "head          EAGLE-3, 1 layer" in shown
    assert "parity check, greedy, K = 4" in shown
    assert re.search(r"as read +\d\.\d\d ± \d\.\d\d", shown)
    assert shown.count("<- best") == 1
    assert main(["inspect", "zoo:model"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["drafter", "ModelDrafter"]
    for drafter in ("none", "suffix"):
        assert main(["evaluate", "--drafter", drafter, *SHORT]) == 0
    assert "acceptance length" in capsys.readouterr().out


def test_a_prompt_is_read_from_standard_input(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("def g(é):\n"))
    options = ["--prompt", "-", "--drafter", "none", "--max-new-tokens", "2"]
    assert main(["generate", "--target", "zoo", *options]) == 0
    assert capsys.readouterr().out.startswith("def g(é):\n")


@pytest.mark.parametrize(
    ("chosen", "expected"), [(None, 1), pytest.param("2", 2, marks=pytest.mark.slow)]
)
def test_a_small_model_decodes_on_one_core_unless_told_otherwise(chosen, expected, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    before, command = torch.get_num_threads(), ["generate", "--target", "zoo", "--prompt", "a b"]
    try:
        torch.set_num_threads(2)
        assert main([*command, "--max-new-tokens", "2"]) == 0
        assert torch.get_num_threads() == expected
    finally:
        torch.set_num_threads(before)
