"""Every direction of the bets has a planted fault that makes it lead, and so has every other
distribution, and every kind of place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from diagonal import first
from torch import Tensor

from specdec.lab.certificates.generator.alternatives import (
    ALTERNATIVES,
    TEMPERATURES,
    TO_DRAFT,
    BestFit,
    Ratios,
)
from specdec.lab.certificates.generator.directions import (
    DIRECTIONS,
    Directions,
    Gains,
    accept_effect,
)
from specdec.lab.certificates.generator.learned import Learned
from specdec.lab.certificates.generator.martingale import Wealth
from specdec.types import Draft

V, ROWS, LENGTH = 24, 32, 32


@dataclass
class Before:
    """What is known when a column of tokens is drawn; `[B, V]` where no shape is said."""

    p: Tensor
    q: Tensor  # of the first draft token
    place: int  # new tokens before
    texts: Tensor  # [B, T] so far, the prompt's one token included
    last: Tensor  # p of one token earlier
    mean: Tensor  # of p over the text so far
    tables: Tensor  # [V, V] of another model
    q_second: Tensor = field(default_factory=lambda: torch.zeros(ROWS, V))  # after the first one
    second: Tensor = field(default_factory=lambda: torch.zeros(ROWS, V))  # of a tree, likewise
    tokens: Tensor | None = None  # [B, 2] that are proposed here


Change = Callable[[Before], Tensor]


@dataclass
class Fault:
    """One mistake.

    Args:
        law: weights by which the next token is drawn.
        draws: of uniforms `[B]` of a column and those `[B, t]` before it, those that are used.
        draft: weights by which first draft tokens are drawn; q is reported.
        is_tree: drafts are trees of point masses.
        is_known: the generator hands over what it drew from.
        nearness: of the draft to the target, where it is not the usual one.
        kept: likeliest tokens of the target that are possible; `None` for all.
        batches: of texts.
    """

    law: Change = lambda b: b.p
    draws: Callable[[Tensor, Tensor], Tensor] = lambda u, before: u
    draft: Change = lambda b: b.q
    is_tree: bool = False
    is_known: bool = False
    nearness: float | None = None
    kept: int | None = None
    batches: int = 6


def tables(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Target, draft and another model, `[V, V]` each."""
    rng = torch.Generator().manual_seed(seed)
    one, two, three = torch.randn(3, V, V, generator=rng, dtype=torch.float64)
    return tuple(x.softmax(dim=-1) for x in (1.5 * one, 1.2 * one + 0.8 * two, 1.5 * three))


def normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(dim=-1, keepdim=True)


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """`[B, 1]` tokens at which the cumulative probabilities pass uniforms."""
    ends = probs.cumsum(dim=-1)
    passed = ends <= uniforms[:, None] * ends[:, -1:]
    return passed.sum(dim=-1, keepdim=True).clamp(max=probs.shape[-1] - 1)


def watched(fault: Fault, seed: int = 0) -> tuple[dict[str, float], BestFit]:
    """Standard deviations by which texts with a fault lean, by direction; and the distribution and
    the place that they speak for most.
    """
    target, draft, other = tables(seed)
    if fault.kept is not None:
        target = normalised(target * (target >= target.topk(fault.kept).values[:, -1:]))
    rng = torch.Generator().manual_seed(seed + 1)
    if fault.nearness is not None:
        noise = torch.randn(V, V, generator=rng, dtype=torch.float64)
        draft = normalised(target * (fault.nearness * noise).exp())
    learned, sums, wealth = Learned(), 0.0, Wealth(len(DIRECTIONS), alternatives=True)
    for _ in range(fault.batches):
        texts = torch.randint(V, (ROWS, 1), generator=rng)
        uniforms, seen = torch.empty(ROWS, 0, dtype=torch.float64), []
        last, total, drafts = target[texts[:, 0]], 0.0, None
        for _ in range(LENGTH):
            newest = texts[:, -1]
            p, total = target[newest], total + target[newest]
            b = Before(p, draft[newest], len(seen), texts, last, normalised(total), other)
            if drafts is not None:
                hit = (drafts.tokens[:, :1] == texts[:, -1:]).double()
                b.second = points(p, drafts.tokens[:, 2:4]) * hit if fault.is_tree else p * 0
                b.q_second = draft[newest] * hit
            drafts = _tree(b, draft, other) if fault.is_tree else _chain(b, fault, draft, rng)
            b.tokens = drafts.tokens[:, :2]
            law = normalised(fault.law(b))
            u = fault.draws(torch.rand(ROWS, dtype=torch.float64, generator=rng), uniforms)
            uniforms = torch.cat([uniforms, u[:, None]], dim=1)
            texts = torch.cat([texts, draw(law, u)], dim=1)
            seen.append((p, drafts, law if fault.is_known else None))
            last = p
        directions = Directions(texts[:, :1].tolist(), texts[:, 1:].tolist(), learned=learned)
        steps = zip(*(directions.step(*column) for column in seen), strict=True)
        found = Gains(*(torch.stack(each, dim=1) for each in steps))
        sums = sums + torch.stack([found.gains, found.variances]).sum(dim=(1, 2))
        ratios = Ratios(found.ratios, found.spreads)
        wealth.add(found.gains, torch.full((ROWS,), LENGTH), ratios=ratios)
    z = (sums[0] / sums[1].clamp(min=1e-300).sqrt()).tolist()
    return dict(zip(DIRECTIONS, z, strict=True)), wealth.alternatives.best


