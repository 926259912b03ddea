"""`Captured`: a function over tensors, recorded once as a CUDA graph and replayed.

One launch replaces all launches of the function. A replay runs the recorded kernels on the recorded
addresses: no Python runs, no shape and no number of the host can change. So inputs are copied into
static tensors, outputs are static tensors too, and whatever a call is given is compared with what
was recorded.

On a CPU there is nothing to record. The same checks are made and the same tensors are reused, so
that code which keeps an output for too long, or passes another shape, fails there as well.
"""

from __future__ import annotations

import atexit
import gc
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from specdec.arguments import check_device, check_integer, shown
from specdec.graphs.check import (
    changeable_tensors,
    parameter_versions,
    restore,
    why_different,
)
from specdec.graphs.rows import map_tensors
from specdec.graphs.sync import HostSyncError, no_host_sync
from specdec.graphs.tree import copy_into, leaves
from specdec.torch_names import clear_workspaces, communicators, end_allocation

_ONE_CAPTURE = threading.Lock()
"""CUDA allows one capture at a time in a process."""


class CaptureError(RuntimeError):
    """A function cannot be captured, or a replay does something else than the function; says which
    operation or which tensor is to blame, and what to do.
    """


class GraphPool:
    """Memory that several graphs share, and the stream that they are captured on.

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

    def run(self, function: Callable[[], Any], *, is_guarded: bool = False) -> Any:
        """Calls a function before it is captured, which loads its kernels and libraries. It runs on
        the current stream: nothing but captures runs on the pool's own, where a call that another
        thread makes meanwhile would become a part of the graph.

        Args:
            function: of no arguments.
            is_guarded: the call runs under `no_host_sync`.

        Raises:
            CaptureError: a guarded call would wait for the device.
        """
        device = torch.cuda.device(self.device) if self._is_cuda else nullcontext()
        try:
            with no_host_sync() if is_guarded else nullcontext(), device:
                return function()
        except HostSyncError as error:
            raise CaptureError(_explain_failure(error)) from error


class Captured:
    """A function over tensors as one CUDA graph; on a CPU the function, with the same checks.

    Inputs and outputs are nested tuples, lists, dictionaries and dataclasses of tensors. Other
    values among the inputs are part of what is captured and must be the same in every call.
    **Inputs are copied; outputs are the same tensors in every call, overwritten by the next one.**
    The function may read and write other tensors that live as long as the graph; it runs in
    inference mode. What else a replay touches, workspaces of libraries too, lies in the pool.

    Args:
        function: makes no host synchronisation, and allocates tensors of fixed shapes only.
        example_inputs: arguments of the shapes, data types and devices of all later calls.
        pool: memory to share with other graphs; `None` is memory of its own.
        warmup: real calls before the capture, which load kernels and libraries; the last one runs
            under `no_host_sync`. A function that changes tensors of its own changes them in these
            calls, too: call it with `pool.run` as often as needed, and pass 0.
        device: where the function runs; `None` is the device of the example inputs.
        is_guarded: as said of `warmup`; with 0 the first call on a CPU runs under `no_host_sync` (a
            capture raises an error at any operation that waits). Compiled code runs uncompiled
            under this guard.
        check: every call is made twice, replayed and eagerly from the same values, and all numbers
            are compared, bit for bit: outputs, inputs, and the tensors that are reached from the
            function (what it closes over, the object of a method, buffers of modules, globals that
            its code names). Parameters are not copied: one that is changed in place between two
            calls is read as it is by both, and a function that changes one raises an error. The
            numbers of a function that draws from torch's generators, or adds in any order
            (atomics), differ without a fault.

    Attributes:
        outputs: what the last call returned, `None` before.
        capture_seconds: how long the capture took, warm-up excluded.
        num_bytes: by how much the capture made the memory grow; 0 on a CPU.
        num_calls: how often it was called.

    Raises:
        CaptureError: the function waits for the device, or does something else that cannot be
            captured; a call raises it where the replay differs from the function.

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
        is_guarded: bool = True,
        check: bool = False,
    ):
        if not isinstance(example_inputs, tuple):
            got = shown(example_inputs)
            raise TypeError(f"example_inputs must be a tuple, got {got}; one argument x is (x,)")
        check_integer("warmup", warmup, 0)
        self._function, self._is_checked = function, check
        # A warm-up call is guarded; on a CPU, where nothing is captured, else the first one.
        self._guards_first = is_guarded and not warmup
        self.device = _device_of(example_inputs, device)
        self.pool = GraphPool(self.device) if pool is None else pool
        self.outputs: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self.capture_seconds, self.num_bytes, self.num_calls = 0.0, 0, 0
        self._is_released = False
        with torch.inference_mode():
            self._inputs = map_tensors(Tensor.clone, example_inputs)
            for index in range(warmup):
                self.pool.run(self._call, is_guarded=is_guarded and index == warmup - 1)
        self._capture()

    def __call__(self, *inputs: Any) -> Any:
        """Runs it on other values of the same shapes.

        Raises:
            ValueError: another structure, shape, data type or device than captured, or another
                value of something that is no tensor; names both sides.
            CaptureError: with `check=True`, the replay differs from the function; on a CPU also
                where the first call would wait for a device.
        """
        _check_alike("input", self._inputs, inputs)
        if self._is_released:
            self._capture()
        self.num_calls += 1
        with torch.inference_mode():
            copy_into(self._inputs, inputs)
            if self._is_checked:
                self._compare()
            else:
                self._replay()
        return self.outputs

    def _replay(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        elif self.outputs is None:
            self.outputs = self.pool.run(self._call, is_guarded=self._guards_first)
        else:
            outputs = self._call()
            _check_alike("output", self.outputs, outputs)
            copy_into(self.outputs, outputs)

    def _compare(self) -> None:
        """Replays, takes back what that changed, calls the function, and compares."""
        tensors = changeable_tensors(self._function, self._inputs)
        before = map_tensors(Tensor.clone, tensors)
        self._replay()
        replayed = map_tensors(Tensor.clone, _by_name(self.outputs, tensors))
        restore(tensors, before)
        outputs = self._call_that_keeps_parameters()
        _check_alike("output", self.outputs, outputs)
        called = _by_name(outputs, changeable_tensors(self._function, self._inputs))
        for name, found in replayed.items():
            if why := why_different(found, called.get(name)):
                raise CaptureError(
                    f"{name}: {why}, replayed and called; the function reads or writes something "
                    "that is not what it was at capture (a tensor bound to a new one, a number of "
                    "the host), or its numbers differ from call to call (torch's generators, sums "
                    "in any order)"
                )

    def _call_that_keeps_parameters(self) -> Any:
        """The function's own call; it has changed a parameter in the replay as well."""
        before = parameter_versions(self._function, self._inputs)
        outputs = self.pool.run(self._call)
        now = parameter_versions(self._function, self._inputs)
        for name, version in before.items():
            if now.get(name, version) != version:
                raise CaptureError(
                    f"the function changes the parameter {name} in place, which check=True cannot "
                    "take back, so it was changed twice in this call; make it a buffer or a plain "
                    "tensor, or leave check out"
                )
        return outputs

    def release(self) -> None:
        """Frees the graph; the next call captures it again, with other tensors as outputs.

        `torch.distributed.destroy_process_group()` calls this, and so does the end of the process,
        where a process group existed at capture: NCCL waits for graphs that hold its collectives.
        """
        self._graph, self.outputs = None, None
        self.pool.renew()
        self._is_released = True

    def _call(self) -> Any:
        return self._function(*self._inputs)

    def _capture(self) -> None:
        _release_before_communicators(self)
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
        torch.cuda.current_blas_handle()  # this thread's: none can be made during a capture
        try:
            with (
                _no_garbage_collection(),
                torch.inference_mode(),
                _no_graph_inside(),
                torch.cuda.graph(graph, self.pool.handle, **options),
                _own_workspaces(),
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
            raise CaptureError(_explain_failure(failure or error)) from (failure or error)
        self._graph = graph
        self.capture_seconds = time.perf_counter() - start
        self.num_bytes = max(0, torch.cuda.memory_reserved() - reserved)

    def _clean_up(self) -> None:
        """After a failed capture: allocator and random generator may count it as one under way."""
        index = self.device.index
        index = torch.cuda.current_device() if index is None else index
        with suppress(Exception):  # it was ended, or this version of torch has ended it
            end_allocation(index, self.pool.handle)
        with suppress(Exception):  # reported by the error that follows
            torch.cuda.synchronize()
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())  # the same numbers, in no capture
        self.pool.renew()


def _explain_failure(error: BaseException) -> str:
    """What a function did that cannot be captured, where, and what to do about it."""
    where = _place_of(error)
    text = str(error).strip().split("\n")[0]
    advice = "keep the decision on the device (torch.where, gather, masks), or do not capture it"
    if not isinstance(error, HostSyncError) and "captur" not in text.lower():
        advice = "it must allocate and compute in fixed shapes, without asking the host"
    elif "/transformers/" in where:
        advice = "a mask of four dimensions is used as it is (specdec/graphs/README.md)"
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


def _check_alike(what: str, captured: Any, called: Any) -> None:
    """Raises `ValueError` for the first leaf that is of another kind than the captured one."""
    before, now = dict(leaves(captured)), dict(leaves(called))
    if list(before) != list(now):
        missing = [path for path in before if path not in now]
        surplus = [path for path in now if path not in before]
        raise ValueError(
            f"{what}s have another structure than captured: missing {missing}, not expected "
            f"{surplus}; capture another function for them"
        )
    for path, one in before.items():
        kind, other = _kind_of(one), _kind_of(now[path])
        if kind is not other and not bool(kind == other):
            hint = "a graph has fixed shapes: capture one for each"
            if not isinstance(one, Tensor):
                hint = "numbers of the host are part of the graph: capture again, or pass a tensor"
            raise ValueError(
                f"{what} {path or 'itself'}: captured with {kind}, called with {other}; {hint}"
            )


def _by_name(outputs: Any, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """What a call may have changed, and what it returned."""
    return tensors | {f"output {path}".rstrip(): leaf for path, leaf in leaves(outputs)}


def _kind_of(leaf: Any) -> Any:
    """Data type, shape and device of a tensor, in words; other values are their own kind."""
    if not isinstance(leaf, Tensor):
        return leaf
    return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)} on {leaf.device}"


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


