"""The rules of verify on paths that were drawn independently of each other (`Draft.num_paths`).
Derivations are in README.md.

Legend: B rows, P paths, D depth, N rows of the window (1 + P D), V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.sample.reference import draw
from specdec.kernels.types import VerifyUniforms
from specdec.kernels.verify.reference import block_rule, find_draft_faults, take_rows
from specdec.kernels.verify.tree import Path, verdict_of
from specdec.types import Draft, Verdict

_HALVINGS = 30
"""Of the interval in which the divisor of `k_sequential` lies: to 1e-9 of its width."""


def verify_greedy_path(
    draft: Draft, target_probs: Tensor, largest_logits: Tensor, uniforms: VerifyUniforms
) -> Verdict:
    """Block verification of the best one of several paths (GBV): that whose first token has the
    largest target / draft; of equal ones, that whose second token has; and so on.

    The best path is drawn from `best_of` the draft distributions, so these take the place of the
    draft's own in `block_rule`.

    Args:
        draft: independent paths with probabilities.
        target_probs: `[B, N, V]`.
        largest_logits: `[B, N]`, see `find_faults`.
        uniforms: to accept and to resample.

    Reference: Thomas, Pal, arXiv:2602.16961.
    """
    of_paths = _OfPaths(draft, target_probs)
    is_best = torch.ones_like(of_paths.tokens[:, 0], dtype=torch.bool)  # [B, P]
    for ratios, tokens in zip(of_paths.ratios.unbind(1), of_paths.tokens.unbind(1), strict=True):
        for score in (ratios, tokens):
            score = score.masked_fill(~is_best, -1)
            is_best = score == score.amax(dim=1, keepdim=True)
    nodes = of_paths.nodes(is_best)
    target = take_rows(target_probs, F.pad(nodes + 1, (1, 0)))  # [B, D + 1, V]
    tokens, probs = draft.tokens.gather(1, nodes), take_rows(draft.probs, nodes)
    probs = best_of(of_paths.count, tokens, probs, target[:, :-1])
    uniforms = VerifyUniforms(uniforms.accept.gather(1, nodes), uniforms.resample)
    tokens, count = block_rule(Draft(tokens, probs, of_paths.num_valid), target, uniforms)
    extra = tokens.gather(1, count[:, None])[:, 0]
    return of_paths.verdict(nodes, count, extra, largest_logits)


def best_of(count: int, tokens: Tensor, probs: Tensor, target: Tensor) -> Tensor:
    """`[B, D, V]`: the distributions of the tokens of the best one of `count` paths.

    The paths that begin with a prefix are an interval `(low, high]` of the cumulative distribution
    of paths, in the order in which they are better. The best of P is there with probability
    `high ** P - low ** P`; of the tokens after a prefix only low / high has to be known.

    Args:
        count: P.
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
    share = _mean_power(count, start + (1 - start) * low, start + (1 - start) * high)
    return (wide * share / _mean_power(count, start, torch.ones_like(start))).to(probs.dtype)


def _mean_power(count: int, low: Tensor, high: Tensor) -> Tensor:
    """`(high ** P - low ** P) / (high - low)`, without a difference that could cancel."""
    total, power = torch.ones_like(high), torch.ones_like(low)
    for _ in range(count - 1):
        power = power * low
        total = total * high + power
    return total


