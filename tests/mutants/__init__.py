"""Faults to plant by hand, at least one per law of `tests/README.md`, each after one that a public
project, or a trial of this one, has shown.

Most are patches of behaviour at seams that outlive a rewording (`Swap`); where a fault lies within
a function, a small piece of its source is exchanged (`Edit`).
"""

from mutants.blocks import BLOCKS
from mutants.devices import DEVICES
from mutants.drawing import DRAWING
from mutants.texts import TEXTS
from mutants.trees import TREES

FAULTS = [*DRAWING, *TEXTS, *DEVICES, *TREES, *BLOCKS]
