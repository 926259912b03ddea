"""`verify` on a GPU, in four launches: softmax partials of the target's rows; accept; residual
sums; and finalize, which draws the extra token.

Legend: as `triton_accept`.
"""

import torch
import triton
from torch import Tensor

from specdec.kernels.triton_common import NO_FUSION, rows_of, softmax_partials, table_of
from specdec.kernels.truncate.reference import WarpParams
from specdec.kernels.verify.reference import VerifyUniforms
from specdec.kernels.verify.triton_accept import (
    Inputs,
    Outcome,
    Residuals,
    Tables,
    Target,
    accept_kernel,
)
from specdec.kernels.verify.triton_residual import finalize_kernel, residual_kernel
from specdec.types import Draft, Verdict

BLOCK, NUM_WARPS = 4096, 4


def verify(
    draft: Draft,
    logits: Tensor,
    params: WarpParams,
    uniforms: VerifyUniforms,
    *,
    by_block: bool,
    block: int = BLOCK,
    num_warps: int = NUM_WARPS,
) -> Verdict:
    """As the definition; a program has `num_warps` warps and `block` tokens, a power of two."""
    (count, width), device = draft.tokens.shape, logits.device
    tokens = torch.empty(count, width + 1, dtype=torch.long, device=device)
    outcome = Outcome(tokens, torch.empty_like(tokens[:, 0]), torch.empty_like(tokens[:, 0]))
    if count:
        inputs = Inputs(
            draft.tokens.contiguous(),
            None if draft.probs is None else table_of(draft.probs),
            None if draft.num_valid is None else draft.num_valid.contiguous(),
            table_of(uniforms.accept),
            table_of(uniforms.resample[:, None]),
        )
        by_block = by_block and draft.probs is not None and width > 0  # else the rules are the same
        with torch.cuda.device_of(logits):
            _launch(rows_of(logits, params), inputs, outcome, by_block, block, num_warps)
    return Verdict(*outcome[:2], draft.num_valid, outcome.faults)


def _launch(rows, inputs, outcome, by_block: bool, block: int, num_warps: int) -> None:
    """Fills `outcome`."""
    (count, width), device = inputs.tokens.shape, inputs.tokens.device
    partials = softmax_partials(rows, block=block, num_warps=num_warps, num_valid=inputs.num_valid)
    row_max = torch.empty(count, width + 1, dtype=torch.float32, device=device)
    one_hot = torch.empty_like(row_max, dtype=torch.int32)
    path = torch.empty_like(row_max, dtype=torch.float64)
    target = Target(row_max, torch.empty_like(row_max), one_hot, path)
    num_residuals, num_chunks = width if by_block else 1, partials.num_chunks
    sums = torch.empty(count, num_residuals, num_chunks, dtype=torch.float32, device=device)
    residuals = Residuals(sums, torch.empty_like(sums), num_residuals)
    tables = Tables(rows, inputs, partials, target, residuals, outcome)
    sizes = {"by_block": by_block, "width": width, **NO_FUSION}
    padded_chunks = triton.next_power_of_2(num_chunks)
    padded = {"padded_indices": triton.next_power_of_2(width + 1), "padded_chunks": padded_chunks}
    accept_kernel[(count,)](tables, **sizes, **padded)
    if width:
        residual_kernel[(count, num_residuals, num_chunks)](
            tables, **sizes, block=block, num_warps=num_warps
        )
    finalize_kernel[(count,)](tables, **sizes, **padded, block=block)
