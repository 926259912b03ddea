"""How a sampler's `draw_draft` draws, held against the probabilities that it reports.

Enumeration hands a rule drafts of known probabilities, so that it says nothing of the way in which
the class has its drafts drawn. That way must be honest: each token has the probabilities that are
reported with it, whatever the tokens before it were, and no number by which the rule decides has a
part in it. A draft without probabilities is a point mass to the rule, whatever it was drawn from.

Where a token is a step function of its own number of `Stream.PROPOSE`, its distribution is found
exactly, by bisection. Else tokens are drawn, and each pair of them is compared with the product of
what is reported.

Legend: W tables of draft probabilities, R rows, n = 4 tokens, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from specdec.lab.certificates.chisquare import goodness_of_fit
from specdec.lab.certificates.sampler.enumeration import inversion_law
from specdec.lab.certificates.sampler.paths import Paths
from specdec.lab.certificates.sampler.problems import FILTERS, Problems, random_problems
from specdec.samplers import LogitsFilter, Sampler, ScriptedNoise, Stream

_TABLES, _TOKENS = 12, 4


@dataclass(frozen=True)
class DraftLaw:
    """What was found.

    Args:
        says: in words.
        is_honest: nothing was found wrong.
        size: how far off.
        names: numbers of their own that tokens are drawn by (`StepNoise.uniform`).
    """

    says: str
    is_honest: bool = True
    size: float = 0.0
    names: frozenset[str] = frozenset()


def examine_draft_law(
    sampler: Sampler,
    vocab: int,
    *,
    tolerance: float,
    num_draws: int,
    false_alarm: float,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> DraftLaw:
    """Tries `draw_draft` on tables over a vocabulary, token by token and several at once."""
    generator, found = torch.Generator().manual_seed(0), []
    names = names_of_drawing(sampler, vocab, dtype, device)
    for filters in (({},), [options for options in FILTERS if options.get("temperature") != 0.0]):
        problems = random_problems(vocab, 1, _TABLES, generator, kind="soft", filters=filters)
        for each in (_one_by_one, _at_once):
            tables = _Tables(sampler, problems, each, dtype, device, generator)
            threshold = false_alarm / (4 * _TABLES)
            found.append(_examine(tables, generator, tolerance, num_draws, threshold))
            if not found[-1].is_honest:
                return found[-1]
    law = next((one for one in found if "by draws" in one.says), found[0])
    return replace(law, names=names)


def names_of_drawing(
    sampler: Sampler, vocab: int, dtype: torch.dtype, device: torch.device | str
) -> frozenset[str]:
    """Names of their own by which a rule's draft tokens are drawn."""
    shape = 1, len(Stream), _TOKENS + 1
    noise = _Watched(torch.full(shape, 0.5, dtype=torch.float64, device=device))
    logits = torch.zeros(1, _TOKENS, vocab, dtype=dtype, device=device)
    for each in (_one_by_one, _at_once):
        logits_filter = LogitsFilter(1, device=device)
        each(sampler.draw_draft, logits, logits_filter, noise, sampler.uses_draft_probs)
    return frozenset(noise.names)


def num_lists_of(sampler: Sampler, problems: Problems, device: torch.device | str) -> int:
    """How many races at a position a rule verifies by; 0 where it asks for none."""
    draft, logits, logits_filter = Paths(problems, device=device).inputs(
        torch.zeros(1, dtype=torch.long, device="cpu")
    )
    shape = 1, len(Stream), logits.shape[1]
    numbers = torch.full(shape, 0.5, dtype=torch.float64, device=device)
    noise = _Watched(numbers)
    sampler(draft, logits, logits_filter, noise)
    return max(noise.paths, default=-1) + 1


