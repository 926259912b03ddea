"""Operations with a plain-PyTorch definition (`reference`), and later a Triton kernel beside
each.
"""

from specdec.kernels.reference import draw, verify_chain, verify_points

__all__ = ["draw", "verify_chain", "verify_points"]