def _chain(b: Before, fault: Fault, draft: Tensor, rng: torch.Generator) -> Draft:
    """Two tokens."""
    first = torch.multinomial(normalised(fault.draft(b)), 1, generator=rng)
    then = draft[first[:, 0]]
    second = torch.multinomial(then, 1, generator=rng)
    return Draft(torch.cat([first, second], dim=1), torch.stack([b.q, then], dim=1))


def _tree(b: Before, draft: Tensor, other: Tensor) -> Draft:
    """Two point masses, and two after the first."""
    first = b.q.topk(2, dim=-1).indices
    tokens = torch.cat([first, other[first[:, 0]].topk(2, dim=-1).indices], dim=1)
    parents = torch.tensor([-1, -1, 0, 0]).expand(ROWS, -1)
    return Draft(tokens, None, parents=parents, depth=2)


def scaled(p: Tensor, q: Tensor, factor: float) -> Tensor:
    """The rule's distribution where accept draws are multiplied by a factor."""
    return p * (1 + (1 - factor) * accept_effect(p, q, factor))


def tempered(p: Tensor, rows: Tensor | bool, temperature: float = 0.8) -> Tensor:
    """p at another temperature, in some rows."""
    rows = torch.as_tensor(rows).expand(len(p))[:, None]
    return torch.where(rows, normalised(p ** (1 / temperature)), p)


def mixed(p: Tensor, other: Tensor, share: float) -> Tensor:
    """Some draws are from another distribution, where it is one."""
    is_there = other.sum(dim=-1, keepdim=True) > 0
    return torch.where(is_there, (1 - share) * p + share * normalised(other), p)


def points(p: Tensor, tokens: Tensor) -> Tensor:
    """Point masses on tokens `[B, n]`, all alike."""
    return normalised(torch.zeros_like(p).scatter(1, tokens, 1.0))


def again(b: Before) -> Tensor:
    """What followed the last token where it was last seen."""
    found = torch.zeros_like(b.p)
    for row, text in enumerate(b.texts.tolist()):
        for at in range(len(text) - 2, -1, -1):
            if text[at] == text[-1]:
                found[row, text[at + 1]] = 1.0
                break
    return found


def recent(b: Before) -> Tensor:
    """1 for the tokens of the text."""
    return torch.zeros_like(b.p).scatter(1, b.texts, 1.0)


def pattern(b: Before) -> Tensor:
    """-1 or 1 for each token, others after each other last token."""
    return (
        b.tables[b.texts[:, -1]] > b.tables.median(dim=-1).values[b.texts[:, -1], None]
    ) * 2.0 - 1


ROW, IDS = torch.arange(ROWS), torch.arange(V)
FAULTS = {
    "draft above target": Fault(lambda b: torch.minimum(b.p, b.q) + b.p * (b.p > b.q)),
    "accept draws small": Fault(lambda b: scaled(b.p, b.q, 0.8)),
    "accept draws large": Fault(lambda b: scaled(b.p, b.q, 1.25), nearness=0.05),
    "log q / p": Fault(lambda b: mixed(b.p, b.q, 0.15)),
    "log q / p, second": Fault(lambda b: mixed(b.p, b.q_second, 0.6)),
    "log q": Fault(lambda b: b.p * b.q**0.15),
    "proposed": Fault(lambda b: mixed(b.p, points(b.p, b.tokens), 0.08), is_tree=True),
    "proposed second": Fault(lambda b: mixed(b.p, b.second, 0.3), is_tree=True),
    "log p": Fault(lambda b: tempered(b.p, True, 0.9)),
    "top 1": Fault(lambda b: mixed(b.p, points(b.p, b.p.argmax(-1, True)), 0.06)),
    "top 8": Fault(lambda b: mixed(b.p, b.p * (b.p >= b.p.topk(8).values[:, -1:]), 0.5)),
    "recent": Fault(lambda b: b.p * (1 - 0.2 * recent(b))),
    "again": Fault(lambda b: mixed(b.p, again(b), 0.05)),
    "row before": Fault(lambda b: mixed(b.p, b.last, 0.1)),
    "average": Fault(lambda b: mixed(b.p, b.mean, 0.3)),
    "quantile": Fault(draws=lambda u, before: 0.9 * u, batches=1),
    "quantile again": Fault(draws=lambda u, b: b[:, -1] if b.shape[1] % 4 == 3 else u),
    "quantile beside": Fault(draws=lambda u, b: u[ROW - ROW % 2] if b.shape[1] % 4 == 3 else u),
    "beside": Fault(draws=lambda u, b: u[ROW - ROW % 2]),
    "learned": Fault(lambda b: b.p * (1 + 0.3 * (IDS % 3 - 1)), batches=12),
    "learned here": Fault(lambda b: b.p * (1 + 0.6 * pattern(b)), batches=12),
    "draft, log q": Fault(draft=lambda b: b.q**1.25),
    "draft, quantile": Fault(draft=lambda b: b.q * torch.linspace(1.3, 0.7, V)),
    "draft, learned": Fault(draft=lambda b: b.q * (1 + 0.6 * pattern(b)), batches=12),
    "loop": Fault(lambda b: mixed(b.p, b.tables[b.texts[:, -1]], 0.2), is_known=True),
}
"""By the direction that leads: a residual that is not reduced by what was accepted, accept draws
that are scaled, texts that are draws from the draft now and then (at the second token, or any token
of a tree), logits of the draft that are added, a temperature, a greedy token or a top-k now and
then, a repetition penalty, prompt lookup that accepts too much, the row of logits before, a context
that is lost, uniforms that end early, numbers that serve two positions, or two rows (now and then,
or always), a bias of the head, one that depends on the context; drafts that are sharper than
reported, of uniforms that are not even, of a context's own bias; and a cache that holds something
else.
"""


