"""The rules of verify on paths that were drawn independently of each other, and what such a draft
is. Derivations are in README.md.

Legend: B rows, P paths, D depth, N rows of the window (1 + P D), V vocabulary.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.arguments import check_integer
from specdec.kernels.sample.reference import draw
from specdec.kernels.types import VerifyUniforms
from specdec.kernels.verify.reference import block_rule, take_rows
from specdec.kernels.verify.tree import Path, verdict_of
from specdec.types import Draft, Verdict

_HALVINGS = 30
"""Of the interval in which the divisor of `k_sequential` lies: to 1e-9 of its width."""


@dataclass(frozen=True, eq=False)
class PathDraft(Draft):
    """P paths from the root, each drawn independently of the others, so that two may agree: node
    i follows node i - P, and the first P the root. The draft says so, since a rule cannot see in
    `probs` whether its paths were drawn independently.

    Args:
        num_paths: P.
        tokens, ...: see `Draft`.
    """

    num_paths: int = 1

    def __post_init__(self):
        super().__post_init__()
        width = self.tokens.shape[1]
        check_integer("draft.num_paths", self.num_paths, min(width, 1), width)


def verify_greedy_path(draft: PathDraft, target_probs: Tensor, uniforms: VerifyUniforms) -> Verdict:
    """Block verification of the best one of several paths (GBV): that whose first token has the
    largest target / draft; of equal ones, that whose second token has; and so on.

    The best path is drawn from `best_of` the draft distributions, so these take the place of the
    draft's own in `block_rule`. A depth that not all paths reach is left out, but the first.

    Args:
        draft: with probabilities.
        target_probs: `[B, N, V]`.
        uniforms: to accept and to resample.

    Reference: Thomas, Pal, arXiv:2602.16961.
    """
    nodes, lengths = _nodes_of_paths(draft)
    num_valid = torch.maximum(lengths[:, -1], lengths[:, 0].clamp(max=1))
    num_rows, tokens = len(draft.tokens), draft.tokens.clamp(min=0)
    of_paths = tokens[:, nodes]  # [B, P, D]
    rows = nodes[_first_of_prefix(of_paths), torch.arange(draft.depth, device=nodes.device)]
    flat = rows.flatten(1)
    parents = draft.window_parents.expand(num_rows, -1).gather(1, flat)
    chosen = of_paths.flatten(1)
    ratios = _ratio(
        target_probs.flatten(1).gather(1, parents * target_probs.shape[2] + chosen),
        draft.probs.flatten(1).gather(1, flat * draft.probs.shape[2] + chosen),
    )
    scores = torch.stack([ratios, chosen.to(ratios)], dim=2).unflatten(1, rows.shape[1:])
    is_left_out = torch.arange(draft.depth, device=nodes.device) >= num_valid[:, None]
    scores = scores.masked_fill(is_left_out[:, None, :, None], 0)
    is_best = lengths > 0  # [B, P]
    for score in scores.flatten(2).unbind(dim=2):
        score = score.masked_fill(~is_best, -1)
        is_best = score == score.amax(dim=1, keepdim=True)
    best = is_best.long().argmax(dim=1)
    nodes = nodes[best]  # [B, D]
    rows = rows[torch.arange(num_rows, device=best.device), best]
    chain, target, draws = _chains(draft, target_probs, uniforms, nodes[:, None], num_valid)
    chain = replace(chain, probs=take_rows(draft.probs, rows))
    window = draft.window_parents.expand(num_rows, -1).gather(1, rows)
    target = torch.cat([take_rows(target_probs, window), target[:, -1:]], dim=1)
    count = (lengths > 0).sum(dim=1)
    probs = best_of(count, draft.num_paths, chain.tokens, chain.probs, target[:, :-1])
    tokens, length = block_rule(replace(chain, probs=probs), target, draws)
    path, extra = Path(length, F.pad(nodes + 1, (1, 0))), tokens.gather(1, length[:, None])[:, 0]
    return verdict_of(draft, path, extra)


def _first_of_prefix(tokens: Tensor) -> Tensor:
    """`[B, P, D]`: the first path that has the same tokens before each depth. Its distributions are
    taken for all of these paths: computed in several rows they differ by rounding, and which path
    is best would be decided by that and not by the tokens in which the paths differ.

    Args:
        tokens: `[B, P, D]`.
    """
    before = F.pad(tokens[..., :-1], (1, 0))  # the root is common to all
    is_equal = (before[:, :, None] == before[:, None]).cumprod(dim=-1)  # [B, P, P, D]
    return is_equal.argmax(dim=2)


def best_of(count: Tensor, most: int, tokens: Tensor, probs: Tensor, target: Tensor) -> Tensor:
    """`[B, D, V]`: the distributions of the tokens of the best one of some paths.

    The paths that begin with a prefix are an interval `(low, high]` of the cumulative distribution
    of paths, in the order in which they are better. The best of P is there with probability
    `high ** P - low ** P`; of the tokens after a prefix only low / high has to be known.

    Args:
        count: `[B]`, how many paths.
        most: P, of any row.
        tokens: `[B, D]` of the best path.
        probs: `[B, D, V]`, the distributions that they were drawn from.
        target: `[B, D, V]`; the order is that of target / draft, and of ids where it is equal.
    """
    order = _ratio(target, probs).sort(dim=-1, stable=True).indices
    wide, tokens = probs.double(), tokens[..., None].clamp(min=0)
    ends = F.pad(wide.gather(2, order).cumsum(dim=-1), (1, 0))
    ends = ends / ends[..., -1:]
    bounds = ends[..., :-1], ends[..., 1:]
    low, high = (torch.empty_like(wide).scatter_(2, order, x) for x in bounds)
    low_of_token, high_of_token = low.gather(2, tokens), high.gather(2, tokens)  # [B, D, 1]
    of_prefix = [torch.zeros_like(low[:, 0, :1])]  # low / high
    for i in range(tokens.shape[1] - 1):
        start = of_prefix[-1]
        start, end = (start + (1 - start) * x[:, i] for x in (low_of_token, high_of_token))
        of_prefix.append(start / end)
    start = torch.stack(of_prefix, dim=1)  # [B, D, 1]
    # (high ** P - low ** P) / (high - low), without a difference that could cancel: of tokens, and
    # of the prefix, whose high is 1.
    low, high = (F.pad(x, (0, 1), value=v) for x, v in ((low, 0.0), (high, 1.0)))
    low, high = (start + (1 - start) * x for x in (low, high))
    share, power = torch.ones_like(high), torch.ones_like(low)
    for i in range(1, most):
        power = power * low
        share = torch.where(i < count[:, None, None], share * high + power, share)
    return (wide * share[..., :-1] / share[..., -1:]).to(probs.dtype)


def verify_sequential_paths(
    draft: PathDraft, target_probs: Tensor, uniforms: VerifyUniforms
) -> Verdict:
    """Tries path after path until one is accepted in part: whether by SpecTr's k-sequential
    selection, and how far by the block rule.

    A path is judged by `block_rule` with P_0 = 1 / divisor, see `k_sequential`. If none is accepted
    the extra token is drawn from what all of them leave of the target.

    Args and Returns: as `verify_greedy_path`.

    Reference: Sun et al., arXiv:2310.15141, for the selection; that block verification may follow
    it is derived in README.md.
    """
    nodes, lengths = _nodes_of_paths(draft)
    count, most = (lengths > 0).sum(dim=1), draft.num_paths
    divisor, rest = k_sequential(count, target_probs[:, 0], draft.probs[:, 0])
    of_all = nodes.expand(len(draft.tokens), -1, -1)
    chains = _chains(draft, target_probs, uniforms, of_all, lengths.flatten())
    tokens, lengths = block_rule(*chains, (1 / divisor).repeat_interleave(most))
    extra = tokens.gather(1, lengths[:, None]).view(-1, most)
    lengths = lengths.view(-1, most)
    first = (lengths > 0).long().argmax(dim=1, keepdim=True)  # path that is accepted in part
    length, extra = (x.gather(1, first)[:, 0] for x in (lengths, extra))
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, target_probs[:, 0])
    extra = torch.where(length > 0, extra, draw(rest, uniforms.resample))
    path = Path(length, F.pad(nodes[first[:, 0]] + 1, (1, 0)))
    return verdict_of(draft, path, extra)


def k_sequential(count: Tensor, target: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """SpecTr's selection among tokens drawn from the same distribution: one after the other is
    accepted with probability `min(1, target / (divisor * draft))`.

    Args:
        count: `[B]`, how many tokens.
        target: `[B, V]`.
        probs: `[B, V]`, what each token is drawn from.

    Returns:
        divisor `[B]` float64 in 1..P, the least that leaves no negative weight, up to rounding of
        the weights; and these, the weights `[B, V]` of the token after P rejections.

    Reference: Sun et al., arXiv:2310.15141, Alg. 3 (their rho, beta are our divisor, overlap).
    """
    high = count.clamp(min=1).double().expand(len(target))
    low = torch.ones_like(high)

    def selected(divisor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scaled = torch.minimum(probs, target / divisor[:, None].to(target.dtype))
        overlap = scaled.sum(dim=-1, dtype=torch.float64).clamp(max=1)
        return scaled, overlap, 1 - (1 - overlap) ** count

    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        _, overlap, chance = selected(middle)
        is_enough = chance <= middle * overlap
        low, high = torch.where(is_enough, low, middle), torch.where(is_enough, middle, high)
    scaled, overlap, chance = selected(high)
    tries = torch.where(overlap > 0, chance / overlap, 1.0)  # on average
    return high, (target - scaled * tries[:, None].to(target.dtype)).clamp_(min=0)


def _nodes_of_paths(draft: PathDraft) -> tuple[Tensor, Tensor]:
    """`[P, D]` the nodes of each path, and `[B, P]` how many a row has of them; the last paths of a
    row may be shorter by a token.
    """
    nodes = torch.arange(draft.num_paths * draft.depth, device=draft.tokens.device)
    nodes = nodes.view(draft.depth, draft.num_paths).T
    lengths = (nodes[..., None] < draft.is_valid.sum(dim=1)).sum(dim=1).T
    return nodes.clamp(max=draft.tokens.shape[1] - 1), lengths


def _chains(
    draft: PathDraft,
    target_probs: Tensor,
    uniforms: VerifyUniforms,
    nodes: Tensor,
    num_valid: Tensor,
) -> tuple[Draft, Tensor, VerifyUniforms]:
    """Paths as a batch of chains, with `[B n]` tokens each, for `block_rule`; nodes `[B, n, D]`."""
    window = F.pad(nodes + 1, (1, 0)).flatten(1)
    target = take_rows(target_probs, window).unflatten(1, (nodes.shape[1], -1)).flatten(0, 1)
    tokens, accept = (x.gather(1, nodes.flatten(1)) for x in (draft.tokens, uniforms.accept))
    tokens, accept = (x.view(-1, nodes.shape[2]) for x in (tokens, accept))
    probs = take_rows(draft.probs, nodes.flatten(1)).unflatten(1, nodes.shape[1:]).flatten(0, 1)
    resample = uniforms.resample.repeat_interleave(nodes.shape[1])
    return Draft(tokens, probs, num_valid), target, VerifyUniforms(accept, resample)


def _ratio(target: Tensor, probs: Tensor) -> Tensor:
    """target / draft, 0 for tokens that are never drafted."""
    return torch.where(probs > 0, target / probs, 0.0)
