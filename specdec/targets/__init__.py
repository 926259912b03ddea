"""The model whose distribution the output must have, run over slots, and interventions on it."""

from specdec.targets.edits.edit import window_of
from specdec.targets.target import Target
from specdec.targets.view import wrap_forward

__all__ = ["Target", "window_of", "wrap_forward"]
