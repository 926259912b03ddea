"""`WrappedDrafter`: a drafter around another one, which overrides only what it changes.

Legend: B rows, N rows of a window or a chunk, F features.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.arguments import shown
from specdec.drafters.base import Drafter
from specdec.drafters.check import check_drafter, check_state
from specdec.drafters.settable import OF_LOGITS
from specdec.drafters.verified import Verified
from specdec.samplers.noise import Drawing
from specdec.torch_names import CHILDREN, children_of
from specdec.types import Context, Draft, FeatureLayer, TargetOutput

if TYPE_CHECKING:
    from specdec.targets.prompt_inputs import PromptInputs
    from specdec.targets.target import Target


class _OfInner:
    """An attribute that is the inner drafter's, as long as neither a subclass nor an object sets
    one of its own.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: WrappedDrafter | None, owner: type) -> Any:
        return self if wrapper is None else getattr(wrapper.inner, self._name)


class _SetOnInner(_OfInner):
    """One that is set on the inner drafter, too."""

    def __set__(self, wrapper: WrappedDrafter, value: Any) -> None:
        inner, name = wrapper.inner, self._name
        if not hasattr(inner, name):
            own = type(inner).__name__
            raise ValueError(f"{own}.{name} would have no effect; {OF_LOGITS[name]}")
        setattr(inner, name, value)


@dataclass(eq=False)
class WrappedState:
    """The inner drafter's state. A subclass with a state of its own adds fields."""

    inner: Any


class WrappedDrafter(Drafter):
    """Drafts as another drafter does, and declares what that one declares.

    A subclass overrides what it changes and calls `super()` for the rest. What it declares itself
    (`reads_outcome = True`) holds in place of what the inner drafter declares; `feature_layers` and
    `row_inputs` of its own must have the inner drafter's among them. `inner` is a drafter of any
    kind, a `WrappedDrafter` too: of several, each brings its edit of the drafts
    (`Drawing.with_edit`, the innermost runs first), and each learns.

    Args:
        inner: the drafter that drafts.

    Attributes:
        inner: the same. Setting `num_draft_tokens`, `proposal`, `tree` or `visible` sets the inner
            drafter's.

    Raises:
        TypeError: something else than a drafter.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> class Cautious(WrappedDrafter):
        ...     def propose(self, context, state, drawing):
        ...         flatter = drawing.with_edit(lambda logits: logits / 2)
        ...         return super().propose(context, state, flatter)
        >>> target = zoo.load_target()
        >>> drafter = Cautious(zoo.load_drafter("eagle3", target))
        >>> SpeculativeGenerator(target, drafter).drafter.feature_layers
        (2, 8, 13)
    """

    tree_depth = _OfInner()
    feature_layers = _OfInner()
    row_inputs = _OfInner()
    reads_target = _OfInner()
    reads_outcome = _OfInner()
    extra_slots = _OfInner()
    has_memory = _OfInner()
    num_draft_tokens = _SetOnInner()
    proposal = _SetOnInner()
    tree = _SetOnInner()
    visible = _SetOnInner()
    _not_set = ("draft_temperature",)

    def __init__(self, inner: Drafter):
        super().__init__()
        if not isinstance(inner, Drafter):
            raise TypeError(
                f"{type(self).__name__} wraps a drafter, PromptLookupDrafter() for one, got "
                f"{shown(inner)}"
            )
        check_drafter(inner)
        self.inner = inner
        self._widths: list[int] | None = None  # of the features of each layer

    def __copy__(self) -> WrappedDrafter:
        """Over the same weights, with sizes of its own: around a copy of the inner drafter."""
        other = object.__new__(type(self))
        inner = {**children_of(self), "inner": copy(self.inner)}
        vars(other).update({**vars(self), CHILDREN: inner})
        return other

    def settings(self) -> dict[str, Any]:
        """See `Drafter.settings`; with those of the inner drafter."""
        return {**super().settings(), "inner": self.inner.settings()}

    def validate(self, *, vocab_size: int, device: torch.device) -> None:
        """Raises the inner drafter's errors, or an error if a declaration lacks what it reads."""
        name, own = type(self).__name__, type(self.inner).__name__
        for kind in ("feature_layers", "row_inputs"):
            declared, read = getattr(self, kind), getattr(self.inner, kind)
            if not set(read) <= set(declared):
                raise ValueError(
                    f"{name}.{kind} is {declared}, and the inner {own} reads {read}; declare both"
                )
        learns = type(self).learn is not WrappedDrafter.learn or self.inner.reads_outcome
        if self.reads_outcome and not learns:
            raise TypeError(
                f"{name}.reads_outcome is True, and {name} has no method learn(verified, state); "
                "define it, or drop reads_outcome"
            )
        self.inner.validate(vocab_size=vocab_size, device=device)

    def check_target(self, target: Target) -> None:
        """Raises the error that the inner drafter raises."""
        self.inner.check_target(target)
        self._widths = target.feature_widths(self.feature_layers)

    def read_prompts(self, prompts: PromptInputs, read: Any) -> PromptInputs | None:
        """What the inner drafter reads."""
        return self.inner.read_prompts(prompts, read)

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> Any:
        """The inner drafter's. A state of one's own has it as `inner`."""
        sizes = {"vocab_size": vocab_size, "device": device}
        return WrappedState(check_state(self.inner, batch_size, max_length, **sizes))

    def prefill(self, context: Context, state: Any) -> None:
        """The inner drafter reads the tokens."""
        self.inner.prefill(context_of(self.inner, context, self.feature_layers), state.inner)

    def propose(self, context: Context, state: Any, drawing: Drawing) -> Draft:
        """The inner drafter's draft."""
        context = context_of(self.inner, context, self.feature_layers)
        return self.inner.propose(context, state.inner, drawing)

    def learn(self, verified: Verified, state: Any) -> None:
        """The inner drafter learns, if it asks."""
        learn_of(self.inner, verified, state.inner, self.feature_layers, self._widths)