@contextmanager
def _no_graph_inside() -> Iterator[None]:
    """Raises RuntimeError at the replay of another graph, whose memory belongs to its owner."""
    replay = torch.cuda.CUDAGraph.replay

    def replay_outside(graph: torch.cuda.CUDAGraph) -> None:
        if torch.cuda.is_current_stream_capturing():  # of this thread; others may replay meanwhile
            raise RuntimeError(
                "it replays a graph of its own, whose memory is not this one's: compile without "
                "mode='reduce-overhead', and call the function in the place of its Captured"
            )
        replay(graph)

    torch.cuda.CUDAGraph.replay = replay_outside
    try:
        yield
    finally:
        torch.cuda.CUDAGraph.replay = replay


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """cuBLAS and cuBLASLt get their workspaces from the memory of the capture under way.

    torch keeps them by thread and stream, and whoever clears them frees what a graph still writes
    to: `torch.compile(mode="reduce-overhead")` does. So those that are there are given up before,
    and the capture allocates its own in its pool; and these are given up after, so that only graphs
    of this pool can get their memory. torch clears all or none, in torch 2.11 those of other
    threads too. Their memory goes back to the stream that they are used on, whose order keeps them
    valid, as long as it is not unmapped before their kernel is launched: nothing is between here.
    """
    clear_workspaces()
    try:
        yield
    finally:
        clear_workspaces()


def _release_before_communicators(captured: Captured) -> None:
    """Has a captured function, held weakly, released when its process groups are destroyed, or at
    exit; without a process group this does nothing.

    NCCL ends a communicator only after every graph that captured one of its operations is freed.
    With such a graph alive `torch.distributed.destroy_process_group()` never returns
    (pytorch#115388). It first calls `finalize()` of every member of `_world.comms`, whatever name
    it was imported by; torch offers no public hook. The destruction of one group
    (`destroy_process_group(group)`) makes no such call.
    """
    if not distributed_c10d.is_initialized():
        return
    members = communicators()
    for member in members:
        if isinstance(member, _LiveGraphs):
            break
    else:
        members.append(member := _LiveGraphs())
    member.captured.add(captured)


class _LiveGraphs:
    """What was captured while the process groups of now existed."""

    def __init__(self):
        self.captured: WeakSet[Captured] = WeakSet()
        atexit.register(self.finalize)

    def finalize(self) -> None:
        """Called by torch before it ends the communicators, and by Python at exit."""
        for captured in list(self.captured):
            captured.release()
