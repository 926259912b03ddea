"""What the benchmarks share: sides take turns within a round, a figure is a median over rounds, and
a comparison is the median of the ratios within a round, so a drift of the machine meets all sides.

A side is a function that does its work once and returns how long a unit of it took, in ms. Without
a GPU shapes are small and the figures of one say nothing; they show that a program runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import transformers
from torch import Tensor

from specdec.lab.show.table import Table

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Side = Callable[[], float]
Op = Callable[[], tuple[Tensor, ...]]


def about() -> str:
    """The device and the versions of a run."""
    name = f"CPU, {torch.get_num_threads()} threads"
    if DEVICE == "cuda":
        name = torch.cuda.get_device_name()
    elif torch.get_num_threads() == 1:
        name = "CPU, one thread, by its own time"
    return f"{name}, torch {torch.__version__}, transformers {transformers.__version__}"


def synchronize() -> None:
    """Waits for the device."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def now_ms() -> float:
    """The clock: of the wall, or of the only thread on a CPU, which other programs cannot slow."""
    is_alone = DEVICE == "cpu" and torch.get_num_threads() == 1
    return (time.thread_time() if is_alone else time.perf_counter()) * 1e3


def timed(work: Callable) -> tuple[float, object]:
    """Milliseconds of a call, the device's work included, and its result."""
    synchronize()
    start = now_ms()
    result = work()
    synchronize()
    return now_ms() - start, result


class Turns(dict[str, list[float]]):
    """Milliseconds of each side by round."""

    def run(self, sides: Mapping[str, Side], rounds: int) -> Turns:
        """More rounds, in each of which the sides take turns; the one before them warms up."""
        for index in range(rounds + 1):
            for name, side in sides.items():
                taken = side()
                if index:
                    self.setdefault(name, []).append(taken)
        return self

    def ms(self, name: str) -> float:
        """The median."""
        return statistics.median(self[name])

    def ratio(self, over: str, under: str) -> float:
        """The median over rounds of one side's time over the other's in the same round."""
        return statistics.median(a / b for a, b in zip(self[over], self[under], strict=True))


def show(header: str, rows: Sequence[Sequence[object]]) -> None:
    """Prints a table in Markdown; the header's columns are separated by bars."""
    print(Table(header.split("|"), [[str(cell) for cell in row] for row in rows]).markdown())


def replay(ops: Sequence[Op]) -> Side:
    """A side: one graph of all calls, one after the other; on a CPU the calls themselves."""
    if DEVICE == "cpu":
        return lambda: timed(lambda: [op() for op in ops])[0] / len(ops)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for op in ops[:2]:
            op()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch._C._cuda_clearCublasWorkspaces()  # those of the graph are then its own
        for op in ops:
            op()
    # What the operations hold stays as long as the graph, which reads and writes it.
    return launched(lambda kept=ops: graph.replay(), len(ops))


def launched(work: Callable, count: int) -> Side:
    """A side: milliseconds on the device of what a call launches, per unit of `count`."""

    def side() -> float:
        if DEVICE == "cpu":
            return timed(work)[0] / count
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / count

    return side


def copies(num_bytes: float, count: int) -> list[Op]:
    """The roof of work on memory: copies that read and write so many bytes together."""
    half = int(num_bytes / 2) // 4096 * 4096 or 4096  # aligned, as tables are
    pairs = [torch.empty(2, half, dtype=torch.uint8, device=DEVICE) for _ in range(count)]
    return [lambda pair=pair: (pair[1].copy_(pair[0]),) for pair in pairs]


def num_launches(op: Op) -> int:
    """Launches, memory operations included, of a call; refuses one that waits for the device."""
    if DEVICE == "cpu":
        return 0
    torch.cuda.set_sync_debug_mode("error")
    op()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        op()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profile.events())
