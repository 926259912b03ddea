"""Sampling and verifying on a CPU against the same work done with Hugging Face's own parts.

    python benchmarks/cpu_samplers.py

The work is logits in, tokens and their probabilities out. Hugging Face's side is what
`generate` runs: its warpers, a softmax and `torch.multinomial`; for a verdict, the warpers on each
of the K + 1 rows and then its function of speculative sampling. Our side includes its noise.

Every round times both sides on the same logits, the first in turn; figures are medians over rounds
of the ratio within a round, with its quartiles. Before it is timed a side runs once on other
logits, so that neither pays for the memory that the other gave back to the system. Other processes
on the machine blur the figures, with two threads most, so the load is printed.
"""

import argparse
import functools
import inspect
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.utils import _speculative_sampling

from specdec.samplers import Noise, RejectionSampler, Stream, Warp
from specdec.types import Draft

TEMPERATURE = 0.8
TRUNCATIONS = {"no truncation": {}, "top-p 0.9": {"top_p": 0.9}, "top-k 50": {"top_k": 50}}
Side = Callable[[Tensor], object]


def with_peaks(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Standard deviation 3 and 20 tokens that stand out."""
    logits = torch.randn(shape, generator=generator) * 3
    ids = torch.randint(0, shape[-1], (20,), generator=generator)
    logits[..., ids] += 12 * torch.rand(20, generator=generator)
    return logits


def peaked(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """One token has nearly all the mass."""
    logits = torch.randn(shape, generator=generator) * 2
    logits[..., shape[-1] // 3] = 22
    return logits


LOGITS = {
    "peaks": with_peaks,
    "normal": lambda shape, generator: torch.randn(shape, generator=generator) * 3,
    "one peak": peaked,
    "nearly flat": lambda shape, generator: torch.randn(shape, generator=generator) / 10,
}


def warpers(top_p: float | None = None, top_k: int | None = None) -> LogitsProcessorList:
    """Hugging Face's, in the order of `generate`."""
    chain = [TemperatureLogitsWarper(TEMPERATURE)]
    chain += [TopKLogitsWarper(top_k)] if top_k else []
    return LogitsProcessorList(chain + ([TopPLogitsWarper(top_p)] if top_p else []))


def samplers(truncation: dict) -> tuple[Side, Side]:
    """Ways to draw one token for each row of logits `[1, N, V]`."""
    processors, warp, noise = (
        warpers(**truncation),
        Warp(1, temperature=TEMPERATURE, **truncation),
        Noise([7]),
    )
    start = torch.tensor([5])

    def hugging_face(logits: Tensor):
        probs = processors(None, logits[0]).softmax(dim=-1)
        return torch.multinomial(probs, num_samples=1), probs

    def ours(logits: Tensor):
        uniforms = noise.at(start, width=logits.shape[1]).uniform(Stream.PROPOSE)
        return warp.draw(logits, uniforms)

    return hugging_face, ours


def verifiers(truncation: dict, draft_logits: Tensor) -> tuple[Side, Side]:
    """Ways to decide on K tokens, drafted from logits `[1, K, V]`, given logits `[1, K + 1, V]`.

    The draft is made beforehand, with its warped logits and its probabilities.
    """
    processors, warp, noise = (
        warpers(**truncation),
        Warp(1, temperature=TEMPERATURE, **truncation),
        Noise([7]),
    )
    width, start = draft_logits.shape[1], torch.tensor([5])
    warped = processors(None, draft_logits[0])[None]
    tokens, probs = warp.draw(draft_logits, noise.at(start, width).uniform(Stream.PROPOSE))
    draft, sampler = Draft(tokens, probs), RejectionSampler()
    names = inspect.signature(_speculative_sampling).parameters
    verdict = functools.partial(
        _speculative_sampling,
        **({"is_done_candidate": False} if "is_done_candidate" in names else {}),
    )

    def hugging_face(logits: Tensor):
        rows = logits.clone()
        for i in range(width + 1):
            rows[:, i] = processors(None, rows[:, i])
        return verdict(tokens, warped, width, rows)

    def ours(logits: Tensor):
        return sampler(draft, logits, warp, noise.at(start, width + 1))

    return hugging_face, ours


def compare(title: str, sides: tuple[Side, Side], inputs: list[Tensor], rounds: int) -> None:
    """Prints milliseconds of both sides and the ratio."""
    times: tuple[list[float], list[float]] = ([], [])
    for round_ in range(-2, rounds):  # the first two warm up
        logits = inputs[round_ % len(inputs)]
        for which in (0, 1) if round_ % 2 else (1, 0):
            sides[which](inputs[(round_ + 1) % len(inputs)])
            begin = time.perf_counter()
            sides[which](logits)
            if round_ >= 0:
                times[which].append(1e3 * (time.perf_counter() - begin))
    low, ratio, high = statistics.quantiles(
        [theirs / ours for theirs, ours in zip(*times, strict=True)], n=4
    )
    theirs, ours = map(statistics.median, times)
    print(
        f"  {title:<34}{theirs:>9.3f} ms{ours:>9.3f} ms{ratio:>8.1f} x  ({low:.1f} to {high:.1f})"
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--kinds", nargs="+", choices=LOGITS, default=list(LOGITS))
    args = parser.parse_args()
    rows, generator = args.num_draft_tokens + 1, torch.Generator().manual_seed(0)
    print(f"V = {args.vocab}, {rows} rows, temperature {TEMPERATURE}, torch {torch.__version__}")
    for threads in args.threads:
        torch.set_num_threads(threads)
        print(f"\n{threads} threads, load {os.getloadavg()[0]:.1f}; Hugging Face, specdec, ratio")
        for kind in args.kinds:
            inputs = [LOGITS[kind]((1, rows, args.vocab), generator) for _ in range(8)]
            noise = torch.randn(inputs[0][:, :-1].shape, generator=generator)
            for name, truncation in TRUNCATIONS.items():
                compare(f"sample, {kind}, {name}", samplers(truncation), inputs, args.rounds)
                sides = verifiers(truncation, inputs[0][:, :-1] + noise)
                compare(f"verify, {kind}, {name}", sides, inputs, args.rounds)
    print(f"\nload {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
