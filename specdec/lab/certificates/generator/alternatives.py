r"""Other distributions that a generator may draw from, and at which places of the texts it does.

With a function f of tokens and a strength s, p(v) exp(s f(v)) / Z is another distribution than the
target's p: p at another temperature, p moved to the draft's q, or p of which the least likely
tokens are never drawn. The ratio of the two has the mean 1 under p, so that the product of ratios
over any tokens is a fair bet. If the generator does draw from the other distribution there, no
bet grows faster: its logarithm gains the relative entropy of the two per token.

Such bets are made on all tokens, and apart for places: the first token of each text, each half
octave of positions, all positions from one on, and each row by its number modulo 64 and modulo 8.
The mean of all is a bet.

Legend: B rows, T tokens of the longest text, A alternatives, V vocabulary, P half octaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot


class Alternative(NamedTuple):
    """Weights exp(s f) of tokens, relative to p."""

    what: str
    kind: str  # those of a kind share the wealth
    strength: float  # s
    values: Callable[[Tensor, Tensor], Tensor]  # f of p and q, `[B, V]`


def log_p(p: Tensor, q: Tensor) -> Tensor:
    """Cut at exp(-8)."""
    return p.clamp(min=1e-300).log().clamp(min=-8)


def log_q_over_p(p: Tensor, q: Tensor) -> Tensor:
    """Cut at -2 and 2; 0 where nothing is drafted."""
    ratio = q.clamp(min=1e-30).log() - p.clamp(min=1e-30).log()
    return ratio.clamp(-2, 2) * (q.sum(dim=-1, keepdim=True) > 0)


def last_tokens(p: Tensor, count: int) -> Tensor:
    """1 for the least likely tokens of those that are possible; ties count all."""
    least = p.masked_fill(p == 0, torch.inf).topk(min(count, p.shape[-1]), largest=False)
    return ((p > 0) & (p <= least.values[:, -1:])).to(p)


def last_mass(p: Tensor, mass: float) -> Tensor:
    """1 for the least likely tokens that have at most so much probability together."""
    ascending = p.sort(dim=-1).values
    fits = ascending.cumsum(dim=-1) <= mass
    largest = (ascending * fits).amax(dim=-1, keepdim=True)
    return ((p > 0) & (p <= largest)).to(p)


TEMPERATURES = (0.3, 0.5, 0.65, 0.8, 0.9, 1.1, 1.25, 1.6)
TO_DRAFT = (-0.5, -0.25, -0.1, 0.1, 0.25, 0.5, 1.0)
_RARELY = 1 / 50
"""How often tokens are drawn that a narrower truncation leaves out, relative to p: one that is
drawn all the same, where the faulty truncation left out fewer, costs a factor of 50.
"""
ALTERNATIVES = [
    *(Alternative(f"at temperature x {t}", "p", 1 / t - 1, log_p) for t in TEMPERATURES),
    *(Alternative(f"weighted by (q / p)^{s}", "q", s, log_q_over_p) for s in TO_DRAFT),
    *(
        Alternative(
            f"without the {count} least likely tokens" if count > 1 else "without the least likely",
            "cut",
            math.log(_RARELY),
            lambda p, q, count=count: last_tokens(p, count),
        )
        for count in (1, 4)
    ),
    *(
        Alternative(
            f"without the least likely {mass:.0%}",
            "cut",
            math.log(_RARELY),
            lambda p, q, mass=mass: last_mass(p, mass),
        )
        for mass in (0.01, 0.05)
    ),
]
_KINDS = {"p": 1 / 2, "q": 1 / 4, "cut": 1 / 4}
"""Shares of the wealth."""
_HALF_OCTAVES, _ROWS, _FEW_ROWS = 20, 64, 8
_PLACES = {
    "of all": (1 / 4, 1),
    "of first tokens": (1 / 4, 1),
    "of positions": (1 / 8, _HALF_OCTAVES),
    "of all positions from one on": (1 / 8, _HALF_OCTAVES),
    "of rows modulo 64": (1 / 8, _ROWS),
    "of rows modulo 8": (1 / 8, _FEW_ROWS),
}
"""Shares of the wealth, and the number of places that have equal parts of it."""


class Ratios(NamedTuple):
    """Of one token per row.

    Args:
        logs: `[B, A]` logarithms of the ratio of each alternative and p, at the token.
        spreads: `[B, A]` how far the ratio is from 1 at most, over all tokens.
    """

    logs: Tensor
    spreads: Tensor


def ratios_of(p: Tensor, q: Tensor, tokens: Tensor) -> Ratios:
    """Of tokens `[B, 1]`, with p `[B, V]` float64 of the target, and q of the draft, all 0 where
    there is none.
    """
    logs, spreads, values, made_by = [], [], None, None
    for each in ALTERNATIVES:
        if each.values is not made_by:
            values, made_by = each.values(p, q), each.values
            # Tokens of probability 0 are no part of either distribution.
            most = values.masked_fill(p == 0, -torch.inf).amax(dim=-1)
            least = values.masked_fill(p == 0, torch.inf).amin(dim=-1)
            here = values.gather(1, tokens)[:, 0]
        log_z = (p * (each.strength * values).exp()).sum(dim=-1).log()
        logs.append(each.strength * here - log_z)
        ends = (each.strength * torch.stack([least, most]) - log_z).exp()
        spreads.append((ends - 1).abs().amax(dim=0))
    return Ratios(torch.stack(logs, dim=-1), torch.stack(spreads, dim=-1))


class BestFit(NamedTuple):
    """The alternative, and the place, whose bet has won most."""

    alternative: Alternative
    place: str
    log_e: float  # logarithm of what the bet has won, times its share of the wealth

    def __str__(self) -> str:
        return f"p {self.alternative.what}, {self.place}"


class AlternativeBets:
    """The bets on all alternatives at all places: a wealth that begins with 1.

    Example:
        >>> p = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).expand(16, -1)
        >>> bets, likeliest = AlternativeBets(), torch.zeros(16, 1, dtype=torch.long)
        >>> found = ratios_of(p, torch.zeros_like(p), likeliest)
        >>> bets.add(found.logs[:, None].expand(-1, 8, -1))
        >>> print(bets.best)
        p at temperature x 0.3, everywhere
    """

    def __init__(self):
        size = len(ALTERNATIVES)
        self._by_position = torch.zeros(_HALF_OCTAVES, size, dtype=torch.float64, device="cpu")
        self._by_row = torch.zeros(_ROWS, size, dtype=torch.float64, device="cpu")

    def add(self, logs: Tensor) -> None:
        """`[B, T, A]` logarithms of ratios of texts that were drawn side by side, 0 where a row has
        ended.
        """
        positions = half_octaves(logs.shape[1])
        by_position = torch.einsum("bta,tp->pa", logs, one_hot(positions, _HALF_OCTAVES).to(logs))
        rows = one_hot(torch.arange(len(logs), device="cpu") % _ROWS, _ROWS).to(logs)
        self._by_position = self._by_position + by_position
        self._by_row = self._by_row + torch.einsum("bta,br->ra", logs, rows)

    @property
    def log_e(self) -> float:
        """Logarithm of the wealth."""
        return torch.cat([*self._shares.values()]).logsumexp(dim=(0, 1)).item()

    @property
    def best(self) -> BestFit:
        """The alternative and the place whose bet has won most."""
        name = max(self._shares, key=lambda each: self._shares[each].max().item())
        logs = self._shares[name]  # [places, A]
        number, index = divmod(int(logs.argmax()), len(ALTERNATIVES))
        return BestFit(ALTERNATIVES[index], _place(name, number), logs.max().item())

    @property
    def _shares(self) -> dict[str, Tensor]:
        """`[places, A]` of each kind of place: logarithms of what each bet has won, times its share
        of the wealth.
        """
        by = self._by_position
        sums = {
            "of all": by.sum(dim=0, keepdim=True),
            "of first tokens": by[:1],
            "of positions": by,
            "of all positions from one on": by.flip(0).cumsum(dim=0).flip(0),
            "of rows modulo 64": self._by_row,
            "of rows modulo 8": self._by_row.view(-1, _FEW_ROWS, by.shape[1]).sum(dim=0),
        }
        kinds = [each.kind for each in ALTERNATIVES]
        shares = [_KINDS[kind] / kinds.count(kind) for kind in kinds]
        own = torch.tensor(shares, dtype=by.dtype, device="cpu").log()
        return {
            name: logs + own + math.log(share / count)
            for (name, (share, count)), logs in zip(_PLACES.items(), sums.values(), strict=True)
        }


def half_octaves(count: int) -> Tensor:
    """`[T]` of new tokens by their number in the text, from 0: 0 holds the first token alone."""
    positions = torch.arange(count, device="cpu") + 1
    return (2 * positions.double().log2()).floor().long().clamp(max=_HALF_OCTAVES - 1)


def _place(name: str, number: int) -> str:
    """In words."""
    if name.startswith("of rows"):
        return f"in row {number} {name.removeprefix('of rows ')}"
    if name == "of first tokens":
        return "at the first token of each text"
    if name == "of all":
        return "everywhere"
    first, after = (math.ceil(2 ** (n / 2)) for n in (number, number + 1))
    if "from" in name:
        return f"from new token {first} on"
    return f"at new tokens {first} to {max(first, after - 1)}"
