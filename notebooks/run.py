"""Runs the notebooks in place, so that their outputs are those of this code.

    python notebooks/run.py            # all of them
    python notebooks/run.py 3_drafters

Needs `pip install 'specdec-torch[dev]'`, and TRL for the last. Outputs that are committed come from
this command, and `tests/notebooks` holds them against another run. A cell that shows times has the
tag `times`, and the words of its outputs alone are compared.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
TIMEOUT_S = 600


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with new outputs, and nothing in them that differs from run to run."""
    notebook = nbformat.read(path, as_version=4)
    # Another package of that name on the path would be what is shown.
    root = str(FOLDER.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    os.environ.setdefault("TQDM_DISABLE", "1")
    how = {"timeout": TIMEOUT_S, "kernel_name": "python3", "coalesce_streams": True}
    client = NotebookClient(notebook, **how)
    client.execute(cwd=root)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return notebook


def main() -> None:
    """Runs the notebooks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of notebooks, or their paths; all by default")
    known = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    names = [Path(name).name.removesuffix(".ipynb") for name in parser.parse_args().names] or known
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"error: there is no notebook {unknown[0]!r}; expected one of {', '.join(known)}")
    for name in names:
        started = time.perf_counter()
        path = FOLDER / f"{name}.ipynb"
        nbformat.write(execute(path), path)
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
