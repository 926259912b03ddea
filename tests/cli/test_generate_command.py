"""`specdec generate` with an EAGLE head."""

import pytest

from specdec import zoo
from specdec.cli import main

ARGUMENTS = ["generate", "--target", str(zoo.WEIGHTS_DIR / "target"), "--prompt", "def main():"]


def test_an_eagle_head_is_named_by_its_folder(capsys):
    head = f"eagle:{zoo.WEIGHTS_DIR / 'eagle3'}"
    options = ["--drafter", head, "--max-new-tokens", "12", "--dtype", "float32"]
    assert main([*ARGUMENTS, *options]) == 0
    assert "acceptance length" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["target", "nowhere"])
def test_what_is_no_head_is_one_line_and_exit_status_2(capsys, folder):
    assert main([*ARGUMENTS, "--drafter", f"eagle:{zoo.WEIGHTS_DIR / folder}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    *progress, message = captured.err.strip().splitlines()
    assert message.startswith("specdec: ")
    assert all("Loading weights" in line for line in progress)
