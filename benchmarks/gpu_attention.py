"""Ragged attention against the memory, and against PyTorch's attention with a dense mask, on a GPU.

    python benchmarks/gpu_attention.py
    python benchmarks/gpu_attention.py --sweep

The window of a chain, 4 queries, with 32 query heads over 8 heads of keys of width 128, bfloat16.
Both sides, and a device-to-device copy of as many bytes as the roof, are captured in CUDA graphs
over the same input sets, which together exceed the cache, and are replayed in turn; figures are
medians over rounds, of ratios within a round. The dense mask is made beforehand. Bytes are those of
keys and values in the slots that the rows have filled. "eager" is ours outside a graph: what a
launch costs on the host shows there.

`--sweep` times the cuts of the work and prints the fastest.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from gpu_kernels import copies, graph_of, milliseconds, num_launches
from torch import Tensor

from specdec.kernels import attends_raggedly, ragged_attention, write_slots
from specdec.kernels.attention import triton as kernels
from specdec.target.attention import window_mask
from specdec.target.cache import Window, round_up

QUERIES, HEADS, KV_HEADS, WIDTH, DTYPE = 4, 32, 8, 128, torch.bfloat16
SLOT_BYTES = 2 * KV_HEADS * WIDTH * DTYPE.itemsize
SET_BYTES, MAX_SETS = 1e9, 96  # many times the cache; or enough launches to time
TOLERANCE = 0.02  # of results, in rms: bfloat16 rounds twice, in other places


class Shape(NamedTuple):
    """What is attended over; `lengths` include the window."""

    name: str
    lengths: list[int]
    num_slots: int


class Inputs(NamedTuple):
    """Arguments of both sides."""

    query: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor
    mask: Tensor


def same(rows: int, length: int, num_slots: int | None = None) -> Shape:
    """Rows of one length, in a cache of so many slots."""
    return Shape(f"{rows} x {length}", [length] * rows, num_slots or round_up(length))


MIXED = [round(8192 * (i + 1) / 16) for i in range(16)]
SHAPES = [
    *(same(rows, length) for rows in (1, 8, 16) for length in (512, 4096, 8192)),
    same(1, 512, 32768),
    same(16, 512, 8192),
    Shape("16 x 512..8192", MIXED, 8192),
]


def inputs(shape: Shape) -> Inputs:
    """Random, laid out as a `SlotCache` does."""
    rows, size = len(shape.lengths), (shape.num_slots + 1, KV_HEADS, WIDTH)
    query = torch.randn(rows, QUERIES, HEADS, WIDTH, device="cuda", dtype=DTYPE).transpose(1, 2)
    keys, values = (
        torch.randn(rows, *size, device="cuda", dtype=DTYPE)[:, :-1].transpose(1, 2) for _ in "kv"
    )
    ends = torch.tensor(shape.lengths, device="cuda")[:, None]
    slots = ends - QUERIES + torch.arange(QUERIES, device="cuda")
    mask = window_mask(Window(slots, shape.num_slots), slots.shape[1], DTYPE)
    return Inputs(query, keys, values, slots, mask)


def ours(data: Inputs, tiles: kernels.Tiles | None = None) -> Tensor:
    """The library's operation, or the kernels with another cut."""
    if tiles is None:
        return ragged_attention(*data[:4])
    return kernels.ragged_attention(*data[:4], tiles=tiles)


def theirs(data: Inputs) -> Tensor:
    """PyTorch's attention with a dense mask."""
    query, keys, values, _, mask = data
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)


def make_sets(shape: Shape) -> tuple[list[Inputs], float]:
    """Input sets, and the bytes of one that must be read."""
    num_bytes = sum(shape.lengths) * SLOT_BYTES
    allocated = len(shape.lengths) * shape.num_slots * SLOT_BYTES
    count = max(2, min(MAX_SETS, round(SET_BYTES / num_bytes), int(40e9 / allocated)))
    return [inputs(shape) for _ in range(count)], num_bytes


def check(data: Inputs) -> float:
    """The difference between both sides, in rms over that of the result; too much ends the run."""
    one, other = ours(data).double(), theirs(data).double()
    error = float((one - other).square().mean().sqrt() / other.square().mean().sqrt())
    if not error < TOLERANCE:
        raise SystemExit(f"the results differ by {error:.2g} in rms: do not believe the times")
    return error