def without_last(p: Tensor, count: int) -> Tensor:
    """Weights without the least likely tokens that are possible."""
    possible = (p > 0).sum(dim=-1, keepdim=True)
    ranks = p.argsort(dim=-1, descending=True).argsort(dim=-1)
    return p * (ranks < possible - count)


def top_p(p: Tensor, mass: float) -> Tensor:
    """Weights of the fewest likeliest tokens that have a mass or more."""
    likeliest = p.sort(dim=-1, descending=True)
    before = likeliest.values.cumsum(dim=-1) - likeliest.values
    return p * (before < mass).gather(-1, likeliest.indices.argsort(dim=-1))


OTHER_LAWS = {
    **{f"at temperature x {t}": Fault(lambda b, t=t: tempered(b.p, True, t)) for t in TEMPERATURES},
    **{
        f"weighted by (q / p)^{s}": Fault(lambda b, s=s: b.p ** (1 - s) * b.q**s, batches=12)
        for s in TO_DRAFT
    },
    "without the least likely": Fault(lambda b: without_last(b.p, 1), kept=12),
    "without the 4 least likely tokens": Fault(lambda b: without_last(b.p, 4), kept=12),
    "without the least likely 1%": Fault(lambda b: top_p(b.p, 0.99)),
    "without the least likely 5%": Fault(lambda b: top_p(b.p, 0.95)),
}
"""Everywhere: another temperature, draws that lean to the draft or away from it, and a truncation
that is narrower than asked, or where none was asked.
"""
PLACES = {
    "at the first token of each text": Fault(lambda b: tempered(b.p, b.place == 0, 0.5)),
    "at new tokens 8 to 11": Fault(lambda b: tempered(b.p, 7 <= b.place < 11, 0.5)),
    "from new token 16 on": Fault(lambda b: tempered(b.p, b.place >= 15, 0.5)),
    "in row 5 modulo 64": Fault(lambda b: tempered(b.p, ROW == 5, 0.5)),
    "in row 3 modulo 8": Fault(lambda b: tempered(b.p, ROW % 8 == 3, 0.5)),
}
"""Half the temperature, at some places."""


QUICK = ["draft above target", "proposed second"]
QUICK_LAWS = "at temperature x 1.25", "weighted by (q / p)^-0.25", "without the least likely 5%"
QUICK_PLACES = ["at new tokens 8 to 11", "in row 3 modulo 8"]
ENOUGH = 13.8
"""Logarithm of 1 / `false_alarm` of certificates."""


def test_no_direction_is_without_a_fault():
    assert list(FAULTS) == list(DIRECTIONS)
    assert list(OTHER_LAWS) == [each.what for each in ALTERNATIVES]


@pytest.mark.parametrize("name", first(FAULTS, QUICK))
def test_its_fault_makes_a_direction_lead(name):
    found, _ = watched(FAULTS[name])
    first = max(found, key=lambda each: abs(found[each]))
    assert first == name
    assert abs(found[first]) > 4


@pytest.mark.parametrize("name", first(OTHER_LAWS, QUICK_LAWS))
def test_texts_speak_for_the_distribution_that_they_are_drawn_from(name):
    _, best = watched(OTHER_LAWS[name])
    assert best.alternative.what == name
    assert best.log_e > ENOUGH


@pytest.mark.parametrize("name", first(PLACES, QUICK_PLACES))
def test_places_in_text_and_batch_are_looked_at(name):
    _, best = watched(PLACES[name])
    assert str(best) == f"p at temperature x 0.5, {name}"
    assert best.log_e > ENOUGH


def test_sound_texts_lean_nowhere():
    found, best = watched(Fault())
    assert max(map(abs, found.values())) < 4
    assert best.log_e < 0
