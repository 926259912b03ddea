"""Help fits a terminal, comes at once, and says of every option what it is and its default; shells
complete commands and options.
"""

import os
import pty
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from specdec import zoo
from specdec.lab.cli import app, main

ROOT = Path(__file__).parents[2]
WITHOUT = ("prompt", "revision", "rope_theta", "feature_layers", "mask_token_id", "target")
"""Options that stand for nothing unless they are given."""
COMMANDS = typer.main.get_command(app()).commands


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_80_columns(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*command.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"Usage: specdec {command}".rstrip() in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize("command", ["generate", "evaluate", "certify"])
def test_the_help_of_a_drafter_names_every_form(command):
    (option,) = (option for option in COMMANDS[command].params if option.name == "drafter")
    for name in ("none", "lookup", "suffix", "mine.py:make", *(f"zoo:{n}" for n in zoo.DRAFTERS)):
        assert name in option.help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_what_it_is_and_its_default(command):
    options = COMMANDS[command].params
    for option in (each for each in options if each.param_type_name == "option"):
        assert option.help, option.name
        is_told = option.required or option.default is not None  # and shown by typer
        assert is_told or "default: " in option.help or option.name in WITHOUT, option.name


def test_versions_are_told(capsys):
    assert main(["--version"]) == 0
    assert re.match(r"specdec-torch \S+, torch \S+, transformers \S+\n", capsys.readouterr().out)


def shown_after(line: str, expected: str, folder: Path) -> str:
    """What a terminal shows after a line was typed in bash with the completion of `specdec`."""
    command = folder / "specdec"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m specdec "$@"\n')
    command.chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    script = {"_SPECDEC_COMPLETE": "source_bash"}
    done = subprocess.run([command], env=os.environ | path | script, capture_output=True, text=True)
    (folder / "rc").write_text(f"{done.stdout}\nPS1='ready '\n")
    process, terminal = pty.fork()
    if process == 0:
        command = ["bash", "--noprofile", "--rcfile", str(folder / "rc"), "-i"]
        os.execvpe("bash", command, os.environ | path)
    shown, is_typed = "", False
    while expected not in shown and select.select([terminal], [], [], 10)[0]:
        shown += os.read(terminal, 4096).decode().replace("\a", "")
        if not is_typed and "ready " in shown:
            is_typed = bool(os.write(terminal, line.encode()))
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    os.close(terminal)
    return shown


@pytest.mark.parametrize(
    ("line", "completed"),
    [("specdec ev\t", "specdec evaluate"), ("specdec evaluate --dra\t", "evaluate --draft")],
)
def test_a_tab_completes_commands_and_options(line, completed, tmp_path):
    assert completed in shown_after(line, completed, tmp_path)


def test_the_zoo_is_listed(capsys):
    assert main(["zoo"]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()[1:-1]}
    assert list(rows) == ["zoo", *(f"zoo:{name}" for name in zoo.DRAFTERS)]
    parameters = zoo.load_drafter("model").model.num_parameters()
    assert rows["zoo:model"][1] == f"{parameters / 1e6:.2f}"


def test_the_demo_draws_trees_and_compares(capsys):
    assert main(["demo", "--prompts", "1", "--max-new-tokens", "8", "--tree", "8x3"]) == 0
    shown = capsys.readouterr().out
    assert "outputs of all ways of decoding are identical" in shown
    names = re.findall(r"^(\S.*?)  +[\d.]+ +[\d.]+ +[\d.]+$", shown, re.MULTILINE)
    trees = ["model", "eagle3", "mask-token"]
    expected = ["plain decoding", "lookup, tree 6x3", *(f"zoo:{n}, tree 8x3" for n in trees)]
    assert names == [*expected, "zoo:mtp, K = 4"]
