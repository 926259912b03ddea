"""Verify: which draft tokens are accepted, and the token after them. See README.md."""

from specdec.kernels.verify.reference import (
    VerifyUniforms,
    append_token,
    block_rule,
    find_draft_faults,
    find_faults,
    find_target_faults,
    point_rule,
    token_rule,
)

__all__ = [
    "VerifyUniforms",
    "append_token",
    "block_rule",
    "find_draft_faults",
    "find_faults",
    "find_target_faults",
    "point_rule",
    "token_rule",
]
