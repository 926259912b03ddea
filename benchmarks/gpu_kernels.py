"""The Triton kernels against their definitions in plain PyTorch, and against the memory, on a GPU.

    PYTHONPATH=. python benchmarks/gpu_kernels.py --batch 1 64

Both sides, and a device-to-device copy as the roof, are captured in CUDA graphs over the same input
sets, which together exceed the cache several times, and are replayed in turn. Where in memory the
tables lie makes a difference of some per cent to either side, so all is done with several sets of
tables. Results are compared with the definition's: they are equal but for draws within rounding of
a boundary.

The bytes of a verdict are those that any algorithm must read once: all target logits, and of the
draft probabilities (float32) all K rows by the block rule, and one row per rejection by the token
rule.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from unittest import mock

import torch
from timing import DEVICE, Op, Turns, about, copies, num_launches, replay, show
from torch import Tensor

from specdec.kernels import FilterParams, draw, filtered_probs, race, sample, verify
from specdec.kernels.race.reference import race_weights
from specdec.kernels.truncate import reference as truncate
from specdec.kernels.truncate.reference import find_cutoff, is_kept
from specdec.kernels.types import Cutoff, Truncation, VerifyUniforms
from specdec.kernels.verify.reference import block_rule, token_rule
from specdec.types import Draft, Verdict

NUM_DRAFT_TOKENS, VOCAB = 5, 128256 if DEVICE == "cuda" else 4096
PLACEMENTS = 3  # of all tables in memory
SET_BYTES = 2e9 if DEVICE == "cuda" else 0  # many times the cache
SIDES = ("kernel", "definition", "copy")
VERDICTS = ["verify blocks", "verify tokens", "verify points", "step"]
SPREADS = {"top-p": 3, "flat top-p": 0.3, "tied top-p": 0, "tied top-k": 0}  # of logits
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Contest:
    """One operation: functions of each input set, the bytes of a set, and which results of a set
    are equal.
    """

    ours: list[Op]
    theirs: list[Op]
    num_bytes: float
    agree: Callable[[int, tuple, tuple], Tensor]


def verdict(kind: str, rows: int, dtype: torch.dtype, sets: int) -> Contest:
    """`verify`, by blocks or tokens, of draft probabilities or of points. "step" is all of a step's
    sampling: K draws with their probabilities, and `verify` by blocks.
    """
    rule, k = kind.split()[-1], NUM_DRAFT_TOKENS
    num_draws = k if kind == "step" else 0
    by_block = rule in ("blocks", "step")
    define = block_rule if by_block else token_rule

    def inputs() -> tuple:
        logits = 3 * torch.randn(rows, k + 1, VOCAB)
        probs = (logits[:, :k] + torch.randn_like(logits[:, :k])).softmax(-1)
        tokens = probs.flatten(0, 1).multinomial(1).view(rows, k)
        uniforms = torch.rand(2, rows, k, dtype=torch.float64)
        draft = Draft(tokens, None if rule == "points" else probs)
        return draft, logits.to(dtype), VerifyUniforms(uniforms[0], uniforms[1, :, 0])

    def ours(draft, logits, uniforms):
        for i in range(num_draws):
            sample(logits[:, i : i + 1], FilterParams(), uniforms.accept[:, i : i + 1])
        verdict: Verdict = verify(draft, logits, FilterParams(), uniforms, by_block=by_block)
        return verdict.tokens, verdict.num_accepted

    def theirs(draft, logits, uniforms):
        for i in range(num_draws):
            draw(filtered_probs(logits[:, i], FilterParams()), uniforms.accept[:, i])
        return define(draft, filtered_probs(logits, FilterParams()), uniforms)

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
    key = torch.arange(2 * rows).view(rows, 2)
    position = torch.arange(rows * width).view(rows, width)
    top_k = torch.full((rows,), 50)
    top_p = torch.full((rows,), 0.9, dtype=torch.float64)
    truncation = Truncation(top_k, top_p, torch.full_like(top_p, 0.05), 50)
    if kind in SPREADS:
        truncation = Truncation(top_k if kind == "tied top-k" else None, top_p, None, 50)
    spread, shape = SPREADS.get(kind, 3), (rows, width, VOCAB)
    data = [(spread * torch.randn(shape)).to(dtype) for _ in range(sets)]
    draws = torch.rand(rows, width, dtype=torch.float64)

    def ours(x: Tensor) -> tuple:
        if kind == "sample":
            return sample(x, FilterParams(), draws)
        if kind == "race":
            return (race(x, FilterParams(), key, position, 3),)
        return find_cutoff(x, None, truncation)

    def theirs(x: Tensor) -> tuple:
        if kind == "sample":
            probs = filtered_probs(x, FilterParams())
            return draw(probs, draws), probs
        if kind == "race":
            return (race_weights(filtered_probs(x, FilterParams()), key, position, 3),)
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


def measure(name: str, rows: int, dtype_name: str, rounds: int) -> list[str]:
    """Checks and times one operation; returns a line of the table."""
    torch.manual_seed(rows)
    dtype, make = DTYPES[dtype_name], verdict if name in VERDICTS else drawing
    size = rows * VOCAB * (NUM_DRAFT_TOKENS + 1) * (dtype.itemsize + 4 * (name in VERDICTS))
    sets = 2 if name == "race" else max(2, min(32, round(SET_BYTES / size)))
    matches, times = [], Turns()
    for _ in range(PLACEMENTS):
        torch.cuda.empty_cache()
        contest = make(name, rows, dtype, sets)
        for i, (one, other) in enumerate(zip(contest.ours, contest.theirs, strict=True)):
            matches.append(contest.agree(i, one(), other()).flatten())
        sides = contest.ours, contest.theirs, copies(contest.num_bytes, sets)
        times.run(dict(zip(SIDES, map(replay, sides), strict=True)), rounds)
    equal = torch.cat(matches).double().mean()
    if equal < 0.95:
        raise SystemExit(f"{name}, B = {rows}, {dtype_name}: results differ from the definition's")
    us = [f"{times.ms(side) * 1e3:.1f}" for side in SIDES[:2]]
    rate = contest.num_bytes / times.ms("kernel") / 1e6
    faster, of_copy = (times.ratio(side, "kernel") for side in SIDES[1:])
    runs = num_launches(contest.ours[0])
    figures = *us, f"{faster:.1f} x", f"{rate:.0f}", f"{of_copy:.1%}", runs, f"{equal:.2%}"
    return [name, rows, dtype_name, *figures]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    names = [*VERDICTS, "sample", "race", "cutoff", *SPREADS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    options = parser.parse_args()
    torch.set_default_device(DEVICE)
    cases = product(options.only, options.batch, options.dtypes)
    print(f"{about()}, K = {NUM_DRAFT_TOKENS}, V = {VOCAB}; copy: of as many bytes\n")
    header = "operation|B|logits|kernel, us|definition, us|faster|GB/s|of copy|launches|equal"
    show(header, [measure(*case, options.rounds) for case in cases])


if __name__ == "__main__":
    main()
