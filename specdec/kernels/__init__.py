"""The operations as the rest of the library calls them, one folder each.

Each chooses by one `if`: its Triton kernels on a GPU, else its definition in plain PyTorch. Wide
rows on a CPU go through `truncate.cpu`, which gives the definition's numbers faster. Triton is
imported by the first call on a GPU, so other machines do not need it.

Legend: B rows, K draft tokens, N window indices, V vocabulary.
"""

import torch
from torch import Tensor

from specdec.kernels import attention, mask_window, truncate
from specdec.kernels import mtp_shift as shift
from specdec.kernels.attention import CAUSAL, MAX_WINDOW, AttentionOptions
from specdec.kernels.mask_window import MaskWindow, WindowSpec
from specdec.kernels.mtp_shift import PastRows, ShiftedWindow
from specdec.kernels.philox import philox, step_uniforms
from specdec.kernels.race import first_arrival, race_weights
from specdec.kernels.sample import draw
from specdec.kernels.truncate import Cutoff, Truncation, WarpParams, cpu, warp_probs
from specdec.kernels.verify import (
    VerifyUniforms,
    append_token,
    block_rule,
    find_faults,
    find_target_faults,
    point_rule,
    token_rule,
)
from specdec.kernels.write_slots import write_slots as define_write_slots
from specdec.types import Context, Draft, Verdict

__all__ = [
    "CAUSAL",
    "AttentionOptions",
    "Cutoff",
    "MaskWindow",
    "PastRows",
    "ShiftedWindow",
    "Truncation",
    "VerifyUniforms",
    "WarpParams",
    "WindowSpec",
    "append_token",
    "attends_raggedly",
    "draw",
    "expand_window",
    "find_cutoff",
    "find_faults",
    "first_arrival",
    "philox",
    "race",
    "ragged_attention",
    "sample",
    "sample_tokens",
    "shift_window",
    "token_rule",
    "uniforms",
    "verify_blocks",
    "verify_points",
    "verify_tokens",
    "warp_probs",
    "write_slots",
    "writes_slots",
]


def find_cutoff(logits: Tensor, temperature: Tensor | None, truncation: Truncation) -> Cutoff:
    """The one cutoff of top-k, then top-p of what top-k kept, then min-p.

    Args:
        logits: `[B, V]` or `[B, N, V]`.
        temperature: `[B]` > 0, or `None` for 1.
        truncation: what to keep.

    Returns:
        A cutoff per row of V logits; see `truncate.reference.find_cutoff`.
    """
    if _has_kernel(logits):
        from specdec.kernels.truncate import triton

        return triton.find_cutoff(logits, temperature, truncation)
    definition = cpu if cpu.is_wide(logits) else truncate
    return definition.find_cutoff(logits, temperature, truncation)


