"""Applies HF logits processors to a window of logits, each row with the prefix that it would have
in plain decoding.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from transformers import LogitsProcessor

from specdec.arguments import shown
from specdec.loop.token_buffer import TokenBuffer
from specdec.request.call import Request
from specdec.types import Draft


def process_step(request: Request, buffer: TokenBuffer, draft: Draft, logits: Tensor) -> Tensor:
    """The target's logits of a step after the processors of its options.

    Processors run on the host and need token values, so this waits for the device.

    Args:
        request: the call.
        buffer: of the generation, before the step is committed.
        draft: of the step.
        logits: `[B, K + 1, V]` of the target.
    """
    options, prompts = request.options, request.prompts
    ends = (buffer.lengths + 1).tolist()
    rows = zip(prompts.padded.tolist(), buffer.tokens.tolist(), prompts.lengths, ends, strict=True)
    prefixes = [prompt + tokens[start:end] for prompt, tokens, start, end in rows]
    return process_window(options.processors, logits, prefixes, draft.tokens, pad=options.pad)


def process_window(
    processors: Iterable[LogitsProcessor],
    logits: Tensor,
    prefixes: list[list[int]],
    draft_tokens: Tensor,
    *,
    pad: int,
) -> Tensor:
    """Processes every row of every window as HF would process it in plain decoding.

    Processors see a rectangle of token ids and one row of scores per batch row, so windows of rows
    with different lengths are visited length by length: for every length, the rows whose window
    covers it take part with their own tokens, and what the others get is thrown away. Row numbers
    stay those of the batch, which processors may use.

    Args:
        processors: HF processors that map (ids `[B, t]`, scores `[B, V]`) to scores.
        logits: `[B, K + 1, V]` of the target; widened to float32 first, as HF does.
        prefixes: per row the prompt exactly as passed (padding included) and the tokens generated
            so far.
        draft_tokens: `[B, K]`.
        pad: fills the rectangle where a row has no token yet.

    Returns:
        `[B, K + 1, V]` processed logits.

    Raises:
        TypeError, ValueError: a processor returned something other than such scores; says which.
    """
    rows, width, _ = logits.shape
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).clone()
    starts = [len(prefix) for prefix in prefixes]
    ids = torch.full((rows, max(starts) + width - 1), pad, dtype=torch.long, device=logits.device)
    for row, prefix in enumerate(prefixes):
        ids[row, : len(prefix)] = torch.tensor(prefix, device=logits.device)
        ids[row, len(prefix) : len(prefix) + width - 1] = draft_tokens[row].clamp(min=0)
    for length in range(min(starts), max(starts) + width):
        taking_part = [row for row in range(rows) if starts[row] <= length < starts[row] + width]
        if not taking_part:
            continue
        row_index = torch.tensor(taking_part, device=logits.device)
        window_index = length - torch.tensor(
            [starts[row] for row in taking_part], device=logits.device
        )
        scores = logits.new_zeros(rows, logits.shape[-1])
        scores[row_index] = logits[row_index, window_index]
        for processor in processors:
            # A copy of the ids: what a processor writes into its input is nobody else's.
            out = processor(ids[:, :length].clone(), scores)
            scores = _checked(processor, out, scores, taking_part)
        logits[row_index, window_index] = scores[row_index]
    return logits


def _checked(processor: LogitsProcessor, out: object, scores: Tensor, rows: list[int]) -> Tensor:
    """The scores that a processor returned; their values are looked at where that waits for
    nothing.
    """
    who = f"the logits processor {_name_of(processor)}"
    expected = f"scores {list(scores.shape)} of {scores.dtype} on {scores.device}, as it was given"
    if not isinstance(out, Tensor):
        raise TypeError(f"{who} returned {shown(out)}; expected {expected}")
    if out.shape != scores.shape or out.device != scores.device:
        raise ValueError(f"{who} returned {shown(out)} on {out.device}; expected {expected}")
    if out.dtype != scores.dtype:
        raise TypeError(f"{who} returned {shown(out)}; expected {expected}")
    if not out.is_cuda and out[rows].isnan().any():
        raise ValueError(f"{who} returned NaN; use -inf for tokens that must not come")
    return out


def _name_of(processor: LogitsProcessor) -> str:
    """Its class, or its own name where it is a plain function."""
    return getattr(processor, "__name__", type(processor).__name__)
