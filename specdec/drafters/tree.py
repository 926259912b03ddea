"""`Tree`: the shape of a draft tree; `TreePlan`: how one grows, depth by depth, from a drafter's
logits.

Legend: B rows, K nodes, D depth, W nodes of a pass, m nodes of all passes so far, V vocabulary.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.arguments import check_integer, check_number, shown
from specdec.drafters.proposal import Proposal
from specdec.drafters.proposal_check import edited
from specdec.samplers.noise import Drawing, DrawRule
from specdec.types import Draft

LEAST_LOGIT = -1e30
"""Of an earlier sibling's token: probability 0 beside any other logit, and still a number where all
others are `-inf`.
"""


@dataclass(frozen=True)
class Tree:
    """The shape of a draft tree.

    Where tokens are point masses (greedy targets, `proposal="argmax"`) it is EAGLE-2's dynamic
    tree: at each depth the `top_k` most likely nodes, by the product of the drafter's probabilities
    along their path, get their `top_k` most likely children, and of all candidates the best `nodes`
    stay.

    Where they are sampled (for all rows of a batch, if one of them is) the shape is fixed, since a
    choice by what was drawn would bias the text. Siblings are drawn without replacement. Which
    nodes have how many children follows from `rates`: the shape has the `nodes` paths whose product
    of rates is largest.

    Args:
        nodes: K, tokens that the target verifies in a step (EAGLE's `total_token` less the root,
            SGLang's `speculative_num_draft_tokens` less 1).
        depth: D, tokens of the longest path (SGLang's `speculative_num_steps`).
        top_k: of the dynamic tree (SGLang's `speculative_eagle_topk`).
        rates: of the fixed shape: about how likely a first child is accepted, a second one, ....
        parents: a fixed shape to use instead of that of `rates`, of exactly so many nodes and that
            depth; see `Draft.parents`. The dynamic tree is not affected by it.
        ranks: the nodes of one shape for all steps, each as the ranks of the tokens of its path
            (Medusa's choices): (2, 0) is the most likely token after the third likely one. Where
            tokens are drawn only the shape is kept; `proposal="argmax"` keeps the ranks. `nodes`
            and `depth` follow from it.

    Raises:
        ValueError: a number out of range, or more nodes than the rest allows.

    Example:
        >>> Tree(nodes=6, depth=3, rates=(0.6, 0.3)).shape
        (-1, -1, 0, 1, 0, 2)
        >>> Tree(ranks=((0,), (1,), (0, 0), (0, 1))).nodes
        4

    Reference: Li et al., arXiv:2406.16858 (EAGLE-2), section 4; a fixed shape from rates, Chen et
    al., arXiv:2402.12374 (Sequoia); ranks, Cai et al., arXiv:2401.10774 (Medusa), section 2.1.2.
    """

    nodes: int = 31
    depth: int = 5
    top_k: int = 8
    rates: tuple[float, ...] = (0.6, 0.2, 0.1, 0.05)
    parents: tuple[int, ...] | None = None
    ranks: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self):
        if self.ranks is not None:
            self._take_ranks()
        check_integer("Tree.depth", self.depth, 1)
        check_integer("Tree.nodes", self.nodes, self.depth)
        check_integer("Tree.top_k", self.top_k, 1)
        for name, kinds in (("rates", tuple | list), ("parents", tuple | list | None)):
            if not isinstance(numbers := getattr(self, name), kinds):
                raise TypeError(f"Tree.{name} must be a tuple of numbers, got {shown(numbers)}")
        for rate in self.rates:
            check_number("a rate of Tree.rates", rate, above=0, below=1)
        self._check_candidates(self.top_k)
        self.check_shape()

    def _take_ranks(self) -> None:
        """Nodes and depth of `ranks`; `ValueError` where a parent or an earlier sibling lacks."""
        if not isinstance(self.ranks, tuple | list) or not self.ranks:
            raise TypeError(f"Tree.ranks must be a tuple of paths, got {shown(self.ranks)}")
        if self.parents is not None:
            raise ValueError("Tree.parents and Tree.ranks are two shapes; leave one out")
        paths = tuple(tuple(path) for path in self.ranks)
        for path in paths:
            if not path:
                raise ValueError("Tree.ranks has an empty path; the root is no node")
            for rank in path:
                check_integer("a rank of Tree.ranks", rank, 0)
            above, before = path[:-1], (*path[:-1], path[-1] - 1)
            for needed in [above] * bool(above) + [before] * bool(path[-1]):
                if needed not in paths:
                    raise ValueError(f"Tree.ranks has {path} and lacks {needed}; name it as well")
        if len({*paths}) < len(paths):
            raise ValueError("Tree.ranks names a path twice")
        sizes = {"ranks": paths, "nodes": len(paths), "depth": max(map(len, paths))}
        for name, value in sizes.items():
            object.__setattr__(self, name, value)

    def check_shape(self) -> None:
        """Raises `ValueError` for a fixed shape that does not have so many nodes."""
        if self.parents is not None:
            self._check_parents(self.parents)
        elif len(self._best_paths()) < self.nodes:
            raise ValueError(
                f"{len(self.rates)} children of each node (Tree.rates) to depth {self.depth} are "
                f"fewer than {self.nodes} nodes"
            )

    @classmethod
    def of(cls, shape: Tree | str | None) -> Tree | None:
        """A tree as users write it: itself, "32x6" for `Tree(nodes=32, depth=6)`, or `None` for
        chains.

        Raises:
            ValueError: another text, or a shape that cannot be.
            TypeError: something else.

        Example:
            >>> Tree.of("12x3") == Tree(nodes=12, depth=3)
            True
        """
        if shape is None or isinstance(shape, Tree):
            return shape
        if not isinstance(shape, str):
            raise TypeError(
                'tree must be Tree(nodes=32, depth=6), "32x6" for the same, or None for chains, '
                f"got {shown(shape)}"
            )
        sizes = shape.split("x")
        if len(sizes) != 2 or not all(size.isdecimal() for size in sizes):
            raise ValueError(
                f"tree={shape!r} is no shape; write nodes and depth with an x between them: "
                'tree="32x6" has 32 nodes and paths of up to 6 tokens, "4x5 paths" 4 paths of 5'
            )
        return cls(*map(int, sizes))

    def _check_parents(self, parents: tuple[int, ...]) -> None:
        from specdec.tree_shape import depths_of

        for node, parent in enumerate(parents):
            check_integer(f"Tree.parents of node {node}", parent, -1, node - 1)
        found = len(parents), max(depths_of(parents))
        if found != (self.nodes, self.depth):
            raise ValueError(
                f"Tree.parents has {found[0]} nodes and depth {found[1]}, expected nodes="
                f"{self.nodes} and depth={self.depth}"
            )

    def _best_paths(self) -> list[tuple[int, ...]]:
        """Up to `nodes` paths, each as the ranks of its nodes among their siblings."""
        if self.ranks is not None:
            return list(self.ranks)
        found, waiting = [], [(-rate, (0,)) for rate in self.rates[:1]]
        while waiting and len(found) < self.nodes:
            value, path = heapq.heappop(waiting)
            found.append(path)
            *above, rank = path
            if rank + 1 < len(self.rates):
                next_value = value / self.rates[rank] * self.rates[rank + 1]
                heapq.heappush(waiting, (next_value, (*above, rank + 1)))
            if len(path) < self.depth:
                heapq.heappush(waiting, (value * self.rates[0], (*path, 0)))
        return found

    def check_ids(self, num_ids: int) -> None:
        """Raises `ValueError` for more children of a node, or more nodes, than a drafter of so many
        ids can draw; a larger `top_k` alone is cut.
        """
        siblings = max(len(level.widths) for level in self.levels)
        if siblings > num_ids:
            raise ValueError(
                f"a tree with {siblings} children of one node (rates, parents or ranks) cannot be "
                f"drawn from {num_ids} ids without replacement; name at most {num_ids} rates"
            )
        self._check_candidates(min(self.top_k, num_ids), f" over {num_ids} ids")

    def _check_candidates(self, num_children: int, over: str = "") -> None:
        if self.ranks is not None:
            return  # no tree is chosen
        width = most = num_children
        for _ in range(self.depth - 1):
            width = min(self.top_k, width) * num_children
            most += width
        if self.nodes > most:
            raise ValueError(
                f"a tree of depth {self.depth}{over} has at most {most} candidates with top_k="
                f"{self.top_k}, and {self.nodes} nodes were asked for"
            )

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The fixed shape, depth by depth."""
        children: dict[tuple, list] = {}
        if self.parents is None:
            for path in sorted(self._best_paths()):
                children.setdefault(path[:-1], []).append(path)
        else:
            paths = [()]
            for parent in self.parents:
                siblings = children.setdefault(paths[parent + 1], [])
                siblings.append((*paths[parent + 1], len(siblings)))
                paths.append(siblings[-1])
        levels, index, parents = [], {(): -1}, [()]
        while parents:
            ranks = range(len(children[parents[0]]))
            widths = tuple(sum(len(children[p]) > r for p in parents) for r in ranks)
            levels.append(Level(tuple(index[p] for p in parents), widths))
            below = [children[p][r] for r, width in enumerate(widths) for p in parents[:width]]
            for path in below:
                index[path] = len(index) - 1
            # Those with the most children first: the rth children are of the first so many.
            parents = sorted((p for p in below if p in children), key=lambda p: -len(children[p]))
        return tuple(levels)

    def check_rule(self, rule: DrawRule) -> None:
        """Raises `ValueError` for a rule that its fixed shape cannot be drawn by."""

    def paths_of(self, width: int, device: torch.device) -> Tensor | int:
        """Which of independent paths each of `width` nodes that are drawn at once is on, `[W]`; 0,
        since the nodes of a tree are not drawn independently.
        """
        return 0

    def drawn(self, draft: Draft) -> Draft:
        """A draft of its fixed shape, which was drawn, as rules are to see it."""
        return draft

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """`parents` of the fixed shape, as nodes are drawn: by depth, first children first."""
        return tuple(
            level.parents[i]
            for level in self.levels
            for width in level.widths
            for i in range(width)
        )


class Level(NamedTuple):
    """A depth of a fixed shape.

    Args:
        parents: the nodes above that have children, those with the most first; -1 is the root,
            once for each of independent `Paths`.
        widths: how many of them have a first child, a second one, ....
    """

    parents: tuple[int, ...]
    widths: tuple[int, ...]


class TreePass(NamedTuple):
    """Nodes whose children are drawn next, as the drafter reads them.

    Args:
        tokens: `[B, W]`.
        above: `[B, W]`, the row of each one's parent in the pass before.
        visible: bool that broadcasts to `[B, W, m]`, which nodes of all passes so far are ancestors
            of each, and itself.
        depth: of these nodes, 1 for the root's children.
        num_before: nodes of earlier passes.
    """

    tokens: Tensor
    above: Tensor
    visible: Tensor
    depth: int
    num_before: int


Expand = Callable[[TreePass], Tensor]
"""Logits `[B, W, Vd]` of what follows the nodes of a pass, over the ids that the drafter can
propose; `[B, 1, Vd]` where they are all alike.
"""


class TreePlan:
    """How trees of a shape grow, with what their passes need on a device.

    Args:
        tree: the shape.
        device: of the drafter.
        is_read: the drafter reads nodes to say what follows them. Else what follows depends on the
            depth alone, and all nodes are in the running for children, so that none is missed.
    """

    def __init__(self, tree: Tree, device: torch.device, *, is_read: bool = True):
        self.tree, self._beam = tree, tree.top_k if is_read else tree.nodes
        drawn = sum(len(level.parents) for level in tree.levels[1:])
        self.max_read = max((tree.depth - 1) * tree.top_k, drawn) if is_read else 0
        """Most nodes that the passes of a step read."""
        self._parents = torch.tensor(tree.shape, device=device)
        self._tables, read = [], []
        for level in tree.levels[1:]:
            above = tree.levels[len(self._tables)].parents
            nodes = torch.tensor(level.parents, device=device)
            rows = torch.tensor([above.index(tree.shape[n]) for n in level.parents], device=device)
            read += level.parents
            lines = [set(_ancestors(node, tree.shape)) for node in level.parents]
            seen = [[other in line for other in read] for line in lines]
            self._tables.append((nodes, rows, torch.tensor(seen, device=device)[None]))

    def grow(
        self,
        proposal: Proposal,
        drawing: Drawing,
        first_logits: Tensor,
        expand: Expand,
        num_valid: Tensor | None = None,
        *,
        ids: Tensor | None = None,
        widen: Callable[[Tensor], Tensor] = lambda logits: logits,
    ) -> Draft:
        """A tree of `drawing.num_draft_tokens` nodes.

        Args:
            proposal, drawing: how tokens are drawn.
            first_logits: `[B, 1, Vd]`, of what follows the last committed token.
            expand: the drafter's pass over some nodes.
            num_valid: see `Draft`.
            ids: `[Vd]` of the target's that the drafter can propose; `None` for all.
            widen: from logits over these to logits over the target's vocabulary.
        """
        if (edit := proposal.edit_in(drawing)) is not None:
            # Once for each pass, before the siblings that were drawn are taken out of its logits.
            unedited = replace(proposal, edit=None), replace(drawing, edit=None)
            first = edited(widen(first_logits), edit)
            return self.grow(
                *unedited, first, lambda nodes: edited(widen(expand(nodes)), edit), num_valid
            )
        has_points = proposal.kind == "argmax" or drawing.logits_filter.is_greedy
        if has_points and self.tree.ranks is None:
            draft = self._grow_best(drawing, first_logits, expand, ids)
        else:
            self.tree.check_rule(drawing.rule)
            first, wide = widen(first_logits), lambda nodes: widen(expand(nodes))
            draft = self.tree.drawn(self._grow_drawn(proposal, drawing, first, wide))
        return replace(draft, num_valid=num_valid)

    def _grow_drawn(
        self, proposal: Proposal, drawing: Drawing, logits: Tensor, expand: Expand
    ) -> Draft:
        """The fixed shape, siblings drawn without replacement: each child from the distribution of
        the logits without its earlier siblings' tokens. Of point masses that is the next likely
        token. Where an edit leaves fewer ids than siblings, the last ones repeat earlier ones.
        """
        drafting, count, runs, num_read = proposal.begin(drawing), 0, [], 0
        least = max(LEAST_LOGIT, torch.finfo(logits.dtype).min)
        for depth, level in enumerate(self.tree.levels):
            if depth:
                nodes, rows, visible = self._tables[depth - 1]
                drawn = torch.cat(drafting.tokens, dim=1)
                tokens = drawn.index_select(1, nodes)
                above = rows.expand(len(tokens), -1)
                logits = expand(TreePass(tokens, above, visible, depth, num_read))
                num_read += tokens.shape[1]
            whole = logits.expand(-1, len(level.parents), -1)
            left = whole.clone()
            for width in level.widths:
                width = min(width, drawing.num_draft_tokens - count)
                own = left[:, :width]
                path = self.tree.paths_of(width, own.device)
                options = {"depth": depth, "path": path, "whole": whole[:, :width]}
                tokens = drafting.draw(own.contiguous(), **options)
                own.scatter_(2, tokens[..., None], least)
                runs += [1] * width if depth == 0 else [width]  # siblings have a run each
                count += width
                if count == drawing.num_draft_tokens:
                    break
            if count == drawing.num_draft_tokens:
                break
        shape = {"parents": self._parents[:count].expand(len(logits), -1), "depth": depth + 1}
        return drafting.end(**shape, runs=tuple(runs))

    def _grow_best(
        self, drawing: Drawing, logits: Tensor, expand: Expand, own_ids: Tensor | None
    ) -> Draft:
        """EAGLE-2's tree."""
        count = drawing.num_draft_tokens
        top_k, rows = min(self.tree.top_k, logits.shape[-1]), len(logits)
        scores, tokens = (table[:, 0] for table in _top(logits, top_k, own_ids))  # [B, top_k]
        found = [(scores, tokens, torch.full_like(tokens, -1))]
        chosen = torch.arange(top_k, device=tokens.device).expand(rows, -1)  # of the candidates
        above, ids, totals = torch.zeros_like(chosen), tokens, scores
        visible, first, num_read = torch.empty(1, 1, 0, device=ids.device) > 0, 0, 0
        for depth in range(1, min(self.tree.depth, count)):
            if depth > 1:
                scores, chosen = totals.topk(min(self._beam, totals.shape[1]))
                above, tokens = chosen // top_k, ids.gather(1, chosen)
            width = tokens.shape[1]
            itself = (torch.eye(width, device=ids.device) > 0).expand(rows, -1, -1)
            index = above[..., None].expand(-1, -1, visible.shape[2])
            visible = torch.cat([visible.expand(rows, -1, -1).gather(1, index), itself], dim=2)
            logits = expand(TreePass(tokens, above, visible, depth, num_read))
            values, ids = _top(logits, top_k, own_ids)
            parents = (chosen + first).repeat_interleave(top_k, dim=1)
            num_read, first = num_read + width, first + totals.shape[1]
            totals = (scores[..., None] + values).flatten(1)  # [B, W top_k]
            ids = ids.expand(-1, width, -1).flatten(1)
            found.append((totals, ids, parents))
        scores, tokens, parents = (torch.cat(table, dim=1) for table in zip(*found, strict=True))
        # Parents come before their children, and where scores are equal they have to stay first.
        order = scores.sort(dim=1, descending=True, stable=True).indices
        best = order[:, :count].sort(dim=1).values
        chosen = parents.gather(1, best)
        index = torch.searchsorted(best, chosen.clamp(min=0))
        parents = torch.where(chosen < 0, -1, index)
        raw, depth = None, min(self.tree.depth, count)
        if drawing.wants_raw:
            scores = scores.gather(1, best)  # of whole paths
            raw = (scores - F.pad(scores, (1, 0)).gather(1, parents + 1)).exp()
        return Draft(tokens.gather(1, best), parents=parents, depth=depth, raw_probs=raw)


def _ancestors(node: int, parents: tuple[int, ...]) -> list[int]:
    """A node and those above it."""
    line = []
    while node >= 0:
        line.append(node)
        node = parents[node]
    return line


def _top(logits: Tensor, top_k: int, own_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids of the most likely tokens."""
    values, ids = logits.topk(top_k, dim=-1)
    values = values.float() - logits.float().logsumexp(dim=-1, keepdim=True)
    return values, ids if own_ids is None else own_ids[ids]
