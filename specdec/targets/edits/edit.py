"""`Edit`: a function that changes one private view of a model, before anything runs.

An intervention on a model is an edit. A forward hook sees the tokens of one call, and which tokens
those are depends on how a text is cut into calls: HF's `generate` makes a call for each token,
specdec one for each draft. An edit sees the window of the call (`window_of`): where each token
stands in its text, and where the prompt of its row ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specdec.arguments import shown
from specdec.slots.cache import Window
from specdec.targets.view import shared_with_model

Edit = Callable[[PreTrainedModel], None]
"""Changes one private view: wraps forwards of its modules (`wrap_forward`), replaces modules, sets
attributes. Its attribute `row_inputs`, a tuple of names, is what it reads of the calls' own
(`generate(row_inputs=)`); a call may leave them out.
"""


class Faster:
    """An edit that makes a model faster. Where a model with several of these does not pass the
    self-test they are given up, the last one first, until it does.

    Attributes:
        given_up: begins the note on one that was given up; the reason follows.
        is_compiled: steps run code that was compiled, in inference mode.
        why_not_in_chunks: why chunks of prompts go without it, and wait; `None` where they do not.
    """

    given_up = ""
    is_compiled = False
    why_not_in_chunks: str | None = None

    def __call__(self, view: PreTrainedModel) -> None:
        """Changes a private view. What somebody else has wrapped or replaced is left alone."""
        raise NotImplementedError

    def prepare(self, model: PreTrainedModel) -> None:
        """Changes the model's storage before views are opened."""

    def undo(self, model: PreTrainedModel) -> None:
        """Takes `prepare` back."""

    def fits(self, model: PreTrainedModel) -> bool:
        """Whether the same would be chosen for the model as it is now."""
        return True

    def stored_anew(self, model: PreTrainedModel) -> list[nn.Module]:
        """Modules of the model whose storage `prepare` changed."""
        return []


class Running(threading.local):
    """The window of the forward that a view runs; forwards in other threads have others."""

    window: Window | None = None


def window_of(view: nn.Module) -> Window:
    """The window of the forward that a private view is running, for a function of `wrap_forward`.

    `since_prompt` `[B, N]` is how many positions after the last token of its row's prompt each
    token stands, `text_positions` `[B, N]` where each stands in its text, and `row_inputs` has
    `[B, ...]` that the call brought for each row. They are on the device of the embeddings;
    `window_of(view).on(device)` has them on that of another layer.

    Args:
        view: that an edit was given.

    Raises:
        ValueError: the view runs no window.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> from specdec.targets import Target, window_of, wrap_forward
        >>> def steer(view):
        ...     def add(forward, *args, **kwargs):
        ...         hidden = forward(*args, **kwargs)  # [B, N, H]
        ...         return hidden + 0.1 * (window_of(view).since_prompt >= 0)[..., None]
        ...
        ...     wrap_forward(view.model.layers[6], add)
        >>> target = Target(zoo.load_target(), edits=(steer,))
        >>> ids = zoo.load_tokenizer()("def main(argv):", return_tensors="pt").input_ids
        >>> result = SpeculativeGenerator(target, "lookup").generate(ids, max_new_tokens=8)
    """
    running = vars(view).get("running")
    if running is None or running.window is None:
        raise ValueError(
            f"{type(view).__name__} runs no window; call window_of(view) inside of a function of "
            "wrap_forward, with the view that the edit was given"
        )
    return running.window


def check_edits(edits: Any) -> tuple[Edit, ...]:
    """Edits of the user as a tuple.

    Raises:
        TypeError: not a tuple or list of functions.
    """
    if not isinstance(edits, tuple | list):
        raise TypeError(
            f"edits must be a tuple of functions of a view, got {shown(edits)}; edits=(edit,)"
        )
    for edit in edits:
        if isinstance(edit, type | nn.Module) or not callable(edit):
            raise TypeError(f"edits must be functions of a view, got {shown(edit)}")
    return tuple(edits)


def name_of(edit: Edit) -> str:
    """For messages."""
    return getattr(edit, "__name__", type(edit).__name__)


def apply_edit(edit: Edit, view: PreTrainedModel) -> None:
    """Lets an edit of the user change a private view, and not what the view shares with its model.

    Raises:
        ValueError: it registered a hook, or set a parameter or a buffer. That has been undone.
    """
    before = shared_with_model(view)
    try:
        edit(view)
    except AttributeError as error:
        raise AttributeError(
            f"the edit {name_of(edit)} failed: {error}; it gets the whole causal LM, "
            f"{type(view).__name__}, with layers in view.model.layers for most types"
        ) from error
    changed = [path for path, now, kept in before if not _is_alike(now, kept)]
    for _, now, kept in before:
        now.clear()
        now.update(kept)
    if changed:
        raise ValueError(
            f"{name_of(edit)} changed {changed[0] or 'the model'} of {type(view).__name__} itself: "
            "a view shares hooks, parameters and buffers with its model; call "
            "wrap_forward(module, around) in place of a hook, set attributes of the view's modules "
            "or replace them"
        )


def _is_alike(now: dict | set, kept: dict | set) -> bool:
    """Whether a container has the same keys and the same objects."""
    if isinstance(now, set):
        return now == kept
    return [*now] == [*kept] and all(
        a is b for a, b in zip(now.values(), kept.values(), strict=True)
    )