def eager_milliseconds(sets: list[Inputs]) -> float:
    """Per call, launched from the host one after the other."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for data in sets:
        ours(data)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / len(sets)


def measure(shape: Shape, rounds: int) -> str:
    """A line of the table."""
    sets, num_bytes = make_sets(shape)
    assert attends_raggedly(sets[0].query, sets[0].keys)
    error, count = check(sets[0]), len(sets)
    sides: list[list[Callable]] = [
        [lambda data=data: ours(data) for data in sets],
        [lambda data=data: theirs(data) for data in sets],
        copies(num_bytes, count),
    ]
    graphs = [graph_of(ops) for ops in sides]
    times = [[milliseconds(graph, count) for graph in graphs] for _ in range(rounds + 1)][1:]
    eager = statistics.median(eager_milliseconds(sets) for _ in range(5))
    mine, dense, copy = (statistics.median(column) for column in zip(*times, strict=True))
    faster = statistics.median(t[1] / t[0] for t in times)
    of_copy = statistics.median(t[2] / t[0] for t in times)
    splits = kernels.default_tiles(*sets[0][:3]).num_splits
    runs = num_launches(lambda: ours(sets[0]))
    return (
        f"{shape.name:<15}{shape.num_slots:>6}{splits:>7}{runs:>5}{mine * 1e3:>9.1f}"
        f"{eager * 1e3:>8.1f}{dense * 1e3:>9.1f}{faster:>8.1f} x{copy * 1e3:>8.1f}"
        f"{num_bytes / mine / 1e6:>8.0f}{of_copy:>8.1%}{error:>9.1e}"
    )


def measure_write(rows: int, rounds: int) -> str:
    """A line of the table of cache writes: one window of one layer, by both ways."""
    count, num_slots = 64, 4096
    storage = [torch.zeros(rows, num_slots, KV_HEADS, WIDTH, device="cuda", dtype=DTYPE)] * 2
    made = torch.randn(count, rows, QUERIES, KV_HEADS, WIDTH, device="cuda", dtype=DTYPE)
    slots = torch.randint(0, num_slots - QUERIES, (rows, 1), device="cuda")
    slots = slots + torch.arange(QUERIES, device="cuda")
    lines = (slots + num_slots * torch.arange(rows, device="cuda")[:, None]).flatten()

    def by_copies(states: Tensor) -> None:
        for table in storage:
            table.flatten(0, 1).index_copy_(0, lines, states.transpose(1, 2).flatten(0, 1))

    by_head = list(made.transpose(2, 3))
    sides = [
        [lambda s=s: write_slots(*storage, s, s, slots) for s in by_head],
        [lambda s=s: by_copies(s) for s in by_head],
    ]
    graphs = [graph_of(ops) for ops in sides]
    times = [[milliseconds(graph, count) for graph in graphs] for _ in range(rounds + 1)][1:]
    one, other = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
    runs = [num_launches(side[0]) for side in sides]
    return f"{rows:>4}{one:>9.2f}{runs[0]:>5}{other:>13.2f}{runs[1]:>5}{other / one:>8.1f} x"


def cuts(shape: Shape, default: kernels.Tiles) -> list[kernels.Tiles]:
    """What `--sweep` tries: tiles, warps, stages, splits for 1, 2 and 4 programs per processor."""
    heads = len(shape.lengths) * KV_HEADS
    most = -(-max(shape.lengths) // 32)
    splits = {
        min(max(round(per * kernels.num_processors(torch.device("cuda", 0)) / heads), 1), most)
        for per in (1, 2, 4)
    }
    grid = itertools.product((32, 64, 128), (4, 8), (2, 3, 4), sorted(splits))
    found = [kernels.Tiles(slots, 16, warps, stages, n) for slots, warps, stages, n in grid]
    return list(dict.fromkeys([default, *found]))


def sweep(shape: Shape, rounds: int, best: int) -> list[str]:
    """The fastest cuts for a shape, and the default's."""
    sets, num_bytes = make_sets(shape)
    default = kernels.default_tiles(*sets[0][:3])
    expected, times = ours(sets[0]).double(), {}
    for tiles in cuts(shape, default):
        try:
            out = ours(sets[0], tiles).double()
            graph = graph_of([lambda data=data, t=tiles: ours(data, t) for data in sets])
        except Exception as error:  # too much shared memory for this cut, say
            print(f"{shape.name}: {tiles} failed: {str(error).splitlines()[0][:90]}")
            continue
        error = float((out - expected).square().mean().sqrt() / expected.square().mean().sqrt())
        if not error < TOLERANCE:
            raise SystemExit(f"{tiles} differs by {error:.2g}: do not believe the times")
        times[tiles] = statistics.median(milliseconds(graph, len(sets)) for _ in range(rounds))
        del graph
    ranked = sorted(times, key=times.get)
    rows = [*ranked[:best], default]
    return [
        f"{shape.name:<15}{t.block_slots:>6}{t.num_warps:>6}{t.num_stages:>7}{t.num_splits:>7}"
        f"{times[t] * 1e3:>9.1f}{num_bytes / times[t] / 1e6:>8.0f}"
        f"  {'default, rank ' + str(1 + ranked.index(t)) if t == default else ''}"
        for t in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sweep", action="store_true", help="time other cuts of the work")
    parser.add_argument("--best", type=int, default=5, help="of a sweep, how many to print")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.sweep:
        chosen = [same(1, 512), same(1, 8192), same(16, 4096)]
        lines = []
        for shape in chosen:
            lines += sweep(shape, min(args.rounds, 7), args.best)
            torch.cuda.empty_cache()
        print(f"\n{'rows x length':<15}{'tile':>6}{'warps':>6}{'stages':>7}{'splits':>7}", end="")
        print(f"{'us':>9}{'GB/s':>8}\n" + "\n".join(lines))
        return
    lines = []
    for shape in SHAPES:
        lines.append(measure(shape, args.rounds))
        torch.cuda.empty_cache()
    writes = [measure_write(rows, args.rounds) for rows in (1, 8, 16)]
    print(
        f"\n{torch.cuda.get_device_name()}, torch {torch.__version__}; N = {QUERIES}, {HEADS} heads"
    )
    print(
        f"over {KV_HEADS}, width {WIDTH}, {DTYPE}; microseconds per layer, captured but for eager\n"
    )
    print(
        f"{'rows x length':<15}{'slots':>6}{'splits':>7}{'runs':>5}{'ragged':>9}{'eager':>8}"
        f"{'dense':>9}{'faster':>10}{'copy':>8}{'GB/s':>8}{'of copy':>8}{'differ':>9}"
    )
    print("\n".join(lines))
    print("\nkeys and values of a window into the cache; microseconds, captured")
    print(f"{'B':>4}{'one run':>9}{'runs':>5}{'index copies':>13}{'runs':>5}{'faster':>10}")
    print("\n".join(writes))


if __name__ == "__main__":
    main()
