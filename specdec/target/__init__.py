"""The model whose distribution the output must have, run over slots."""

from specdec.target.target import Target

__all__ = ["Target"]
