"""Cases and checks for `ragged_attention`, the same for the interpreter and for a GPU.

The oracle is the definition, in float64 over the same numbers. Every slot that no query may read
holds NaN: those at or beyond a row's length, and the padding slot.
"""

from dataclasses import dataclass, replace

import torch
from kernel_cases import on_gpu
from torch import Tensor

from specdec.kernels import AttentionOptions
from specdec.kernels.attention.reference import ragged_attention

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Root mean square error over that of the oracle: a few roundings of weights and result."""


@dataclass(frozen=True)
class Sizes:
    """Rows, queries per row, heads of keys, query heads per head of keys, widths, slots."""

    rows: int = 2
    queries: int = 4
    kv_heads: int = 2
    group: int = 2
    width: int = 16
    value_width: int = 16
    slots: int = 64


@dataclass(frozen=True)
class Case:
    """The arguments of `ragged_attention`."""

    query: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor
    options: AttentionOptions

    @property
    def arguments(self) -> tuple:
        return self.query, self.keys, self.values, self.slots, self.options

    def oracle(self) -> Tensor:
        """`[B, N, Hq, Dv]` float64, by the definition."""
        *states, slots, options = self.arguments
        sinks = None if options.sinks is None else options.sinks.double()
        wide = (tensor.double() for tensor in states)
        return ragged_attention(*wide, slots, options._replace(sinks=sinks))

    def cuda(self) -> "Case":
        """The same case on a GPU; keys and values are laid out by slot there, too."""
        keys, values = (t.transpose(1, 2).contiguous().cuda() for t in (self.keys, self.values))
        moved = on_gpu((self.query, self.slots, self.options))
        return Case(moved[0], keys.transpose(1, 2), values.transpose(1, 2), *moved[1:])


def random_case(
    sizes: Sizes,
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
    lengths: list[int] | None = None,
    forgets: bool = False,
    **options,
) -> Case:
    """A window after rows of given or random lengths (the window's included).

    Args:
        sizes: of all tensors.
        seed: of all numbers.
        dtype: of states and sinks.
        lengths: by row.
        forgets: whether each row sends a random number of its last queries to the padding slot,
            some rows all of them.
        options: of `AttentionOptions`; `has_sinks` and `has_mask` for random ones.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def random(*shape: int, high: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    s, count = sizes, sizes.queries
    heads = s.kv_heads * s.group
    ends = count + random(s.rows, high=s.slots - count + 1)
    if lengths is not None:
        ends = torch.tensor(lengths)
    slots = ends[:, None] - count + torch.arange(count)
    if forgets:
        slots = slots.masked_fill(torch.arange(count) >= random(s.rows, 1, high=count + 1), s.slots)
    keys = normal(s.rows, s.slots + 1, s.kv_heads, s.width)
    values = normal(s.rows, s.slots + 1, s.kv_heads, s.value_width)
    real_ends = torch.where(slots < s.slots, slots + 1, 0).amax(1, keepdim=True)
    is_dead = torch.arange(s.slots + 1) >= real_ends
    keys[is_dead], values[is_dead] = torch.nan, torch.nan
    if options.pop("has_sinks", False):
        options["sinks"] = normal(heads)
    if options.pop("has_mask", False):
        options["window_visible"] = random(s.rows, count, count, high=2) == 1
    query = normal(s.rows, count, heads, s.width).transpose(1, 2)
    by_head = (states[:, : s.slots].transpose(1, 2) for states in (keys, values))
    return Case(query, *by_head, slots, AttentionOptions(**options))


def ancestors(parents: list[int]) -> Tensor:
    """`[N, N]` bool: a node of a tree sees itself and its ancestors."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def with_visible(case: Case, visible: Tensor) -> Case:
    """The same case with a mask `[N, M]` of its own in every row."""
    visible = visible.expand(len(case.slots), -1, -1)
    return replace(case, options=case.options._replace(window_visible=visible))


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """In root mean square; NaN if a number is."""
    theirs = theirs.double()
    return float((ours.double() - theirs).square().mean().sqrt() / theirs.square().mean().sqrt())


def assert_near(ours: Tensor, case: Case) -> None:
    """The result is the oracle's up to rounding, and exactly 0 for queries to forget."""
    theirs = case.oracle()
    assert ours.shape == theirs.shape
    assert ours.dtype == case.query.dtype
    is_real = case.slots < case.keys.shape[2]
    assert bool((ours[~is_real] == 0).all())
    if bool(theirs.any()):
        assert relative_error(ours, theirs) <= TOLERANCE[ours.dtype]
    else:
        assert not bool(ours.any())
