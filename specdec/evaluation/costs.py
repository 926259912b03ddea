"""What a step costs at each draft length, measured.

Legend: r rounds, K draft tokens, R resamples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from specdec.arguments import check_integer
from specdec.evaluation.anchors import with_draft_length
from specdec.evaluation.evaluate import synchronize, timed
from specdec.evaluation.intervals import counted
from specdec.generator import SpeculativeGenerator
from specdec.show.table import Table, Tabular


@dataclass(frozen=True, eq=False, repr=False)
class CostCurve(Tabular):
    """Milliseconds of a step, by draft length; lengths between two measured ones are interpolated.

    Args:
        plain_ms: `[r]`, of a step of plain decoding, one per round.
        step_ms: by K, `[r]` of the same rounds.

    Example:
        >>> curve = CostCurve([10.0, 10.0], {0: [10.0, 10.0], 4: [14.0, 14.0]})
        >>> curve.medians(4)[1].tolist()
        [10.0, 11.0, 12.0, 13.0, 14.0]
        >>> print(curve)
        K  ms per step  x plain step
        0        10.00          1.00
        4        14.00          1.40
        Medians of 2 rounds; a plain step takes 10.00 ms.
    """

    plain_ms: list[float]
    step_ms: dict[int, list[float]]

    def __post_init__(self):
        lengths = {len(times) for times in (self.plain_ms, *self.step_ms.values())}
        if len(lengths) > 1 or 0 in lengths:
            raise ValueError(
                f"a cost curve needs times of the same rounds at every draft length, got {lengths}"
            )

    def medians(self, num_draft_tokens: int) -> tuple[float, np.ndarray]:
        """Of a plain step, and `[K + 1]` of steps with 0..K draft tokens, as far as measured."""
        plain, table = self._at(np.arange(len(self.plain_ms))[None], num_draft_tokens)
        return float(plain[0]), table[0]

    def tables(self) -> list[Table]:
        """One line per measured K."""
        plain = np.median(self.plain_ms)
        medians = {k: np.median(self.step_ms[k]) for k in sorted(self.step_ms)}
        rows = [[str(k), f"{ms:.2f}", f"{ms / plain:.2f}"] for k, ms in medians.items()]
        rounds = counted(len(self.plain_ms), "round")
        note = f"Medians of {rounds}; a plain step takes {plain:.2f} ms."
        return [Table(["K", "ms per step", "x plain step"], rows, (note,))]

    def records(self) -> list[dict[str, Any]]:
        """One per measured K and round, with the plain step of the same round."""
        return [
            {"num_draft_tokens": k, "round": round_, "step_ms": ms, "plain_ms": plain}
            for k in sorted(self.step_ms)
            for round_, (ms, plain) in enumerate(zip(self.step_ms[k], self.plain_ms, strict=True))
        ]

    def resampled(
        self, num_draft_tokens: int, count: int, generator: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `medians`, over resampled rounds: `[R]` and `[R, K + 1]`."""
        rounds = generator.integers(0, len(self.plain_ms), (count, len(self.plain_ms)))
        return self._at(rounds, num_draft_tokens)

    def _at(self, rounds: np.ndarray, num_draft_tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """Medians over the rounds `[R, r]`; curves reach from 0 to the largest measured K."""
        known, most = sorted(self.step_ms), max(self.step_ms, default=-1)
        check_integer("num_draft_tokens", num_draft_tokens, 0, most, advice="measure it there")
        if known[0] > 0:
            raise ValueError(f"the cost curve begins at K = {known[0]}; measure K = 0 as well")
        plain, *table = (
            np.median(np.array(times)[rounds], axis=1)
            for times in (self.plain_ms, *(self.step_ms[k] for k in known))
        )
        ks = np.arange(num_draft_tokens + 1)
        return plain, np.stack([np.interp(ks, known, row) for row in np.stack(table, axis=1)])


def measure_costs(
    generator: SpeculativeGenerator,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    draft_lengths: Iterable[int] | None = None,
    num_steps: int = 16,
    rounds: int = 5,
) -> CostCurve:
    """Times greedy steps at several draft lengths, in turn within each round.

    Args:
        generator: target, drafter and sampler.
        input_ids: `[B, T]` prompts; what a step costs depends on both.
        attention_mask: `[B, T]` or `None`.
        draft_lengths: the K to be measured, at most the drafter's; by default 0, 1, 2, 4, ... and
            the drafter's own.
        num_steps: timed together.
        rounds: r, after one that is not kept.

    Example:
        >>> import torch
        >>> from specdec import PromptLookupDrafter, zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), PromptLookupDrafter(4))
        >>> curve = measure_costs(generator, torch.tensor([[7, 8, 9]]), num_steps=2, rounds=1)
        >>> sorted(curve.step_ms)
        [0, 1, 2, 4]
    """
    check_integer("num_steps", num_steps, 1)
    check_integer("rounds", rounds, 1)
    most = generator.drafter.num_draft_tokens
    if draft_lengths is None:
        doubled = [2**i for i in range(most.bit_length()) if 2**i < most]
        draft_lengths = sorted({0, *doubled, most})
    draft_lengths = list(draft_lengths)
    if not draft_lengths:
        raise ValueError("there is nothing to measure: draft_lengths is empty")
    drafters = {k: with_draft_length(generator.drafter, k) for k in draft_lengths}
    contenders: dict[int | None, SpeculativeGenerator] = {
        k: SpeculativeGenerator(
            generator.target, drafter, generator.sampler, graphs=generator.graphs
        )
        for k, drafter in {None: None, **drafters}.items()
    }
    taken: dict[int | None, list[float]] = {k: [] for k in contenders}
    for round_ in range(rounds + 1):
        for k, contender in contenders.items():
            seconds = _step_seconds(contender, input_ids, attention_mask, num_steps)
            if round_:
                taken[k].append(1e3 * seconds)
    return CostCurve(taken.pop(None), taken)


def _step_seconds(
    generator: SpeculativeGenerator, ids: Tensor, mask: Tensor | None, num_steps: int
) -> float:
    """Of one step, of several in a row; reading the prompt is not counted."""
    device = generator.target.device
    most = num_steps * (generator.drafter.num_draft_tokens + 1)
    options = {"neutral": True, "do_sample": False, "eos_token_id": []}
    generation = generator.start(ids, mask, max_new_tokens=most, **options)
    synchronize(device)

    def steps() -> None:
        for _ in range(num_steps):
            outcome = generator.step(generation).fetch()
            if generator.steps_ahead == 0:
                outcome.read()

    return timed(steps, device)[1] / num_steps
