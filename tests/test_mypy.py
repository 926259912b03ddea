"""What mypy says of five ordinary programs of users: nothing; and something of a wrong one.

One process reads all of them; torch, transformers and others are not followed, which takes most of
its time.
"""

import re
import subprocess
import sys

import pytest
from typed_programs import PROGRAMS, WRONG

pytest.importorskip("mypy")
SETTINGS = """
[mypy]
follow_imports = silent
[mypy-torch.*,transformers.*,tokenizers.*,huggingface_hub.*,numpy.*,scipy.*,pandas.*,triton.*]
follow_imports = skip
ignore_missing_imports = True
"""


@pytest.fixture(scope="module", name="found")
def _found(request, tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("programs")
    (folder / "settings.ini").write_text(SETTINGS)
    for name, text in {**PROGRAMS, "wrong": WRONG}.items():
        (folder / f"{name}.py").write_text(text)
    cache = request.config.cache.mkdir("mypy")
    options = ["--config-file", "settings.ini", "--cache-dir", str(cache), "--no-error-summary"]
    command = [sys.executable, "-m", "mypy", *options, *sorted(map(str, folder.glob("*.py")))]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr  # the control has errors
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_ordinary_program_has_no_error(name, found):
    assert [line for line in found if f"{name}.py:" in line] == []


def test_a_wrong_one_has_an_error_in_each_line(found):
    lines = {int(m[1]) for line in found if (m := re.search(r"wrong\.py:(\d+): error", line))}
    assert lines == {5, 6, 7}
