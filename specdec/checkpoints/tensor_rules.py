"""What tensors of heads are called in files, and how they are stored there: rules of a `Layout`.

A rule turns a file's tensors into the head's (`read`) and the head's into a file's (`write`). The
rules of a record are applied in their order while reading, names before all others, and in the
reverse order while writing. Reading sees names, types and shapes; values are computed later.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.checkpoints.files import StoredTensor
from specdec.checkpoints.layout import Reading, Rule, Tensors, Values
from specdec.drafters.head.layer_config import LayerConfig


class Names(Rule, ABC):
    """A rule that changes names only."""

    @abstractmethod
    def ours(self, name: str, reading: Reading) -> str | None:
        """The head's name; `None` for a tensor that is not the head's."""

    def theirs(self, name: str, reading: Reading) -> str:
        """The name in a file."""
        return name

    def read(self, tensors: Tensors, reading: Reading) -> Tensors:
        """`ValueError` if two names mean the same."""
        result: Tensors = {}
        for name, stored in tensors.items():
            ours = self.ours(name, reading)
            if ours is None:
                continue
            if ours in result:
                both = f"{stored.name} and {result[ours].name}"
                raise ValueError(f"{both} are two names for one tensor")
            result[ours] = stored
        return result

    def write(self, tensors: Values, reading: Reading) -> Values:
        """Under the names of files."""
        return {self.theirs(name, reading): x for name, x in tensors.items()}


@dataclass(frozen=True)
class Named(Names):
    """How names begin, in files and in the head.

    Args:
        starts: of names in files, and in the head; the first that fits counts. `{depth}` stands for
            a number, and `{N+depth}` for that number counted from N, the target's decoder layers,
            on.
        is_all: names without such a start are not the head's.
    """

    starts: Mapping[str, str]
    is_all: bool = False

    def ours(self, name: str, reading: Reading | None = None) -> str | None:
        """See `Names`."""
        return _renamed(self.starts.items(), name, reading) or (None if self.is_all else name)

    def theirs(self, name: str, reading: Reading | None = None) -> str:
        """See `Names`."""
        turned = ((ours, theirs) for theirs, ours in self.starts.items())
        return _renamed(turned, name, reading) or name


def _renamed(starts: Iterable[tuple[str, str]], name: str, reading: Reading | None) -> str | None:
    """The name with the first start that fits exchanged; `None` if none does."""
    for pair in starts:
        if (depth := _depth(pair[0], name, reading)) is not None:
            start, new = (_filled(start, depth, reading) for start in pair)
            return new + name.removeprefix(start)
    return None


def _depth(start: str, name: str, reading: Reading | None) -> int | None:
    """The number in a name that begins so, 0 where the start has none; `None` for other names."""
    if "{" not in start:
        return 0 if name.startswith(start) else None
    before, counted, after = re.split(r"\{(N\+)?depth\}", start)
    found = re.match(rf"{re.escape(before)}(\d+){re.escape(after)}", name)
    if found is None:
        return None
    depth = int(found[1]) - (_num_layers(reading) if counted else 0)
    return depth if depth >= 0 else None


def _filled(start: str, depth: int, reading: Reading | None) -> str:
    if "{N+depth}" in start:
        return start.replace("{N+depth}", str(_num_layers(reading) + depth))
    return start.replace("{depth}", str(depth))


def _num_layers(reading: Reading) -> int:
    """N, of a configuration that is the target's."""
    return reading.fields.integer("num_hidden_layers", high=4096)


@dataclass(frozen=True)
class Prefixed(Names):
    """What all names begin with.

    Args:
        written: in a file that is written.
        also: what they may begin with beside it.
        bare: starts of names that have none.
    """

    written: str = ""
    also: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()

    def ours(self, name: str, reading: Reading | None = None) -> str:
        """See `Names`."""
        prefixes = tuple(prefix for prefix in (self.written, *self.also) if prefix)
        while name.startswith(prefixes):
            name = next(name.removeprefix(p) for p in prefixes if name.startswith(p))
        return name

    def theirs(self, name: str, reading: Reading | None = None) -> str:
        """See `Names`."""
        return name if self.bare and name.startswith(self.bare) else self.written + name


@dataclass(frozen=True)
class Ending(Names):
    """How a name ends, in files and in the head; `is_read_only` keeps the head's in files."""

    of_file: str
    of_head: str
    is_read_only: bool = False

    def ours(self, name: str, reading: Reading | None = None) -> str:
        """See `Names`."""
        is_so = name.endswith(self.of_file)
        return name.removesuffix(self.of_file) + self.of_head if is_so else name

    def theirs(self, name: str, reading: Reading | None = None) -> str:
        """See `Names`."""
        is_so = name.endswith(self.of_head) and not self.is_read_only
        return name.removesuffix(self.of_head) + self.of_file if is_so else name


