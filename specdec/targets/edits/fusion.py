"""`Fusion`: Inductor compiles the small work between the matrix products of a model.

HF's norms, rotary embeddings and gated activations are chains of elementwise kernels. A step over a
few tokens spends a fifth of its time in them, at a few microseconds each. Compiled, each chain is
one kernel. Attention and products of floating-point weights stay what they are; products of
weights of one byte, which torchao widens in memory, have a kernel that widens them in registers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType

import torch
from torch import Tensor, nn

from specdec.hf.forward import without_renaming
from specdec.hf.layers import ACTIVATIONS, GATE_UP, JOINED_GATE_UP, ROTATE
from specdec.kernels.linear.reference import scaled_linear
from specdec.targets.edits.edit import Faster
from specdec.targets.edits.joint import JointProduct
from specdec.targets.view import own_copy, private_view
from specdec.targets.watch import is_hooked
from specdec.torch_names import mark_dynamic, num_dispatch_modes


class Fusion(Faster):
    """Compiled norms, gated MLPs and rotary embeddings, for any number of views of one model: what
    was compiled for one view serves them all.
    """

    given_up = "pointwise work is not fused: "
    is_compiled = True

    def __init__(self, backend: str = "inductor"):
        self._backend = backend
        self._copies: dict[tuple, Callable] = {}

    def __reduce__(self) -> tuple:
        """A copied or pickled one compiles anew."""
        return Fusion, ()

    @classmethod
    def of(cls, model: nn.Module) -> tuple[Fusion | None, str]:
        """For a model, and a note on what is fused; `None` where nothing is recognised."""
        fusion = cls()
        if kinds := fusion.fuse(private_view(model)):
            return fusion, f"pointwise work is fused in {', '.join(kinds)}"
        nothing = "no norm, gated MLP or rotary embedding recognised"
        return None, f"{cls.given_up}{nothing}"

    def __call__(self, view: nn.Module) -> None:
        self.fuse(view)

    def fuse(self, view: nn.Module) -> list[str]:
        """Replaces the forwards of a private view's modules: compiles them, and multiplies with
        weights of one byte as they are.

        Modules whose forward was replaced or wrapped (by accelerate, say) are left alone. Joint
        products of gated MLPs are compiled with them; others stay around what is compiled.

        Returns:
            Kinds of what is replaced; none where nothing was recognised.
        """
        fused: dict[str, None] = {}
        for module in view.modules():
            product: JointProduct | None = vars(module).get("joint_product")
            if product is not None:
                product.take_out()
            if is_fused := self._fuse(module, product):
                fused[type(module).__name__] = None
            if product is not None and not (is_fused and _is_gated_mlp(module)):
                product.install()
        return list(fused)

    def _fuse(self, module: nn.Module, product: JointProduct | None) -> bool:
        """Whether there was something to replace in a module."""
        forward = without_renaming(type(module).forward)
        if "forward" in vars(module) or inspect.unwrap(forward) is not forward:
            return False
        if has_bytes(module):
            module.forward = partial(_multiply, module)
        elif _is_norm(module) or _is_gated_mlp(module):
            module.forward = partial(on_rows, self._compiled(module, product), module)
        elif ROTATE in forward.__code__.co_names and ROTATE in forward.__globals__:
            module.forward = MethodType(self._with_compiled_rotation(forward), module)
        else:
            return False
        return True

    def _compiled(self, module: nn.Module, product: JointProduct | None) -> Fused:
        """The forward of a module's class, compiled."""
        forward = without_renaming(type(module).forward)
        # One copy per shape of weights: norms of queries and of the residual stream differ.
        key = forward, product is None, *(weight.shape for weight in module.parameters())
        if key not in self._copies:
            copy = own_copy(forward if product is None else _over_product(forward))
            self._copies[key] = Fused(copy, self._backend)
        return self._copies[key]

    def _with_compiled_rotation(self, forward: FunctionType) -> FunctionType:
        rotate = forward.__globals__[ROTATE]
        key = forward, rotate
        if key not in self._copies:
            compiled = Fused(own_copy(rotate), self._backend)
            self._copies[key] = own_copy(forward, {ROTATE: compiled})
        return self._copies[key]


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
        if num_dispatch_modes() > 0:
            return self._plain(*args, **kwargs)
        for tensor in args:
            if isinstance(tensor, Tensor):
                mark_dynamic(tensor, list(range(tensor.dim() - 1)))
        return self._compiled(*args, **kwargs)


def on_rows(function: Callable, module: nn.Module, x: Tensor, *args, **kwargs) -> Tensor:
    """`function(module, x)` of tokens `x` `[B, N, ...]`, over all of them as rows `[B N, ...]`, so
    that it meets one size in place of two. What has no such shape is passed on as it is.
    """
    product = vars(module).get("joint_product")
    if any(map(is_hooked, module.children())) or not (product is None or product.is_whole):
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


def _is_norm(module: nn.Module) -> bool:
    """A norm written in single operations; those of torch are one kernel already."""
    kind, is_leaf = type(module), next(module.children(), None) is None
    return is_leaf and kind.__name__.endswith("Norm") and not kind.__module__.startswith("torch.")


def note_on_weights(model: nn.Module) -> dict[str, str]:
    """What is slow in a model of torchao's that is not fused; nothing for other models."""
    kinds = {type(m.weight).__name__ for m in model.modules() if has_bytes(m)}
    slow = "every forward writes all weights anew in the model's data type"
    note = f"{', '.join(kinds)}: {slow}; fuse=True multiplies with them as they are"
    return {"weights": note} if kinds else {}


def has_bytes(module: nn.Module) -> bool:
    """A linear layer over a weight of torchao's of one byte a number, with a scale for each output,
    and activations as they come.
    """
    weight = module.weight if type(module) is nn.Linear else None
    data, scale = getattr(weight, "qdata", None), getattr(weight, "scale", None)
    if data is None or scale is None or data.is_meta or _quantises_activations(module):
        return False
    is_byte = data.dtype in (torch.int8, torch.float8_e4m3fn) and data.shape == weight.shape
    zero, factor = getattr(weight, "zero_point", None), getattr(weight, "act_pre_scale", None)
    is_plain = factor is None and (zero is None or not bool(zero.any()))
    return is_byte and is_plain and scale.numel() == module.out_features


def _quantises_activations(module: nn.Module) -> bool:
    """By torchao's names."""
    names = "act_quant_kwargs", "activation_quantization"
    return any(getattr(w, name, None) is not None for w in module.parameters() for name in names)


def _multiply(module: nn.Linear, x: Tensor) -> Tensor:
    weight = module.weight
    return scaled_linear(x, weight.qdata, weight.scale.flatten(), module.bias)


def _is_gated_mlp(module: nn.Module) -> bool:
    """Linear layers around `act(gate) * up`, and nothing else."""
    names = {name for name, _ in module.named_children()}
    has_gate = {*GATE_UP} <= names or JOINED_GATE_UP in names
    activation = next((getattr(module, n) for n in ACTIVATIONS if hasattr(module, n)), None)
    linear = [m for m in module.children() if m is not activation]
    if any("forward" in vars(child) for child in module.children()):
        return False
    if not has_gate or activation is None or _quantises_activations(module):
        return False  # such layers compile anew for every number of tokens
    return all(isinstance(m, nn.Linear) and not has_bytes(m) for m in linear)
