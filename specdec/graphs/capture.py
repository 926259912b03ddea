"""`Captured`: a function over tensors, recorded once as a CUDA graph and replayed.

One launch replaces all launches of the function. A replay runs the recorded kernels on the recorded
addresses: no Python runs, no shape and no number of the host can change. So inputs are copied into
static tensors, outputs are static tensors too, and whatever a call is given is compared with what
was recorded.

On a CPU there is nothing to record. The same checks are made and the same tensors are reused, so
that code which keeps an output for too long, or passes another shape, fails there as well.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from specdec.arguments import check_device, check_integer, check_type
from specdec.graphs.communicators import release_before_communicators
from specdec.graphs.sync import HostSyncError, no_host_sync
from specdec.graphs.tree import leaves, map_tensors

_ONE_CAPTURE = threading.Lock()
"""CUDA allows one capture at a time in a process."""


class CaptureError(RuntimeError):
    """A function cannot be captured; says which operation is to blame, and what to do."""


class GraphPool:
    """Memory, and a stream to capture on, that several graphs share.

    Graphs of one pool reuse each other's temporary memory. A replay of one may therefore overwrite
    the outputs of another, and two of them must never run at the same time.

    Args:
        device: of the graphs.
    """

    def __init__(self, device: torch.device | str):
        self.device = check_device("device", device)
        self._is_cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if self._is_cuda else None
        self.renew()

    def renew(self) -> None:
        """Takes other memory for the graphs to come: torch fails to capture once more into memory
        whose graphs were all freed.
        """
        self.handle = torch.cuda.graph_pool_handle() if self._is_cuda else None

    def run(self, function: Callable[[], Any]) -> Any:
        """Calls a function on the pool's stream, in the order of the current one: before a capture
        every kernel, and the workspace of every library, has to be loaded on that stream.
        """
        if not self._is_cuda:
            return function()
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                return function()
        finally:
            current.wait_stream(self.stream)


class Captured:
    """A function over tensors as one CUDA graph; on a CPU the function, with the same checks.

    Inputs and outputs are nested tuples, lists, dictionaries and dataclasses of tensors. Other
    values among the inputs are part of what is captured and must be the same in every call.
    **Inputs are copied; outputs are the same tensors in every call, overwritten by the next one.**
    The function may read and write other tensors that live as long as the graph; it runs in
    inference mode.

    Args:
        function: makes no host synchronisation, and allocates tensors of fixed shapes only.
        example_inputs: arguments of the shapes, data types and devices of all later calls.
        pool: memory to share with other graphs; `None` is memory of its own.
        warmup: real calls before the capture, which load kernels and libraries; the last one runs
            under `no_host_sync`. A function that changes tensors of its own changes them in these
            calls, too: call it with `pool.run` as often as needed, and pass 0.
        device: where the function runs; `None` is the device of the example inputs.

    Attributes:
        outputs: what the last call returned, `None` before.
        capture_seconds: how long the capture took, warm-up excluded.
        num_bytes: by how much the capture made the memory grow; 0 on a CPU.
        num_calls: how often it was called.

    Raises:
        CaptureError: the function waits for the device, or does something else that cannot be
            captured.

    Example:
        >>> total = torch.zeros(2)
        >>> def add(x, scale):
        ...     total.add_(x * scale["by"])
        ...     return total * 1
        >>> x, by = torch.ones(2), {"by": torch.tensor(2.0)}
        >>> captured = Captured(add, (x, by), warmup=0)
        >>> first = captured(x, by)
        >>> captured(x, {"by": torch.tensor(5.0)}), first  # both are the last call's
        (tensor([7., 7.]), tensor([7., 7.]))
        >>> captured(torch.ones(3), by)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        ValueError: input [0]: captured with float32 [2] on cpu, called with float32 [3] on cpu...
    """

    def __init__(
        self,
        function: Callable[..., Any],
        example_inputs: tuple = (),
        *,
        pool: GraphPool | None = None,
        warmup: int = 3,
        device: torch.device | str | None = None,
    ):
        self._function = check_type("function", function, Callable)
        advice = "one argument x is (x,)"
        check_type("example_inputs", example_inputs, tuple, advice=advice)
        check_type("pool", pool, GraphPool | None)
        check_integer("warmup", warmup, 0)
        self.device = _device_of(example_inputs, device)
        self.pool = GraphPool(self.device) if pool is None else pool
        with torch.inference_mode():
            self._inputs = map_tensors(torch.clone, tuple(example_inputs))
        self._spec = _specify(self._inputs)
        self.outputs: Any = None
        self._output_spec: list | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self.capture_seconds, self.num_bytes, self.num_calls = 0.0, 0, 0
        self._is_released = False
        self._warm_up(warmup)
        self._capture()

    def __call__(self, *inputs: Any) -> Any:
        """Runs it on other values of the same shapes.

        Raises:
            ValueError: another structure, shape, data type or device than captured, or another
                value of something that is no tensor; names both sides.
        """
        _check_spec("input", self._spec, _specify(inputs))
        if self._is_released:
            self._capture()
        self.num_calls += 1
        with torch.inference_mode():
            _copy_leaves(self._inputs, inputs)
            if self._graph is not None:
                self._graph.replay()
            else:
                self._run()
        return self.outputs

    def release(self) -> None:
        """Frees the graph; the next call captures it again, with other tensors as outputs.

        `torch.distributed.destroy_process_group()` calls this, and so does the end of the process,
        where a process group existed at capture: NCCL waits for graphs that hold its collectives.
        """
        self._graph, self.outputs, self._output_spec = None, None, None
        self.pool.renew()
        self._is_released = True

    def _warm_up(self, count: int) -> None:
        with torch.inference_mode():
            for index in range(count):
                if index < count - 1:
                    self.pool.run(self._call)
                else:
                    self.pool.run(self._guarded_call)

    def _call(self) -> Any:
        return self._function(*self._inputs)

    def _guarded_call(self) -> Any:
        try:
            with no_host_sync():
                return self._call()
        except HostSyncError as error:
            raise CaptureError(explain_failure(error)) from error

    def _run(self) -> None:
        """The function itself, its outputs in the tensors of the first call."""
        outputs = self._call()
        spec = _specify(outputs)
        if self._output_spec is None:
            self.outputs, self._output_spec = outputs, spec
            return
        _check_spec("output", self._output_spec, spec)
        _copy_leaves(self.outputs, outputs)

    def _capture(self) -> None:
        release_before_communicators(self)
        if self.device.type == "cuda":
            with _ONE_CAPTURE, torch.cuda.device(self.device):
                self._record()
        self._is_released = False

    def _record(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        start, reserved = time.perf_counter(), torch.cuda.memory_reserved()
        graph, failure, current = torch.cuda.CUDAGraph(), None, torch.cuda.current_stream()
        # Another thread may allocate memory meanwhile: only this thread's calls are restricted.
        options = {"stream": self.pool.stream, "capture_error_mode": "thread_local"}
        try:
            with (
                _no_garbage_collection(),
                torch.inference_mode(),
                torch.cuda.graph(graph, self.pool.handle, **options),
            ):
                try:
                    self.outputs = self._call()
                except Exception as error:
                    failure = error
                    raise
        except Exception as error:
            self.outputs = None
            torch.cuda.set_stream(current)  # torch stays on the capture's where ending it fails
            self._clean_up()
            raise CaptureError(explain_failure(failure or error)) from (failure or error)
        self._graph = graph
        self.capture_seconds = time.perf_counter() - start
        self.num_bytes = max(0, torch.cuda.memory_reserved() - reserved)

    def _clean_up(self) -> None:
        """After a failed capture: allocator and random generator may count it as one under way."""
        index = self.device.index
        index = torch.cuda.current_device() if index is None else index
        with suppress(Exception):  # it was ended, or this version of torch has ended it
            torch._C._cuda_endAllocateToPool(index, self.pool.handle)
        with suppress(Exception):  # reported by the error that follows
            torch.cuda.synchronize()
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())  # the same numbers, in no capture
        self.pool.renew()


class CapturedBuckets:
    """A captured function for batches of any size: one graph per bucket, smaller batches padded.

    Every tensor of the inputs and of the outputs has one entry per row of the batch in its first
    dimension. The rows that fill up a bucket are those of the example, copied anew in every call:
    no row of an earlier call is ever computed again.

    Args:
        function: treats the rows independently of each other.
        example_inputs: of one row or more; its first row fills the buckets up, so it has to be
            harmless.
        sizes: of the buckets. They are captured when first needed, in one pool; `capture_all`
            captures them at once, the largest first.
        pool, warmup: as of `Captured`.

    Raises:
        ValueError: no sizes, or sizes that are not positive.

    Example:
        >>> doubled = CapturedBuckets(lambda x: 2 * x, (torch.zeros(1, 2),), [2, 4])
        >>> doubled(torch.ones(3, 2)).shape
        torch.Size([3, 2])
        >>> doubled(torch.ones(5, 2))
        Traceback (most recent call last):
            ...
        ValueError: a batch of 5 rows is larger than the largest bucket, 4; split it or add a bucket
    """

    def __init__(
        self,
        function: Callable[..., Any],
        example_inputs: tuple,
        sizes: Sequence[int],
        *,
        pool: GraphPool | None = None,
        warmup: int = 3,
    ):
        check_type("sizes", sizes, Sequence[int])
        if not sizes or min(sizes) < 1:
            raise ValueError(f"sizes must be positive integers, at least one, got {list(sizes)}")
        check_type("example_inputs", example_inputs, tuple, advice="one argument x is (x,)")
        _count_rows("example_inputs", example_inputs)
        self.sizes = sorted(set(sizes))
        self._function, self._warmup = function, warmup
        self._row = map_tensors(lambda tensor: tensor[:1].clone(), tuple(example_inputs))
        device = _device_of(example_inputs, None)
        self.pool = GraphPool(device) if pool is None else pool
        self._captured: dict[int, Captured] = {}

    def capture_all(self) -> None:
        """Captures every bucket, the largest first: the others then fit into its memory."""
        for size in reversed(self.sizes):
            self._for_size(size)

    def __call__(self, *inputs: Any) -> Any:
        """Runs it on a batch; the outputs are views of static tensors, as of `Captured`.

        Raises:
            ValueError: a batch larger than every bucket, rows that disagree, and as `Captured`.
        """
        count = _count_rows("inputs", inputs)
        if count > self.sizes[-1]:
            raise ValueError(
                f"a batch of {count} rows is larger than the largest bucket, {self.sizes[-1]}; "
                "split it or add a bucket"
            )
        size = self.sizes[bisect_left(self.sizes, count)]
        outputs = self._for_size(size)(*self._filled(inputs, size))
        if any(isinstance(leaf, Tensor) for _, leaf in leaves(outputs)):
            _count_rows("outputs", outputs, size)
        return map_tensors(lambda tensor: tensor[:count], outputs)

    def _for_size(self, size: int) -> Captured:
        if size not in self._captured:
            example = map_tensors(
                lambda tensor: tensor.expand(size, *tensor.shape[1:]).clone(), self._row
            )
            options = {"pool": self.pool, "warmup": self._warmup}
            self._captured[size] = Captured(self._function, example, **options)
        return self._captured[size]

    def _filled(self, inputs: tuple, size: int) -> tuple:
        """The inputs, filled up with the example's row."""
        spec = _specify(map_tensors(lambda tensor: tensor[:1], inputs))
        _check_spec("input", _specify(self._row), spec)
        rows = iter([leaf for _, leaf in leaves(self._row) if isinstance(leaf, Tensor)])

        def fill(tensor: Tensor) -> Tensor:
            row = next(rows)
            missing = size - len(tensor)
            if missing == 0:
                return tensor
            return torch.cat([tensor, row.expand(missing, *row.shape[1:])])

        return map_tensors(fill, inputs)


