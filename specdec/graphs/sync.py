"""`no_host_sync`: refuses what would make a GPU wait for its host, on any device.

A step that passes under this guard on a CPU can be captured in a CUDA graph: its kernels, their
shapes and their addresses do not depend on data that the host would have to look at.
"""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_SYNCING_OPS = {
    "aten._local_scalar_dense",  # item(), bool(), int(), float(), if tensor:
    "aten.nonzero",
    "aten.masked_select",
    "aten._unique2",
    "aten.unique_dim",
    "aten.unique_consecutive",
    "aten.equal",
    "aten.allclose",
    "aten.histc",  # asks for the range
    "aten.multinomial",  # asks whether the weights are sound
    "aten.is_nonzero",
    "aten.bincount",
    "aten.repeat_interleave.Tensor",
    "aten._assert_async",
}
_INDEXING_OPS = {"aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_"}
_COPYING_OPS = {"aten._to_copy", "aten.copy_", "aten.lift_fresh"}
_METHODS = {
    **dict.fromkeys(("tolist", "numpy", "cpu", "__array__", "item"), "copies a tensor to the host"),
    **dict.fromkeys(("__repr__", "__str__", "__format__"), "copies a tensor, to print it"),
    **dict.fromkeys(("__reduce_ex__", "storage", "untyped_storage"), "is how a tensor is saved"),
}
"""Methods that read a CPU tensor's memory and so never reach the dispatcher."""


class HostSyncError(RuntimeError):
    """An operation would have synchronised the device with its host."""


class _RefuseHostMethods(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in _METHODS and args and isinstance(args[0], Tensor):
            raise HostSyncError(f"Tensor.{name}() {_METHODS[name]}")
        return func(*args, **(kwargs or {}))


class _RefuseSyncingOps(TorchDispatchMode):
    def __init__(self, shapes: list):
        super().__init__()
        self._shapes = shapes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = str(func.overloadpacket)
        if packet in _SYNCING_OPS or str(func).removesuffix(".default") in _SYNCING_OPS:
            raise HostSyncError(f"{func} makes the host wait")
        if packet in _INDEXING_OPS and _counts_a_mask(*args):
            raise HostSyncError(f"{func} with a boolean mask has a shape that depends on data")
        if packet in _COPYING_OPS and _crosses_the_bus(packet, args, kwargs or {}):
            raise HostSyncError(f"{func} copies between host and device, and waits for it")
        with self:  # in inference mode composite operations arrive whole: look inside
            out = func.decompose(*args, **(kwargs or {}))
        if out is not NotImplemented:
            return out
        out = func(*args, **(kwargs or {}))
        outputs = out if isinstance(out, tuple | list) else (out,)
        self._shapes += [(str(func), tuple(o.shape)) for o in outputs if isinstance(o, Tensor)]
        return out


def _counts_a_mask(
    tensor: Tensor, indices: list, value: Tensor | None = None, accumulate: bool = False, *unused
) -> bool:
    """Whether an indexing operation has to count the true elements of a mask; it has not where one
    number of the host is written (`x[mask] = 0.0`), for which torch calls `masked_fill_`.
    """
    found = [index for index in indices if isinstance(index, Tensor)]
    if not any(index.dtype in (torch.bool, torch.uint8) for index in found):
        return False
    is_number = value is not None and value.numel() == 1 and value.device.type == "cpu"
    return not (is_number and len(found) == 1 and not accumulate)


def _crosses_the_bus(packet: str, args: tuple, kwargs: dict) -> bool:
    """Whether a copy has one end on a CPU, in memory that is not pinned, and the other on a GPU."""
    if packet == "aten.lift_fresh":  # torch.tensor(..., device="cuda"): the numbers are the host's
        return args[0].is_cuda
    source = args[1] if packet == "aten.copy_" else args[0]
    goal = args[0].device if packet == "aten.copy_" else kwargs.get("device") or source.device
    kinds = {torch.device(goal).type, source.device.type}
    if kinds != {"cpu", "cuda"}:
        return False
    return not (kwargs.get("non_blocking") and source.device.type == "cpu" and source.is_pinned())


class no_host_sync:  # noqa: N801 - a context manager, used like a function (as torch.no_grad)
    """Raises `HostSyncError` at the first operation that would synchronise a device with its host.

    Refused are `item()` and everything built on it, `tolist`, `numpy`, `cpu`, `allclose`,
    `nonzero`, boolean masks as indices, `unique` and other operations whose result shape depends on
    data, printing, saving and pickling tensors, and copies between host and device other than from
    pinned memory.

    What passes through neither the dispatcher nor `__torch_function__` cannot be seen:
    `torch.cuda.synchronize()`, events and streams that are waited for, memory read through
    `data_ptr()` or DLPack. On a CPU `x.to("cpu")` does nothing, so it passes there, and so does
    `x[mask] = value` with a tensor of one element, which on a GPU passes only for a Python number.

    Attributes:
        shapes: the (operation, result shape) pairs seen, in order: two runs of a step that agree
            here allocate the same tensors.

    Example:
        >>> with no_host_sync() as seen:
        ...     y = torch.ones(3).cumsum(0)
        >>> seen.shapes[-1]
        ('aten.cumsum.default', (3,))
        >>> with no_host_sync():
        ...     float(y.sum())
        Traceback (most recent call last):
            ...
        specdec.graphs.sync.HostSyncError: aten._local_scalar_dense.default makes the host wait
    """

    def __init__(self):
        self.shapes: list[tuple[str, tuple[int, ...]]] = []

    def __enter__(self) -> "no_host_sync":
        self._modes = _RefuseHostMethods(), _RefuseSyncingOps(self.shapes)
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
