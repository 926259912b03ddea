"""Reads the files of a checkpoint folder without trusting them.

Nothing in a file is executed, nothing outside the folder is opened, and sizes are bounded before
anything is allocated. Which tensors there are is known from headers alone; values are read last.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.atomic import check_whole
from specdec.checkpoints.config_fields import ConfigFields
from specdec.lab.show.text import printable, printable_json

MAX_JSON_BYTES = 8 * 2**20
"""Largest configuration or safetensors header that is parsed."""

MAX_INDEX_BYTES = 32 * 2**20
"""Largest index of shards that is parsed; a target's own may list 100 000 tensors."""

MAX_TENSORS = 4096
"""Most tensors that a head may consist of."""

FLOATS = {"BF16", "F16", "F32", "F64"}
"""Types of weights, in safetensors' words."""

_TYPES = {
    **{torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16"},
    **{torch.int32: "I32", torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.float32: "F32", torch.float64: "F64"},
}
_PICKLE_RISK = (
    "pickled weights can carry code, which a bug in the unpickler could run: pass "
    "allow_pickle=True (command line: --allow-pickle) only for files whose origin you trust, "
    "better convert them to safetensors. They are read with torch.load(weights_only=True)"
)

Wanted = Callable[[str], bool]
"""Which of a checkpoint's tensors are read, by name."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor before its values are read: its name in the file, safetensors' name of its type
    (`"BF16"`), its shape, and a function that returns the values.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def as_stored(name: str, tensor: Tensor) -> StoredTensor:
    """A tensor in memory, as one of a file."""
    return StoredTensor(name, _TYPES[tensor.dtype], tuple(tensor.shape), tensor.detach)


class CheckpointFolder:
    """A checkpoint before any of its values is read; with `allow_pickle` also one in pickled
    files. Its `fields` are config.json; `ValueError` if that cannot be read safely. `files` are
    names of weight files that it may have in the place of the usual ones.
    """

    def __init__(self, path: Path, *, allow_pickle: bool = False, files: Sequence[str] = ()):
        self.path = path
        self._allow_pickle = allow_pickle
        self._files = ("model.safetensors", "pytorch_model.bin", *files)
        check_whole(path)
        self.fields = ConfigFields(read_json(path / "config.json"), str(path / "config.json"))

    def anew(self) -> CheckpointFolder:
        """The folder, with none of its fields read yet."""
        folder = copy(self)
        folder.fields = ConfigFields(self.fields.raw, self.fields.origin)
        return folder

    def tensors(self, wanted: Wanted | None = None) -> dict[str, StoredTensor]:
        """The wanted weights (`None`: all) by their names: `model.safetensors`, sharded with an
        index, or pickled. Of a sharded checkpoint only the files that hold a wanted tensor are
        opened, so that modules that a large target ships can be read.
        """
        for name in self._files:
            read_file = _read_safetensors if name.endswith(".safetensors") else _read_pickle
            whole, index = self.path / name, self.path / f"{name}.index.json"
            if not whole.exists() and not index.exists():
                continue
            if read_file is _read_pickle and not self._allow_pickle:
                raise ValueError(f"{self.path} holds its weights in {name}: {_PICKLE_RISK}")
            if not whole.exists():
                return _read_shards(index, read_file, wanted)
            found = read_file(inside(whole))
            return {name: found[name] for name in _only(wanted, found, f"{whole} holds")}
        names = sorted(printable(path.name) for path in self.path.iterdir())
        present, expected = ", ".join(names[:12]) or "nothing", ", no ".join(self._files)
        raise ValueError(f"{self.path} holds no {expected} and no index; it holds {present}")


def _only(wanted: Wanted | None, names: Iterable[str], where: str) -> list[str]:
    names = [name for name in names if wanted is None or wanted(name)]
    if len(names) > MAX_TENSORS:
        raise ValueError(f"{where} {len(names)} tensors; at most {MAX_TENSORS} are read")
    return names


def _read_shards(
    index: Path, read_file: Callable, wanted: Wanted | None
) -> dict[str, StoredTensor]:
    """Wanted tensors of the files that an index names, which must hold what the index lists."""
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
    names, tensors = _only(wanted, weight_map, f"{index} lists"), {}
    for shard in sorted({weight_map[name] for name in names}):
        found = read_file(inside(index.parent / shard))
        listed = {name for name, file in weight_map.items() if file == shard}
        if listed != found.keys():
            raise ValueError(
                f"{index.parent / shard} and {index.name} disagree on the tensors "
                f"{names_of(listed ^ found.keys())}"
            )
        tensors |= found
    return {name: tensors[name] for name in names}


def _read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The header of a safetensors file, which the library checks against the file's own size."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if length > MAX_JSON_BYTES:
        raise ValueError(
            f"{path} declares a header of {length} bytes; at most {MAX_JSON_BYTES} are read"
        )
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
            tensors = [
                StoredTensor(name, s.get_dtype(), tuple(s.get_shape()), partial(_value, path, name))
                for name, s in slices.items()
            ]
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or truncated: {printable(str(error))}") from error
    return _by_printable_names(path, tensors)


def _value(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(name)


def _by_printable_names(path: Path, tensors: list[StoredTensor]) -> dict[str, StoredTensor]:
    """Tensors by their names, or what of them can be printed; `ValueError` if two become one."""
    named = {printable(tensor.name): tensor for tensor in tensors}
    if len(named) < len(tensors):
        raise ValueError(f"{path} has names that differ in control characters only")
    return {name: replace(tensor, name=name) for name, tensor in named.items()}


def _read_pickle(path: Path) -> dict[str, StoredTensor]:
    """A flat dictionary of tensors from a pickled file; any other content raises ValueError."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler raises whatever damaged bytes lead to
        reason = printable(" ".join(str(error).split())[:120]) or type(error).__name__
        raise ValueError(f"{path} is damaged or holds more than tensors: {reason}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a dictionary of tensors, got {type(content).__name__}")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise ValueError(f"{path} must hold tensors by name, got {name!r}: {kind}")
        if tensor.dtype not in _TYPES or tensor.layout != torch.strided:
            raise ValueError(f"{path}: {name!r} is stored as {tensor.dtype}, {tensor.layout}")
    return _by_printable_names(path, [as_stored(name, t) for name, t in content.items()])


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Reads a JSON object; its strings become `printable`.

    Raises:
        ValueError: no such file (see `inside`), too large, not an object, NaN or infinity among its
            values, or a key that occurs twice (parsers disagree on which of them counts).
    """
    size = inside(path).stat().st_size
    if size > max_bytes:
        raise ValueError(f"{path} has {size} bytes; at most {max_bytes} are read")

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        if twice:
            raise ValueError(f"keys that occur twice: {names_of(twice)}")
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON number")

    try:
        options = {"object_pairs_hook": without_duplicates, "parse_constant": refuse}
        content = printable_json(json.loads(path.read_bytes(), **options))
    except RecursionError:
        raise ValueError(f"{path} is not valid JSON: too deeply nested") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {printable(str(error))}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a JSON object, got {type(content).__name__}")
    return content


def inside(path: Path) -> Path:
    """Resolves a file; `ValueError` unless it exists and lies in its own folder, links followed.

    A snapshot in Hugging Face's cache consists of links into its repository's own `blobs`, so
    there the repository's folder is the border.
    """
    border = path.parent.resolve()
    if border.parent.name == "snapshots" and border.parent.parent.name.startswith("models--"):
        border = border.parent.parent
    real = path.resolve()
    if not real.is_relative_to(border):
        raise ValueError(f"{path} lies outside of {border}; files must lie in the folder itself")
    if not real.is_file():
        raise ValueError(f"{path} does not exist")
    return real


def names_of(names: Iterable[str]) -> str:
    """A list of names for a message, sorted and cut at twelve."""
    shown = sorted(map(printable, names))
    more = f" and {len(shown) - 12} more" if len(shown) > 12 else ""
    return ", ".join(shown[:12]) + more
