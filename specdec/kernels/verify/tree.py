"""The rules of verify on trees: which nodes are accepted, and the token after them.

A tree's nodes are candidates; the accepted ones are a path from the root. A node may only be
accepted where its parent is, and of siblings the first that can be wins, so every rule comes down
to a table: which nodes it would take (`path_of`).

Legend: B rows, K nodes, D depth, N = K + 1 rows of the window, W nodes of a run, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.sample.reference import draw
from specdec.kernels.types import VerifyUniforms
from specdec.kernels.verify.reference import append_token, flat_rows, take_rows
from specdec.types import Draft, Verdict


class Path(NamedTuple):
    """An accepted path: its length `[B]`, and the rows of the window `[B, D + 1]` on it, the root
    first; 0 after its end.
    """

    num_accepted: Tensor
    rows: Tensor

    @property
    def end(self) -> Tensor:
        """`[B, 1]`, the last row on it."""
        return self.rows.gather(1, self.num_accepted[:, None])


def path_of(draft: Draft, is_taken: Tensor) -> Path:
    """The path that one reaches from the root by going to the first child that is taken.

    Args:
        draft: a tree.
        is_taken: `[B, K]` bool.

    Example:
        >>> parents = torch.tensor([[-1, -1, 1, 1]])
        >>> draft = Draft(torch.tensor([[5, 6, 7, 8]]), parents=parents, depth=2)
        >>> path_of(draft, torch.tensor([[False, True, False, True]]))
        Path(num_accepted=tensor([2]), rows=tensor([[0, 2, 4]]))
    """
    is_taken = is_taken & draft.is_valid
    is_first = is_taken & ~(draft.earlier_siblings & is_taken[:, None]).any(dim=2)
    return path_along(draft, ~(draft.ancestors[:, 1:, 1:] & ~is_first[:, None]).any(dim=2))


def longest_path(draft: Draft, is_accepted: Tensor) -> Path:
    """The longest path all of whose nodes are accepted, `[B, K]` bool; the first of several."""
    above = draft.ancestors[:, 1:, 1:]
    is_reached = ~(above & ~(is_accepted & draft.is_valid)[:, None]).any(dim=2)
    lengths = F.pad(draft.depths[:, 1:] * is_reached, (0, 1))  # a chain may have no tokens
    longest, node = lengths.max(dim=1, keepdim=True)
    above = F.pad(above, (0, 0, 0, 1)).gather(1, node[..., None].expand(-1, -1, above.shape[2]))
    return path_along(draft, above[:, 0] & (longest > 0))


def path_along(draft: Draft, is_on_path: Tensor) -> Path:
    """The path of the nodes that lie on it, `[B, K]` bool: at most one of each depth, each after
    its parent.
    """
    depth, rows = draft.depth, draft.tokens.new_zeros(len(draft.tokens), draft.depth + 2)
    index = torch.where(is_on_path, draft.depths[:, 1:], depth + 1)  # the last column is dropped
    nodes = torch.arange(1, is_on_path.shape[1] + 1, device=index.device).expand_as(index)
    return Path(is_on_path.sum(dim=1), rows.scatter_(1, index, nodes)[:, : depth + 1])


def verdict_of(draft: Draft, path: Path, extra: Tensor) -> Verdict:
    """The verdict of a path.

    Args:
        draft: a tree, or a chain.
        path: that was accepted.
        extra: `[B]`, the token after it.
    """
    tokens = draft.tokens.gather(1, (path.rows[:, 1:] - 1).clamp(min=0))
    tokens = append_token(tokens, path.num_accepted, extra)
    return Verdict(tokens, path.num_accepted, draft.num_valid, path.rows)


def verify_tree(
    draft: Draft, target_probs: Tensor, uniforms: VerifyUniforms, *, by_block: bool
) -> Verdict:
    """Accepts a path of a tree by `traversal`, or else by `recursive_rejection`, and draws one more
    token from what the rejected children of its end leave of the target's distribution.

    Args:
        draft: a tree.
        target_probs: `[B, N, V]`, overwritten.
        uniforms: to accept and to resample.
        by_block: which rule. For point masses both are one.
    """
    if draft.probs is None:
        is_taken, residual = _points(draft, target_probs, uniforms.accept)
    else:
        rule = traversal if by_block else recursive_rejection
        is_taken, residual = rule(draft, target_probs, uniforms.accept)
    path = path_of(draft, is_taken)
    return verdict_of(draft, path, draw(residual(path.end), uniforms.resample))


def verify_tree_points(draft: Draft, target_tokens: Tensor) -> Verdict:
    """Accepts the nodes that equal the target's own token after their parent; the extra token is
    the target's.

    No lossless rule accepts more of a tree of point masses whose siblings differ: accepting a node
    means that the text begins with its path, so the expected number accepted is at most the sum
    over all nodes of the target's probability of their path, and this rule has exactly that. Of
    equal siblings the first is taken, and nodes behind the others are not reached.

    Args:
        draft: a tree.
        target_tokens: `[B, N]`, after each row of the window.
    """
    path = path_of(draft, draft.tokens == target_tokens.gather(1, draft.window_parents))
    return verdict_of(draft, path, target_tokens.gather(1, path.end)[:, 0])


def _points(draft: Draft, target_probs: Tensor, accept: Tensor):
    """Nodes that are point masses: child after child is accepted with the share that its token has
    of what its earlier siblings left. Needs the probabilities of the tokens only.
    """
    rows, vocab_size = draft.tokens.shape[0], target_probs.shape[2]
    index = draft.window_parents * vocab_size + draft.tokens.clamp(min=0)
    probs = target_probs.flatten(1).gather(1, index).double()  # [B, K]
    # What stands there twice was rejected once, and has nothing left.
    siblings = draft.earlier_siblings & draft.is_valid[:, None]
    is_repeated = (siblings & (draft.tokens[:, :, None] == draft.tokens[:, None])).any(dim=2)
    probs = probs.masked_fill(is_repeated, 0.0)
    left = 1 - (siblings * probs[:, None]).sum(dim=2)
    is_taken = accept * left.clamp(min=0) < probs

    def residual(end: Tensor) -> Tensor:
        row = target_probs[torch.arange(rows, device=end.device), end[:, 0]]  # [B, V]
        is_child = (draft.window_parents == end) & draft.is_valid
        tokens = torch.where(is_child, draft.tokens, vocab_size)
        rest = F.pad(row, (0, 1)).scatter(1, tokens, 0.0)[:, :vocab_size]
        return torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, row)

    return is_taken, residual


def recursive_rejection(draft: Draft, target_probs: Tensor, accept: Tensor):
    """Speculative sampling node by node: a child with token x, drawn from q, is accepted with
    probability min(1, p(x) / q(x)); after a rejection p becomes the normalised max(0, p - q), and
    the next child has its turn.

    Args:
        draft: a tree with probabilities.
        target_probs: `[B, N, V]`, overwritten: at the end each row holds what its children left.
        accept: `[B, K]` uniforms.

    Returns:
        `[B, K]` bool, the nodes that are accepted if it is their turn; and a function from rows of
        the window `[B, 1]` to what is left there, `[B, V]`.

    Reference: Miao et al., arXiv:2305.09781 (SpecInfer), Alg. 2; without replacement, Jeon et al.,
    arXiv:2402.14160, and Chen et al., arXiv:2402.12374 (Sequoia).
    """
    is_taken = []
    for run in _runs(draft, target_probs):
        is_taken.append(accept[:, run.nodes] * run.draft_of_token < run.target_of_token)
        run.leave(run.target - run.draft)
    return torch.cat(is_taken, dim=1), lambda end: take_rows(target_probs, end)[:, 0]


def traversal(draft: Draft, target_probs: Tensor, accept: Tensor):
    """Speculative sampling of whole paths, from the leaves to the root: what the block rule is to
    chains.

    A node carries the probability P that its path is accepted when its turn comes: for a child with
    token x, drawn from q, `min(1, P p(x) / q(x))` of its parent's P and distribution p. A child
    whose whole subtree was rejected leaves its parent with `max(0, P p - q)`, of mass m: normalised
    that is the new p, and the new P is `m / (m + 1 - P)`. Nodes have their turn after their
    children. Args and Returns: as `recursive_rejection`; a node is taken where it or a node below
    it is accepted.

    Reference: Weng et al., arXiv:2505.12398 (Traversal Verification).
    """
    carried = torch.ones_like(target_probs[:, :, 0], dtype=torch.float64)  # [B, N]
    for run in _runs(draft, target_probs):
        above = carried.gather(1, run.parents)
        share = above * run.target_of_token / run.draft_of_token
        carried[:, 1:][:, run.nodes] = share.clamp(max=1)
        mass = run.leave(above[..., None].to(run.target.dtype) * run.target - run.draft)
        chance = mass + 1 - above  # that the child's subtree is rejected
        left = torch.where(chance > 0, mass / chance, above)
        left = torch.where(draft.is_valid[:, run.nodes], left, above)
        carried.scatter_(1, run.parents, left)
    is_accepted = (accept < carried[:, 1:]) & draft.is_valid
    below = draft.ancestors[:, 1:, 1:] & is_accepted[:, :, None]  # (i, j): node i, below j
    return below.any(dim=1), lambda end: take_rows(target_probs, end)[:, 0]


class _NodeRun(NamedTuple):
    """The nodes of a run, and the distributions that they are judged by."""

    nodes: slice
    parents: Tensor  # [B, W] rows of the window
    target: Tensor  # [B, W, V] of their parents, after earlier siblings
    draft: Tensor  # [B, W, V]
    target_of_token: Tensor  # [B, W] float64
    draft_of_token: Tensor  # [B, W] float64
    is_valid: Tensor  # [B, W]
    target_probs: Tensor

    def leave(self, residual: Tensor) -> Tensor:
        """Leaves parents with a residual's positive part, normalised; its mass `[B, W]`."""
        residual = residual.clamp_(min=0)
        mass = residual.sum(dim=-1, dtype=torch.float64)
        is_left = (self.is_valid & (mass > 0))[..., None]
        rest = torch.where(is_left, residual / mass[..., None].to(residual.dtype), self.target)
        lines = self.target_probs.flatten(0, 1)
        lines.index_copy_(0, flat_rows(self.target_probs, self.parents), rest.flatten(0, 1))
        return mass


def _runs(draft: Draft, target_probs: Tensor):
    first = 0
    for count in draft.runs:
        nodes = slice(first, first + count)
        first += count
        parents, tokens = draft.window_parents[:, nodes], draft.tokens[:, nodes, None].clamp(min=0)
        target, probs = take_rows(target_probs, parents), draft.probs[:, nodes]
        of_token = target.gather(2, tokens)[..., 0].double(), draft.token_probs[:, nodes].double()
        yield _NodeRun(
            *(nodes, parents, target, probs, *of_token, draft.is_valid[:, nodes]), target_probs
        )
