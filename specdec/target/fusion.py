"""`Fusion`: Inductor compiles the small work between the matrix products of a model.

HF's norms, rotary embeddings and gated activations are chains of elementwise kernels. A step over a
few tokens spends a fifth of its time in them, at a few microseconds each. Compiled, each chain is
one kernel. Attention and products with plain weights stay what they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from specdec.target.joint import GATE_UP, Group, JointProduct

ROTATE = "apply_rotary_pos_emb"
"""HF's name, in every modelling file, of the function that rotates queries and keys."""


class Fusion:
    """Compiled norms, gated MLPs, rotary embeddings and quantised linear layers, for any number of
    views of one model: what was compiled for one view serves them all.
    """

    def __init__(self, backend: str = "inductor"):
        self._backend = backend
        self._copies: dict[tuple, Callable] = {}

    def __reduce__(self) -> tuple:
        """A copied or pickled one compiles anew."""
        return Fusion, ()

    def fuse(self, view: nn.Module, products: dict[Group, JointProduct]) -> list[str]:
        """Replaces the forwards of a private view's modules.

        Modules whose forward was replaced or wrapped (by accelerate, say) are left alone. Joint
        products of gated MLPs are compiled with them, and taken out of the dictionary.

        Returns:
            Kinds of what is compiled; none where nothing was recognised.
        """
        fused: dict[str, None] = {}
        inside: set[nn.Module] = set()  # of modules that are compiled as a whole
        for path, module in view.named_modules():
            forward = type(module).forward
            if "forward" in vars(module) or inspect.unwrap(forward) is not forward:
                continue
            if module in inside:
                continue
            if _is_norm(module) or _is_gated_mlp(module) or _is_dequantised(module):
                inside.update(module.children())
                product = products.pop(Group(path, GATE_UP), None)
                module.forward = partial(on_rows, self._compiled(module, product), module)
            elif ROTATE in forward.__code__.co_names and ROTATE in forward.__globals__:
                module.forward = MethodType(self._with_compiled_rotation(forward), module)
            else:
                continue
            fused[type(module).__name__] = None
        return list(fused)

    def _compiled(self, module: nn.Module, product: JointProduct | None) -> Fused:
        """The forward of a module's class, compiled."""
        forward = _linear if type(module) is nn.Linear else type(module).forward
        # One copy per shape of weights: norms of queries and of the residual stream differ.
        key = forward, product is None, *(weight.shape for weight in module.parameters())
        if key not in self._copies:
            copy = _own_copy(forward if product is None else _over_product(forward))
            self._copies[key] = Fused(copy, self._backend)
        if product is not None:
            module.joint_product = product
        return self._copies[key]

    def _with_compiled_rotation(self, forward: FunctionType) -> FunctionType:
        rotate = forward.__globals__[ROTATE]
        key = forward, rotate
        if key not in self._copies:
            compiled = Fused(_own_copy(rotate), self._backend)
            self._copies[key] = _own_copy(forward, {ROTATE: compiled})
        return self._copies[key]


def _linear(module: nn.Module, x: Tensor) -> Tensor:
    """What `nn.Linear.forward` computes. Dynamo runs functions of torch's files through one wrapper
    and counts their compilations together.
    """
    return F.linear(x, module.weight, module.bias)


class Fused:
    """A function, compiled on first use, once for all sizes but those of last dimensions. (A size
    of one token or one row is compiled for itself.)

    Under a mode that watches single operations (`no_host_sync`, a counter of operations) it runs as
    it is: those would see nothing of compiled code.
    """

    def __init__(self, function: Callable, backend: str):
        self._plain = function
        self._compiled = torch.compile(function, fullgraph=True, backend=backend)

    def __call__(self, *args, **kwargs):
        """Runs it."""
        if torch._C._len_torch_dispatch_stack() > 0:
            return self._plain(*args, **kwargs)
        for tensor in args:
            if isinstance(tensor, Tensor):
                torch._dynamo.maybe_mark_dynamic(tensor, list(range(tensor.dim() - 1)))
        return self._compiled(*args, **kwargs)


def on_rows(function: Callable, module: nn.Module, x: Tensor, *args, **kwargs) -> Tensor:
    """`function(module, x)` of tokens `x` `[B, N, ...]`, over all of them as rows `[B N, ...]`, so
    that it meets one size in place of two. What has no such shape is passed on as it is.
    """
    if any(child._forward_hooks or child._forward_pre_hooks for child in module.children()):
        return type(module).forward(module, x, *args, **kwargs)  # which compiled code would miss
    if x.dim() < 3 or args or kwargs:
        return function(module, x, *args, **kwargs)
    return function(module, x.flatten(0, 1)).unflatten(0, x.shape[:2])


class _WithParts:
    """A module whose joined layers have been called with `x`."""

    def __init__(self, module: nn.Module, x: Tensor):
        product = module.joint_product
        self._module, self._x = module, x
        self._parts = dict(zip(product.names, product.parts(x), strict=True))

    def __getattr__(self, name: str):
        part, own = self._parts.get(name), getattr(self._module, name)
        return own if part is None else lambda x: part if x is self._x else own(x)


def _over_product(forward: FunctionType) -> FunctionType:
    """The same function of (module, x), over the module's joint product."""

    def over_product(module: nn.Module, x: Tensor):
        return forward(_WithParts(module, x), x)

    return over_product


def _own_copy(function: FunctionType, changed: dict | None = None) -> FunctionType:
    """A function with code of its own, and names of its module changed for it alone. Dynamo counts
    compilations per code object and refuses a ninth; a window of one token, or one row, is compiled
    for itself, so one model's code needs up to four. Models do not use up each other's.
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


def note_on_weights(model: nn.Module) -> dict[str, str]:
    """What is slow in a model of torchao's that is not fused; nothing for other models."""
    kinds = {type(m.weight).__name__ for m in model.modules() if _is_dequantised(m)}
    slow = "linear layers dequantise their weights operation by operation in every forward"
    return {"weights": f"{', '.join(kinds)}: {slow}; fuse=True compiles them"} if kinds else {}


def _is_dequantised(module: nn.Module) -> bool:
    """A linear layer whose weight is a class of torchao's: operation by operation it writes all of
    its weight in the data type of its input, in every forward.
    """
    is_linear = type(module) is nn.Linear and is_traceable_wrapper_subclass(module.weight)
    return is_linear and not _quantises_activations(module)


def _quantises_activations(module: nn.Module) -> bool:
    """By torchao's names. Such layers compile anew for every number of tokens."""
    names = "act_quant_kwargs", "activation_quantization"
    return any(getattr(w, name, None) is not None for w in module.parameters() for name in names)


def _is_gated_mlp(module: nn.Module) -> bool:
    """Linear layers around `act(gate) * up`, and nothing else."""
    names = {name for name, _ in module.named_children()}
    has_gate = {"gate_proj", "up_proj"} <= names or "gate_up_proj" in names
    activation = getattr(module, "act_fn", getattr(module, "activation_fn", None))
    linear = [m for m in module.children() if m is not activation]
    if not has_gate or activation is None or _quantises_activations(module):
        return False
    return all(isinstance(m, nn.Linear) for m in linear)
