"""Reads JSON files of a folder without trusting them: bounded, inside the folder, no key twice."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 8 * 2**20
"""Largest configuration, index or safetensors header that is parsed."""


def read_json(path: Path, *, folder: Path | None = None) -> dict[str, Any]:
    """Reads a JSON object.

    Args:
        path: the file.
        folder: the folder that the file must lie in, links followed; by default its own.

    Raises:
        ValueError: no such file, too large, not an object, or a key that occurs twice (parsers
            disagree on which of them counts).
    """
    inside(path.parent if folder is None else folder, path)
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ValueError(f"{path} has {size} bytes; at most {MAX_JSON_BYTES} are read")
    return parse_json(path.read_bytes(), str(path))


def parse_json(data: bytes, origin: str) -> dict[str, Any]:
    """Parses a JSON object.

    Args:
        data: its text.
        origin: what to call it in a message.

    Raises:
        ValueError: not an object, NaN or infinity among its values, or a key that occurs twice.
    """

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if twice:
            raise ValueError(f"keys that occur twice: {names_of(twice)}")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON number")

    try:
        content = json.loads(data, object_pairs_hook=without_duplicates, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{origin} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{origin} must be a JSON object, got {type(content).__name__}")
    return content


def names_of(names: Iterable[str]) -> str:
    """A list of names for a message, sorted and cut at twelve."""
    shown = sorted(names)
    more = f" and {len(shown) - 12} more" if len(shown) > 12 else ""
    return ", ".join(shown[:12]) + more


def inside(folder: Path, path: Path) -> Path:
    """Resolves a file that must exist and lie inside a folder once links are followed.

    A snapshot in Hugging Face's cache consists of links into its repository's own `blobs`, so
    there the repository's folder is the border.

    Raises:
        ValueError: it does not exist, or lies elsewhere.
    """
    border = folder.resolve()
    if border.parent.name == "snapshots" and border.parent.parent.name.startswith("models--"):
        border = border.parent.parent
    real = path.resolve()
    if not real.is_relative_to(border):
        raise ValueError(f"{path} lies outside of {border}; files must lie in the folder itself")
    if not real.is_file():
        raise ValueError(f"{path} does not exist")
    return real
