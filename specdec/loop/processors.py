"""A step whose logits go through HF logits processors, each row with the prefix that it would have
in plain decoding. A call without processors runs none of this.

Legend: B rows, K draft tokens, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor
from transformers import LogitsProcessor

from specdec.graphs.rows import map_tensors
from specdec.loop.outcome import Outcome
from specdec.loop.state import Parts, StepState, TokenBuffer
from specdec.loop.step import Mark, ignore, step
from specdec.request.call import Request
from specdec.request.processors import check_scores
from specdec.types import Draft


def step_with_processors(
    request: Request,
    parts: Parts,
    state: StepState,
    num_draft_tokens: int,
    *,
    mark: Mark = ignore,
) -> Outcome:
    """A `step` whose sampler sees the target's logits after the processors of a call; waits for the
    device.

    Where processors leave no token, all are equally likely to the sampler: up to there any
    distribution gives the same text, and a token that is kept from there is an error.

    Args:
        request: the call.
        parts, state, num_draft_tokens, mark: as `step`.
    """
    is_empty = None

    def process(draft: Draft, logits: Tensor) -> Tensor:
        nonlocal is_empty
        logits = process_step(request, state.buffer, draft, logits)
        is_empty = (logits == -torch.inf).all(dim=-1)  # [B, K + 1]
        return logits.masked_fill(is_empty[..., None], 0.0)

    outcome = step(parts, state, num_draft_tokens, mark=mark, edit_logits=process)
    return _until_empty(outcome, is_empty)


def process_step(request: Request, buffer: TokenBuffer, draft: Draft, logits: Tensor) -> Tensor:
    """The target's logits of a step after the processors of its options.

    Processors run on the host and need token values, so this waits for the device. The buffer is
    that of the generation before the step is committed.
    """
    ends = (buffer.root_position + 1).tolist()
    table, lengths = buffer.tokens.tolist(), request.lengths
    rows = zip(request.shown_prompts, table, lengths, ends, strict=True)
    prefixes = [prompt + tokens[start:end] for prompt, tokens, start, end in rows]
    shape = replace(draft, probs=None)  # no processor needs them
    windows = [
        process_window(
            *(processors, logits[rows], prefixes[rows]),
            map_tensors(lambda table, rows=rows: table[rows], shape),
            pad=request.pad,
        )
        for rows, processors in request.processors
    ]
    return torch.cat(windows)


def _until_empty(outcome: Outcome, is_empty: Tensor) -> Outcome:
    """The outcome whose sound tokens are those up to the first one that comes from a row of the
    window where no token was possible, `[B, K + 1]` bool.
    """
    index = torch.arange(outcome.draft.depth + 1, device=is_empty.device)
    is_empty = is_empty.gather(1, outcome.verdict.rows.clamp(0, is_empty.shape[1] - 1))
    first = torch.where(is_empty, index, len(index)).amin(dim=1)
    return replace(outcome, num_sound=torch.minimum(outcome.num_new, first))


def process_window(
    processors: Iterable[LogitsProcessor],
    logits: Tensor,
    prefixes: list[list[int]],
    draft: Draft,
    *,
    pad: int,
) -> Tensor:
    """Processes every row of every window as HF would process it in plain decoding.

    Processors see a rectangle of token ids and one row of scores per batch row, so windows of rows
    with different lengths are visited length by length: for every length, the rows whose window
    covers it take part with their own tokens, and what the others get is thrown away. Nodes of a
    tree that are as deep as another one of their row have a visit of their own. Row numbers stay
    those of the batch, which processors may use.

    Args:
        processors: HF processors that map (ids `[B, t]`, scores `[B, V]`) to scores.
        logits: `[B, K + 1, V]` of the target; widened to float32 first, as HF does.
        prefixes: per row the prompt as processors are shown it, and the tokens generated so far.
        draft: of the window.
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
        ids[row, len(prefix) : len(prefix) + width - 1] = draft.tokens[row].clamp(min=0)
    visits: dict[tuple[int, int], list[tuple[int, list[int]]]] = defaultdict(list)
    for row, of_row in enumerate(draft.window_parents.tolist()):
        paths = [[0]]  # of each row of the window, from the root
        for node, parent in enumerate(of_row, start=1):
            paths.append([*paths[parent], node])
        lengths = [starts[row] + len(path) - 1 for path in paths]
        for index, (length, path) in enumerate(zip(lengths, paths, strict=True)):
            visits[length, lengths[:index].count(length)].append((row, path))
    for (length, _), places in sorted(visits.items()):
        taking_part = [row for row, _ in places]
        for row, path in () if draft.is_chain else places:  # of a chain they are there
            nodes = torch.tensor(path[1:], dtype=torch.long, device=logits.device) - 1
            ids[row, starts[row] : length] = draft.tokens[row][nodes].clamp(min=0)
        row_index = torch.tensor(taking_part, device=logits.device)
        window_index = torch.tensor([path[-1] for _, path in places], device=logits.device)
        scores = logits.new_zeros(rows, logits.shape[-1])
        scores[row_index] = logits[row_index, window_index]
        for processor in processors:
            # A copy of the ids: what a processor writes into its input is nobody else's.
            out = processor(ids[:, :length].clone(), scores)
            scores = check_scores(processor, out, scores, taking_part)
        logits[row_index, window_index] = scores[row_index]
    return logits
