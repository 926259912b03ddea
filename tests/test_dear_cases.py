"""`dear.txt` names tests that exist."""

from pathlib import Path

ROOT = Path(__file__).parent


def test_every_function_of_the_list_is_there():
    lines = (ROOT / "dear.txt").read_text().splitlines()
    places = [line.split("::") for line in lines if line and line[0] not in "# "]
    assert len(places) > 100
    for file, *classes, function in places:
        if file.startswith("specdec/"):  # an example, in the docstring of a class or function
            text, name = (ROOT.parent / file).read_text(), function.rpartition(".")[2]
            assert f"def {name}(" in text or f"class {name}" in text, function
            continue
        text = (ROOT / file).read_text()
        assert all(f"class {name}" in text for name in classes)
        assert f"def {function}(" in text or function == "runTest", f"{file}::{function}"
