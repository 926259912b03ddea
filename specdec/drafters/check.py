"""What is checked of a drafter where a generator is built, and of its state where one is made."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specdec.arguments import check_integer, shown
from specdec.drafters.base import Drafter, check_num_draft_tokens
from specdec.graphs.tree import leaves
from specdec.torch_names import CHILDREN


def check_drafter(drafter: Drafter) -> None:
    """Raises `TypeError` or `ValueError` where the attributes of a drafter cannot be right."""
    name = type(drafter).__name__
    if CHILDREN not in vars(drafter):
        raise TypeError(f"{name}.__init__ must call super().__init__()")
    check_num_draft_tokens(getattr(drafter, "num_draft_tokens", None), of=f"{name}.")
    if drafter.tree_depth is not None:
        check_integer(f"{name}.tree_depth", drafter.tree_depth, 1, max(drafter.num_draft_tokens, 1))
    layers = drafter.feature_layers
    if not isinstance(layers, tuple):
        raise TypeError(
            f"{name}.feature_layers must be a tuple of hidden states and 'final', () for none, got "
            f"{shown(layers)}"
        )
    inputs = drafter.row_inputs
    if not isinstance(inputs, tuple) or not all(isinstance(n, str) for n in inputs):
        got = shown(inputs)
        raise TypeError(f'{name}.row_inputs must be a tuple of names, such as ("bias",), got {got}')
    check_integer(f"{name}.extra_slots", drafter.extra_slots, 0)
    for flag in ("has_memory", "reads_target", "reads_outcome"):
        if not isinstance(getattr(drafter, flag), bool):
            got = shown(getattr(drafter, flag))
            raise TypeError(f"{name}.{flag} must be True or False, got {got}")
    if drafter.reads_outcome and type(drafter).learn is Drafter.learn:
        raise TypeError(
            f"{name}.reads_outcome is True, and {name} has no method learn(verified, state); "
            "define it, or drop reads_outcome"
        )


def check_state(
    drafter: Drafter, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
) -> Any:
    """Returns what a drafter's `init_state` returns, or raises `TypeError` or `ValueError` if it is
    no tree of tensors with rows first.
    """
    state = drafter.init_state(batch_size, max_length, vocab_size=vocab_size, device=device)
    who = f"{type(drafter).__name__}.init_state returned"
    advice = "what is the same for all rows is a field of a dataclass, `= specdec.graphs.shared()`"
    if isinstance(state, type):
        raise TypeError(f"{who} the class {state.__name__}; return {state.__name__}(...)")
    for path, leaf in leaves(state, "state", with_shared=False):
        if leaf is None:
            continue
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{who} {path} = {shown(leaf)}; a state is a dataclass, a tuple, a list or a dict "
                f"of tensors (None for nothing), a number of each row is a tensor, and {advice}"
            )
        if leaf.dim() == 0 or len(leaf) != batch_size:
            raise ValueError(
                f"{who} {path} of shape {list(leaf.shape)} for {batch_size} rows; tensors of a "
                f"state have rows first, and {advice}"
            )
        if leaf.device.type != device.type:
            raise ValueError(f"{who} {path} on {leaf.device}, and the target is on {device}")
    return state
