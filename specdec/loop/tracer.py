"""`StepTracer`: takes the numbers of every step while a generation runs.

The numbers are computed on the device after the step and copied to the host as its outcome is, so
tracing adds work but no waiting. A call that is not traced runs none of this.

Legend: B rows, K draft tokens, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from specdec.loop.collector import StepRecord
from specdec.loop.generation import Generation
from specdec.loop.outcome import Outcome
from specdec.loop.state import StepState
from specdec.samplers import Sampler, Stream
from specdec.trace import StepNumbers, StepTimes, Trace


class StepTracer:
    """Collects the trace of one call.

    Args:
        generation: the call under way; its steps take their times from now on.
        sampler: that decides.
    """

    def __init__(self, generation: Generation, sampler: Sampler):
        self._generation, self._sampler = generation, sampler
        rows = len(generation.request.prompts.lengths)
        self._steps = [[] for _ in range(rows)]
        self._numbers: list[list[StepNumbers]] = [[] for _ in range(rows)]
        self._clock = _Clock(generation.state.buffer.lengths.device)
        self._pending: deque[_Pending] = deque()
        self._num_read = 0
        generation.mark = self._clock.mark

    @torch.inference_mode()
    def observe(self, outcome: Outcome) -> None:
        """Takes the numbers of the step that has just been issued."""
        state = self._generation.state
        table = _numbers(outcome, state, self._sampler.uses_accept_draws)
        self._pending.append(_Pending.send(table, list(self._generation.rows)))
        self._clock.mark("traced")

    def read(self, record: StepRecord) -> None:
        """Joins the numbers of the oldest step that was not read yet with what it did."""
        pending = self._pending.popleft()
        self._num_read += 1
        for number, row in zip(pending.rows, pending.values(), strict=True):
            step = record.rows[number]
            if step is not None:
                self._steps[number].append(step)
                drafted = len(step.draft_tokens)
                self._numbers[number].append(_unpack(record.index, row, drafted))

    def trace(self) -> Trace:
        """The finished trace."""
        self._generation.mark = None
        request, owner = self._generation.request, self._generation.owner
        prompts = request.prompts
        tokens = [ids[:n] for ids, n in zip(prompts.tokens.tolist(), prompts.lengths, strict=True)]
        about = {
            "target": type(owner.target.model).__name__,
            "drafter": type(owner.drafter).__name__,
            "sampler": type(owner.sampler).__name__,
            "num_draft_tokens": self._generation.num_draft_tokens,
            "device": str(owner.target.device),
            "dtype": str(owner.target.dtype).removeprefix("torch."),
            "seeds": request.seeds,
            "sampling": asdict(request.options.sampling),
        }
        # A step that was issued ahead of the last token was never read: no row has a part in it.
        times = self._clock.times()[: self._num_read]
        return Trace(self._steps, self._numbers, times, tokens, about)


@dataclass(frozen=True, eq=False)
class _Pending:
    """Numbers `[B, 5 K + 4]` of a step on their way to the host, and rows of the batch."""

    table: Tensor
    rows: list[int]
    arrived: torch.cuda.Event | None = None

    @classmethod
    def send(cls, table: Tensor, rows: list[int]) -> _Pending:
        """Starts the transfer and does not wait for it."""
        if not table.is_cuda:
            return cls(table, rows)
        pinned = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
        pinned.copy_(table, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(pinned, rows, arrived)

    def values(self) -> list[list[float]]:
        """The numbers; this waits for the device."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.table.tolist()


