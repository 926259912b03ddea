"""Progress bars."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any


def bar(name: str, batches: Sequence | None = None, **options: Any) -> Iterable:
    """A progress bar with the time left on a terminal, nothing elsewhere.

    Args:
        name: of what is done.
        batches: what is gone through.
        options: of `tqdm`.
    """
    from tqdm import tqdm

    options = {"leave": False, "disable": not sys.stderr.isatty(), "file": sys.stderr, **options}
    return tqdm(batches, desc=name, **options)
