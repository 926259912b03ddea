"""The model whose distribution the output must have, run over slots."""

from specdec.targets.target import Target

__all__ = ["Target"]
