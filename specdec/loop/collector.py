"""`OutputCollector`: the host's record of a generation. It reads outcomes; no step waits for it."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from specdec.arguments import shown
from specdec.loop.contracts import fault_text
from specdec.loop.generation import Generation
from specdec.loop.outcome import PendingOutcome, StepScores
from specdec.results import GenerationResult, RowStep, SpeculationStats
from specdec.trace import Trace


@dataclass(frozen=True, eq=False)
class StepRecord:
    """One step of a batch as `SpeculativeGenerator.stream` yields it.

    Args:
        index: number of the step, from 0.
        rows: per row what the step did, `None` for rows that had ended before.
    """

    index: int
    rows: list[RowStep | None]


class OutputCollector:
    """Collects the tokens of every row, evaluates HF's stopping criteria on the host, and builds
    the result.

    Args:
        generation: the call under way.
        streamer: receives each token once, in order; may be `None`.
    """

    def __init__(self, generation: Generation, streamer: BaseStreamer | None = None):
        self._generation, self._streamer = generation, streamer
        self._request = generation.request
        prompts = self._request.prompts
        self._room = self._request.max_new_tokens
        rows = len(prompts.lengths)
        self.new_tokens: list[list[int]] = [[] for _ in range(rows)]
        self.finish_reasons: list[str | None] = [None if self._room > 0 else "length"] * rows
        self.steps: list[list[RowStep]] = [[] for _ in range(rows)]
        self._kept = {"scores": [[] for _ in range(rows)], "logits": [[] for _ in range(rows)]}
        self._lengths = list(prompts.lengths)
        self._num_read = 0
        self._num_streamed = 0

    @property
    def is_done(self) -> bool:
        """Every row has ended."""
        return None not in self.finish_reasons

    @property
    def longest(self) -> int:
        """Length of the longest row on the device, as far as outcomes have been read; rows that a
        stopping criterion cut count in full there, and rows that were dropped do not count.
        """
        return max(self._lengths[row] for row in self._generation.rows)

    def read(self, outcome: PendingOutcome, scores: StepScores | None = None) -> StepRecord:
        """Takes over one step.

        Args:
            outcome: of the step.
            scores: its logits, where the call keeps them.

        Raises:
            ValueError: the step found something wrong with its inputs; nothing of it is kept.
        """
        numbers = self._generation.rows
        rows = sorted(zip(numbers, outcome.read(), strict=True))  # by row of the batch
        for number, row in rows:
            if row.faults and self.finish_reasons[number] is None:
                parts = self._generation.runner.parts
                raise ValueError(
                    f"in row {number} after {len(self.new_tokens[number])} new tokens (step "
                    f"{self._num_read}) {fault_text(row.faults, parts.drafter, parts.sampler)} "
                    f"(drafted {row.drafted}, {row.num_accepted} accepted, emitted {row.emitted})"
                )
        records: list[RowStep | None] = [None] * len(self.new_tokens)
        for number, row in rows:
            self._lengths[number] += len(row.new_tokens)
            if self.finish_reasons[number] is not None:
                continue
            kept = self._cut_where_criteria_stop(number, row.new_tokens)
            self.new_tokens[number] += kept
            if len(kept) == len(row.new_tokens) and row.is_eos:
                self.finish_reasons[number] = "eos"
            elif self.finish_reasons[number] is None and (
                len(self.new_tokens[number]) >= self._room
            ):
                self.finish_reasons[number] = "length"
            records[number] = RowStep(row.draft_tokens, row.num_accepted, kept)
            self.steps[number].append(records[number])
            if scores is not None:
                self._keep(scores, numbers.index(number), number, len(kept))
        self._num_read += 1
        self._stream()
        return StepRecord(self._num_read - 1, records)

    def result(
        self, trace: Trace | None = None, *, wall_s: float | None = None
    ) -> GenerationResult:
        """The finished generation, with its trace where there is one, and the seconds it took."""
        lengths = [len(new) for new in self.new_tokens]
        pad, prompts = self._request.options.pad, self._request.prompts.padded
        padded = [new + [pad] * (max(lengths) - len(new)) for new in self.new_tokens]
        new_tokens = torch.tensor(padded, dtype=torch.long, device=prompts.device)
        return GenerationResult(
            sequences=torch.cat([prompts.long(), new_tokens], dim=1),
            lengths=lengths,
            finish_reasons=list(self.finish_reasons),
            seeds=self._request.seeds,
            stats=SpeculationStats(self.steps, self._generation.num_draft_tokens, wall_s=wall_s),
            trace=trace,
            steps=self.steps,
            origins=[[kind for step in row for kind in step.kinds] for row in self.steps],
            scores=self._columns("scores", max(lengths)),
            logits=self._columns("logits", max(lengths)),
            tokenizer=self._request.options.tokenizer,
        )

    def _keep(self, scores: StepScores, index: int, number: int, count: int) -> None:
        """Keeps the logits of a row's new tokens on their device, and no others."""
        for name, rows in self._kept.items():
            table = getattr(scores, name)
            if table is not None:
                rows[number].append(table[index, :count].clone())

    def _columns(self, name: str, width: int) -> tuple[Tensor, ...] | None:
        """`[B, V]` for each new column, NaN after a row's end; `None` where nothing was kept."""
        rows = [torch.cat(blocks) for blocks in self._kept[name] if blocks]
        if not rows:
            return None
        table = rows[0].new_full((len(rows), width, rows[0].shape[-1]), torch.nan)
        for number, row in enumerate(rows):
            table[number, : len(row)] = row
        return table.unbind(dim=1)

    def _cut_where_criteria_stop(self, row: int, tokens: list[int]) -> list[int]:
        """The tokens up to the first at which a stopping criterion is met, as if they had come one
        by one.
        """
        criteria = self._request.options.criteria
        if not criteria:
            return tokens
        ids = self._request.shown_prompts[row] + self.new_tokens[row] + tokens
        start = len(ids) - len(tokens)
        ids = torch.tensor([ids], device=self._request.prompts.tokens.device)
        for count in range(1, len(tokens) + 1):
            if any([_is_met(c, c(ids[:, : start + count], None)) for c in criteria]):
                self.finish_reasons[row] = "stop"
                self._generation.end_rows([row])
                return tokens[:count]
        return tokens

    def _stream(self) -> None:
        """Hands over the columns that every row has reached, as plain decoding would: `[B]` tokens
        at a time.
        """
        if self._streamer is None:
            return
        pad = self._request.options.pad
        is_open = [reason is None for reason in self.finish_reasons]
        counts = [len(new) for new in self.new_tokens]
        ready = min(
            (n for n, open_ in zip(counts, is_open, strict=True) if open_), default=max(counts)
        )
        for column in range(self._num_streamed, ready):
            tokens = [new[column] if column < len(new) else pad for new in self.new_tokens]
            self._streamer.put(torch.tensor(tokens))
        self._num_streamed = ready


def _is_met(criterion: StoppingCriteria, answer: object) -> bool:
    """What a stopping criterion says of one row."""
    is_flag = isinstance(answer, Tensor) and answer.dtype == torch.bool and answer.numel() == 1
    if is_flag or isinstance(answer, bool | np.bool_):
        return bool(answer)
    name = getattr(criterion, "__name__", type(criterion).__name__)
    raise TypeError(
        f"the stopping criterion {name} returned {shown(answer)} for ids [1, T]; expected a bool "
        "tensor of shape [1], or True or False"
    )
