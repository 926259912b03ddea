"""Faults to plant by hand, at least one per law of `tests/README.md`, each after one that a public
project, or a trial of this one, has shown.

`edits.txt` exchanges small pieces of source, `swaps.py` functions at seams.
"""

from pathlib import Path

from mutation import Edit, Fault

from mutants.swaps import SWAPS


def read_edits(text: str) -> list[Fault]:
    """Paragraphs: `# ` and the test that catches those after it; or a fault, which has a line of
    words and its source in brackets, a place, and the piece there after `- ` and what takes its
    place after `+ `.
    """
    faults, test = [], ""
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("# "):
            test = paragraph.removeprefix("# ")
            continue
        words, where, *pieces = paragraph.strip("\n").split("\n")
        old, new = ("\n".join(p[2:] for p in pieces if p[0] == sign) for sign in "-+")
        faults.append(Fault(words, test, Edit(where, old, new)))
    return faults


FAULTS = [*read_edits((Path(__file__).parent / "edits.txt").read_text()), *SWAPS]
