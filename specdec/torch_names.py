"""Private names of torch: what each is for, and what happens where a release has renamed it.

`tests/test_private_names.py` reads each from the installed torch. No other file has one.
"""

from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

PARAMETERS, BUFFERS, CHILDREN = "_parameters", "_buffers", "_modules"
parameters_of = attrgetter(PARAMETERS)
buffers_of = attrgetter(BUFFERS)
children_of = attrgetter(CHILDREN)
"""A module's own dictionaries, which torch's public generators walk six times more slowly. Without
them the first call of a model raises an AttributeError that names the dictionary.
"""
SHARED = {PARAMETERS, BUFFERS, "_non_persistent_buffers_set"}
"""What a view shares with its module, beside hooks; a renamed one is copied instead, and the
self-test of the view fails.
"""
pre_hooks_of = attrgetter("_forward_pre_hooks")
hooks_of = attrgetter("_forward_pre_hooks", "_forward_hooks")
"""Dictionaries of hooks that run before a module's forward, and of both kinds."""
_OF_ALL = "_global_forward_hooks", "_global_forward_pre_hooks"
HOOKS_OF_ALL_MODULES: tuple[dict, ...] = tuple(getattr(nn.modules.module, n, {}) for n in _OF_ALL)
"""The dictionaries of hooks that were registered for all modules; without their names, such hooks
run in models and are not noticed.
"""
COMPILED_CALL, COMPILED_FROM = "_compiled_call_impl", "_torchdynamo_orig_callable"
"""Attributes of a compiled module, and of a compiled function. Without them a view runs what was
compiled for its model, and the self-test compares its logits.
"""


def is_hook_table(name: str) -> bool:
    """Whether an attribute of a module is a dictionary of hooks."""
    return "_hooks" in name


def uncompiled(module: nn.Module) -> Any:
    """A module's call past what `module.compile()` has put before it; without the name, its call,
    which may compile.
    """
    return getattr(module, "_call_impl", module)


def compiled_from(module: nn.Module) -> nn.Module | None:
    """What `torch.compile` was called with; without the name, such a model raises the error of
    a model that is not HF's.
    """
    return getattr(module, "_orig_mod", None)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 without the name, when no change is seen."""
    return getattr(tensor, "_version", 0)


def arguments_of(operation: Any) -> list[str]:
    """Names of the arguments of an operation of `torch.ops`; without them `no_host_sync` misses
    checks of errors that wait for the device.
    """
    schema = getattr(operation, "_schema", None)
    return [argument.name for argument in getattr(schema, "arguments", ())]


def communicators() -> list:
    """What `destroy_process_group` finalises first, to which others may be added; without the name,
    captured functions must be released before it.
    """
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    return getattr(world, "comms", [])


def mark_dynamic(tensor: Tensor, sizes: list[int]) -> None:
    """Sizes that compiled code may meet with other values; without the name each value compiles."""
    if mark := getattr(torch._dynamo, "maybe_mark_dynamic", None):
        mark(tensor, sizes)


def _found(home: str, name: str, use: str) -> Any:
    """A private class or function of torch; where it is not, a class that says so when it is made.

    Raises:
        ImportError: when what is missing is called.
    """
    try:
        return getattr(import_module(home), name)
    except (AttributeError, ImportError):
        words = (
            f"torch {torch.__version__} has no {home}.{name}, by which {use}; install a version "
            "that constraints.txt or pyproject.toml names"
        )

        def missing(*args: Any, **kwargs: Any):
            raise ImportError(words)

        return type(name, (), {"__init__": missing})


TorchDispatchMode = _found(
    "torch.utils._python_dispatch", "TorchDispatchMode", "operations of a call are watched"
)
num_dispatch_modes = _found(
    "torch._C", "_len_torch_dispatch_stack", "compiled code steps aside under a dispatch mode"
)
clear_workspaces = _found(
    "torch._C", "_cuda_clearCublasWorkspaces", "captured graphs own the workspaces of cuBLAS"
)
end_allocation = _found(
    "torch._C", "_cuda_endAllocateToPool", "a failed capture gives its memory pool back"
)