def context_of(drafter: Drafter, context: Context, layers: tuple[FeatureLayer, ...]) -> Context:
    """A context with the features that a drafter reads.

    Args:
        drafter: inside another one.
        context: of that one.
        layers: whose features the context has.
    """
    if context.features is None or drafter.feature_layers == layers:
        return context
    widths = None
    if context.target is not None:  # queries among them are of other widths
        widths = context.target.target.feature_widths(layers)
    return replace(context, features=_picked(drafter, context.features, layers, widths))


def learn_of(
    drafter: Drafter,
    verified: Verified,
    state: Any,
    layers: tuple[FeatureLayer, ...],
    widths: list[int] | None,
) -> None:
    """Has a drafter learn, if it asks, with the features that it reads.

    Args:
        drafter: inside another one.
        verified: of that one.
        state: the drafter's own.
        layers: whose features there are.
        widths: of each layer; `None` where all are alike.
    """
    if not drafter.reads_outcome:
        return
    features = verified.output.features
    if features is not None and drafter.feature_layers != layers:
        features = _picked(drafter, features, layers, widths)
        verified = replace(verified, output=TargetOutput(verified.output.logits, features))
    drafter.learn(verified, state)


def _picked(
    drafter: Drafter,
    features: Tensor,
    layers: tuple[FeatureLayer, ...],
    widths: list[int] | None,
) -> Tensor | None:
    """Of features `[B, N, F]` of some layers those of a drafter's, in its order."""
    if not drafter.feature_layers:
        return None
    sizes = widths or [features.shape[2] // len(layers)] * len(layers)
    of_layer = dict(zip(layers, features.split(sizes, dim=2), strict=True))
    return torch.cat([of_layer[layer] for layer in drafter.feature_layers], dim=2)
