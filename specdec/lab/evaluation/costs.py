"""What a step costs at each draft length, measured.

Legend: r rounds, K draft tokens, R resamples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.arguments import check_integer
from specdec.generator import SpeculativeGenerator
from specdec.lab.evaluation.intervals import counted, taken
from specdec.lab.evaluation.plan import Plan
from specdec.lab.show.table import Table, Tabular
from specdec.loop.lengths import Timed, lengths_to_measure, time_steps


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
        K  ms per step  spread  step cost
        0        10.00    0.00       1.00
        4        14.00    0.00       1.40
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

    def medians(
        self, num_draft_tokens: int, counts: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of a plain step, and `[K + 1]` of steps with 0..K draft tokens, as far as measured.

        Args:
            num_draft_tokens: K.
            counts: how often each round is taken, `[R, r]` for R resamples, each with medians of
                its own; `None` takes every round once.
        """
        known, most = sorted(self.step_ms), max(self.step_ms, default=-1)
        check_integer("num_draft_tokens", num_draft_tokens, 0, most, advice="measure it there")
        if known[0] > 0:
            raise ValueError(f"the cost curve begins at K = {known[0]}; measure K = 0 as well")
        rounds = np.arange(len(self.plain_ms)) if counts is None else taken(counts)
        times = np.array([self.plain_ms, *(self.step_ms[k] for k in known)])
        plain, *table = np.median(times[:, rounds], axis=-1)  # [1 + lengths, ...]
        ks = np.arange(num_draft_tokens + 1)
        shares = [np.interp(ks, known, one) for one in np.eye(len(known))]  # linear in the times
        return plain, np.stack(table, axis=-1) @ np.array(shares)

    def tables(self) -> list[Table]:
        """One line per measured K; the spread is the range of the middle half over the median."""
        plain = np.median(self.plain_ms)
        medians = {k: np.median(self.step_ms[k]) for k in sorted(self.step_ms)}
        rows = []
        for k, ms in medians.items():
            low, high = np.quantile(self.step_ms[k], [0.25, 0.75])
            rows.append([str(k), f"{ms:.2f}", f"{(high - low) / ms:.2f}", f"{ms / plain:.2f}"])
        rounds = counted(len(self.plain_ms), "round")
        notes = [f"Medians of {rounds}; a plain step takes {plain:.2f} ms."]
        if pairs := ", ".join(f"{a} and {b}" for a, b in self.unranked):
            notes.append(f"Times vary too much to rank K = {pairs}; pass more rounds.")
        return [Table(["K", "ms per step", "spread", "step cost"], rows, tuple(notes))]

    @property
    def unranked(self) -> list[tuple[int, int]]:
        """Neighbouring draft lengths of which the rounds do not show which one costs more: the
        median difference within rounds is at most twice its standard error (of as many normal
        values).
        """
        found = []
        for pair in pairwise(sorted(self.step_ms)):
            few, many = (np.array(self.step_ms[k]) for k in pair)
            off, count = many - few, len(few)
            error = 1.2533 * off.std(ddof=1) / count**0.5 if count > 1 else np.inf
            if abs(np.median(off)) <= 2 * error:
                found.append(pair)
        return found

    def records(self) -> list[dict[str, Any]]:
        """One per measured K and round, with the plain step of the same round."""
        return [
            {"num_draft_tokens": k, "round": round_, "step_ms": ms, "plain_ms": plain}
            for k in sorted(self.step_ms)
            for round_, (ms, plain) in enumerate(zip(self.step_ms[k], self.plain_ms, strict=True))
        ]


def costs(
    generator: SpeculativeGenerator,
    *,
    batch_sizes: Iterable[int] = (1, 8),
    contexts: Iterable[int] = (64,),
    **options: Any,
) -> dict[tuple[int, int], CostCurve]:
    """Times steps by draft length, batch size and context, after prompts of random tokens.

    Args:
        generator: target, drafter and sampler.
        batch_sizes: rows.
        contexts: tokens of the prompts.
        options: of `measure_costs`.

    Returns:
        The curve of each (rows, tokens); `AutoLength` takes their `step_ms`.

    Example:
        >>> from specdec import PromptLookupDrafter, zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), PromptLookupDrafter(2))
        >>> curves = costs(generator, batch_sizes=[2], num_steps=2, rounds=1)
        >>> [(size, sorted(curve.step_ms)) for size, curve in curves.items()]
        [((2, 64), [0, 1, 2])]
    """
    curves, contexts, target = {}, list(contexts), generator.target
    for rows in batch_sizes:
        for tokens in contexts:
            draws = torch.Generator().manual_seed(0)
            ids = torch.randint(target.vocab_size, (rows, tokens), generator=draws, device="cpu")
            inputs = ids.to(target.device), torch.ones_like(ids)  # whatever pads its texts
            curves[rows, tokens] = measure_costs(generator, *inputs, **options)
    return curves


def measure_costs(
    generator: SpeculativeGenerator,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    draft_lengths: Iterable[int] | None = None,
    num_steps: int = 16,
    rounds: int = 5,
    temperature: float = 0.0,
) -> CostCurve:
    """Times steps at several draft lengths, in turn within each round.

    Args:
        generator: target, drafter and sampler.
        input_ids: `[B, T]` prompts; what a step costs depends on both.
        attention_mask: `[B, T]` or `None`.
        draft_lengths: the K to be measured, at most the drafter's; by default 0, 1, 2, 3, 4, 6, 8,
            12, ... and the drafter's own. A step of 0 drafts a token and drops it, so that a later
            one may draft.
        num_steps: timed together.
        rounds: r, after one that is not kept.
        temperature: 0 is greedy.

    Example:
        >>> import torch
        >>> from specdec import PromptLookupDrafter, zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), PromptLookupDrafter(4))
        >>> curve = measure_costs(generator, torch.tensor([[7, 8, 9]]), num_steps=2, rounds=1)
        >>> sorted(curve.step_ms)
        [0, 1, 2, 3, 4]
    """
    check_integer("num_steps", num_steps, 1)
    check_integer("rounds", rounds, 1)
    if draft_lengths is None:
        draft_lengths = lengths_to_measure(generator.drafter.num_draft_tokens)
    draft_lengths = list(draft_lengths)
    if not draft_lengths:
        raise ValueError("there is nothing to measure: draft_lengths is empty")
    target, sampler = generator.target, generator.sampler
    plain = SpeculativeGenerator(target, None, sampler, graphs=generator.graphs)
    options = Plan(1, temperature).sampling(list(range(len(input_ids))))
    none, own = (
        one.start(input_ids, attention_mask, max_new_tokens=1, **options)
        for one in (plain, generator)
    )
    runs = {None: Timed(none, 0), **{k: Timed(own, k) for k in draft_lengths}}
    times = time_steps(runs, rounds=rounds, num_steps=num_steps)
    return CostCurve(times.pop(None), times)
