"""`no_host_sync`: raises an error where a GPU would wait for its host, on any device.

A step that passes under this guard on a CPU can be captured in a CUDA graph: its kernels, their
shapes and their addresses do not depend on data that the host would have to look at.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from specdec.torch_names import TorchDispatchMode, arguments_of

_SYNCING_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""What torch declares: item(), bool(), int(), nonzero, unique, equal, bincount and others."""
_SYNCING_OPS = {
    "aten.is_nonzero",
    "aten._assert_async",
    "aten.multinomial",  # asks whether the weights are sound
    "aten.normal.float_Tensor",  # asks whether the standard deviations are
    "aten.normal.Tensor_Tensor",
    "aten._linalg_check_errors",  # of inv, solve, cholesky, lu_factor, ldl_factor and others
    "aten.cholesky",
    "aten.linalg_eig",
    "aten.linalg_eigvals",
    "aten._linalg_eigvals",
    "aten._linalg_eigh",
    "aten._linalg_svd",
    "aten.linalg_pinv",
    "aten.linspace.Tensor_Tensor",  # read their ends
    "aten.linspace.Tensor_Scalar",
    "aten.linspace.Scalar_Tensor",
    "aten.logspace.Tensor_Tensor",
    "aten.logspace.Tensor_Scalar",
    "aten.logspace.Scalar_Tensor",
    "aten._coalesce",  # count what is not zero, as those below
    "aten._to_sparse",
    "aten._to_sparse_csr",
    "aten._to_sparse_csc",
    "aten._to_sparse_bsr",
    "aten._to_sparse_bsc",
}
"""What torch documents, or does in kernels that all devices share, and does not declare."""
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
        if packet in _INDEXING_OPS and _counts_a_mask(*args):
            raise HostSyncError(f"{func} with a boolean mask has a shape that depends on data")
        if packet not in _INDEXING_OPS and _waits(func, args, kwargs or {}):
            raise HostSyncError(f"{func} makes the host wait")
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


def _waits(func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether an operation reads its result on the host, before it returns."""
    names = {str(func.overloadpacket), str(func)}
    if _SYNCING_TAGS.intersection(func.tags) or names & _SYNCING_OPS:
        return True
    given = dict(zip(arguments_of(func), args, strict=False)) | kwargs
    if str(func.overloadpacket) == "aten.histc":  # without a range it looks for one
        return given.get("min", 0) == given.get("max", 0)
    return bool(given.get("check_errors"))


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

    It raises at `item()` and everything built on it, `tolist`, `numpy`, `cpu`, `allclose`,
    `nonzero`, boolean masks as indices, `unique` and other operations whose result shape depends on
    data, linear algebra that reports failures (`inv`, `solve`, `cholesky`, `svd`, ...; `inv_ex` and
    its like pass), printing, saving and pickling tensors, and copies between host and device other
    than from pinned memory.

    Known are the operations that torch declares or documents to wait. Another one whose kernel for
    a GPU waits passes on a CPU; on a GPU the capture raises an error.

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
