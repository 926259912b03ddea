"""Functions f of (text before, token): each is one direction in which a faulty generator would
shift its tokens. A certificate bets on f(token) minus its mean under the target's distribution p.

- Of draft and target: the first eight compare p with the draft's distribution q. A wrong rule emits
  drafted tokens too often, or too rarely.
- Of the target alone: a wrong cache, mask or row of logits emits tokens that p finds too unlikely,
  or that another context makes likely. The last of these compares p with what the loop drew from,
  where that is known.
- Of numbers used twice: two tokens that were drawn by one uniform number lie at the same quantile
  of their distributions, with tokens in the order of their ids.
- Learned: two directions come from the texts before.
- Of draft tokens: whether they are draws from q, as the drafter reports.

All have values in -1..1, and 0 for all tokens where what they need is not known.

A column of new tokens is drawn row by row, and the draft before the token: what a row bets on may
depend on the rows before it.

Legend: B rows, T tokens of the longest text, D directions, V vocabulary, K draft tokens (nodes of a
tree).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec.lab.certificates.generator.alternatives import Ratios, ratios_of
from specdec.lab.certificates.generator.learned import Learned
from specdec.types import Draft

_RECENT = 64
_MOST = 10.0
"""Where the effects of accept draws are cut; few tokens move by more than 20 %."""
_SURE = 0.9
"""Stake on the loop's own distribution, of which a token may be no draw either."""
_MOST_RATIO = 8.0
"""Rounding may move the cutoff of a truncation, so that p is 0 in one of two computations."""


class Proposal(NamedTuple):
    """Tokens that are drafted for one column."""

    q: Tensor  # `[B, V]` what the first of them was drawn from, 0 where there is none
    tokens: Tensor  # `[B, V]` 1 for each of them
    first: Tensor  # `[B, 1]`
    is_drawn: Tensor  # `[B]` from q, which is no point mass


class Before(NamedTuple):
    """What is known before a column of tokens is drawn; `[B, V]` float64 where no shape is said."""

    p: Tensor  # the target's distribution
    loop: Tensor  # what the generator took for p; p where it is not known
    first: Proposal  # of this column
    second: Proposal  # of this column after the draft's first token, where that is the text's
    small: Tensor  # what accept draws that are 2 % too small add to p, relative to p
    last: Tensor  # p of one token earlier
    mean: Tensor  # of p over the text so far
    recent: Tensor  # 1 for the last 64 tokens
    again: Tensor  # 1 for what followed the last token where it was last seen
    beside: Tensor  # 1 for this column's token of the row before
    last_midst: Tensor  # `[B, 1]` where the last token stood
    midst_beside: Tensor  # `[B, 1]` where this column's token of the row before stands
    learned: Tensor  # by how much each token was seen too often
    learned_here: Tensor  # in this context
    learned_draft: Tensor  # of draft tokens


class Direction(NamedTuple):
    """A function of tokens: of the text, or of first draft tokens that were drawn from q."""

    what: str
    values: Callable[[Before], Tensor]
    is_of_draft: bool = False


DIRECTIONS = {
    "draft above target": Direction(
        "sign(q - p)", lambda b: (b.first.q - b.p).sign() * _is_there(b.first.q)
    ),
    "accept draws small": Direction(
        "what accept draws that are 2 % too small add to p, relative to p",
        lambda b: b.small.clamp(-_MOST, _MOST) / _MOST,
    ),
    "accept draws large": Direction(
        "what accept draws that are 2 % too large take from p, relative to p",
        lambda b: accept_effect(b.p, b.first.q, 1.02).clamp(-_MOST, _MOST) / _MOST,
    ),
    "log q / p": Direction("of the first draft token", lambda b: _log_ratio(b.first.q, b.p, 2.0)),
    "log q / p, second": Direction(
        "of the second draft token, where the first is the text's",
        lambda b: _log_ratio(b.second.q, b.p, 2.0),
    ),
    "log q": Direction(
        "how likely the first draft token is in the draft", lambda b: _log(b.first.q)
    ),
    "proposed": Direction("a first token of the draft", lambda b: b.first.tokens),
    "proposed second": Direction(
        "a second token of the draft, after the text's own first one", lambda b: b.second.tokens
    ),
    "log p": Direction("how likely the token is", lambda b: _log(b.p)),
    "top 1": Direction("the likeliest token", lambda b: _top(b.p, 1)),
    "top 8": Direction("one of the eight likeliest tokens", lambda b: _top(b.p, 8)),
    "recent": Direction("one of the last 64 tokens", lambda b: b.recent),
    "again": Direction("what followed the last token where it was last seen", lambda b: b.again),
    "row before": Direction("p of one token earlier / p", lambda b: _log_ratio(b.last, b.p, 4.0)),
    "average": Direction("mean p of the text so far / p", lambda b: _log_ratio(b.mean, b.p, 4.0)),
    "quantile": Direction("where it stands when tokens are lined up", lambda b: _midst(b.p)),
    "quantile again": Direction(
        "it stands where the token before stood", lambda b: _midst(b.p) * b.last_midst
    ),
    "quantile beside": Direction(
        "it stands where another row's token stands", lambda b: _midst(b.p) * b.midst_beside
    ),
    "beside": Direction("this column's token of another row", lambda b: b.beside),
    "learned": Direction("seen too often in the texts before", lambda b: b.learned),
    "learned here": Direction("seen too often after the last tokens", lambda b: b.learned_here),
    "draft, log q": Direction("draft tokens are too likely in it", lambda b: _log(b.first.q), True),
    "draft, quantile": Direction("where draft tokens stand", lambda b: _midst(b.first.q), True),
    "draft, learned": Direction("drafted too often here", lambda b: b.learned_draft, True),
    "loop": Direction("what the loop drew from / p", lambda b: _log_ratio(b.loop, b.p, 0.4)),
}
"""In their order; the last one is empty where the loop's own distributions are not known."""
DRAFT_ABOVE, TOP = 0, list(DIRECTIONS).index("top 1")
"""Those whose mean is twice a total variation, and a total variation."""


