"""`dear.txt` names tests that exist."""

from pathlib import Path

ROOT = Path(__file__).parent


def test_every_function_of_the_list_is_there():
    lines = (ROOT / "dear.txt").read_text().splitlines()
    places = [line.split("::") for line in lines if line and line[0] not in "# "]
    assert len(places) > 100
    for file, *classes, function in places:
        text = (ROOT / file).read_text()
        assert all(f"class {name}" in text for name in classes)
        assert f"def {function}(" in text or function == "runTest", f"{file}::{function}"
