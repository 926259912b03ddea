"""The zoo's prompts are the same on every Python: pinned, and cut from sources in the package."""

import hashlib
import json
import platform
import sysconfig
from pathlib import Path

import pytest

from specdec import zoo
from specdec.lab.zoo import corpus

PINNED = {
    (64, 10): "9709b8f47cfe79dbab46b061ed194ad1e7400bcebb8451985c2a9649a8926dbb",
    (512, 10): "9b5973caecd16780149588750b7ac7435ec035ae11b45b0ede2682142a70d0a9",
    (64, 3): "d036f8baabbd39b0578f849bffcf48913411a510d74f90dba65cdd14d7596923",
    (32, 40): "c12395e9c469a6a4be8a2b619eb40b665c93705df6b2232912236f3992b5084f",
    (8, 160): "cdad14e2e51dba74c745e4a7c21603265f5d183e27e45778aed4538e3ccb10d0",
}
"""What CPython 3.11.7's own library gave, by (n, num_lines)."""


def digest(n, num_lines):
    prompts = json.dumps(zoo.heldout_prompts(n, num_lines=num_lines))
    return hashlib.sha256(prompts.encode()).hexdigest()


@pytest.mark.parametrize(("n", "num_lines"), PINNED)
def test_prompts_do_not_depend_on_the_interpreters_library(n, num_lines, tmp_path, monkeypatch):
    """Another library holds other sources of the same modules."""
    for name in corpus.HELD_OUT:
        (tmp_path / name).write_text("x = 1\n" * 200 + "def f(x):\n    return x\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda *_, **__: str(tmp_path))
    assert digest(n, num_lines) == PINNED[n, num_lines]


@pytest.mark.skipif(platform.python_version() != "3.11.7", reason="the archive is of 3.11.7")
def test_the_archive_is_cpythons_own():
    library = Path(sysconfig.get_path("stdlib"))
    for file in corpus.heldout_files():
        assert file.read_bytes() == (library / file.name).read_bytes()


def test_the_archive_holds_its_licence():
    (first, *_) = corpus.heldout_files()
    licence = first.parent / "LICENSE.txt"
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in licence.read_text(encoding="utf-8")


def test_no_training_sees_a_held_out_module():
    names = {file.name for file in corpus.heldout_files()}
    assert names == set(corpus.HELD_OUT)
    root = corpus.stdlib_root()
    assert names.isdisjoint(path.relative_to(root).as_posix() for path in corpus.library_files())
