"""`TrainingPlan` and `TrainingProgress`: how a run is to go, and how far it has come."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from specdec.arguments import check_integer, check_number, check_type

_COUNTS = {"steps": 1, "tokens_per_step": 1, "accumulation": 1, "evaluate_every": 0, "seed": 0}
"""Whole numbers, and the least value of each."""
_POSITIVE = ("minutes", "clip_norm", "lr_matrices", "lr_others")
_NOT_NEGATIVE = ("weight_decay", "final_lr_ratio", "checkpoint_minutes")


@dataclass(frozen=True)
class TrainingPlan:
    """How one module is trained; written into its card.

    Either `steps` or `minutes` of wall-clock sets the length; the schedule follows the fraction
    done, so that both give the same curve.

    Args:
        minutes: of wall-clock, or `None`.
        steps: of the optimiser, or `None`.
        tokens_per_step: over all processes and accumulated batches together.
        lengths: (until this fraction of the run, tokens per row). Attention is most of the cost of
            long rows, so most of a run can see short ones and its end teach long positions.
        accumulation: batches per optimiser step.
        lr_matrices: peak learning rate of hidden matrices (Muon).
        lr_others: peak learning rate of everything else (AdamW).
        weight_decay: of hidden matrices.
        warmup_fraction: of the run, in which rates rise linearly.
        final_lr_ratio: of the peak, where the cosine ends.
        clip_norm: largest norm of the gradient.
        seed: of the initialisation and the order of the data.
        precision: `"bf16"` runs matrix products in bfloat16 (weights stay as they are), `"no"` runs
            everything in the weights' own type.
        checkpoint_minutes: between checkpoints; evaluations and interrupts save as well.
        evaluate_every: steps between evaluations; 0 for none but the last.
        compiled: run the loss through `torch.compile`; needs a C++ compiler.

    Raises:
        ValueError: both or neither of `steps` and `minutes`, or a setting out of range.

    Example:
        >>> plan = TrainingPlan(steps=100, tokens_per_step=4096, lengths=((0.5, 256), (1.0, 512)))
        >>> plan.rows_at(0.0, num_processes=2), plan.rows_at(0.9, num_processes=2)
        (16, 8)
    """

    minutes: float | None = None
    steps: int | None = None
    tokens_per_step: int = 6144
    lengths: tuple[tuple[float, int], ...] = ((0.6, 256), (0.88, 512), (1.0, 1024))
    accumulation: int = 1
    lr_matrices: float = 8e-3
    lr_others: float = 3e-3
    weight_decay: float = 0.1
    warmup_fraction: float = 0.02
    final_lr_ratio: float = 0.02
    clip_norm: float = 1.0
    seed: int = 0
    precision: str = "bf16"
    checkpoint_minutes: float = 4.0
    evaluate_every: int = 0
    compiled: bool = True

    def __post_init__(self):
        if (self.minutes is None) == (self.steps is None):
            raise ValueError(
                f"expected either steps or minutes, got steps={self.steps}, minutes={self.minutes}"
            )
        for name, least in _COUNTS.items():
            if name != "steps" or self.steps is not None:
                check_integer(name, getattr(self, name), least)
        for name in _POSITIVE:
            if name != "minutes" or self.minutes is not None:
                check_number(name, getattr(self, name), above=0)
        for name in _NOT_NEGATIVE:
            check_number(name, getattr(self, name), 0)
        check_number("warmup_fraction", self.warmup_fraction, 0, below=1)
        check_type("precision", self.precision, Literal["bf16", "no"])
        check_type("compiled", self.compiled, bool)
        _check_lengths(self.lengths)

    def length_at(self, fraction: float) -> int:
        """Tokens per row at a fraction of the run."""
        return next((length for end, length in self.lengths if fraction < end), self.lengths[-1][1])

    def lr_factor_at(self, fraction: float) -> float:
        """The learning rates' factor: linear warm-up, then a cosine."""
        if fraction < self.warmup_fraction:
            return max(fraction, 1e-4) / self.warmup_fraction
        done = (fraction - self.warmup_fraction) / (1 - self.warmup_fraction)
        cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        return self.final_lr_ratio + (1 - self.final_lr_ratio) * cosine

    def rows_at(self, fraction: float, num_processes: int) -> int:
        """Rows of one batch over all processes.

        Raises:
            ValueError: a step has not a row for every process and accumulated batch.
        """
        length = self.length_at(fraction)
        rows = self.tokens_per_step // (length * self.accumulation * num_processes) * num_processes
        if rows == 0:
            raise ValueError(
                f"tokens_per_step = {self.tokens_per_step} has not a row of {length} tokens for "
                f"each of {num_processes} processes and {self.accumulation} accumulated batches; "
                "raise it or shorten the rows"
            )
        return rows


def _check_lengths(lengths: tuple[tuple[float, int], ...]) -> None:
    """Refuses what is no schedule of row lengths."""
    form = "lengths must be pairs (until this fraction, tokens per row)"
    pairs = lengths if isinstance(lengths, tuple | list) else ()
    if not pairs or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"{form}, got {lengths!r}")
    for end, length in pairs:
        check_number("a fraction of lengths", end, None, 1, above=0)
        check_integer("the tokens per row of lengths", length, 1)
    ends = [end for end, _ in pairs]
    if sorted(set(ends)) != ends or ends[-1] != 1:
        raise ValueError(f"{form} with rising fractions that end at 1, got {lengths}")


@dataclass
class TrainingProgress:
    """What a run has done so far; checkpointed with the module.

    Args:
        num_steps: of the optimiser.
        num_tokens: trained on, over all processes.
        wall_s: seconds inside training steps; evaluations and checkpoints do not count.
        loss: smoothed over about 50 steps; `None` before the first.
        history: (step, smoothed loss), every 50 steps.
        evaluations: what `evaluate` returned, beside its `"step"`.
    """

    num_steps: int = 0
    num_tokens: int = 0
    wall_s: float = 0.0
    loss: float | None = None
    history: list[tuple[int, float]] = field(default_factory=list)
    evaluations: list[dict] = field(default_factory=list)

    def fraction(self, plan: TrainingPlan) -> float:
        """How much of the plan is done, 1 at its end."""
        if plan.steps is not None:
            return self.num_steps / plan.steps
        return self.wall_s / (60 * plan.minutes)

    def record(self, loss: float, num_tokens: int, wall_s: float) -> None:
        """Counts one optimiser step."""
        self.loss = loss if self.loss is None else 0.98 * self.loss + 0.02 * loss
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.wall_s += wall_s
        if self.num_steps % 50 == 0:
            self.history.append((self.num_steps, round(self.loss, 4)))

    def state_dict(self) -> dict:
        """All fields."""
        return dict(vars(self))

    def load_state_dict(self, state: dict) -> None:
        """Sets all fields; `ValueError` if these are others."""
        if not isinstance(state, dict) or state.keys() != vars(self).keys():
            raise ValueError(f"expected {', '.join(vars(self))}, got {state!r}")
        vars(self).update(state)
