"""`StepTracer`: takes the steps of a call, with the times of their parts and every number that
decided.

The numbers are computed on the device after the step and copied to the host as its outcome is, so
tracing adds work but no waiting. A call that is not traced runs none of this.

Legend: B rows, K draft tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from specdec.lab.trace import Trace
from specdec.lab.trace.record import StepNumbers, StepTimes
from specdec.loop.host import Generation, StepRecord
from specdec.loop.outcome import Outcome, Transfer
from specdec.loop.state import StepState
from specdec.samplers import Stream
from specdec.settings import called


class StepTracer:
    """A stepper that takes the steps of one call by another one and collects the call's trace.

    Args:
        generation: at its start, with a stepper that is `step` or passes its `mark` on.
    """

    def __init__(self, generation: Generation):
        self._stepper, self._parts = generation.stepper, generation.parts
        self._request, self._rows = generation.request, generation.rows
        rows = len(generation.request.lengths)
        self._steps = [[] for _ in range(rows)]
        self._numbers: list[list[StepNumbers]] = [[] for _ in range(rows)]
        self._is_cuda = generation.tokens.is_cuda
        self._times: list[list] = []
        self._pending: deque[tuple[list[int], dict[str, Transfer]]] = deque()
        self._num_added = 0

    def __call__(self, state: StepState, num_draft_tokens: int) -> Outcome:
        """One step for every row, with its numbers on their way to the host and the time after each
        of its parts.
        """
        state = replace(state, signature=state.signature._replace(wants_raw=True))
        times = [self._now()]
        outcome = self._stepper(state, num_draft_tokens, mark=lambda _: times.append(self._now()))
        times.append(self._now())
        numbers = _numbers(outcome, state, self._parts.sampler.uses_accept_draws)
        columns = {name: Transfer(column) for name, column in numbers.items()}
        self._pending.append((list(self._rows), columns))
        self._times.append([*times, self._now()])
        return outcome

    def add(self, record: StepRecord) -> None:
        """Joins the numbers of the oldest step that was not read yet with what it did."""
        numbers, columns = self._pending.popleft()
        self._num_added += 1
        columns = {name: column.wait().tolist() for name, column in columns.items()}
        for index, number in enumerate(numbers):
            if (step := record.rows[number]) is not None:
                values = {name: column[index] for name, column in columns.items()}
                self._steps[number].append(step)
                own = _step_numbers(record.index, values, len(step.draft_tokens))
                self._numbers[number].append(own)

    def trace(self, num_draft_tokens: int) -> Trace:
        """The finished trace; its steps drafted at most so many tokens."""
        request, target, drafter = self._request, self._parts.target, self._parts.drafter
        about = {
            "target": type(target.model).__name__,
            "drafter": type(drafter).__name__,
            "sampler": called(self._parts.sampler.settings()),
            "num_draft_tokens": num_draft_tokens,
            "device": str(target.device),
            "dtype": str(target.dtype).removeprefix("torch."),
            "seeds": request.seeds,
            "sampling": asdict(request.sampling),
        }
        # A step that was issued ahead of the last token was never read: no row has a part in it.
        times = self._step_times()[: self._num_added]
        trace = Trace(self._steps, self._numbers, times, request.prompts, about)
        more = request.prompt_inputs
        return trace if more is None else replace(trace, placeholders=more.placeholders)

    def _step_times(self) -> list[StepTimes]:
        """Of all steps; waits for the device."""
        end = self._now()
        if self._is_cuda:
            end.synchronize()
        ends = [times[0] for times in self._times[1:]] + [end]
        return [
            StepTimes(
                draft_ms=self._ms(start, drafted),
                verify_ms=self._ms(drafted, verified),
                sample_ms=self._ms(verified, sampled),
                host_ms=self._ms(traced, end),
            )
            for (start, drafted, verified, sampled, traced), end in zip(
                self._times, ends, strict=False
            )
        ]

    def _now(self):
        """A clock on a CPU, an event on a GPU's stream."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, before, after) -> float:
        return before.elapsed_time(after) if self._is_cuda else 1e3 * (after - before)