class LaterNorms(Rule):
    """SGLang calls the norm of layers after the first `hidden_norm`, all others
    `input_layernorm`.
    """

    _NAME = re.compile(r"layers\.([1-9]\d*)\.hidden_norm\.weight")

    def read(self, tensors: Tensors, reading: Reading) -> Tensors:
        """See `Rule`."""
        result = dict(tensors)
        for name in tensors:
            found = self._NAME.fullmatch(name)
            usual = found and f"layers.{found[1]}.input_layernorm.weight"
            if found and usual not in tensors:
                result[usual] = result.pop(name)
        return result


@dataclass(frozen=True)
class Joined(Rule):
    """Tensors of the head that are one in files, along their first dimension.

    Args:
        theirs: a part of the one's name, `"qkv_proj."`.
        ours: what stands in the place of that part, in order, `("q_proj.", "k_proj.", "v_proj.")`.
        rows: (reading) -> rows of each; `None` where all have the same number.
    """

    theirs: str
    ours: tuple[str, ...]
    rows: Callable[[Reading], Sequence[int]] | None = None

    def read(self, tensors: Tensors, reading: Reading) -> Tensors:
        """Each is a slice of the whole."""
        result: Tensors = {}
        for name, stored in tensors.items():
            if self.theirs not in name:
                result[name] = stored
                continue
            start = 0
            for part, count in zip(self.ours, self._counts(stored, reading), strict=True):
                result[name.replace(self.theirs, part)] = _slice(stored, start, count)
                start += count
        return result

    def _counts(self, stored: StoredTensor, reading: Reading) -> Sequence[int]:
        total = stored.shape[0] if stored.shape else 0
        share = total // len(self.ours)
        counts = [share] * len(self.ours) if self.rows is None else list(self.rows(reading))
        if sum(counts) != total:
            parts = ", ".join(self.ours)
            raise ValueError(
                f"{reading.fields.origin}: {stored.name} {list(stored.shape)} joins {parts} of "
                f"{counts} rows, which are {sum(counts)} and not {total}"
            )
        return counts

    def write(self, tensors: Values, reading: Reading) -> Values:
        """The whole, of all parts."""
        result: Values = {}
        for name, tensor in tensors.items():
            part = next((part for part in self.ours if part in name), None)
            if part is None:
                result[name] = tensor
            elif part == self.ours[0]:
                names = [name.replace(part, each) for each in self.ours]
                result[name.replace(part, self.theirs)] = torch.cat([tensors[n] for n in names])
        return result


def _slice(stored: StoredTensor, start: int, count: int) -> StoredTensor:
    """A copy, since a view would keep the whole in memory."""
    shape = (count, *stored.shape[1:])
    return replace(stored, shape=shape, read=lambda: stored.read()[start : start + count].clone())


@dataclass(frozen=True)
class Stacked(Rule):
    """Tensors of files that are one in the head, along a new first dimension: `"up.{depth}."` of
    all numbers become `"up."`. Numbers must be 0, 1, ... without a gap, and shapes equal; others
    are left as they are, and will be reported as unexpected.

    Args:
        theirs: parts of a name, with `{depth}`; those of one number are joined in this order, along
            their first dimension, before numbers are stacked.
        ours: what stands in the place of that part.
    """

    theirs: tuple[str, ...]
    ours: str

    def read(self, tensors: Tensors, reading: Reading) -> Tensors:
        """See `Rule`."""
        result, found = dict(tensors), {}
        for name in tensors:
            for kind, part in enumerate(self.theirs):
                before, after = part.split("{depth}")
                pattern = rf"(.*{re.escape(before)})(\d+){re.escape(after)}(.*)"
                if (match := re.fullmatch(pattern, name)) is not None:
                    stem = match[1].removesuffix(before), match[3]
                    found.setdefault(stem, {})[int(match[2]), kind] = name
        for (before, after), names in found.items():
            order = [(i, k) for i in range(1 + max(names)[0]) for k in range(len(self.theirs))]
            members = [tensors[names[at]] for at in order if at in names]
            is_whole = len(members) == len(order)
            if is_whole and len({(t.shape, t.dtype) for t in members}) == 1:
                for name in names.values():
                    del result[name]
                result[before + self.ours + after] = _stacked(members, len(self.theirs))
        return result

    def write(self, tensors: Values, reading: Reading) -> Values:
        """One by one."""
        result: Values = {}
        for name, tensor in tensors.items():
            if not re.search(rf"(^|\.){re.escape(self.ours)}", name):
                result[name] = tensor
                continue
            for index, one in enumerate(tensor):
                for part, rows in zip(self.theirs, one.chunk(len(self.theirs)), strict=True):
                    result[name.replace(self.ours, part.format(depth=index))] = rows
        return result


