"""Ragged attention against the memory, and against PyTorch's attention with a dense mask, on a GPU.

    PYTHONPATH=. python benchmarks/gpu_attention.py
    PYTHONPATH=. python benchmarks/gpu_attention.py --sweep

The window of a chain, 4 queries, with 32 query heads over 8 heads of keys of width 128, bfloat16.
Both sides, and a device-to-device copy of as many bytes as the roof, are captured in CUDA graphs
over the same input sets, which together exceed the cache, and are replayed in turn. The dense mask
is made beforehand. Bytes are those of keys and values in the slots that the rows have filled.
"eager" is ours outside a graph: what a launch costs on the host shows there. A second table has
keys and values written into the cache in one launch against index copies. `--sweep` times other
cuts of the work instead.
"""

import argparse
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from timing import DEVICE, Turns, about, copies, launched, num_launches, replay, show
from torch import Tensor

from specdec.kernels import ragged_attention, write_slots
from specdec.slots.attention import window_mask
from specdec.slots.cache import Window, round_up

QUERIES, HEADS, KV_HEADS, WIDTH, DTYPE = 4, 32, 8, 128, torch.bfloat16
SLOT_BYTES = 2 * KV_HEADS * WIDTH * DTYPE.itemsize
SET_BYTES, MAX_SETS = 1e9, 96 if DEVICE == "cuda" else 2  # many times the cache; or enough to time
TOLERANCE = 0.02  # of results, in rms: bfloat16 rounds twice, in other places
UNIT = 512 if DEVICE == "cuda" else 8  # of the lengths
MIXED = [UNIT * (i + 1) for i in range(16)]
SHAPES = [  # length of a row, of all rows with the window, slots
    *((f"{n}", [n] * r, round_up(n)) for r, n in product((1, 8, 16), (UNIT, 8 * UNIT, 16 * UNIT))),
    (f"{UNIT}", [UNIT], 64 * UNIT),
    (f"{UNIT}", [UNIT] * 16, 16 * UNIT),
    (f"{MIXED[0]}..{MIXED[-1]}", MIXED, MIXED[-1]),
]


class Inputs(NamedTuple):
    """Arguments of both sides."""

    query: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor
    mask: Tensor


def inputs(lengths: list[int], num_slots: int) -> Inputs:
    """Random, laid out as a `SlotCache` does."""
    rows, size = len(lengths), (num_slots + 1, KV_HEADS, WIDTH)
    query = torch.randn(rows, QUERIES, HEADS, WIDTH, dtype=DTYPE).transpose(1, 2)
    keys, values = (torch.randn(rows, *size, dtype=DTYPE)[:, :-1].transpose(1, 2) for _ in "kv")
    slots = torch.tensor(lengths)[:, None] - QUERIES + torch.arange(QUERIES)
    mask = window_mask(Window(slots, num_slots), slots.shape[1], DTYPE)
    return Inputs(query, keys, values, slots, mask)


def dense(data: Inputs) -> Tensor:
    """PyTorch's attention with a dense mask."""
    query, keys, values, _, mask = data
    out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
    return out.transpose(1, 2)


def ragged(data: Inputs, cut: object = None) -> Tensor:
    """The library's operation, or its kernels with another cut of the work."""
    if cut is None:
        return ragged_attention(*data[:4])
    from specdec.kernels.attention import triton

    return triton.ragged_attention(*data[:4], tiles=cut)


def make_sets(lengths: list[int], num_slots: int) -> tuple[list[Inputs], float]:
    """Input sets, and the bytes of one that must be read."""
    num_bytes = sum(lengths) * SLOT_BYTES
    most = min(SET_BYTES / num_bytes, 40e9 / (len(lengths) * num_slots * SLOT_BYTES), MAX_SETS)
    with torch.device(DEVICE):
        return [inputs(lengths, num_slots) for _ in range(max(2, int(most)))], num_bytes


def check(one: Tensor, other: Tensor) -> None:
    """Ends the run where results differ, in rms over that of the result."""
    one, other = one.double(), other.double()
    error = float((one - other).square().mean().sqrt() / other.square().mean().sqrt())
    if not error < TOLERANCE:
        raise SystemExit(f"the results differ by {error:.2g} in rms: do not believe the times")