class _Watched(ScriptedNoise):
    """Takes down what is asked for, of its copies for a tree too; all numbers are alike."""

    def __init__(self, uniforms: Tensor):
        super().__init__(uniforms)
        self.paths: set[int] = set()
        self.names: set[str] = set()

    def uniform(self, stream: Stream | str, num: int | None = None) -> Tensor:
        if not isinstance(stream, str):
            return super().uniform(stream)
        self.names.add(stream)
        rows, _, width = self._uniforms.shape
        return self._uniforms.new_full((rows, width if num is None else num), 0.5)

    def arrivals(self, logits: Tensor, index: int, *, path: Tensor | int = 0) -> Tensor:
        self.paths.update(torch.as_tensor(path, device="cpu").flatten().tolist())
        return torch.ones_like(logits, dtype=torch.float64)

    def exponentials(self, vocab_size: int) -> Tensor:
        return self._uniforms.new_ones(len(self._uniforms), vocab_size)


class DrawnNoise(ScriptedNoise):
    """Numbers that are given, and others that are drawn when they are first asked for.

    Args:
        uniforms, exponentials: as of `ScriptedNoise`.
        generator: draws the others.
        drawn: what was drawn before, by name and path; takes what is drawn now.
    """

    def __init__(
        self,
        uniforms: Tensor,
        exponentials: Tensor | None = None,
        *,
        generator: torch.Generator,
        drawn: dict | None = None,
    ):
        super().__init__(uniforms, exponentials)
        self._generator, self._drawn = generator, {} if drawn is None else drawn

    def uniform(self, stream: Stream | str, num: int | None = None) -> Tensor:
        if not isinstance(stream, str):
            return super().uniform(stream)
        rows, _, width = self._uniforms.shape
        num, known = width if num is None else num, self._drawn.get(stream)
        missing = num - (0 if known is None else known.shape[1])
        if missing > 0:
            more = torch.empty(rows, missing, dtype=torch.float64, device="cpu")
            more = more.uniform_(generator=self._generator).to(self._uniforms.device)
            self._drawn[stream] = known = more if known is None else torch.cat([known, more], 1)
        return known[:, :num]

    def arrivals(self, logits: Tensor, index: int, *, path: Tensor | int = 0) -> Tensor:
        given, lists = self._exponentials, int(torch.as_tensor(path, device="cpu").max()) + 1
        known = 0 if given is None else given.shape[1]
        for each in range(known, lists):
            if each not in self._drawn:
                shape = len(logits), self._uniforms.shape[2], logits.shape[2]
                race = torch.empty(shape, dtype=torch.float64, device="cpu")
                race = race.exponential_(generator=self._generator)
                self._drawn[each] = race.to(logits.device)
        if lists > known:
            drawn = torch.stack([self._drawn[each] for each in range(known, lists)], dim=1)
            self._exponentials = drawn if given is None else torch.cat([given, drawn], dim=1)
        return super().arrivals(logits, index, path=path)

    def exponentials(self, vocab_size: int) -> Tensor:
        if self._exponentials is None:
            self.arrivals(self._uniforms.new_empty(len(self._uniforms), 1, vocab_size), 0)
        return super().exponentials(vocab_size)


