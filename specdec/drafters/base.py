"""`Drafter`: what a component must do to propose tokens."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from specdec.arguments import check_integer, shown
from specdec.drafters.tree import Tree
from specdec.samplers.drawing import Drawing
from specdec.settings import settings_of
from specdec.target.features import FeatureLayer
from specdec.types import Context, Draft


class DrafterState(Protocol):
    """All that changes while a drafter works; its tensors have rows first. `init_state` makes it,
    `prefill` and `propose` change it in place, and the loop holds it and calls these two methods.
    """

    def keep(self, rows: list[int]) -> "DrafterState":
        """A state of the given rows in this one's storage, of which only `reset` will be used from
        then on; see `specdec.types.keep_rows`. The loop calls it when rows have ended.
        """

    def reset(self) -> None:
        """Makes the state, and its storage, ready for other texts."""


class Drafter(nn.Module, ABC):
    """A drafter holds weights only; everything that changes lives in a state that the loop owns.

    The loop calls `prefill` over the prompt, chunk by chunk, and then `propose` once per step; it
    calls neither where `num_draft_tokens` is 0.
    Every context starts where verified history ends: a drafter first brings its own state up to
    date with the newly committed tokens and then drafts, so what it speculated in an earlier step
    never survives.

    Attributes:
        num_draft_tokens: K, the most tokens that a proposal may have; of trees, the nodes.
        tree_depth: D, the most tokens on a path of its trees; `None` for a drafter of chains.
        feature_layers: which target features the context must carry (boundaries or `"final"`).
        reads_target: contexts bring the target's keys and values of the text, `Context.target`.
        has_memory: drafts depend on earlier requests, so the same call need not draft the same
            again. `certify` then compares no drafts, and judges the texts. Lossless as long as no
            text is remembered that the same seed has written: give every call seeds of its own.
    """

    num_draft_tokens: int
    tree_depth: int | None = None
    feature_layers: tuple[FeatureLayer, ...] = ()
    reads_target: bool = False
    has_memory: bool = False

    def settings(self) -> dict[str, Any]:
        """What distinguishes this drafter from others, as plain values: its class, its public
        attributes and a fingerprint of its weights. Saved runs hold it, and go on with no other.
        """
        return settings_of(self)

    @abstractmethod
    def validate(self, *, vocab_size: int, device: torch.device) -> None:
        """Raises `ValueError` if it cannot draft for a target of this vocabulary on this device."""

    @abstractmethod
    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> DrafterState:
        """Fresh state for rows of at most `max_length` tokens, the last proposal included."""

    @abstractmethod
    def prefill(self, context: Context, state: Any) -> None:
        """Reads verified tokens without drafting; called on consecutive chunks of the prompt."""

    @abstractmethod
    def propose(self, context: Context, state: Any, drawing: Drawing) -> Draft:
        """Brings the state up to date with `context` and drafts K tokens after it.

        Args:
            context: at most D + 1 newly committed tokens per row, K + 1 after chains.
            state: this drafter's, updated in place.
            drawing: K >= 1 of this step, which may be smaller than `num_draft_tokens`, and how
                tokens are to be drawn. Most drafters hand it to their `Proposal`.

        Returns:
            K tokens per row and the probabilities that they were drawn from, over the target's
            vocabulary; `None` instead for a deterministic proposal. A drafter of trees says as well
            which node each hangs on.
        """


class TreeDrafter(Drafter):
    """A drafter of chains, or of trees where it is made with one."""

    drafts_trees: ClassVar[bool] = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Reads a tree as `Tree.of` does, checks it, and takes over its sizes."""
        if name != "tree":
            return super().__setattr__(name, value)
        tree, own = Tree.of(value), type(self).__name__
        if tree is not None and not self.drafts_trees:
            raise ValueError(f"{own} drafts chains, got tree={tree}")
        if (vars(self).get("tree", tree) is None) != (tree is None):  # generators looked at it
            raise ValueError(f"{own} cannot change between chains and trees; make a new one")
        super().__setattr__(name, tree)
        if tree is not None:
            self.num_draft_tokens, self.tree_depth = tree.nodes, tree.depth
        return None


def check_drafter(drafter: Drafter) -> None:
    """Raises `TypeError` or `ValueError` where the attributes of a drafter cannot be right."""
    name = type(drafter).__name__
    if "_modules" not in vars(drafter):
        raise TypeError(f"{name}.__init__ must call super().__init__()")
    check_num_draft_tokens(getattr(drafter, "num_draft_tokens", None), of=f"{name}.")
    if drafter.tree_depth is not None:
        check_integer(f"{name}.tree_depth", drafter.tree_depth, 1, max(drafter.num_draft_tokens, 1))
    layers = drafter.feature_layers
    if not isinstance(layers, tuple):
        raise TypeError(
            f"{name}.feature_layers must be a tuple of boundaries and 'final', () for none, got "
            f"{shown(layers)}"
        )
    for flag in ("has_memory", "reads_target"):
        if not isinstance(getattr(drafter, flag), bool):
            got = shown(getattr(drafter, flag))
            raise TypeError(f"{name}.{flag} must be True or False, got {got}")


def check_state(drafter: Drafter, state: Any, *, by: str = "init_state") -> DrafterState:
    """Returns what a method of a drafter returned, or raises `TypeError` if it is no state."""
    missing = [name for name in ("keep", "reset") if not callable(getattr(state, name, None))]
    who = f"{type(drafter).__name__}.{by} returned"
    if isinstance(state, type):
        raise TypeError(f"{who} the class {state.__name__}; return {state.__name__}()")
    if missing:
        raise TypeError(
            f"{who} a {type(state).__name__} without {' and '.join(missing)}; see DrafterState "
            "(NoState, if there is nothing to remember)"
        )
    return state


def check_num_draft_tokens(num_draft_tokens: int, *, of: str = "") -> int:
    """Returns K, or raises `TypeError` or `ValueError` if it is not an integer >= 0; messages name
    the class and a dot that it is `of`.
    """
    advice = "0 decodes plainly, 4 is a usual value"
    return check_integer(f"{of}num_draft_tokens", num_draft_tokens, 0, advice=advice)


class NoState:
    """The state of a drafter that remembers nothing."""

    def keep(self, rows: list[int]) -> "NoState":
        """Nothing to move."""
        return self

    def reset(self) -> None:
        """Nothing to forget."""


class NoDrafter(Drafter):
    """Proposes nothing, so that the same loop decodes plainly: every step emits one bonus token."""

    num_draft_tokens = 0

    def validate(self, *, vocab_size: int, device: torch.device) -> None:
        """Fits every target."""

    def init_state(self, batch_size: int, max_length: int, *, vocab_size: int, device) -> NoState:
        """There is nothing to remember."""
        return NoState()

    def prefill(self, context: Context, state: NoState) -> None:
        """There is nothing to read."""

    def propose(self, context: Context, state: NoState, drawing: Drawing) -> Draft:
        """An empty draft."""
        return Draft(context.tokens[:, :0])
