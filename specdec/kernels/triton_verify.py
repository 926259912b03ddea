"""`verify_tokens` and `verify_blocks` on a GPU: what their kernels, in `triton_tokens` and
`triton_blocks`, are given and fill.
"""

import torch
from torch import Tensor

from specdec.kernels.gate import Gate
from specdec.kernels.triton_blocks import verify_by_block
from specdec.kernels.triton_decide import chain_of
from specdec.kernels.triton_laws import laws_of
from specdec.kernels.triton_settle import Outcome
from specdec.kernels.triton_tokens import verify_by_token

BLOCK = 4096
NUM_WARPS = 4


def verify(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    num_valid: Tensor | None,
    logits: Tensor,
    gate: Gate,
    accept_uniforms: Tensor,
    resample_uniforms: Tensor,
    *,
    by_block: bool,
    block: int = BLOCK,
    num_warps: int = NUM_WARPS,
    lag: int | None = None,
    span: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `ops.verify_blocks` if `by_block`, else as `ops.verify_tokens`.

    One difference: token by token, `Fault.DRAFT_PROBS` is judged by the one law of each row that is
    read in full, that of the rejected token.

    Args:
        by_block: the rule.
        block: tokens of a chunk, a power of two, not less than `num_warps`.
        num_warps: of a program.
        lag: by the block rule, rows that are measured ahead; `None` goes by their bytes.
        span: chunks that a program takes the draft off, a power of two; `None` goes by how many
            there are.
    """
    rows, width = draft_tokens.shape
    laws = laws_of(logits, gate)
    is_point = draft_probs is None or width == 0
    probs = None if is_point else draft_probs
    chain = chain_of(draft_tokens, probs, num_valid, accept_uniforms, resample_uniforms)
    tokens = torch.empty(rows, width + 1, dtype=torch.long, device=logits.device)
    outcome = Outcome(tokens, *(torch.empty_like(tokens[:, 0]) for _ in range(2)))
    if not rows:
        return tuple(outcome)  # none of a launch's programs would have a row to wait for
    options = {"block": block, "num_warps": num_warps, "span": span}
    with torch.cuda.device_of(logits):
        if by_block and probs is not None:
            verify_by_block(chain, laws, outcome, lag=lag, **options)
        else:
            verify_by_token(chain, laws, outcome, **options)
    return tuple(outcome)
