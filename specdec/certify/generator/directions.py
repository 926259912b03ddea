"""The functions of (text before, token) in whose direction a wrong generator may lean.

A wrong rule leans to what was drafted, or away from it: the first eight compare the target's
distribution p with the draft's q. A wrong cache, mask or row of logits leans to tokens that the
target finds too unlikely, or that another context makes likely: the others see this, and need no
draft; the last one sees best, where the generator's own logits are known. All have values in -1..1,
0 for all tokens where what they need is not there.

Legend: B rows, D directions, V vocabulary, K draft tokens (nodes of a tree).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.types import Draft

DIRECTIONS = {
    "draft above target": "sign(q - p)",
    "accept draws small": "what accept draws that are 2 % too small add to p, relative to p",
    "accept draws large": "what accept draws that are 2 % too large take from p, relative to p",
    "log q / p": "of the first draft token",
    "log q / p, second": "of the second draft token, where the first is the text's",
    "log q": "how likely the first draft token is in the draft",
    "proposed": "a first token of the draft",
    "proposed second": "a second token of the draft, after the text's own first one",
    "impossible": "p is 0",
    "log p": "how likely the token is",
    "top 1": "the likeliest token",
    "top 8": "one of the eight likeliest tokens",
    "recent": "one of the last 64 tokens",
    "again": "what followed the last token where it was last seen",
    "row before": "log of the p of one token earlier / p",
    "average": "log of the mean p of the text so far / p",
    "quantile": "where the token stands when tokens are lined up by their ids",
    "loop": "log of the p that the loop drew from / p",
}
"""What each is of a token, in their order."""
DRAFT_ABOVE, TOP = 0, list(DIRECTIONS).index("top 1")
"""Those whose mean is twice a total variation, and a total variation."""
_RECENT = 64
_MOST = 10.0
"""Where the effects of accept draws are cut; few tokens move by more than 20 %."""


@dataclass(frozen=True, eq=False)
class Gains:
    """Of one token per row; float64.

    Args:
        gains: `[B, D]` f(x) - mean of f.
        variances: `[B, D]` of f under p.
        effects: `[B, D]` how far the mean of f is off, per epsilon, where accept draws are
            multiplied by 1 - epsilon (token-wise rule; epsilon near 2 %).
        distance: `[B]` total variation between draft and target, 0 without a draft.
        loop_distance: `[B]` between what the generator drew from and p, 0 where it is not known.
    """

    gains: Tensor
    variances: Tensor
    effects: Tensor
    distance: Tensor
    loop_distance: Tensor


class Directions:
    """Follows the texts of a batch, token by token.

    Args:
        texts: `[B, L]` prompt and text of each row, padded on the right.
        lengths: `[B]` tokens of the prompts.
    """

    def __init__(self, texts: Tensor, lengths: Tensor):
        self._texts, self._lengths = texts, lengths.clone()
        self._last: Tensor | None = None  # p of the token before
        self._sum: Tensor | None = None  # of all p so far
        self._draft: Draft | None = None  # after the anchor before the last token

    def step(self, probs: Tensor, draft: Draft | None, loop: Tensor | None = None) -> Gains:
        """Takes the next token of every row.

        Args:
            probs: `[B, V]` float64, p.
            draft: made after the text before, without knowledge of the token; `None` for none.
            loop: `[B, V]`, what the generator itself took for p; `None` where it is not known.
        """
        p, last = probs, probs if self._last is None else self._last
        mean = p if self._sum is None else self._sum / self._sum.sum(dim=-1, keepdim=True)
        first, second = first_proposals(draft), self._second_proposals()
        q, q2 = (_as_distribution(found, p) for found in (first, second))
        has_draft, has_second = q.sum(dim=-1, keepdim=True) > 0, q2.sum(dim=-1, keepdim=True) > 0
        small, large = (accept_effect(p, q, factor) * has_draft for factor in (0.98, 1.02))
        best = p.topk(min(8, p.shape[-1]), dim=-1)
        found = (
            (q - p).sign() * has_draft,
            small.clamp(-_MOST, _MOST) / _MOST,
            large.clamp(-_MOST, _MOST) / _MOST,
            _log_ratio(q, p, 2.0) * has_draft,
            _log_ratio(q2, p, 2.0) * has_second,
            _log(q) * has_draft,
            _indicator(p, *first[:2]),
            _indicator(p, *second[:2]),
            (p == 0).to(p.dtype),
            _log(p),
            _indicator(p, best.indices[:, :1]),
            (p >= best.values[:, -1:]).to(p.dtype),
            _indicator(p, self._recent()),
            _indicator(p, *self._again()),
            _log_ratio(last, p, 4.0),
            _log_ratio(mean, p, 4.0),
            p - 2 * p.cumsum(dim=-1) + 1,
            torch.zeros_like(p) if loop is None else _log_ratio(loop, p, 0.5),
        )
        tokens = self._texts.gather(1, self._lengths[:, None])
        sums = [_moments(p, f, tokens, small) for f in found]
        gains, variances, effects = (torch.stack(each, dim=-1) for each in zip(*sums, strict=True))
        far = [(each - p).clamp(min=0).sum(dim=-1) for each in (q, p if loop is None else loop)]
        self._last, self._draft = p, draft
        self._sum = p if self._sum is None else self._sum + p
        self._lengths = (self._lengths + 1).clamp(max=self._texts.shape[1] - 1)
        return Gains(gains, variances, effects, *far)

    def _second_proposals(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """As `first_proposals`, after the first proposed token that is the text's."""
        if self._draft is None:
            return first_proposals(None)
        draft, tokens = self._draft, self._texts.gather(1, self._lengths[:, None] - 1)
        is_first = (draft.window_parents == 0) & draft.is_valid & (draft.tokens == tokens)
        node = is_first.long().argmax(dim=1, keepdim=True) + 1  # its row of the window
        is_second = (draft.window_parents == node) & draft.is_valid
        return _proposals(draft, is_second & is_first.any(dim=1, keepdim=True))

    def _recent(self) -> Tensor:
        """`[B, 64]` the last tokens, the first of them repeated in short texts."""
        back = torch.arange(1, _RECENT + 1, device=self._texts.device)
        return self._texts.gather(1, (self._lengths[:, None] - back).clamp(min=0))

    def _again(self) -> tuple[Tensor, Tensor]:
        """`[B, 1]` what followed the last token's latest occurrence, and whether there is one."""
        index = torch.arange(self._texts.shape[1], device=self._texts.device)
        newest = self._texts.gather(1, self._lengths[:, None] - 1)
        is_seen = (self._texts == newest) & (index < self._lengths[:, None] - 1)
        where = (is_seen * (index + 1)).amax(dim=1, keepdim=True)  # index of the follower, or 0
        return self._texts.gather(1, where), where > 0


