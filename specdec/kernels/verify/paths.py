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
    draft's own in `block_rule`. A depth that not all paths reach is left out, but the first.

    Args:
        draft: independent paths with probabilities.
        target_probs: `[B, N, V]`.
        largest_logits: `[B, N]`, see `find_faults`.
        uniforms: to accept and to resample.

    Reference: Thomas, Pal, arXiv:2602.16961.
    """
    of_paths = _OfPaths(draft, target_probs)
    is_best, num_valid = of_paths.is_valid[:, 0], 0  # [B, P], [B]
    for i in range(of_paths.depth):
        is_there = of_paths.is_valid[:, i, -1:] if i else is_best.any(dim=1, keepdim=True)
        num_valid = num_valid + is_there[:, 0].long()
        for score in (of_paths.ratios[:, i], of_paths.tokens[:, i]):
            score = score.masked_fill(~is_best, -1)
            is_best = is_best & ((score == score.amax(dim=1, keepdim=True)) | ~is_there)
    nodes = of_paths.nodes(is_best)
    target = take_rows(target_probs, F.pad(nodes + 1, (1, 0)))  # [B, D + 1, V]
    tokens, probs = draft.tokens.gather(1, nodes), take_rows(draft.probs, nodes)
    probs = best_of(of_paths.count, of_paths.most, tokens, probs, target[:, :-1])
    uniforms = VerifyUniforms(uniforms.accept.gather(1, nodes), uniforms.resample)
    tokens, count = block_rule(Draft(tokens, probs, num_valid), target, uniforms)
    extra = tokens.gather(1, count[:, None])[:, 0]
    return of_paths.verdict(nodes, count, extra, largest_logits)


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
    # A zero row after the last token of each path: there nothing is subtracted.
    probs = of_paths.levels(draft.probs).masked_fill(~of_paths.is_valid[..., None], 0.0)
    divisor, rest = k_sequential(of_paths.count, target_probs[:, 0], probs[:, 0, 0])
    chances = [(1 / divisor)[:, None].expand(-1, of_paths.most)]  # P_0, P_1, .. of [B, P]
    for ratios in of_paths.ratios.unbind(1):
        chances.append((chances[-1] * ratios).clamp(max=1))
    chances = torch.stack(chances[1:], dim=1)  # [B, D, P]
    accept, target = (of_paths.levels(x) for x in (uniforms.accept, target_probs[:, 1:]))
    is_accepted = accept < chances  # of whole paths
    residual = chances[..., None].to(target.dtype) * target  # what a path leaves after each token
    residual[:, :-1] -= probs[:, 1:]
    mass = residual.clamp_(min=0).sum(dim=-1, dtype=torch.float64)
    is_end = of_paths.lengths == of_paths.is_valid.sum(dim=1, keepdim=True)
    is_accepted = torch.where(is_end, is_accepted, accept * (mass + 1 - chances) < mass)
    lengths = (is_accepted & of_paths.is_valid) * of_paths.lengths
    lengths = lengths.amax(dim=1)  # [B, P]
    is_first = (lengths > 0) & (lengths.cumsum(dim=1) == lengths)
    nodes, count = of_paths.nodes(is_first), (lengths * is_first).sum(dim=1)
    end = F.pad(nodes + 1, (1, 0)).gather(1, count[:, None])  # [B, 1]
    left = take_rows(torch.cat([rest[:, None], residual.flatten(1, 2)], dim=1), end)
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, take_rows(target_probs, end))
    return of_paths.verdict(nodes, count, draw(left[:, 0], uniforms.resample), largest_logits)


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


class _OfPaths:
    """The nodes of paths as `[B, D, P]`; the last paths of a row may be shorter by a token."""

    def __init__(self, draft: Draft, target_probs: Tensor):
        self.draft, self.most, self.depth = draft, draft.num_paths, draft.depth
        self.lengths = torch.arange(1, self.depth + 1, device=draft.tokens.device)[:, None]
        self.is_valid, tokens = self.levels(draft.is_valid), draft.tokens.clamp(min=0)
        self.count = self.is_valid[:, 0].sum(dim=1)  # [B] paths
        rows = draft.window_parents * target_probs.shape[2] + tokens
        target = target_probs.flatten(1).gather(1, rows)
        ratios = _ratio(target, draft.probs.gather(2, tokens[..., None])[..., 0])
        self.ratios, self.tokens = self.levels(ratios), self.levels(tokens)

    def levels(self, of_nodes: Tensor) -> Tensor:
        """`[B, D, P, ...]` of `[B, K, ...]`."""
        missing = self.depth * self.most - of_nodes.shape[1]
        if missing:
            of_nodes = F.pad(of_nodes, (0, 0) * (of_nodes.dim() - 2) + (0, missing))
        return of_nodes.unflatten(1, (self.depth, self.most))

    def nodes(self, is_chosen: Tensor) -> Tensor:
        """`[B, D]`, the nodes on the first path that is chosen, `[B, P]` bool."""
        nodes = is_chosen.long().argmax(dim=1, keepdim=True) + self.most * (self.lengths[:, 0] - 1)
        return nodes.clamp(max=self.draft.tokens.shape[1] - 1)

    def verdict(self, nodes: Tensor, count: Tensor, extra: Tensor, largest: Tensor) -> Verdict:
        """That the first `count` `[B]` of these nodes are accepted, with an extra token."""
        path, faults = Path(count, F.pad(nodes + 1, (1, 0))), find_draft_faults(self.draft)
        return verdict_of(self.draft, path, extra, largest, faults)


def _ratio(target: Tensor, probs: Tensor) -> Tensor:
    """target / draft, 0 for tokens that are never drafted."""
    return torch.where(probs > 0, target / probs, 0.0)
