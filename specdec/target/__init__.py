"""The model whose distribution the output must have, run over slots."""

from specdec.target.hf_model import Target

__all__ = ["Target"]
