"""Operations and their definitions in plain PyTorch (`reference`, `gate`, `philox`)."""

from specdec.kernels.gate import Floor, Gate, Truncation
from specdec.kernels.ops import (
    choose,
    find_floor,
    race,
    sample,
    verify_blocks,
    verify_draws,
    verify_tokens,
)
from specdec.kernels.philox import philox
from specdec.kernels.reference import (
    append_token,
    draw,
    find_faults,
    first_arrival,
    verify_block,
    verify_chain,
    verify_points,
)

__all__ = [
    "Floor",
    "Gate",
    "Truncation",
    "append_token",
    "choose",
    "draw",
    "find_faults",
    "find_floor",
    "first_arrival",
    "philox",
    "race",
    "sample",
    "verify_block",
    "verify_blocks",
    "verify_chain",
    "verify_draws",
    "verify_points",
    "verify_tokens",
]
