"""`TreeDrafter`: a drafter that takes the shape of its trees, and what its own cache shows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from specdec.arguments import check_integer, shown
from specdec.drafters.base import Drafter
from specdec.drafters.proposal import Proposal

if TYPE_CHECKING:
    from specdec.drafters.tree import Tree
    from specdec.drafters.visible import Visible
    from specdec.slots.cache import SlotCache


def shape_of(shape: Tree | str | None) -> Tree | None:
    """A tree as users write it: as `Tree.of` reads it, and "4x5 paths" for `Paths(4, 5)`.

    Example:
        >>> shape_of("12x3").nodes, shape_of("4x5 paths").nodes
        (12, 20)
    """
    if not (isinstance(shape, str) and shape.endswith(" paths")):
        from specdec.drafters.tree import Tree

        return Tree.of(shape)
    from specdec.drafters.paths import Paths  # which hardly anybody drafts

    return Paths.of(shape.removesuffix(" paths"))


class LogitsDrafter(Drafter):
    """A drafter whose `proposal` and `visible` may be set, for the next call on."""

    visible: Visible | None = None
    _not_set = ("draft_temperature",)

    def __setattr__(self, name: str, value: Any) -> None:
        """Checks what is set."""
        if name == "proposal" and not isinstance(value, Proposal):
            raise TypeError(f"set proposal=Proposal({value!r}), got {shown(value)}")
        if name == "visible" and value is not None:
            self._check_visible(value)
        super().__setattr__(name, value)

    def _check_visible(self, visible: Visible) -> None:
        """Raises an error for what it cannot be shown."""
        from specdec.drafters.visible import near_of

        near_of(visible)


class TreeDrafter(LogitsDrafter):
    """A drafter of chains, or of trees where it is made with one."""

    drafts_trees: ClassVar[bool] = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Reads a tree as `shape_of` does, checks it, and takes over its sizes."""
        if name == "num_draft_tokens" and (tree := vars(self).get("tree")) is not None:
            advice = "set tree for another shape"
            check_integer(name, value, 0, tree.nodes, advice=advice)
        if name != "tree":
            return super().__setattr__(name, value)
        tree, own = shape_of(value), type(self).__name__
        if tree is not None and not self.drafts_trees:
            raise ValueError(f"{own} drafts chains, got tree={tree}")
        if (vars(self).get("tree", tree) is None) != (tree is None):  # generators looked at it
            raise ValueError(f"{own} cannot change between chains and trees; make a new one")
        super().__setattr__(name, tree)
        if tree is not None:
            self.num_draft_tokens, self.tree_depth = tree.nodes, tree.depth
        return None

    def _show(self, cache: SlotCache) -> None:
        """Lets tokens of a new cache of its own see what is `visible`."""
        if self.visible is not None:
            from specdec.drafters.visible import near_of

            cache.near = near_of(self.visible)
