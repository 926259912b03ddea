"""Sample: a token from logits, by inverting the cumulative distribution. See README.md."""

from specdec.kernels.sample.reference import draw

__all__ = ["draw"]
