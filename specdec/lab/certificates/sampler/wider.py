"""Toy problems as users meet them: in a large vocabulary, and with logits of the types of models.

Enumeration needs few texts, and so few tokens; it does not need a small vocabulary. The ids of a
toy problem stand here among tens of thousands of others that neither target nor draft can emit, and
the distribution is found by the same bisections. A smaller vocabulary, of which every id is
possible, is tried beside it.

The target's distribution is as exact for logits in half precision as for float64 logits: it follows
from the rounded numbers.

Legend: V vocabulary of a toy problem, and see `paths`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.lab.certificates.sampler.paths import Decide
from specdec.lab.certificates.sampler.problems import (
    FILTERS,
    Problems,
    random_problems,
    rare_problems,
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

DENSE, DENSE_RACE = (
    ((33, 1, 3, "soft"), (257, 1, 1, "point-mass"), (701, 0, 1, "soft")),
    ((14, 1, 2, "soft"),),
)
"""(vocabulary, draft tokens, problems, kind) of those in which every id can be emitted; a race has
to be looked at pair by pair."""

DEEP = 6
"""Draft tokens of problems in which most levels have one token that is certain."""

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
        tolerance: of their probabilities.
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
        tolerance: of their probabilities.
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
    for size, most, count, kind in DENSE_RACE if is_race or is_slow else DENSE:
        count = 1 if is_slow else count
        problems = random_problems(size, min(most, width), count, generator, kind=kind)
        yield Further(f"{size} ids", sampler, problems.shifted(dtype), tolerance)
    for other in (other for other in TYPES if other != dtype):
        depth, count = (1, 2) if is_slow else (min(2, width), len(FILTERS))
        options = {"kind": "mixed", "filters": FILTERS}
        problems = random_problems(vocab, depth, count, generator, **options).shifted(other)
        name = str(other).removeprefix("torch.")
        problems.name += f" with logits in {name}"
        yield Further(name, sampler, problems, max(tolerance, ROUNDING))
    empty = random_problems(vocab, 0, len(FILTERS), generator, filters=FILTERS)
    yield Further("K = 0", sampler, empty.shifted(dtype), tolerance)
    yield Further(f"K = {DEEP}", sampler, _deep_problems(generator).shifted(dtype), tolerance)
    rare = rare_problems(vocab, width, 2 if is_slow else 18)
    what = f"tokens down to {rare.least:.0e}"
    yield Further(what, sampler, rare.shifted(dtype), tolerance)


def _deep_problems(generator: torch.Generator) -> Problems:
    """Problem w is free at the levels w, w + 3, ...; target and draft are certain of the same
    token at the others.
    """
    problems = random_problems(2, DEEP, 3, generator)
    for level, draft in enumerate(problems.draft):
        is_free = (torch.arange(3, device="cpu") == level % 3)[:, None, None]
        certain = torch.zeros_like(draft).scatter(-1, draft.argmax(dim=-1, keepdim=True), 1.0)
        problems.draft[level] = torch.where(is_free, draft, certain)
        problems.logits[level] = torch.where(is_free, problems.logits[level], certain.log())
    return problems


def _among(
    sampler: Decide, problems: Problems, size: int, *, dtype: torch.dtype, tolerance: float
) -> Further:
    """The problems' ids at even distances in a vocabulary, the last one at its end."""
    vocab = problems.vocab_size
    ids = (torch.arange(vocab, device="cpu") + 1) * size // vocab - 1
    problems.name += f" of {vocab} ids among {size}"
    decide = Among(sampler, ids, size)
    return Further(f"{size} ids", decide, problems.shifted(dtype), tolerance)