def accept_effect(p: Tensor, q: Tensor, factor: float) -> Tensor:
    """`[B, V]` how the distribution of the token-wise rule moves, relative to p and per 1 - factor,
    where its accept draws are multiplied by a factor: token v of the draft is accepted with
    min(q, p / factor), and what is not accepted is drawn from the residual as ever.
    """
    accepted = torch.minimum(q, p / factor)
    residual = (p - q).clamp(min=0)
    rest = (1 - accepted.sum(dim=-1, keepdim=True)).clamp(min=0)
    total = residual.sum(dim=-1, keepdim=True).clamp(min=1e-12)
    moved = accepted + rest * residual / total - p
    return moved / p.clamp(min=1e-300) / (1 - factor)


def first_proposals(draft: Draft | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """`[B, K]` tokens, which of them follow the anchor, and `[B, V]` what the first of these was
    drawn from, `None` for a point mass.
    """
    if draft is None:
        return torch.zeros(1, 0, dtype=torch.long), torch.zeros(1, 0, dtype=torch.bool), None
    return _proposals(draft, (draft.window_parents == 0) & draft.is_valid)


def _proposals(draft: Draft, is_meant: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    if draft.probs is None or not draft.tokens.shape[1]:
        return draft.tokens, is_meant, None
    first = is_meant.long().argmax(dim=1)
    probs = draft.probs[torch.arange(len(first), device=first.device), first]
    return draft.tokens, is_meant, probs


def _as_distribution(found: tuple[Tensor, Tensor, Tensor | None], p: Tensor) -> Tensor:
    """`[B, V]`: of the first proposed token; zeros where nothing is proposed."""
    tokens, is_meant, probs = found
    if not tokens.shape[1]:
        return torch.zeros_like(p)
    if probs is not None:
        return probs.to(p.dtype) * is_meant.any(dim=1, keepdim=True)
    first = is_meant.long().argmax(dim=1, keepdim=True)
    return _indicator(p, tokens.gather(1, first), is_meant.gather(1, first))


def _indicator(p: Tensor, tokens: Tensor, is_meant: Tensor | None = None) -> Tensor:
    """`[B, V]`: 1 for the tokens `[B, n]` that are meant, 0 for others."""
    tokens = tokens.clamp(min=0).to(p.device)
    ones = torch.ones_like(tokens, dtype=p.dtype)
    ones = ones if is_meant is None else is_meant.to(p)
    tokens, ones = (each.expand(len(p), -1) for each in (tokens, ones))
    return torch.zeros_like(p).scatter_reduce_(1, tokens, ones, "amax")


def _log(p: Tensor) -> Tensor:
    return p.clamp(min=1e-300).log().clamp(min=-8) / 4 + 1


def _log_ratio(q: Tensor, p: Tensor, most: float) -> Tensor:
    ratio = q.clamp(min=1e-30).log() - p.clamp(min=1e-30).log()
    return ratio.clamp(-most, most) / most


def _moments(p: Tensor, f: Tensor, tokens: Tensor, accept: Tensor) -> tuple[Tensor, ...]:
    """`[B]` each: gain, variance, and the effect of accept draws."""
    weighted = p * f
    mean = weighted.sum(dim=-1)
    variance = ((weighted * f).sum(dim=-1) - mean**2).clamp(min=0)
    return f.gather(1, tokens)[:, 0] - mean, variance, (weighted * accept).sum(dim=-1)
