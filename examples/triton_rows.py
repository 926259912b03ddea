"""Runs Triton kernels on a CPU with all programs of a launch at once.

Triton's interpreter (`TRITON_INTERPRET=1`) runs one program after another, at some 30 ms each: too
slow to enumerate what a kernel does. `all_programs_at_once` gives its arrays a leading axis, one
row for each program of the first axis of the grid. Everything else, types and casts among it, stays
Triton's own.

Where programs decide differently (an `if`, a loop's length), the launch is split: both groups start
again, so that each group follows one path through the kernel. A kernel may therefore store a value
more than once, and must not read what it has stored. Block sizes, which a launch chooses for speed,
are made small: with a small vocabulary most of a block of 4096 elements is masked.

Legend: B programs, N elements of a block. Scalars are `[B, 1]` or `[1]`, blocks `[B, N]` or `[N]`.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
import triton.language as tl
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.interpreter import (
    GridExecutor,
    ReduceOps,
    ReduceScanOpInterface,
    ScanOps,
    TensorHandle,
)

_builder = triton_interpreter.interpreter_builder
_patch_lang_tensor = triton_interpreter._patch_lang_tensor
_load, _store = _builder.create_masked_load, _builder.create_masked_store
_splat, _reduce, _scan = _builder.create_splat, ReduceOps.apply_impl, ScanOps.apply_impl


@contextmanager
def all_programs_at_once(block: int) -> Iterator[None]:
    """Within it, interpreted kernels run as this module's docstring says.

    Args:
        block: most elements of a block: what a launch passes as `BLOCK...` is at most this.
    """

    def launch(self: GridExecutor, *args, **kwargs) -> None:
        sizes = {k: min(v, block) for k, v in kwargs.items() if k.startswith("BLOCK") and v > 1}
        _launch(self, *args, **kwargs | sizes)

    with ExitStack() as patches, np.errstate(all="ignore"):  # a GPU does not warn of log(0) either
        for place, name, new in (
            (GridExecutor, "__call__", launch),
            (ReduceOps, "apply_impl", _reduce_last),
            (ScanOps, "apply_impl", _scan_last),
            (ReduceScanOpInterface, "to_tensor", _to_tensor),
            (triton_interpreter, "_patch_lang_tensor", _patch_tensor),
            (_builder, "create_get_program_id", _program_id),
            (_builder, "create_splat", _splat_rows),
            (_builder, "create_masked_load", _load_rows),
            (_builder, "create_masked_store", _store_rows),
        ):
            patches.enter_context(patch.object(place, name, new))
        yield


class _Split(BaseException):
    """Programs decide differently; no `Exception`, which the interpreter would wrap."""

    def __init__(self, is_first: np.ndarray):
        self.is_first = is_first


def _launch(self: GridExecutor, *args, **kwargs) -> None:
    known = inspect.getfullargspec(self.fn)
    kwargs = {k: v for k, v in kwargs.items() if k in known.args or k in known.kwonlyargs}
    scope = triton_interpreter._patch_lang(self.fn)
    try:
        args = inspect.getcallargs(self.fn, *args, **kwargs)
        convert = triton_interpreter._implicit_cvt
        args = {k: v if k in self.constexprs else convert(v) for k, v in args.items()}
        programs, *others = self.grid(args) if callable(self.grid) else self.grid
        for other in np.ndindex(*others):
            groups = [np.arange(programs, dtype=np.int32)]
            while groups:
                rows = groups.pop()
                _builder.grid_idx = (rows[:, None], *(np.array([i], np.int32) for i in other))
                try:
                    self.fn(**args)
                except _Split as split:
                    groups += [rows[split.is_first], rows[~split.is_first]]
    finally:
        scope.restore()


def _program_id(axis: int) -> TensorHandle:
    return TensorHandle(_builder.grid_idx[axis], tl.int32)


def _patch_tensor(tensor: type, scope) -> None:
    _patch_lang_tensor(tensor, scope)

    def value(self: tl.tensor):
        data = self.handle.data
        if data.size > 1 and (data != data[0]).any():
            raise _Split((data == data[0])[:, 0])
        return data.flat[0].item()

    scope.set_attr(tensor, "__bool__", lambda self: self.type.is_block() or bool(value(self)))
    scope.set_attr(tensor, "__index__", value)


def _splat_rows(kind: tl.block_type, arg: TensorHandle) -> TensorHandle:
    if arg.data.ndim == 1:
        return _splat(kind, arg)
    return TensorHandle(np.broadcast_to(arg.data, (len(arg.data), *kind.shape)), arg.dtype.scalar)


def _load_rows(pointers, mask, other, *options) -> TensorHandle:
    parts = [x for x in (pointers, mask, other) if x is not None]
    return _load(*_broadcast(*parts), *[None] * (3 - len(parts)), *options)


def _store_rows(pointers, value, mask, *options) -> None:
    return _store(*_broadcast(pointers, value, mask), *options)


def _broadcast(*handles: TensorHandle) -> list[TensorHandle]:
    arrays = np.broadcast_arrays(*(handle.data for handle in handles))
    return [
        TensorHandle(np.ascontiguousarray(array), handle.dtype)
        for array, handle in zip(arrays, handles, strict=True)
    ]


def _reduce_last(self: ReduceOps, inputs: tuple) -> list:
    self.axis, self.keep_dims = -1, True
    return _reduce(self, inputs)


def _scan_last(self: ScanOps, inputs: tuple) -> list:
    self.axis = -1
    return _scan(self, inputs)


def _to_tensor(self: ReduceScanOpInterface, data: np.ndarray, dtype: tl.dtype) -> tl.tensor:
    """The axis of a reduced block stays as one of length 1; a scan keeps its block."""
    handle = TensorHandle(data.astype(triton_interpreter._get_np_dtype(dtype)), dtype.scalar)
    is_scalar = isinstance(self, ReduceOps)
    return tl.tensor(handle, dtype if is_scalar else tl.block_type(dtype, [data.shape[-1]]))