def _count_rows(what: str, tree: Any, expected: int | None = None) -> int:
    """Rows of all tensors in a tree; `ValueError` where there are none, or where they disagree."""
    tensors = {path: leaf for path, leaf in leaves(tree) if isinstance(leaf, Tensor)}
    counts = {path: len(leaf) if leaf.dim() else None for path, leaf in tensors.items()}
    found = set(counts.values())
    is_right = len(found) == 1 and None not in found and min(found) > 0
    if not is_right or expected not in (None, *found):
        rows = "one entry per row" if expected is None else f"one entry for each of {expected} rows"
        raise ValueError(f"every tensor of the {what} must have {rows}, got {counts}")
    return found.pop()


def explain_failure(error: BaseException) -> str:
    """What a function did that cannot be captured, where, and what to do about it.

    Example:
        >>> try:
        ...     with no_host_sync():
        ...         torch.ones(3).sum().item()
        ... except HostSyncError as error:
        ...     print(explain_failure(error).split(" (in")[0])
        the function cannot be captured: Tensor.item() copies a tensor to the host
    """
    where = _place_of(error)
    text = str(error).strip().split("\n")[0]
    advice = "keep the decision on the device (torch.where, gather, masks), or do not capture it"
    if not isinstance(error, HostSyncError) and "captur" not in text.lower():
        advice = "it must allocate and compute in fixed shapes, without asking the host"
    return f"the function cannot be captured: {text} (in {where}); {advice}"


