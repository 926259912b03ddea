"""A call of `generate`, read and checked before anything runs."""

from specdec.request.keywords import GenerateOptions
from specdec.request.sampling import Sampling

__all__ = ["GenerateOptions", "Sampling"]
