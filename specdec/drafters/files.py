"""What reads and writes the files of heads, for drafters, which stand below it."""

from collections.abc import Callable
from types import ModuleType

checkpoints: Callable[[str], ModuleType]
"""Imports a file of `specdec.checkpoints` by its name. The package `specdec` hands it in, which is
imported before any of its parts.
"""