class Gains(NamedTuple):
    """Of one token per row; float64, 0 where a row has ended.

    Args:
        gains: `[B, D]` f(x) - mean of f.
        variances: `[B, D]` of f under p.
        effects: `[B, D]` how far the mean of f is off, per epsilon, where accept draws are
            multiplied by 1 - epsilon (token-wise rule; epsilon near 2 %).
        distance: `[B]` total variation between draft and target, 0 without a draft.
        loop_distance: `[B]` between what the generator drew from and p, 0 where it is not known.
        rounding: `[B]` between two sound computations of p, 0 where there is but one.
        loop_bets: `[B]` logarithms of a bet that x is drawn from the former: 1 + 0.9 (ratio - 1) of
            its probability and p, which is 1 in the mean, or less where a ratio is cut.
        ratios: `[B, A]` logarithms of the ratios of other distributions and p.
        spreads: `[B, A]` how far from 1 these ratios are at most.
    """

    gains: Tensor
    variances: Tensor
    effects: Tensor
    distance: Tensor
    loop_distance: Tensor
    rounding: Tensor
    loop_bets: Tensor
    ratios: Tensor
    spreads: Tensor


class Directions:
    """Follows the texts of a batch, token by token.

    Args:
        prompts: ids of each row.
        texts: what follows them.
        device: of the distributions.
        learned: from earlier texts, and from these ones on; `None` for a new one.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        learned: Learned | None = None,
    ):
        # One token more, which is never looked at: rows that have ended stay there.
        rows = [
            torch.tensor([*p, *t, 0], device="cpu") for p, t in zip(prompts, texts, strict=True)
        ]
        self._texts = pad_sequence(rows, batch_first=True).to(device)
        self._ends = torch.tensor([len(row) - 1 for row in rows], device=device)
        self._lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self._learned = Learned() if learned is None else learned
        self._last: Tensor | None = None  # p of the token before
        self._sum: Tensor | None = None  # of all p so far
        self._midst: Tensor | None = None  # of the token before
        self._draft: Draft | None = None  # after the root before the last token

    def step(
        self,
        probs: Tensor,
        draft: Draft | None,
        loop: Tensor | None = None,
        other: Tensor | None = None,
    ) -> Gains:
        """Takes the next token of every row.

        Args:
            probs: `[B, V]` float64, p.
            draft: made after the text before, without knowledge of the token; `None` for none.
            loop: `[B, V]`, what the generator itself took for p; `None` where it is not known. The
                two change places where p is what tokens are held against.
            other: `[B, V]`, another sound computation of `loop`.
        """
        goes_on = self._lengths < self._ends
        before = self.before(probs, draft, loop, goes_on)
        tokens = self._texts.gather(1, self._lengths[:, None])
        drafted, is_drawn = before.first.first, before.first.is_drawn & goes_on
        none, sums = torch.zeros_like(before.small), []
        for each in DIRECTIONS.values():
            f = each.values(before)
            if each.is_of_draft:
                moments = _moments(before.first.q, f, drafted, none)
                sums.append([moment * is_drawn for moment in moments])
            else:
                sums.append([m * goes_on for m in _moments(probs, f, tokens, before.small)])
        gains = [torch.stack(each, dim=-1) for each in zip(*sums, strict=True)]
        other = before.loop if other is None else other
        pairs = (before.first.q, probs), (before.loop, probs), (other, before.loop)
        far = [(one - two).clamp(min=0).sum(dim=-1) * goes_on for one, two in pairs]
        ratio = before.loop.gather(1, tokens) / probs.gather(1, tokens).clamp(min=1e-300)
        bets = (1 + _SURE * (ratio[:, 0].clamp(max=_MOST_RATIO) - 1)).log() * goes_on
        last = self._last_tokens(2)
        others = Ratios(*(x * goes_on[:, None] for x in ratios_of(probs, before.first.q, tokens)))
        self._learned.add(last[goes_on], probs[goes_on], tokens[goes_on])
        self._learned.of_draft.add(last[is_drawn], before.first.q[is_drawn], drafted[is_drawn])
        self._last, self._draft, self._midst = probs, draft, _midst(probs).gather(1, tokens)
        self._sum = probs if self._sum is None else self._sum + probs
        self._lengths = (self._lengths + 1).minimum(self._ends)
        return Gains(*gains, *far, bets, *others)

    def before(
        self, p: Tensor, draft: Draft | None, loop: Tensor | None, goes_on: Tensor
    ) -> Before:
        """What the functions of this column are made of; arguments as of `step`."""
        first = _proposal(p, draft, lambda draft: draft.window_parents == 0)
        tokens = self._texts.gather(1, self._lengths[:, None])
        # The row before, if both have a token here.
        has_beside = (goes_on & goes_on.roll(1))[:, None]
        has_beside[0] = False
        newest = self._last_tokens(_RECENT)
        return Before(
            p,
            p if loop is None else loop,
            first,
            _proposal(p, self._draft, self._follows_first),
            accept_effect(p, first.q, 0.98),
            p if self._last is None else self._last,
            p if self._sum is None else self._sum / self._sum.sum(dim=-1, keepdim=True),
            _indicator(p, newest),
            _indicator(p, *self._again()),
            _indicator(p, tokens.roll(1, dims=0), has_beside),
            p.new_zeros(len(p), 1) if self._midst is None else self._midst,
            _midst(p).gather(1, tokens).roll(1, dims=0) * has_beside,
            *self._learned.factors(newest[:, :2], p),
            self._learned.of_draft.factors(newest[:, :2], p)[1],
        )

    def _last_tokens(self, count: int) -> Tensor:
        """`[B, count]`, the last one first; the text's first one again where it is too short."""
        back = torch.arange(1, count + 1, device=self._texts.device)
        return self._texts.gather(1, (self._lengths[:, None] - back).clamp(min=0))

    def _follows_first(self, draft: Draft) -> Tensor:
        """`[B, K]` tokens after the first one that is the text's last."""
        tokens = self._texts.gather(1, self._lengths[:, None] - 1)
        is_first = (draft.window_parents == 0) & draft.is_valid & (draft.tokens == tokens)
        node = is_first.long().argmax(dim=1, keepdim=True) + 1  # its row of the window
        return (draft.window_parents == node) & is_first.any(dim=1, keepdim=True)

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


