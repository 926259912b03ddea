"""The package runs where an interpreter or an operating system lacks what Linux has: without
assertions, without docstrings, without Triton, and without POSIX's own modules.

Without docstrings (`python -OO`) transformers cannot import a model; the command line's help can.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMPORT_ALL = """
import importlib, pkgutil, sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *others):
        hidden = name.partition(".")[0] in {missing}
        return None if hidden else self.finder.find_spec(name, *others)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path = [Without(finder) for finder in sys.meta_path]
for name in {missing}:
    sys.modules.pop(name, None)
import specdec
for module in pkgutil.walk_packages(specdec.__path__, "specdec."):
    is_kernel = module.name.endswith((".triton", ".triton_common"))
    if not (module.name == "specdec.__main__" or is_kernel and "triton" in {missing}):
        importlib.import_module(module.name)
"""
GENERATE = """
from specdec import SpeculativeGenerator, zoo
target, ids = zoo.load_target(), zoo.load_tokenizer()("def f(x):", return_tensors="pt").input_ids
generator = SpeculativeGenerator(target, zoo.load_drafter("eagle3", target))
text = generator.generate(ids, max_new_tokens=12, do_sample=False).sequences
plain = target.generate(ids, max_new_tokens=12, do_sample=False)
if not text.equal(plain):
    raise SystemExit(f"{text} is not {plain}")
"""
HELP = """
from specdec.lab.cli import COMMANDS, main
for arguments in [[], *([command.__name__.replace("_", "-")] for command in COMMANDS)]:
    if main([*arguments, "--help"]):
        raise SystemExit(f"{arguments}: no help")
"""
POSIX = ("fcntl", "grp", "pwd", "termios", "tty")


def run(program: str, *options: str) -> str:
    """What another interpreter prints, which must end well."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *options, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_command_has_its_help_without_docstrings():
    assert run(HELP, "-OO").count("Usage:") > 5


def test_everything_but_kernels_is_there_without_assertions_triton_and_posix():
    run(IMPORT_ALL.format(missing=("triton", *POSIX)) + GENERATE, "-O")