def looks_ahead(
    sampler: Sampler, vocab: int, num_lists: int, *, dtype: torch.dtype, device: torch.device | str
) -> str | None:
    """Whether a draft token depends on races of later positions, which decide what follows it; in
    words, or `None`. Tokens of a chain, and of independent paths depth by depth, are tried.
    """
    generator = torch.Generator().manual_seed(0)
    shape = 256, num_lists, _TOKENS + 1, vocab
    logits = torch.randn(256, _TOKENS, vocab, generator=generator, dtype=dtype, device="cpu")
    logits, numbers = logits.to(device), (256, len(Stream), _TOKENS + 1)
    uniforms = torch.rand(numbers, generator=generator, dtype=torch.float64, device="cpu")
    races = torch.empty(2, *shape, dtype=torch.float64, device="cpu")
    races.exponential_(generator=generator)
    logits_filter, paths = LogitsFilter(256, device=device), torch.arange(num_lists, device=device)
    options = {"wants_probs": sampler.uses_draft_probs}

    def tokens(depth: int, exponentials: Tensor) -> Tensor:
        noise = ScriptedNoise(uniforms.to(device), exponentials.to(device))
        own = logits[:, depth : depth + 1]
        chain, _ = sampler.draw_draft(own, logits_filter, noise, depth, **options)
        own, noise = own.expand(-1, num_lists, -1), noise.at_depths(depth, paths)
        index = depth * num_lists
        return torch.cat(
            [chain, sampler.draw_draft(own, logits_filter, noise, index, **options)[0]], dim=1
        )

    for depth in range(_TOKENS):
        later = races[0].clone()
        later[:, :, depth + 1 :] = races[1][:, :, depth + 1 :]
        if not tokens(depth, later).equal(tokens(depth, races[0])):
            return f"draft tokens of depth {depth + 1} depend on the races of later positions"
    return None


