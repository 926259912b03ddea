"""`Paths`: the shape of drafts that are several paths, each drawn independently of the others."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from specdec.arguments import check_integer
from specdec.drafters.tree import Level, Tree
from specdec.kernels.verify.paths import PathDraft
from specdec.samplers.noise import DrawRule
from specdec.samplers.races import draw_by_race
from specdec.types import Draft


@dataclass(frozen=True, init=False)
class Paths(Tree):
    """Several paths from the root, each drawn independently of the others: the drafts that GBV
    and SpecTr are made for. Paths may agree; where tokens are point masses all would, and the
    dynamic tree of as many nodes is drafted instead.

    Args:
        num_paths: P.
        depth: D, tokens of each.

    Raises:
        ValueError: a number below 1.

    Example:
        >>> Paths(2, 3).shape
        (-1, -1, 0, 1, 2, 3)
    """

    num_paths: int = 1

    def __init__(self, num_paths: int, depth: int):
        check_integer("num_paths", num_paths, 1)
        check_integer("depth", depth, 1)
        object.__setattr__(self, "num_paths", num_paths)
        super().__init__(num_paths * depth, depth, max(Tree.top_k, num_paths))

    def check_shape(self) -> None:
        """Every number of paths has one."""

    def check_rule(self, rule: DrawRule) -> None:
        """Raises ValueError for the race, whose winner depends on the position alone."""
        if rule is draw_by_race:
            raise ValueError(
                "paths that are drawn by one race (CouplingSampler) are all the same; draft a tree "
                f"without replacement, such as Tree({self.nodes}, {self.depth})"
            )

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """A node of each path at every depth; none of them are siblings."""
        count = self.num_paths
        firsts = range(0, self.nodes - count, count)
        above = [(-1,) * count, *(tuple(range(i, i + count)) for i in firsts)]
        return tuple(Level(parents, (count,)) for parents in above)

    def paths_of(self, width: int, device: torch.device) -> Tensor:
        """A node of each path is drawn at a time."""
        return torch.arange(width, device=device)

    def drawn(self, draft: Draft) -> PathDraft:
        """With the number of paths; fewer tokens than that are a path each."""
        given = {field.name: getattr(draft, field.name) for field in fields(draft)}
        return PathDraft(**given, num_paths=min(self.num_paths, draft.tokens.shape[1]))
