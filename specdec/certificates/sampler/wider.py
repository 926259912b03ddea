"""Toy problems as users meet them: in a large vocabulary, and with logits of the types of models.

An exact law needs few texts, and so few tokens; it does not need a small vocabulary. The ids of a
toy problem stand here among tens of thousands of others that neither target nor draft can emit, and
the law is found by the same bisections. A smaller vocabulary, of which every id is possible, is
tried beside it.

Of logits in half precision the target's law is known as exactly as of others: it is that of the
rounded numbers.

Legend: V vocabulary of a toy problem, and see `paths`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.certificates.sampler.paths import Decide
from specdec.certificates.sampler.problems import (
    FILTERS,
    Problems,
    filtered_law,
    random_problems,
)
from specdec.loop.faults import check_decisions
from specdec.loop.step import check_verdict
from specdec.samplers import LogitsFilter, ScriptedNoise
from specdec.types import PAD_TOKEN, Draft, Verdict

SPARSE = (307, 2, 4, 6, 2000), (32_003, 1, 2, 2, 750)
"""(vocabulary, draft tokens, ids at most, problems, seed) of those in which only the ids of a toy
problem can be emitted. Neither vocabulary is a multiple of anything that a kernel would like. Of
seed 750 every distribution has two probabilities that differ."""

TREE, PATHS = (-1, -1, 1), (-1, -1, 0, 1)
"""Of rules that take trees: two ids of `SPARSE[0]`."""

DENSE, DENSE_RACE = (33, 1, 3), (14, 1, 2)
"""The same of one in which every id can be; a race has to be looked at pair by pair."""

TYPES = torch.float32, torch.bfloat16, torch.float16
"""Of logits, where the toy problems have another one."""

ROUNDING = 1e-5
"""What a rule may be off by that computes in float32."""

_FIRST = 2.0**-60


class OutsideError(ValueError):
    """A rule emitted an id that neither target nor draft can emit."""


@dataclass(frozen=True, eq=False)
class Among:
    """A sampler as a rule over few ids of a large vocabulary: all others have probability 0, and
    arrive first in every race.

    Args:
        sampler: decides in the large vocabulary.
        ids: `[V]`, rising, that the ids of the toy problem are there.
        vocab: how many there are.
    """

    sampler: Decide
    ids: Tensor
    vocab: int

    def __call__(
        self, draft: Draft, logits: Tensor, logits_filter: LogitsFilter, noise: ScriptedNoise
    ) -> Verdict:
        """As the sampler, in ids of the toy problem.

        Raises:
            OutsideError: the sampler emitted another id.
        """
        ids = self.ids.to(logits.device)
        tokens = torch.where(draft.tokens < 0, PAD_TOKEN, ids[draft.tokens.clamp(min=0)])
        probs = None if draft.probs is None else self._wide(draft.probs, 0.0)
        draft, logits = replace(draft, tokens=tokens, probs=probs), self._wide(logits, -torch.inf)
        noise, races = copy.copy(noise), noise._exponentials
        if races is not None:
            noise._exponentials = self._wide(races, _FIRST)
        verdict = check_verdict(
            self.sampler, self.sampler(draft, logits, logits_filter, noise), draft
        )
        check_decisions(self.sampler, verdict, draft, logits)
        own = torch.full((self.vocab,), -2, device=ids.device)
        own[ids] = torch.arange(len(ids), device=ids.device)
        small = torch.where(verdict.tokens < 0, PAD_TOKEN, own[verdict.tokens.clamp(min=0)])
        if (small == -2).any():
            row = int((small == -2).any(dim=1).nonzero()[0])
            emitted = int(verdict.tokens[row][small[row] == -2][0])
            raise OutsideError(
                f"id {emitted} is emitted in a vocabulary of {self.vocab}, of which target and "
                f"draft can emit ids {ids.tolist()} alone"
            )
        return replace(verdict, tokens=small)

    def _wide(self, table: Tensor, other: float) -> Tensor:
        wide = table.new_full((*table.shape[:-1], self.vocab), other)
        wide[..., self.ids.to(table.device)] = table
        return wide


@dataclass(frozen=True, eq=False)
class Further:
    """Problems beyond the toy ones.

    Args:
        what: for reports.
        decide: the sampler, or the sampler `Among` ids.
        problems: that it is tried on.
        tolerance: of their law.
    """

    what: str
    decide: Decide
    problems: Problems
    tolerance: float


def wider_problems(
    sampler: Decide,
    vocab: int,
    width: int,
    *,
    dtype: torch.dtype,
    tolerance: float,
    parents: tuple[int, ...] | None = None,
    is_race: bool,
    is_slow: bool,
) -> Iterator[Further]:
    """What a sampler is tried on besides, always the same.

    Args:
        sampler: what to try.
        vocab, width: V and the most draft tokens of the toy problems in a large vocabulary.
        dtype: of the toy problems.
        tolerance: of their law.
        parents: `TREE` or `PATHS`, for rules that take such.
        is_race: every pair of tokens is looked at.
        is_slow: the rule decides row by row, and gets fewer problems.
    """
    generator = torch.Generator()
    exact = {"dtype": dtype, "tolerance": tolerance}
    for size, most, ids, count, seed in SPARSE:
        generator.manual_seed(seed)
        count, depth = (1, 1) if is_slow else (count, min(most, width))
        problems = random_problems(min(vocab, ids), depth, count, generator)
        yield _among(sampler, problems, size, **exact)
    if parents:
        problems = random_problems(2, 2, 3, generator, parents=parents)
        problems.has_replacement = parents == PATHS
        yield _among(sampler, problems, SPARSE[0][0], **exact)
    size, most, count = DENSE_RACE if is_race or is_slow else DENSE
    problems = random_problems(size, min(most, width), 1 if is_slow else count, generator)
    yield Further(f"{size} ids", sampler, _typed(problems, dtype), tolerance)
    for other in (other for other in TYPES if other != dtype):
        depth, count = (1, 2) if is_slow else (min(2, width), 6)
        options = {"kind": "mixed", "filters": FILTERS}
        problems = random_problems(vocab, depth, count, generator, **options)
        problems, name = _typed(problems, other), str(other).removeprefix("torch.")
        problems.name += f" with logits in {name}"
        yield Further(name, sampler, problems, max(tolerance, ROUNDING))


def _among(
    sampler: Decide, problems: Problems, size: int, *, dtype: torch.dtype, tolerance: float
) -> Further:
    """The problems' ids at even distances in a vocabulary, the last one at its end."""
    vocab = problems.vocab_size
    ids = (torch.arange(vocab, device="cpu") + 1) * size // vocab - 1
    problems.name += f" of {vocab} ids among {size}"
    decide = Among(sampler, ids, size)
    return Further(f"{size} ids", decide, _typed(problems, dtype), tolerance)


def _typed(problems: Problems, dtype: torch.dtype) -> Problems:
    """The problems with logits of a type, and the law of what these are after rounding."""
    logits = [level.to(dtype) for level in problems.logits]
    given = problems.logits_filter
    options = [{name: given[name][w] for name in given} for w in range(len(problems))]
    if dtype != torch.float64:
        weights = [level.double().exp() for level in logits]
        problems.target = [torch.stack([*map(filtered_law, x, options)]) for x in weights]
    type_of_draft = dtype if dtype == torch.float64 else torch.float32
    problems.draft = [level.to(type_of_draft) for level in problems.draft]
    problems.logits = logits
    return problems