def verify_sequential_paths(
    draft: Draft, target_probs: Tensor, largest_logits: Tensor, uniforms: VerifyUniforms
) -> Verdict:
    """Tries path after path until one is accepted in part: whether by SpecTr's k-sequential
    selection, and how far by the block rule.

    A path is judged by `block_rule` with P_0 = 1 / divisor in place of 1, see `k_sequential`. If
    none is accepted the extra token is drawn from what all of them leave of the target.

    Args and Returns: as `verify_greedy_path`.

    Reference: Sun et al., arXiv:2310.15141, for the selection; that block verification may follow
    it is derived in README.md.
    """
    of_paths = _OfPaths(draft, target_probs)
    divisor, rest = k_sequential(of_paths.count, target_probs[:, 0], draft.probs[:, 0])
    chances = [(1 / divisor)[:, None].expand(-1, of_paths.count)]  # P_0, P_1, .. of [B, P]
    for ratios in of_paths.ratios.unbind(1):
        chances.append((chances[-1] * ratios).clamp(max=1))
    chances = torch.stack(chances[1:], dim=1)  # [B, D, P]
    accept, target = (of_paths.levels(x) for x in (uniforms.accept, target_probs[:, 1:]))
    is_accepted = accept < chances  # of whole paths
    residual = chances[..., None].to(target.dtype) * target  # what a path leaves after each token
    residual[:, :-1] -= of_paths.levels(draft.probs)[:, 1:]
    mass = residual.clamp_(min=0).sum(dim=-1, dtype=torch.float64)
    is_end = of_paths.lengths == of_paths.limit
    is_accepted = torch.where(is_end, is_accepted, accept * (mass + 1 - chances) < mass)
    lengths = (is_accepted & of_paths.is_valid) * of_paths.lengths
    lengths = lengths.amax(dim=1)  # [B, P]
    is_first = (lengths > 0) & (lengths.cumsum(dim=1) == lengths)
    nodes, count = of_paths.nodes(is_first), (lengths * is_first).sum(dim=1)
    end = F.pad(nodes + 1, (1, 0)).gather(1, count[:, None])  # [B, 1]
    left = take_rows(torch.cat([rest[:, None], residual.flatten(1, 2)], dim=1), end)
    is_whole = (count[:, None] == of_paths.limit[:, :, 0])[..., None] | ~(left.sum(-1, True) > 0)
    left = torch.where(is_whole, take_rows(target_probs, end), left)
    return of_paths.verdict(nodes, count, draw(left[:, 0], uniforms.resample), largest_logits)


def k_sequential(count: int, target: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """SpecTr's selection among `count` tokens drawn from the same distribution: one after the other
    is accepted with probability `min(1, target / (divisor * draft))`.

    Args:
        count: P.
        target: `[B, V]`.
        probs: `[B, V]`, what each token is drawn from.

    Returns:
        divisor `[B]` float64 in 1..P, the least that leaves no negative weight, or by a rounding
        more; and the weights `[B, V]` of the token after P rejections.

    Reference: Sun et al., arXiv:2310.15141, Alg. 3 (their rho, beta are our divisor, overlap).
    """
    low, high = (target.new_full(target.shape[:1], x, dtype=torch.float64) for x in (1, count))

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


class _OfPaths:
    """The nodes of paths as `[B, D, P]`; a depth that not all paths reach is left out."""

    def __init__(self, draft: Draft, target_probs: Tensor):
        self.draft, self.count = draft, draft.num_paths
        self.depth = draft.tokens.shape[1] // self.count
        self.num_valid = None if draft.num_valid is None else draft.num_valid // self.count
        self.lengths = torch.arange(1, self.depth + 1, device=draft.tokens.device)[:, None]
        limit = self.lengths[-1] if self.num_valid is None else self.num_valid
        self.limit = limit[:, None, None]
        self.is_valid = self.lengths <= self.limit  # [B, D, 1]
        tokens = draft.tokens.clamp(min=0)
        rows = draft.window_parents * target_probs.shape[2] + tokens
        target = target_probs.flatten(1).gather(1, rows)
        ratios = _ratio(target, draft.probs.gather(2, tokens[..., None])[..., 0])
        self.ratios = self.levels(ratios).masked_fill(~self.is_valid, 0.0)
        self.tokens = self.levels(tokens).masked_fill(~self.is_valid, 0)

    def levels(self, of_nodes: Tensor) -> Tensor:
        """`[B, D, P, ...]` of `[B, K, ...]`."""
        return of_nodes[:, : self.depth * self.count].unflatten(1, (self.depth, self.count))

    def nodes(self, is_chosen: Tensor) -> Tensor:
        """`[B, D]`, the nodes on the first path that is chosen, `[B, P]` bool."""
        first = is_chosen.long().argmax(dim=1, keepdim=True)
        return first + self.count * (self.lengths[:, 0] - 1)

    def verdict(self, nodes: Tensor, count: Tensor, extra: Tensor, largest: Tensor) -> Verdict:
        """That the first `count` `[B]` of these nodes are accepted, with an extra token."""
        rows = F.pad(nodes + 1, (1, self.draft.depth - self.depth))
        faults = find_draft_faults(self.draft)
        return verdict_of(self.draft, Path(count, rows), extra, largest, faults)


def _ratio(target: Tensor, probs: Tensor) -> Tensor:
    """target / draft, 0 for tokens that are never drafted."""
    return torch.where(probs > 0, target / probs, 0.0)
