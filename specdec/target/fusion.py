"""`fuse_pointwise`: Inductor compiles the small work between the matrix products of a model.

HF's norms, rotary embeddings and gated activations are chains of elementwise kernels. A step over a
few tokens spends a fifth of its time in them, at a few microseconds each. Compiled, each chain is
one kernel. Matrix products and attention stay what they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType

import torch
from torch import nn

ROTATE = "apply_rotary_pos_emb"
"""HF's name, in every modelling file, of the function that rotates queries and keys."""


def fuse_pointwise(view: nn.Module, *, backend: str = "inductor") -> list[str]:
    """Compiles norms, gated MLPs and rotary embeddings of a private view.

    Modules whose forward was replaced or wrapped (by accelerate, say) are left alone.

    Args:
        view: from `private_view`; the model that it is a view of is not touched.
        backend: of `torch.compile`.

    Returns:
        Kinds of what was compiled; none where nothing was recognised.
    """
    fused: dict[str, None] = {}
    copies: dict[tuple, FunctionType] = {}
    for module in view.modules():
        forward = type(module).forward
        if "forward" in vars(module) or inspect.unwrap(forward) is not forward:
            continue
        if _is_norm(module) or _is_gated_mlp(module):
            # One copy per shape of weights: norms of queries and of the residual stream differ.
            key = forward, *(weight.shape for weight in module.parameters())
            copy = copies.setdefault(key, _own_copy(forward))
            module.forward = Fused(MethodType(copy, module), backend)
        elif ROTATE in forward.__code__.co_names and ROTATE in forward.__globals__:
            rotate = forward.__globals__[ROTATE]
            if (forward, rotate) not in copies:
                compiled = Fused(_own_copy(rotate), backend)
                copies[forward, rotate] = _own_copy(forward, {ROTATE: compiled})
            module.forward = MethodType(copies[forward, rotate], module)
        else:
            continue
        fused[type(module).__name__] = None
    return list(fused)


class Fused:
    """A function, compiled on first use.

    Under a mode that watches single operations (`no_host_sync`, a counter of operations) it runs as
    it is: those would see nothing of compiled code.

    Args:
        function: traceable as a whole.
        backend: of `torch.compile`.
    """

    def __init__(self, function: Callable, backend: str):
        self._plain = function
        self._compiled = torch.compile(function, fullgraph=True, backend=backend)

    def __call__(self, *args, **kwargs):
        """Runs it."""
        is_watched = torch._C._len_torch_dispatch_stack() > 0
        return (self._plain if is_watched else self._compiled)(*args, **kwargs)


def _own_copy(function: FunctionType, changed: dict | None = None) -> FunctionType:
    """A function with code of its own, and names of its module changed for it alone. Dynamo counts
    compilations per code object and refuses a ninth; a window of one token, or one row, is compiled
    for itself, so one model's code needs up to five. Models do not use up each other's.
    """
    names = function.__globals__ if changed is None else function.__globals__ | changed
    copy = FunctionType(
        function.__code__.replace(),
        names,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _is_norm(module: nn.Module) -> bool:
    """A norm written in single operations; those of torch are one kernel already."""
    kind, is_leaf = type(module), next(module.children(), None) is None
    return is_leaf and kind.__name__.endswith("Norm") and not kind.__module__.startswith("torch.")


def _is_gated_mlp(module: nn.Module) -> bool:
    """Linear layers around `act(gate) * up`, and nothing else."""
    names = {name for name, _ in module.named_children()}
    has_gate = {"gate_proj", "up_proj"} <= names or "gate_up_proj" in names
    activation = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    linear = [m for m in module.children() if m is not activation]
    return has_gate and activation is not None and all(isinstance(m, nn.Linear) for m in linear)