def sample(
    logits: Tensor, params: WarpParams, uniforms: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Draws tokens, and returns the probabilities that they were drawn from.

    Args:
        logits: `[B, V]` or `[B, N, V]`.
        params: how they become probabilities.
        uniforms: `[B]` or `[B, N]` float64 in [0, 1).
        out: filled with the probabilities; of the shape of `logits`, float32 (float64 for float64
            logits), any strides whose last is 1. `None` allocates it.

    Returns:
        Tokens of the shape of `uniforms`, and `out`.
    """
    if _has_kernel(logits):
        from specdec.kernels.sample import triton

        if out is None:
            out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        return triton.sample(logits, params, uniforms, out), out
    probs = _probs(logits, params, out)
    return draw(probs, uniforms), probs


def sample_tokens(logits: Tensor, params: WarpParams, uniforms: Tensor) -> Tensor:
    """The tokens of `sample`; on a GPU no probabilities are written."""
    if _has_kernel(logits):
        from specdec.kernels.sample import triton

        return triton.sample(logits, params, uniforms, None)
    return draw(_probs(logits, params), uniforms)


def uniforms(key: Tensor, position: Tensor, num_streams: int, width: int) -> Tensor:
    """The uniforms of a step, `[B, num_streams, width]` float64 in [0, 1).

    Args:
        key, position, num_streams, width: see `philox.reference.step_uniforms`.
    """
    if position.is_cuda:
        from specdec.kernels.philox import triton

        return triton.step_uniforms(key, position, num_streams, width)
    return step_uniforms(key, position, num_streams, width)


def race(logits: Tensor, params: WarpParams, key: Tensor, position: Tensor, stream: int) -> Tensor:
    """Draws tokens `[B, N]` from logits `[B, N, V]` by an exponential race.

    Args:
        logits: `[B, N, V]`.
        params: how they become probabilities.
        key, position, stream: of the noise; see `race.reference.race_weights`.
    """
    if _has_kernel(logits):
        from specdec.kernels.race import triton

        return triton.race(logits, params, key, position, stream)
    return race_weights(_probs(logits, params), key, position, stream)


def shift_window(
    context: Context, past: PastRows, width: int, *, trash: int, num_later: int = 0
) -> ShiftedWindow:
    """The last `width` rows of every text, the newest in the last column: new rows of a context
    after remembered ones. Args and Raises as `mtp_shift.reference.mtp_shift`.
    """
    if context.features is not None and _has_kernel(context.features):
        from specdec.kernels.mtp_shift import triton

        return triton.mtp_shift(context, past, width, trash=trash, num_later=num_later)
    return shift.mtp_shift(context, past, width, trash=trash, num_later=num_later)


def verify_tokens(
    draft: Draft, logits: Tensor, params: WarpParams, uniforms: VerifyUniforms
) -> Verdict:
    """`verify.reference.token_rule` on the target's logits, with what is wrong with the inputs.

    On a GPU `Fault.DRAFT_PROBS` is judged at each row's rejected token only: no other row of draft
    probabilities is read in full.

    Args:
        draft: K tokens per row.
        logits: `[B, K + 1, V]` of the target.
        params: how they become probabilities.
        uniforms: to accept and to resample.
    """
    if _has_kernel(logits):
        from specdec.kernels.verify import triton

        return triton.verify(draft, logits, params, uniforms, by_block=False)
    return _verdict(draft, logits, *token_rule(draft, _probs(logits, params), uniforms))


def verify_blocks(
    draft: Draft, logits: Tensor, params: WarpParams, uniforms: VerifyUniforms
) -> Verdict:
    """`verify.reference.block_rule` on the target's logits, with what is wrong with the inputs;
    Args as `verify_tokens`, and `draft.probs` is needed.
    """
    if _has_kernel(logits):
        from specdec.kernels.verify import triton

        return triton.verify(draft, logits, params, uniforms, by_block=True)
    return _verdict(draft, logits, *block_rule(draft, _probs(logits, params), uniforms))


def expand_window(tokens: Tensor, start: Tensor, num_new: Tensor, spec: WindowSpec) -> MaskWindow:
    """The rows of one pass of a parallel drafter, `mask_window.reference.expand_window`.

    Args:
        tokens: `[B, N + 1]` int64, the anchor and the new tokens of a context.
        start: `[B]` int64, position of the anchor.
        num_new: `[B]` int64, how many of the N are a row's own.
        spec: what the window is made of.
    """
    if tokens.is_cuda:
        from specdec.kernels.mask_window import triton

        return triton.expand_window(tokens, start, num_new, spec)
    return mask_window.expand_window(tokens, start, num_new, spec)


def verify_points(draft: Draft, target_tokens: Tensor, largest_logits: Tensor) -> Verdict:
    """`verify.reference.point_rule`, with what is wrong with the target's logits.

    Args:
        draft: K tokens per row; probabilities are not used, so they cannot be wrong.
        target_tokens: `[B, K + 1]`.
        largest_logits: `[B, K + 1]`, the largest logits of the rows that the tokens come from.
    """
    tokens, num_accepted = point_rule(draft, target_tokens)
    faults = find_target_faults(largest_logits, num_accepted)
    return Verdict(tokens, num_accepted, draft.num_valid, faults)


MAX_ATTENTION_ROWS = 512
"""Query rows (queries times query heads per head of keys) of a window that attends raggedly. Longer
windows, chunks of a prompt, have the arithmetic that makes up for a dense mask.
"""


def ragged_attention(
    query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, options: AttentionOptions = CAUSAL
) -> Tensor:
    """Attention of a few queries per row over the slots that the row has filled; Args, Returns and
    Example as `attention.reference.ragged_attention`.

    Time and memory traffic follow the rows' lengths, not the number of slots. `keys` and `values`
    may have any strides (a cache that is laid out by slot is read where it is).

    Raises:
        ValueError: a `window_visible` for more than `attention.MAX_WINDOW` queries, on a GPU.
    """
    if _has_kernel(query):
        from specdec.kernels.attention import triton

        return triton.ragged_attention(query, keys, values, slots, options)
    return attention.ragged_attention(query, keys, values, slots, options)


def attends_raggedly(query: Tensor, keys: Tensor, *, has_window_mask: bool = False) -> bool:
    """Whether `ragged_attention` is the way to attend here: it has a kernel, and the queries are
    few. Elsewhere attention with a dense mask is faster than the definition.

    Args:
        query: `[B, Hq, N, D]`.
        keys: `[B, Hkv, S, D]`.
        has_window_mask: whether the window has a mask of its own.
    """
    if not _has_kernel(query) or query.dtype != keys.dtype:
        return False
    _, num_heads, num_queries, _ = query.shape
    limit = MAX_WINDOW if has_window_mask else num_queries
    return num_queries <= limit and num_queries * num_heads // keys.shape[1] <= MAX_ATTENTION_ROWS


def write_slots(
    keys: Tensor, values: Tensor, key_states: Tensor, value_states: Tensor, slots: Tensor
) -> None:
    """Writes the keys and values of a window into its slots of a cache; Args and Example as
    `write_slots.reference.write_slots`.
    """
    if _has_kernel(key_states):
        from specdec.kernels.write_slots import triton

        triton.write_slots(keys, values, key_states, value_states, slots)
    else:
        define_write_slots(keys, values, key_states, value_states, slots)


def writes_slots(key_states: Tensor, keys: Tensor) -> bool:
    """Whether `write_slots` is the way to write here: it has a kernel for these dtypes. Elsewhere a
    cache has views of its storage that make index copies faster.
    """
    return _has_kernel(key_states) and key_states.dtype == keys.dtype


def _has_kernel(logits: Tensor) -> bool:
    """On a GPU; float64 logits, as oracles have, and logits with gradients use the definition."""
    return logits.is_cuda and logits.dtype != torch.float64 and not logits.requires_grad


def _probs(logits: Tensor, params: WarpParams, out: Tensor | None = None) -> Tensor:
    if cpu.is_wide(logits):
        return cpu.warp_probs(logits, params, out)
    probs = warp_probs(logits, params)
    return probs if out is None else out.copy_(probs)


def _verdict(draft: Draft, logits: Tensor, tokens: Tensor, num_accepted: Tensor) -> Verdict:
    faults = find_faults(draft, logits.amax(dim=-1), num_accepted)
    return Verdict(tokens, num_accepted, draft.num_valid, faults)
