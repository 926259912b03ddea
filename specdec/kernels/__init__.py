"""Operations, each with its definition in plain PyTorch (`reference`)."""

from specdec.kernels.reference import draw, verify_chain, verify_points

__all__ = ["draw", "verify_chain", "verify_points"]
