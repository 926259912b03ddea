"""Finds and reads the weights of a checkpoint folder without trusting them.

Nothing in a file is executed, nothing outside the folder is opened, and sizes are bounded before
anything is allocated. What tensors there are is known from headers alone; values are read last.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.drafters.checkpoints.safe_json import (
    MAX_JSON_BYTES,
    inside,
    names_of,
    parse_json,
    read_json,
)

MAX_TENSORS = 4096
"""Most tensors that a drafter may consist of."""

MAX_SIZE = 2**40
"""Largest extent of a tensor along one dimension."""

ITEM_BYTES = {
    **{"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8},
    **{"F16": 2, "BF16": 2, "F32": 4, "F64": 8},
}
"""Types that are read, by their safetensors names, and bytes per element."""

_TORCH_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
}

PICKLE_RISK = (
    "pickled weights can carry code, which a bug in the unpickler could run: pass "
    "allow_pickle=True (command line: --allow-pickle) only for files whose origin you trust, "
    "better convert them to safetensors. They are read with torch.load(weights_only=True)"
)


@dataclass(frozen=True)
class StoredTensor:
    """What a file says about a tensor before its values are read.

    Args:
        dtype: safetensors' name of the type, `"BF16"` for instance.
        shape: its extents.
        read: fetches the values.
    """

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def list_tensors(folder: Path, *, allow_pickle: bool = False) -> dict[str, StoredTensor]:
    """Finds the weights of a folder: `model.safetensors`, sharded with an index, or pickled.

    Args:
        folder: the checkpoint.
        allow_pickle: read `pytorch_model.bin` where there are no safetensors.

    Returns:
        Every tensor by its name.

    Raises:
        ValueError: no weights, weights in pickled files only without `allow_pickle`, an index that
            points elsewhere or is incomplete, or a damaged file.
    """
    for name, read_file in (
        ("model.safetensors", _read_safetensors),
        ("pytorch_model.bin", _read_pickle),
    ):
        whole, index = folder / name, folder / f"{name}.index.json"
        if not whole.exists() and not index.exists():
            continue
        if read_file is _read_pickle and not allow_pickle:
            raise ValueError(f"{folder} holds its weights in {name}: {PICKLE_RISK}")
        if whole.exists():
            return read_file(inside(folder, whole))
        return _read_shards(folder, index, read_file)
    present = ", ".join(sorted(path.name for path in folder.iterdir())[:12]) or "nothing"
    raise ValueError(
        f"{folder} holds no model.safetensors, no pytorch_model.bin and no index of either; it "
        f"holds {present}"
    )


def _read_shards(folder: Path, index: Path, read_file: Callable) -> dict[str, StoredTensor]:
    """Tensors of every file that an index names, which must be those that the index lists."""
    weight_map = read_json(index, folder=folder).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map of tensor names to file names")
    if len(weight_map) > MAX_TENSORS:
        raise ValueError(f"{index} lists {len(weight_map)} tensors; at most {MAX_TENSORS} are read")
    for shard in weight_map.values():
        is_base_name = isinstance(shard, str) and Path(shard).name == shard and "\\" not in shard
        if not is_base_name or shard in ("", ".", ".."):
            raise ValueError(
                f"{index} names the file {shard!r}; only plain names of files in the same folder "
                "are followed"
            )
    tensors = {}
    for shard in sorted(set(weight_map.values())):
        listed = {name for name, file in weight_map.items() if file == shard}
        found = read_file(inside(folder, folder / shard))
        if listed != found.keys():
            raise ValueError(
                f"{folder / shard} and {index.name} disagree on the tensors "
                f"{names_of(listed ^ found.keys())}"
            )
        tensors |= found
    return tensors


def _read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The header of a safetensors file, checked against the file's own size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if length > MAX_JSON_BYTES:
            raise ValueError(
                f"{path} declares a header of {length} bytes; at most {MAX_JSON_BYTES} are read"
            )
        header = file.read(length)
    if len(start) < 8 or len(header) < length:
        raise ValueError(f"{path} is truncated: it ends inside its header ({size} bytes)")
    entries = parse_json(header, f"the header of {path}")
    entries.pop("__metadata__", None)
    if len(entries) > MAX_TENSORS:
        raise ValueError(f"{path} holds {len(entries)} tensors; at most {MAX_TENSORS} are read")
    _check_layout(path, entries, size - 8 - length)

    def reader(name: str) -> Callable[[], Tensor]:
        def read() -> Tensor:
            try:
                with safe_open(path, framework="pt") as file:
                    return file.get_tensor(name)
            except SafetensorError as error:
                raise ValueError(f"{path} is damaged: {error}") from error

        return read

    return {
        name: StoredTensor(entry["dtype"], tuple(entry["shape"]), reader(name))
        for name, entry in entries.items()
    }


def _check_layout(path: Path, entries: dict[str, Any], num_bytes: int) -> None:
    """Raises `ValueError` unless the entries tile the file's data, each as large as its shape."""
    spans = []
    for name, entry in entries.items():
        try:
            dtype, shape = entry["dtype"], entry["shape"]
            begin, end = entry["data_offsets"]
        except (TypeError, KeyError, ValueError) as error:
            raise ValueError(f"{path}: the entry of {name!r} is damaged") from error
        sizes = shape if isinstance(shape, list) else [None]
        if not all(type(n) is int and 0 <= n < MAX_SIZE for n in [*sizes, begin, end]):
            raise ValueError(f"{path}: {name!r} has an impossible shape or place: {entry}")
        if dtype not in ITEM_BYTES:
            raise ValueError(
                f"{path}: {name!r} is stored as {dtype!r}; quantised heads are not supported "
                f"(expected one of {', '.join(ITEM_BYTES)})"
            )
        if end - begin != math.prod(sizes) * ITEM_BYTES[dtype]:
            raise ValueError(f"{path}: {name!r} has shape {shape} but {end - begin} bytes of data")
        spans.append((begin, end))
    ends = [0, *(end for _, end in sorted(spans))]
    if [begin for begin, _ in sorted(spans)] != ends[:-1]:
        raise ValueError(f"{path}: its tensors overlap or leave holes")
    if ends[-1] != num_bytes:
        problem = "is truncated" if ends[-1] > num_bytes else "has trailing bytes"
        raise ValueError(f"{path} {problem}: {ends[-1]} bytes of tensors, {num_bytes} in the file")


def _read_pickle(path: Path) -> dict[str, StoredTensor]:
    """A flat dictionary of tensors from a `.bin` file; whatever else it holds is refused."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises whatever damaged bytes lead to
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise ValueError(f"{path} is damaged or holds more than tensors: {reason}") from error
    if not isinstance(content, dict) or len(content) > MAX_TENSORS:
        raise ValueError(f"{path} must hold a dictionary of at most {MAX_TENSORS} tensors")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(
                f"{path} must hold tensors by name, got {name!r}: {type(tensor).__name__}"
            )
        if tensor.dtype not in _TORCH_NAMES or tensor.layout != torch.strided:
            raise ValueError(f"{path}: {name!r} is stored as {tensor.dtype}, {tensor.layout}")
    return {
        name: StoredTensor(_TORCH_NAMES[t.dtype], tuple(t.shape), lambda t=t: t.detach())
        for name, t in content.items()
    }