def _stacked(members: list[StoredTensor], num_kinds: int) -> StoredTensor:
    """`[E, kinds * rows, columns]` of E * kinds matrices."""
    first = members[0]
    rows, *rest = first.shape
    shape = (len(members) // num_kinds, num_kinds * rows, *rest)

    def read() -> Tensor:
        return torch.stack([member.read() for member in members]).view(shape)

    return StoredTensor(first.name, first.dtype, shape, read)


@dataclass(frozen=True)
class Padded(Rule):
    """A table of another number of rows in files: it is cut, or has rows of zeros for ids that
    never occur.

    Args:
        name: the head's.
        rows: (reading) -> how many the file has, and how many the head.
    """

    name: str
    rows: Callable[[Reading], tuple[int, int]]

    def read(self, tensors: Tensors, reading: Reading) -> Tensors:
        """See `Rule`."""
        stored = tensors.get(self.name)
        if stored is None:
            return tensors
        own, count = self.rows(reading)
        if own == count or stored.shape[:1] != (own,):
            return tensors

        def read() -> Tensor:
            return F.pad(stored.read(), (0, 0, 0, count - own))

        return tensors | {self.name: replace(stored, shape=(count, *stored.shape[1:]), read=read)}


@dataclass(frozen=True)
class Shaped(Rule):
    """A vector that some files hold with fewer dimensions, or more, in front of it."""

    name: str
    num_dimensions: int

    def read(self, tensors: Tensors, reading: Reading) -> Tensors:
        """See `Rule`."""
        stored = tensors.get(self.name)
        if stored is None or not stored.shape or set(stored.shape[:-1]) - {1}:
            return tensors
        shape = (1,) * (self.num_dimensions - 1) + stored.shape[-1:]
        if stored.shape == shape:
            return tensors
        new = replace(stored, shape=shape, read=lambda: stored.read().reshape(shape))
        return tensors | {self.name: new}


_TURNED = re.compile(r".*\.self_attn\.(q|k)_(proj\.(weight|bias)|norm\.weight)")


def half_pairs(tensors: Tensors, layer: LayerConfig) -> Tensors:
    """Queries and keys whose rope turns channels (2i, 2i + 1) of a head, with channels in the order
    of a rope that turns (i, i + R / 2): their rows, their biases, and weights of norms per head.
    """
    turned = torch.arange(layer.rotary_width, device="cpu")
    rest = torch.arange(layer.rotary_width, layer.head_dim, device="cpu")
    order = torch.cat([turned[::2], turned[1::2], rest])

    def permuted(stored: StoredTensor) -> StoredTensor:
        def read() -> Tensor:
            return stored.read().unflatten(0, (-1, layer.head_dim))[:, order].flatten(0, 1)

        return replace(stored, read=read)

    return {n: permuted(x) if _TURNED.fullmatch(n) else x for n, x in tensors.items()}


def read_tensors(
    tensors: Tensors, rules: Iterable[Rule], reading: Reading, anybodys: Iterable[Rule] = ()
) -> Tensors:
    """Applies rules in their order, those of names first, and after these `anybodys`: so what is
    stored otherwise is known by the head's names.
    """
    rules = tuple(rules)
    for rule in (*_names_of(rules), *anybodys, *_others_of(rules)):
        tensors = rule.read(tensors, reading)
    return tensors


def write_tensors(tensors: Values, rules: Sequence[Rule], reading: Reading) -> Values:
    """Applies rules in the order of writing."""
    for rule in reversed((*_names_of(rules), *_others_of(rules))):
        tensors = rule.write(tensors, reading)
    return tensors


def _names_of(rules: Iterable[Rule]) -> list[Names]:
    return [rule for rule in rules if isinstance(rule, Names)]


def _others_of(rules: Iterable[Rule]) -> list[Rule]:
    return [rule for rule in rules if not isinstance(rule, Names)]


def is_named(name: str, rules: Iterable[Rule], reading: Reading) -> bool:
    """Whether a tensor of a file is one of the head's, as far as names say it."""
    return all((name := rule.ours(name, reading)) is not None for rule in _names_of(rules))


def attention_rows(reading: Reading) -> tuple[int, int, int]:
    """Rows of queries, keys and values, by the record's keys of their sizes, or HF's."""

    def size(name: str, key: str, usual: int | None = None) -> int:
        if f"layer.{name}" in reading.layout.fields:
            return reading[f"layer.{name}"]
        return reading.fields.integer(key, usual)

    heads = size("num_heads", "num_attention_heads")
    width = size("head_dim", "head_dim", max(size("hidden_size", "hidden_size") // heads, 1))
    pairs = size("num_kv_heads", "num_key_value_heads", heads)
    return heads * width, pairs * width, pairs * width
