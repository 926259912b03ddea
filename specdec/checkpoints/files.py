"""Reads the files of a checkpoint folder without trusting them.

Nothing in a file is executed, nothing outside the folder is opened, no JSON key may occur twice,
and sizes are bounded before anything is allocated. Which tensors there are is known from headers
alone; values are read last.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.checkpoints.config_fields import ConfigFields

MAX_JSON_BYTES = 8 * 2**20
"""Largest configuration or safetensors header that is parsed."""

MAX_INDEX_BYTES = 32 * 2**20
"""Largest index of shards that is parsed. A target's own may list 100 000 tensors."""

MAX_TENSORS = 4096
"""Most tensors that a head may consist of."""

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

_PICKLE_RISK = (
    "pickled weights can carry code, which a bug in the unpickler could run: pass "
    "allow_pickle=True (command line: --allow-pickle) only for files whose origin you trust, "
    "better convert them to safetensors. They are read with torch.load(weights_only=True)"
)


Wanted = Callable[[str], bool]
"""Which of a file's tensors are asked for, by name."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor before its values are read.

    Args:
        name: as the file calls it.
        dtype: safetensors' name of the type, `"BF16"` for instance.
        shape: its extents.
        read: returns the values.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


class CheckpointFolder:
    """A checkpoint before any of its values is read.

    Args:
        path: of the folder.
        allow_pickle: also read pickled `.bin` files, with `torch.load(weights_only=True)`.

    Attributes:
        fields: config.json.

    Raises:
        ValueError: no config.json, or one that cannot be read safely.
    """

    def __init__(self, path: Path, *, allow_pickle: bool = False):
        self.path = path
        self._allow_pickle = allow_pickle
        self.fields = ConfigFields(read_json(path / "config.json"), str(path / "config.json"))

    def tensors(self, wanted: Wanted | None = None) -> dict[str, StoredTensor]:
        """Tensors by their names in the file; Args and Raises as `list_tensors`."""
        return list_tensors(self.path, wanted, allow_pickle=self._allow_pickle)


def list_tensors(
    folder: Path, wanted: Wanted | None = None, *, allow_pickle: bool = False
) -> dict[str, StoredTensor]:
    """Finds the weights of a folder: `model.safetensors`, sharded with an index, or pickled.

    Args:
        folder: the checkpoint.
        wanted: which tensors; `None` for all. Of a sharded checkpoint only the files that hold a
            wanted tensor are opened, so that the modules that a large target ships can be read.
        allow_pickle: read `pytorch_model.bin` where there are no safetensors.

    Returns:
        The wanted tensors by name, at most `MAX_TENSORS`.

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
            raise ValueError(f"{folder} holds its weights in {name}: {_PICKLE_RISK}")
        if whole.exists():
            found = read_file(inside(folder, whole))
        else:
            found = _read_shards(folder, index, read_file, wanted)
        names = _only(wanted, found, f"{whole} holds")
        return {name: found[name] for name in names}
    present = ", ".join(sorted(path.name for path in folder.iterdir())[:12]) or "nothing"
    raise ValueError(
        f"{folder} holds no model.safetensors, no pytorch_model.bin and no index of either; it "
        f"holds {present}"
    )


def _only(wanted: Wanted | None, names: Iterable[str], where: str) -> list[str]:
    """The wanted ones of some names, which must not be too many."""
    names = [name for name in names if wanted is None or wanted(name)]
    if len(names) > MAX_TENSORS:
        raise ValueError(f"{where} {len(names)} tensors; at most {MAX_TENSORS} are read")
    return names


def _read_shards(
    folder: Path, index: Path, read_file: Callable, wanted: Wanted | None
) -> dict[str, StoredTensor]:
    """All tensors of the files that an index names for a wanted one; they must be those that the
    index lists.
    """
    weight_map = read_json(index, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map of tensor names to file names")
    for shard in weight_map.values():
        is_base_name = isinstance(shard, str) and Path(shard).name == shard and "\\" not in shard
        if not is_base_name or shard in ("", ".", ".."):
            raise ValueError(
                f"{index} names the file {shard!r}; only plain names of files in the same folder "
                "are followed"
            )
    tensors = {}
    for shard in sorted({weight_map[name] for name in _only(wanted, weight_map, f"{index} lists")}):
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
        name: StoredTensor(name, entry["dtype"], tuple(entry["shape"]), reader(name))
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
            raise ValueError(f"{path}: {name!r} has an impossible shape or offset: {entry}")
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
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a dictionary of tensors, got {type(content).__name__}")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(
                f"{path} must hold tensors by name, got {name!r}: {type(tensor).__name__}"
            )
        if tensor.dtype not in _TORCH_NAMES or tensor.layout != torch.strided:
            raise ValueError(f"{path}: {name!r} is stored as {tensor.dtype}, {tensor.layout}")
    return {
        name: StoredTensor(name, _TORCH_NAMES[t.dtype], tuple(t.shape), lambda t=t: t.detach())
        for name, t in content.items()
    }


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Reads a JSON object from a file that must lie in its own folder, links followed.

    Args:
        path: the file.
        max_bytes: largest file that is parsed.

    Raises:
        ValueError: no such file, too large, not an object, or a key that occurs twice (parsers
            disagree on which of them counts).
    """
    inside(path.parent, path)
    size = path.stat().st_size
    if size > max_bytes:
        raise ValueError(f"{path} has {size} bytes; at most {max_bytes} are read")
    return parse_json(path.read_bytes(), str(path))


def parse_json(data: bytes, origin: str) -> dict[str, Any]:
    """Parses a JSON object.

    Args:
        data: its text.
        origin: what to call it in a message.

    Raises:
        ValueError: not an object, NaN or infinity among its values, or a key that occurs twice.
    """

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if twice:
            raise ValueError(f"keys that occur twice: {names_of(twice)}")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON number")

    try:
        content = json.loads(data, object_pairs_hook=without_duplicates, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{origin} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{origin} must be a JSON object, got {type(content).__name__}")
    return content


def names_of(names: Iterable[str]) -> str:
    """A list of names for a message, sorted and cut at twelve."""
    shown = sorted(names)
    more = f" and {len(shown) - 12} more" if len(shown) > 12 else ""
    return ", ".join(shown[:12]) + more


def inside(folder: Path, path: Path) -> Path:
    """Resolves a file that must exist and lie inside a folder once links are followed.

    A snapshot in Hugging Face's cache consists of links into its repository's own `blobs`, so
    there the repository's folder is the border.

    Raises:
        ValueError: it does not exist, or lies elsewhere.
    """
    border = folder.resolve()
    if border.parent.name == "snapshots" and border.parent.parent.name.startswith("models--"):
        border = border.parent.parent
    real = path.resolve()
    if not real.is_relative_to(border):
        raise ValueError(f"{path} lies outside of {border}; files must lie in the folder itself")
    if not real.is_file():
        raise ValueError(f"{path} does not exist")
    return real