def _proposal(p: Tensor, draft: Draft | None, is_meant: Callable[[Draft], Tensor]) -> Proposal:
    """Those tokens of a draft that are meant."""
    if draft is None or not draft.tokens.shape[1]:
        none = torch.zeros_like(p)
        return Proposal(none, none, none[:, :1].long(), none[:, 0] > 0)
    meant = is_meant(draft) & draft.is_valid
    index, is_there = meant.long().argmax(dim=1, keepdim=True), meant.any(dim=1, keepdim=True)
    first = draft.tokens.gather(1, index).clamp(min=0)
    if draft.probs is None:
        q = _indicator(p, first, is_there)
    else:
        q = draft.probs.take_along_dim(index[..., None], 1)[:, 0].to(p) * is_there
    is_drawn = is_there[:, 0] & (draft.probs is not None)
    return Proposal(q, _indicator(p, draft.tokens, meant), first, is_drawn)


def _indicator(p: Tensor, tokens: Tensor, is_meant: Tensor | None = None) -> Tensor:
    """`[B, V]`: 1 for the tokens `[B, n]` that are meant, 0 for others."""
    ones = torch.ones_like(tokens) if is_meant is None else is_meant
    return torch.zeros_like(p).scatter_reduce_(1, tokens.clamp(min=0), ones.to(p), "amax")


def _midst(p: Tensor) -> Tensor:
    """Where each token stands among all, in -1..1; its mean is 0."""
    return p - 2 * p.cumsum(dim=-1) + 1


def _is_there(q: Tensor) -> Tensor:
    """`[B, 1]`: something is proposed."""
    return q.sum(dim=-1, keepdim=True) > 0


def _top(p: Tensor, count: int) -> Tensor:
    """1 for the likeliest tokens; ties count all."""
    return (p >= p.topk(min(count, p.shape[-1]), dim=-1).values[:, -1:]).to(p)


def _log(p: Tensor) -> Tensor:
    return p.clamp(min=1e-300).log().clamp(min=-8) / 4 + 1


def _log_ratio(q: Tensor, p: Tensor, most: float) -> Tensor:
    """log q / p, cut; 0 where there is no q."""
    ratio = q.clamp(min=1e-30).log() - p.clamp(min=1e-30).log()
    return ratio.clamp(-most, most) / most * _is_there(q)


def _moments(p: Tensor, f: Tensor, tokens: Tensor, accept: Tensor) -> tuple[Tensor, ...]:
    """`[B]` each: gain, variance, and the effect of accept draws."""
    weighted = p * f
    mean = weighted.sum(dim=-1)
    variance = ((weighted * f).sum(dim=-1) - mean**2).clamp(min=0)
    return f.gather(1, tokens)[:, 0] - mean, variance, (weighted * accept).sum(dim=-1)
