"""Heads are read from paths and written to folders; anything else is refused untouched."""

import pytest

from specdec import EagleDrafter, MaskTokenDrafter, MTPDrafter, zoo

TARGET = zoo.load_target()
DRAFTERS = {"eagle3": EagleDrafter, "mask-token": MaskTokenDrafter, "mtp": MTPDrafter}


@pytest.mark.parametrize("path", [None, 5, b"x", ["a"], "", "x" * 5000, "a\0b"])
def test_a_checkpoint_is_read_from_a_path(path):
    with pytest.raises((ValueError, TypeError), match="the checkpoint must be "):
        EagleDrafter.from_pretrained(path, TARGET)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_checkpoint_is_written_to_a_folder(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    drafter, file = zoo.load_drafter(name, TARGET), tmp_path / "file"
    file.write_text("mine")
    for path in (None, 5, "", "a\0b", file, "/proc/no/such"):
        with pytest.raises((ValueError, TypeError), match="folder"):
            drafter.save_pretrained(path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "mine"