def _numbers(outcome: Outcome, state: StepState, uses_draws: bool) -> dict[str, Tensor]:
    """What `StepNumbers` holds: `[B, K]` of the draft tokens, `[B, K + 1]` target entropies, and
    `[B]` of the root and the extra token.
    """
    draft, verdict, logits = outcome.draft, outcome.verdict, outcome.logits
    width = draft.tokens.shape[1]
    probs = state.logits_filter(logits)  # [B, K + 1, V]
    tokens = draft.tokens.clamp(0, outcome.vocab_size - 1)
    end = verdict.num_accepted.clamp(0, draft.depth)[:, None]  # [B, 1]
    extra = verdict.tokens.gather(1, end).clamp(0, outcome.vocab_size - 1)
    end = verdict.rows.gather(1, end).clamp(0, width)
    flat = probs.flatten(1)
    target_probs = flat.gather(1, draft.window_parents * outcome.vocab_size + tokens)
    extra_target_prob = flat.gather(1, end * outcome.vocab_size + extra)
    if draft.probs is None or not width:
        draft_probs, draft_entropies = torch.ones_like(target_probs), torch.zeros_like(target_probs)
        extra_draft_prob = torch.zeros_like(extra_target_prob)
    else:
        draft_probs = draft.probs.gather(-1, tokens[..., None])[..., 0]
        draft_entropies = -torch.special.xlogy(draft.probs, draft.probs).sum(dim=-1)
        first, is_drafted = (table.gather(1, end) for table in draft.first_children)
        of_extra = draft.probs.flatten(1).gather(1, first * outcome.vocab_size + extra)
        extra_draft_prob = of_extra * is_drafted  # nothing is drafted where a bonus token stands
    raw = logits.float().log_softmax(dim=-1)
    raw_of = raw.exp().flatten(1)
    raw_target_probs = raw_of.gather(1, draft.window_parents * outcome.vocab_size + tokens)
    raw_draft_probs = draft.raw_probs
    if raw_draft_probs is None or raw_draft_probs.shape[1] != width:
        raw_draft_probs = torch.full_like(raw_target_probs, torch.nan)
    draws = torch.full_like(target_probs, torch.nan, dtype=torch.float64)
    if uses_draws and not state.logits_filter.is_greedy and width:
        draws = state.noise.at(state.buffer.start, width + 1).uniform(Stream.ACCEPT)[:, :width]
        if state.logits_filter.greedy_rows is not None:
            draws = draws.masked_fill(state.logits_filter.greedy_rows[:, None], torch.nan)
    return {
        "position": state.buffer.start,
        "draft_probs": draft_probs,
        "target_probs": target_probs,
        "accept_draws": draws,
        "draft_entropies": draft_entropies,
        "target_entropies": -(raw.exp() * raw.clamp(min=torch.finfo(raw.dtype).min)).sum(dim=-1),
        "raw_target_probs": raw_target_probs,
        "raw_draft_probs": raw_draft_probs,
        "raw_extra_target_prob": raw_of.gather(1, end * outcome.vocab_size + extra)[:, 0],
        "extra_draft_prob": extra_draft_prob[:, 0],
        "extra_target_prob": extra_target_prob[:, 0],
    }


def _step_numbers(index: int, values: dict[str, Any], drafted: int) -> StepNumbers:
    """The record of a row that drafted so many tokens."""
    entropies = values["target_entropies"][: drafted + 1]
    values = {n: v[:drafted] if isinstance(v, list) else v for n, v in values.items()}
    for name in ("accept_draws", "raw_draft_probs"):  # NaN where there are none
        own = values[name]
        values[name] = own if own and all(u == u for u in own) else None
    return StepNumbers(step=index, **values | {"target_entropies": entropies})
