"""`specdec certify` prints what was found and exits with the verdict."""

import itertools
import re
import sys
from types import SimpleNamespace

import pytest

from specdec.lab.cli import main

FAST = ["--samples", "4", "--max-new-tokens", "6", "--prompts", "1", "--prompt-tokens", "4"]
FAST += ["--audit-tokens", "6"]


def test_trees_are_certified(small, capsys):
    assert main(["certify", "--target", small, *FAST, "--tree", "6x3"]) == 0
    assert "PromptLookupDrafter, BlockSampler, tree 6x3, 1 prompts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sampler", "code", "is_terminal"), [("auto", 0, False), ("typical", 1, True)]
)
def test_the_command_prints_the_verdict_and_exits_with_it(
    sampler, code, is_terminal, small, capsys, monkeypatch
):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert main(["certify", "--target", small, *FAST, "--sampler", sampler]) == code
    out, err = capsys.readouterr()
    assert out.splitlines()[0].startswith("LOSSY  Typical" if code else "PASS  BlockSampler")
    assert re.search(r"\n +accepted per step: [0-3]\.\d\d draft tokens\n", out)
    assert ("TypicalSampler(epsilon=0.3, delta=0.09)" in out.splitlines()[0]) == (code == 1)
    assert "greedy: 6 tokens are the argmax of Hugging Face's own forward" in out
    assert "seen in 95 of 100 runs" in out
    assert is_terminal or "samples: " not in err  # a progress bar, of calls that take seconds


@pytest.mark.parametrize("passed", [*itertools.product((True, False), repeat=2)])
def test_both_halves_decide_the_exit(passed, small, monkeypatch):
    found = iter([SimpleNamespace(passed=each) for each in passed])
    monkeypatch.setattr("specdec.lab.certificates.certify", lambda *_, **__: next(found))
    assert main(["certify", "--target", small, *FAST]) == (0 if all(passed) else 1)
