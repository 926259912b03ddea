"""The Triton kernels against their definitions in plain PyTorch, and against the memory, on a GPU.

    python benchmarks/gpu_kernels.py

Both sides, and a device-to-device copy as the roof, are captured in CUDA graphs over the same input
sets, which together exceed the cache several times, and are replayed in turn; figures are medians
over rounds, of the ratio within a round. Where in memory the tables lie makes a difference of some
per cent to either side, so all is done with several sets of tables. Results are compared with the
definition's: they are equal but for draws within rounding of a boundary.

The bytes of a verdict are those that any algorithm must read once: all target logits, and of the
draft probabilities (float32) all K rows by the block rule, and one row per rejection by the token
rule.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from specdec.kernels import (
    Cutoff,
    Truncation,
    VerifyUniforms,
    WarpParams,
    draw,
    find_cutoff,
    find_faults,
    race,
    sample,
    token_rule,
    verify,
    warp_probs,
)
from specdec.kernels.race.reference import race_weights
from specdec.kernels.truncate import reference as truncate
from specdec.kernels.truncate.reference import is_kept
from specdec.kernels.verify.reference import block_rule
from specdec.types import Draft, Verdict

NUM_DRAFT_TOKENS, VOCAB = 5, 128256
PLACEMENTS = 3  # of all tables in memory
SET_BYTES = 2e9  # many times the cache; and a graph's own start is to count little
VERDICTS = ["verify blocks", "verify tokens", "verify points", "step"]
SPREADS = {"top-p": 3, "flat top-p": 0.3, "tied top-p": 0, "tied top-k": 0}  # of logits
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Op = Callable[[], tuple[Tensor, ...]]


@dataclass
class Contest:
    """One operation: functions of each input set, the bytes of a set, and which results of a set
    are equal.
    """

    ours: list[Op]
    theirs: list[Op]
    num_bytes: float
    agree: Callable[[int, tuple, tuple], Tensor]


def graph_of(ops: list[Op]) -> torch.cuda.CUDAGraph:
    """All input sets, one after the other, in one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for op in ops[:2]:
            op()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for op in ops:
            op()
    return graph


def milliseconds(graph: torch.cuda.CUDAGraph, sets: int) -> float:
    """Of one replay, per input set."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / sets


def copies(num_bytes: float, sets: int) -> list[Op]:
    """Copies that read and write `num_bytes` together, one per set."""
    half = int(num_bytes / 2) // 4096 * 4096  # aligned, as tables are
    pairs = [torch.empty(2, half, dtype=torch.uint8, device="cuda") for _ in range(sets)]
    return [lambda pair=pair: (pair[1].copy_(pair[0]),) for pair in pairs]


def num_launches(op: Op) -> int:
    """Launches, memory operations included, of a call; refuses one that waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    op()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        op()
        torch.cuda.synchronize()
    return sum(event.device_type.name == "CUDA" for event in profile.events())


def verdict(kind: str, rows: int, dtype: torch.dtype, sets: int) -> Contest:
    """`verify`, by blocks or tokens, of draft probabilities or of points. "step" is all of a step's
    sampling: K draws with their probabilities, and `verify` by blocks.
    """
    rule, k = kind.split()[-1], NUM_DRAFT_TOKENS
    num_draws = k if kind == "step" else 0
    by_block = rule in ("blocks", "step")
    define = block_rule if by_block else token_rule

    def inputs() -> tuple:
        logits = 3 * torch.randn(rows, k + 1, VOCAB, device="cuda")
        probs = (logits[:, :k] + torch.randn_like(logits[:, :k])).softmax(-1)
        tokens = probs.flatten(0, 1).multinomial(1).view(rows, k)
        uniforms = torch.rand(2, rows, k, dtype=torch.float64, device="cuda")
        draft = Draft(tokens, None if rule == "points" else probs)
        return draft, logits.to(dtype), VerifyUniforms(uniforms[0], uniforms[1, :, 0])

    def ours(draft, logits, uniforms):
        for i in range(num_draws):
            sample(logits[:, i : i + 1], WarpParams(), uniforms.accept[:, i : i + 1])
        verdict: Verdict = verify(draft, logits, WarpParams(), uniforms, by_block=by_block)
        return verdict.tokens, verdict.num_accepted, verdict.faults

    def theirs(draft, logits, uniforms):
        for i in range(num_draws):
            draw(warp_probs(logits[:, i], WarpParams()), uniforms.accept[:, i])
        tokens, count = define(draft, warp_probs(logits, WarpParams()), uniforms)
        return tokens, count, find_faults(draft, logits.amax(-1), count)

    data = [inputs() for _ in range(sets)]
    draft_rows = rows * k if by_block else 0
    if rule == "tokens":
        draft_rows = statistics.mean(int((ours(*d)[1] < k).sum()) for d in data)
    return Contest(
        [lambda d=d: ours(*d) for d in data],
        [lambda d=d: theirs(*d) for d in data],
        data[0][1].numel() * dtype.itemsize
        + draft_rows * VOCAB * 4
        + rows * num_draws * VOCAB * (dtype.itemsize + 4),
        lambda _, one, other: (one[0] == other[0]).all(-1),
    )