_OWN_FOLDERS = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))


def _place_of(error: BaseException) -> str:
    """The innermost line of a traceback that is neither torch's nor this folder's."""
    frames = traceback.extract_tb(error.__traceback__)
    others = [frame for frame in frames if not frame.filename.startswith(_OWN_FOLDERS)]
    if not others:
        return "an unknown place"
    frame = others[-1]
    file = "/".join(frame.filename.replace(os.sep, "/").split("/")[-3:])
    return f"{file}:{frame.lineno}, {frame.name}: {(frame.line or '').strip()}"


def _device_of(inputs: tuple, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return check_device("device", device)
    devices = {leaf.device for _, leaf in leaves(inputs) if isinstance(leaf, Tensor)}
    cuda = sorted((d for d in devices if d.type == "cuda"), key=str)
    if not devices:
        raise ValueError("without tensors among example_inputs, pass device=")
    return cuda[0] if cuda else next(iter(devices))


def _specify(tree: Any) -> list[tuple[str, Any]]:
    """Path and description of each leaf: of a tensor its data type, shape and device."""
    return [
        (path, _describe(leaf) if isinstance(leaf, Tensor) else _Value(leaf))
        for path, leaf in leaves(tree)
    ]


def _describe(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)} on {tensor.device}"


class _Value:
    """A leaf that is no tensor."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Value):
            return False
        return self.value is other.value or bool(self.value == other.value)

    __hash__ = None

    def __str__(self) -> str:
        return f"the value {self.value!r}"


def _check_spec(what: str, captured: list, called: list) -> None:
    """Raises `ValueError` for the first leaf that differs."""
    before, now = [path for path, _ in captured], [path for path, _ in called]
    if before != now:
        missing = [path for path in before if path not in now]
        surplus = [path for path in now if path not in before]
        raise ValueError(
            f"{what}s have another structure than captured: missing {missing}, not expected "
            f"{surplus}; capture another function for them"
        )
    for (path, one), (_, other) in zip(captured, called, strict=True):
        if one != other:
            hint = "a graph has fixed shapes: capture one for each (CapturedBuckets, for batches)"
            if isinstance(one, _Value):
                hint = "numbers of the host are part of the graph: capture again, or pass a tensor"
            raise ValueError(
                f"{what} {path or 'itself'}: captured with {one}, called with {other}; {hint}"
            )


def _copy_leaves(into: Any, source: Any) -> None:
    """Copies every tensor of a tree into the tensor in its place."""
    for (_, mine), (_, theirs) in zip(leaves(into), leaves(source), strict=True):
        if isinstance(mine, Tensor) and mine.data_ptr() != theirs.data_ptr():
            mine.copy_(theirs)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Python's collector runs before, and not meanwhile: it may find an older graph in a cycle, and
    freeing that graph's memory breaks the capture under way.
    """
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