@dataclass(frozen=True, eq=False)
class _Tables:
    """A way of drawing tokens from tables, by given numbers."""

    sampler: Sampler
    problems: Problems
    way: Callable
    dtype: torch.dtype
    device: torch.device | str
    generator: torch.Generator

    def draw(
        self, rows: Tensor, uniforms: Tensor, exponentials: Tensor, drawn: dict | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Tokens `[R, n]` and what is reported, `[R, n, V]`, for tables `[R]` and numbers `[R,
        streams, n + 1]`, `[R, n + 1, V]` and those that were drawn, see `DrawnNoise`.
        """
        first = self.problems.draft[0][:, 0]
        laws = [first.roll(index, dims=0) for index in range(_TOKENS)]
        logits = torch.stack(laws, dim=1)[rows].log()
        given = self.problems.logits_filter.items()
        options = {name: [values[row] for row in rows.tolist()] for name, values in given}
        logits_filter = LogitsFilter(len(rows), device=self.device, **options)
        numbers = uniforms.to(self.device), exponentials.to(self.device)
        noise = DrawnNoise(*numbers, generator=self.generator, drawn=drawn)
        wants = self.sampler.uses_draft_probs
        logits = logits.to(self.device, self.dtype)
        tokens, probs = self.way(self.sampler.draw_draft, logits, logits_filter, noise, wants)
        return tokens.cpu(), None if probs is None else probs.double().cpu()

    def random(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Numbers of so many rows."""
        shape = count, len(Stream), _TOKENS + 1
        uniforms = torch.rand(shape, dtype=torch.float64, generator=generator, device="cpu")
        vocab = self.problems.vocab_size
        races = torch.empty(count, _TOKENS + 1, vocab, dtype=torch.float64, device="cpu")
        return uniforms, races.exponential_(generator=generator)


def _one_by_one(
    rule, logits: Tensor, logits_filter: LogitsFilter, noise: ScriptedNoise, wants: bool
):
    drawn = [
        rule(logits[:, i : i + 1], logits_filter, noise, i, wants_probs=wants)
        for i in range(_TOKENS)
    ]
    tokens, probs = zip(*drawn, strict=True)
    return torch.cat(tokens, dim=1), None if probs[0] is None else torch.cat(probs, dim=1)


def _at_once(rule, logits: Tensor, logits_filter: LogitsFilter, noise: ScriptedNoise, wants: bool):
    return rule(logits, logits_filter, noise, 0, wants_probs=wants)


def _examine(
    tables: _Tables,
    generator: torch.Generator,
    tolerance: float,
    num_draws: int,
    threshold: float,
) -> DraftLaw:
    """One way of drawing."""
    rows = torch.arange(_TABLES, device="cpu").repeat_interleave(64)
    (uniforms, races), drawn = tables.random(len(rows), generator), {}
    tokens, probs = tables.draw(rows, uniforms, races, drawn)
    again, _ = tables.draw(rows, uniforms, races, drawn)
    if (again != tokens).any():  # by random numbers of its own
        return _by_draws(tables, generator, num_draws, threshold)
    other, other_races = tables.random(len(rows), generator)
    judged = uniforms.clone()
    judged[:, [Stream.ACCEPT, Stream.RESAMPLE]] = other[:, [Stream.ACCEPT, Stream.RESAMPLE]]
    if (tables.draw(rows, judged, races, drawn)[0] != tokens).any():
        says = "draft tokens depend on the numbers (Stream.ACCEPT or RESAMPLE) that judge them"
        return DraftLaw(says, is_honest=False, size=1.0)
    if probs is None:
        return DraftLaw("draft tokens are reported as point masses")

    alone = other.clone()
    alone[:, Stream.PROPOSE, :_TOKENS] = uniforms[:, Stream.PROPOSE, :_TOKENS]
    laws = [_law_of_token(tables, index, generator) for index in range(_TOKENS)]
    law = torch.stack(laws, dim=1)  # [W, n, V]
    is_step = (tables.draw(rows, alone, other_races)[0] == tokens).all()
    own = uniforms[:, Stream.PROPOSE, :_TOKENS, None]
    is_step &= ((law[rows].cumsum(dim=-1)[..., :-1] <= own).sum(dim=-1) == tokens).all()
    if not is_step:
        return _by_draws(tables, generator, num_draws, threshold)
    off = (law[rows] - probs).abs().nan_to_num(nan=torch.inf)
    if off.max() <= tolerance:
        return DraftLaw(f"draft tokens have the reported probabilities (exact, {_TABLES} tables)")
    row, index, token = torch.unravel_index(off.argmax(), off.shape)
    return DraftLaw(
        f"draft token {index} is {token} with probability {law[rows][row, index, token]:.4g}, and "
        f"is reported with {probs[row, index, token]:.4g}",
        is_honest=False,
        size=off.max().item(),
    )


def _law_of_token(tables: _Tables, index: int, generator: torch.Generator) -> Tensor:
    """`[W, V]` of one of the tokens, as a function of its own number."""
    vocab = tables.problems.vocab_size
    rows = torch.arange(_TABLES, device="cpu").repeat_interleave(vocab - 1)
    uniforms, races = tables.random(len(rows), generator)

    def draw(u: Tensor) -> Tensor:
        uniforms[:, Stream.PROPOSE, index] = u
        return tables.draw(rows, uniforms, races)[0][:, index]

    return inversion_law(draw, _TABLES, vocab, bits=52)


def _by_draws(
    tables: _Tables, generator: torch.Generator, num_draws: int, threshold: float
) -> DraftLaw:
    """Each pair of tokens of every table, against the product of what is reported."""
    vocab, pairs = tables.problems.vocab_size, list(combinations(range(_TOKENS), 2))
    for table in range(_TABLES):
        rows = torch.full((num_draws,), table, device="cpu")
        tokens, probs = tables.draw(rows, *tables.random(num_draws, generator))
        if probs is None:
            return DraftLaw("draft tokens are reported as point masses")
        reported = probs.mean(dim=0)
        for one, other in pairs:
            law = (reported[one, :, None] * reported[other]).flatten()
            counts = Counter((tokens[:, one] * vocab + tokens[:, other]).tolist())
            p_value, _ = goodness_of_fit(counts, dict(enumerate(law.tolist())))
            if p_value < threshold / len(pairs):
                return DraftLaw(
                    f"draft tokens {one} and {other} do not have the reported probabilities "
                    f"(p-value {p_value:.1e} of {num_draws} pairs, table {table})",
                    is_honest=False,
                    size=1.0,
                )
    return DraftLaw(
        f"draft tokens have the reported probabilities (by draws, {num_draws} pairs of each of "
        f"{_TABLES} tables)"
    )