def drawing(kind: str, rows: int, dtype: torch.dtype, sets: int) -> Contest:
    """`sample` of one window index, `race` and `find_cutoff` of a window.

    "cutoff" is top-k 50, top-p 0.9 and min-p 0.05 together; the kinds of SPREADS are top-p 0.9, and
    "tied top-k" is top-p 0.9 of what top-k 50 keeps, which are all ties.
    """
    width = 1 if kind == "sample" else NUM_DRAFT_TOKENS + 1
    key = torch.arange(2 * rows, device="cuda").view(rows, 2)
    position = torch.arange(rows * width, device="cuda").view(rows, width)
    top_k = torch.full((rows,), 50, device="cuda")
    top_p = torch.full((rows,), 0.9, dtype=torch.float64, device="cuda")
    truncation = Truncation(top_k, top_p, torch.full_like(top_p, 0.05), 50)
    if kind in SPREADS:
        truncation = Truncation(top_k if kind == "tied top-k" else None, top_p, None, 50)
    spread, shape = SPREADS.get(kind, 3), (rows, width, VOCAB)
    data = [(spread * torch.randn(shape, device="cuda")).to(dtype) for _ in range(sets)]
    draws = torch.rand(rows, width, dtype=torch.float64, device="cuda")

    def ours(x: Tensor) -> tuple:
        if kind == "sample":
            return sample(x, WarpParams(), draws)
        if kind == "race":
            return (race(x, WarpParams(), key, position, 3),)
        return find_cutoff(x, None, truncation)

    def theirs(x: Tensor) -> tuple:
        if kind == "sample":
            probs = warp_probs(x, WarpParams())
            return draw(probs, draws), probs
        if kind == "race":
            return (race_weights(warp_probs(x, WarpParams()), key, position, 3),)
        with mock.patch.object(truncate, "suits_kernels", return_value=False):
            return find_cutoff(x, None, truncation)

    def agree(index: int, one: tuple, other: tuple) -> Tensor:
        if kind in ("sample", "race"):
            return one[0] == other[0]
        kept = [is_kept(data[index].float(), Cutoff(*cutoff)) for cutoff in (one, other)]
        return (kept[0] == kept[1]).all(-1)

    written = 4 if kind == "sample" else 0
    return Contest(
        [lambda x=x: ours(x) for x in data],
        [lambda x=x: theirs(x) for x in data],
        data[0].numel() * (dtype.itemsize + written),
        agree,
    )


def compete(contest: Contest, sets: int, rounds: int) -> list[list[float]]:
    """Milliseconds per input set of ours, of theirs and of a copy, of each round."""
    roof = copies(contest.num_bytes, sets)
    graphs = [graph_of(ops) for ops in (contest.ours, contest.theirs, roof)]
    times = [[milliseconds(graph, sets) for graph in graphs] for _ in range(rounds + 1)]
    return times[1:]  # the first round warms up


def measure(name: str, rows: int, dtype_name: str, rounds: int) -> str:
    """Checks and times one operation; returns a line of the table."""
    torch.manual_seed(rows)
    dtype, make = DTYPES[dtype_name], verdict if name in VERDICTS else drawing
    size = rows * VOCAB * (NUM_DRAFT_TOKENS + 1) * (dtype.itemsize + 4 * (name in VERDICTS))
    sets = 2 if name == "race" else max(2, min(32, round(SET_BYTES / size)))
    times, matches, rates = [], [], []
    for _ in range(PLACEMENTS):
        torch.cuda.empty_cache()
        contest = make(name, rows, dtype, sets)
        for i, (one, other) in enumerate(zip(contest.ours, contest.theirs, strict=True)):
            matches.append(contest.agree(i, one(), other()).flatten())
        times += compete(contest, sets, rounds)
        rates += [contest.num_bytes / ours / 1e6 for ours, _, _ in times[-rounds:]]
    equal = torch.cat(matches).double().mean()
    if equal < 0.95:
        raise SystemExit(f"{name}, B = {rows}, {dtype_name}: results differ from the definition's")
    ours, theirs, copy = zip(*times, strict=True)
    ratio = statistics.median(other / one for one, other in zip(ours, theirs, strict=True))
    of_roof = statistics.median(other / one for one, other in zip(ours, copy, strict=True))
    return (
        f"{name:<14}{rows:>4} {dtype_name:<6}{statistics.median(theirs) * 1e3:>10.1f}"
        f"{statistics.median(ours) * 1e3:>10.1f}{ratio:>8.1f} x{statistics.median(rates):>8.0f}"
        f"{of_roof:>8.1%}{num_launches(contest.ours[0]):>5}{equal:>9.2%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--only", nargs="+", help="operations, by the first letters of their names")
    args = parser.parse_args()
    names = [*VERDICTS, "sample", "race", "cutoff", *SPREADS]
    chosen = [n for n in names if not args.only or n.startswith(tuple(args.only))]
    lines = [
        measure(name, rows, dtype, args.rounds if name != "race" else min(args.rounds, 5))
        for name in chosen
        for rows in args.batch
        for dtype in DTYPES
    ]
    device = torch.cuda.get_device_name()
    print(f"\n{device}, torch {torch.__version__}, K = {NUM_DRAFT_TOKENS}, V = {VOCAB}")
    print("python benchmarks/gpu_kernels.py; times in microseconds; copy: of as many bytes\n")
    print(
        f"{'operation':<14}{'B':>4} {'':<6}{'definition':>10}{'kernel':>10}{'faster':>10}"
        f"{'GB/s':>8}{'of copy':>8}{'runs':>5}{'equal':>9}"
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