def _numbers(outcome: Outcome, state: StepState, uses_draws: bool) -> Tensor:
    """`[B, 5 K + 4]` float64: position, K draft and target probabilities, K draws, K
    draft and K + 1 target entropies, the extra token's probability under drafter and target.
    """
    draft, verdict, logits = outcome.draft, outcome.verdict, outcome.logits
    rows, width = draft.tokens.shape
    probs = state.warp(logits)  # [B, K + 1, V]
    tokens = draft.tokens.clamp(0, outcome.vocab_size - 1)
    accepted = verdict.num_accepted.clamp(0, width)[:, None]  # [B, 1]
    extra = verdict.tokens.gather(1, accepted).clamp(0, outcome.vocab_size - 1)
    of_target = probs[:, :width].gather(-1, tokens[..., None])[..., 0]
    extra_of_target = probs[torch.arange(rows, device=probs.device), accepted[:, 0]].gather(
        1, extra
    )
    if draft.probs is None or not width:
        of_draft, entropy = torch.ones_like(of_target), torch.zeros_like(of_target)
        extra_of_draft = torch.zeros_like(extra_of_target)
    else:
        of_draft = draft.probs.gather(-1, tokens[..., None])[..., 0]
        entropy = -torch.special.xlogy(draft.probs, draft.probs).sum(dim=-1)
        # A table of zeros after the draft: nothing was drafted where a bonus token stands.
        padded = torch.nn.functional.pad(draft.probs, (0, 0, 0, 1))
        extra_of_draft = padded[torch.arange(rows, device=probs.device), accepted[:, 0]]
        extra_of_draft = extra_of_draft.gather(1, extra)
    raw = logits.float().log_softmax(dim=-1)
    target_entropy = -(raw.exp() * raw.clamp(min=torch.finfo(raw.dtype).min)).sum(dim=-1)
    draws = torch.full_like(of_target, torch.nan, dtype=torch.float64)
    if uses_draws and not state.warp.is_greedy and width:
        draws = state.noise.at(state.buffer.start, width + 1).uniform(Stream.ACCEPT)[:, :width]
        if state.warp.greedy_rows is not None:
            draws = draws.masked_fill(state.warp.greedy_rows[:, None], torch.nan)
    columns = [state.buffer.start[:, None], of_draft, of_target, draws, entropy]
    columns += [target_entropy, extra_of_draft, extra_of_target]
    return torch.cat([column.double() for column in columns], dim=1)


def _unpack(index: int, row: list[float], drafted: int) -> StepNumbers:
    width = (len(row) - 4) // 5
    starts = [1 + i * width for i in range(5)]
    parts = [row[start : start + drafted] for start in starts[:4]]
    entropies = row[starts[4] : starts[4] + drafted + 1]
    of_draft, of_target, draws, draft_entropies = parts
    has_draws = bool(draws) and all(u == u for u in draws)
    return StepNumbers(
        step=index,
        position=int(row[0]),
        draft_probs=of_draft,
        target_probs=of_target,
        accept_draws=draws if has_draws else None,
        draft_entropies=draft_entropies,
        target_entropies=entropies,
        extra_draft_prob=row[-2],
        extra_target_prob=row[-1],
    )


class _Clock:
    """Times of the parts of every step: a clock on a CPU, events on a GPU's stream.

    Args:
        device: that the steps run on.
    """

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self._steps: list[dict] = []

    def mark(self, part: str) -> None:
        """Takes the time of `"start"`, which begins a step, or of one of its parts."""
        if part == "start":
            self._steps.append({})
        self._steps[-1][part] = self._now()

    def times(self) -> list[StepTimes]:
        """Of all steps; waits for the device."""
        end = self._now()
        if self._is_cuda:
            end.synchronize()
        ends = [step["start"] for step in self._steps[1:]] + [end]
        return [
            StepTimes(
                draft_ms=self._ms(step["start"], step["draft"]),
                verify_ms=self._ms(step["draft"], step["verify"]),
                sample_ms=self._ms(step["verify"], step["sample"]),
                host_ms=self._ms(step["traced"], end),
            )
            for step, end in zip(self._steps, ends, strict=False)
        ]

    def _now(self):
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, before, after) -> float:
        return before.elapsed_time(after) if self._is_cuda else 1e3 * (after - before)