def measure(name: str, lengths: list[int], num_slots: int, rounds: int) -> list:
    """A line of the table."""
    sets, num_bytes = make_sets(lengths, num_slots)
    check(ragged(sets[0]), dense(sets[0]))
    sides = {
        "ragged": replay([partial(ragged, data) for data in sets]),
        "eager": launched(lambda: [ragged(data) for data in sets], len(sets)),
        "dense": replay([partial(dense, data) for data in sets]),
        "copy": replay(copies(num_bytes, len(sets))),
    }
    times = Turns().run(sides, rounds)
    us = [f"{times.ms(side) * 1e3:.1f}" for side in sides]
    faster, of_copy = times.ratio("dense", "ragged"), times.ratio("copy", "ragged")
    rate, runs = num_bytes / times.ms("ragged") / 1e6, num_launches(partial(ragged, sets[0]))
    what = f"{len(lengths)} x {name}", num_slots, runs
    return [*what, *us, f"{faster:.1f} x", f"{rate:.0f}", f"{of_copy:.1%}"]


def measure_write(rows: int, rounds: int) -> list:
    """A line of the table of cache writes: one window of one layer, by both ways."""
    count, num_slots = MAX_SETS, 4096
    with torch.device(DEVICE):
        storage = [torch.zeros(rows, num_slots, KV_HEADS, WIDTH, dtype=DTYPE) for _ in "kv"]
        made = torch.randn(count, rows, QUERIES, KV_HEADS, WIDTH, dtype=DTYPE)
        slots = torch.randint(0, num_slots - QUERIES, (rows, 1)) + torch.arange(QUERIES)
        lines = (slots + num_slots * torch.arange(rows)[:, None]).flatten()

    def by_copies(states: Tensor) -> None:
        for table in storage:
            table.flatten(0, 1).index_copy_(0, lines, states.transpose(1, 2).flatten(0, 1))

    states = made.transpose(2, 3)
    ways = {
        "one": [partial(write_slots, *storage, new, new, slots) for new in states],
        "copies": [partial(by_copies, new) for new in states],
    }
    times = Turns().run({name: replay(ops) for name, ops in ways.items()}, rounds)
    cells = [f"{times.ms(name) * 1e3:.2f}" for name in ways]
    return [rows, *cells, f"{times.ratio('copies', 'one'):.1f} x"]


def sweep(name: str, lengths: list[int], num_slots: int, rounds: int) -> list[list]:
    """The five fastest cuts, and the default's time: tiles, warps, stages, and splits for 1, 2 and
    4 programs per processor.
    """
    from specdec.kernels.attention import triton

    sets, _ = make_sets(lengths, num_slots)
    programs, device = len(lengths) * KV_HEADS, sets[0].query.device
    whole = (n * triton.num_processors(device) / programs for n in (1, 2, 4))
    splits = {max(1, min(round(n), max(lengths) // 32)) for n in whole}
    grid = product((32, 64, 128), (16,), (4, 8), (2, 3, 4), sorted(splits))
    sides, expected = {}, ragged(sets[0])
    for cut in {triton.default_tiles(*sets[0][:3]): None} | {triton.Tiles(*c): None for c in grid}:
        try:
            check(ragged(sets[0], cut), expected)
            sides[str(tuple(cut))] = replay([partial(ragged, data, cut) for data in sets])
        except Exception as error:  # too much shared memory for this cut, say
            print(f"{name}: {cut} failed: {str(error).splitlines()[0][:90]}")
    times, default = Turns().run(sides, rounds), next(iter(sides))
    best = sorted(times, key=times.ms)[:5]
    where = f"{len(lengths)} x {name}"
    return [
        [where, cut, f"{times.ms(cut) * 1e3:.1f}", f"{times.ratio(cut, default):.2f}"]
        for cut in [default, *best]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sweep", action="store_true", help="time other cuts of the work")
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{about()}; N = {QUERIES}, {HEADS} heads over {KV_HEADS}, width {WIDTH}, {DTYPE}\n")
    if options.sweep:
        lines = [line for index in (0, 2, 7) for line in sweep(*SHAPES[index], options.rounds)]
        return show("rows x length|tile, rows, warps, stages, splits|us|x default", lines)
    header = "rows x length|slots|launches|ragged, us|eager, us|dense, us|copy, us|faster|GB/s"
    show(f"{header}|of copy", [measure(*shape, options.rounds) for shape in SHAPES])
    print("\nKeys and values of a window into the cache:\n")
    show("B|one launch, us|copies, us|faster", [measure_write(n, options.rounds) for n in (1, 16)])


if __name__ == "__main__":
    main()
