"""How many tokens a certificate needs to see a fault, and what it says of sound generators.

    PYTHONPATH=. python benchmarks/certificates.py power --output power.jsonl
    PYTHONPATH=. python benchmarks/certificates.py sound --output sound.jsonl
    PYTHONPATH=. python benchmarks/certificates.py half --output half.jsonl    # on a GPU: 8B shape

Every line of the output is a finished run; what is there already is not run again.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from models import eagle3, prompt, shape
from timing import about
from torch import Tensor

from specdec import (
    BlockSampler,
    CouplingSampler,
    Draft,
    ModelDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    Target,
    zoo,
)
from specdec.certify import Sentinel
from specdec.request.prompts import left_padded
from specdec.samplers import Stream, Warp
from specdec.target import attention

OPTIONS = {"temperature": 1.0, "neutral": True, "eos_token_id": []}
ROWS, NEW_TOKENS, PROMPT_TOKENS = 50, 64, 12
SLOT = PROMPT_TOKENS  # of the first new token: it is stale, or hidden


class OtherDraws:
    """The numbers of a step, those that decide on draft tokens changed."""

    def __init__(self, noise, change: Callable[[Tensor], Tensor]):
        self._noise, self._change = noise, change

    def __getattr__(self, name: str):
        return getattr(self._noise, name)

    def uniform(self, stream: Stream) -> Tensor:
        """As of the step's noise."""
        uniform = self._noise.uniform(stream)
        return self._change(uniform) if stream == Stream.ACCEPT else uniform


class ScaledDraws(RejectionSampler):
    """Accept draws are multiplied by a factor."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def accept(self, draft, target_logits, warp, noise):
        """As the rule, with other draws."""
        noise = OtherDraws(noise, lambda uniform: uniform * self.factor)
        return super().accept(draft, target_logits, warp, noise)


class BonusFromDraft(RejectionSampler):
    """The last token of a step in which all before it were accepted is the draft's own."""

    def accept(self, draft, target_logits, warp, noise):
        """As the rule, where the last draft token is always accepted."""
        is_last = torch.arange(noise.uniform(Stream.ACCEPT).shape[1]) == draft.tokens.shape[1] - 1
        noise = OtherDraws(noise, lambda u: u.masked_fill(is_last.to(u.device), 0.0))
        return super().accept(draft, target_logits, warp, noise)


class NoClamp(RejectionSampler):
    """Negative parts of p - q stay in the residual, so that it sums to 0 and p takes its place."""

    def accept(self, draft, target_logits, warp, noise):
        """As the rule, but for the extra token."""
        verdict = super().accept(draft, target_logits, warp, noise)
        probs = warp(target_logits).double()
        row = probs[torch.arange(len(probs)), verdict.num_accepted].cumsum(dim=-1)
        passed = row <= noise.uniform(Stream.RESAMPLE)[:, :1] * row[:, -1:]
        extra = passed.sum(dim=-1, keepdim=True).clamp(max=row.shape[1] - 1)
        tokens = verdict.tokens.scatter(1, verdict.num_accepted[:, None], extra)
        return replace(verdict, tokens=tokens)


class Sharpened(ModelDrafter):
    """Draws from q and reports q^1.25, normalised."""

    def propose(self, context, state, drawing):
        """Its tokens, and other probabilities."""
        draft = super().propose(context, state, drawing)
        probs = draft.probs**1.25
        return replace(draft, probs=probs / probs.sum(dim=-1, keepdim=True))


class TruncatedDraft(ModelDrafter):
    """Draws behind top-p 0.9 and reports the whole distribution."""

    def propose(self, context, state, drawing):
        """One token is drafted, so that both distributions are of the same text."""
        cut = replace(drawing, warp=Warp(drawing.warp.batch_size, top_p=0.9))
        tokens = super().propose(context, state, cut).tokens
        return Draft(tokens, super().propose(context, state, drawing).probs)


class StaleSlot(Target):
    """In one row of 50 a slot holds what another one does."""

    def verify(self, cache, start, anchor, draft, **options):
        """Where the slot is committed, it is overwritten before each forward."""
        rows = torch.arange(0, len(start), ROWS)
        rows = rows[start[rows] > SLOT]
        for table in (*cache.keys.values(), *cache.values.values()):
            table[rows, SLOT] = table[rows, SLOT - 3]
        return super().verify(cache, start, anchor, draft, **options)


@contextmanager
def hidden_slot() -> Iterator[None]:
    """No later token sees one slot, in all rows and layers (of a CPU's masks)."""
    whole = attention.window_mask

    def cut(window, *args, **options):
        mask = whole(window, *args, **options)
        if mask.shape[-1] > SLOT:
            mask, slots = mask.clone(), window.slots[:, -mask.shape[-2] :]
            lost = mask[..., SLOT].masked_fill(slots[:, None] > SLOT, -torch.inf)
            mask[..., SLOT] = lost
        return mask

    attention.window_mask = cut
    try:
        yield
    finally:
        attention.window_mask = whole


@dataclass(frozen=True)
class Case:
    """A generator, by the functions that make it, and the one that judges its texts."""

    drafter: Callable
    sampler: Callable = RejectionSampler
    target: Callable = Target
    around: Callable = nullcontext


def drafts(kind: type = ModelDrafter, count: int = 4) -> Callable:
    """Of the zoo's draft model."""
    return lambda target: kind(zoo.load_drafter("model", target).model, count)


FAULTS = {
    "accept draws x 0.98": Case(drafts(), lambda: ScaledDraws(0.98)),
    "accept draws x 0.95": Case(drafts(), lambda: ScaledDraws(0.95)),
    "accept draws x 1.05": Case(drafts(), lambda: ScaledDraws(1.05)),
    "residual without clamp": Case(drafts(), NoClamp),
    "sharpened q": Case(drafts(Sharpened)),
    "bonus from the draft": Case(drafts(), BonusFromDraft),
    "stale slot in one row of 50": Case(drafts(), target=StaleSlot),
    "mask hides one slot": Case(drafts(), around=hidden_slot),
    "truncation of the draft alone": Case(drafts(TruncatedDraft, 1)),
}
RULES = {"rejection": RejectionSampler, "block": BlockSampler, "coupling": CouplingSampler}
HEADS = ("model", "eagle3", "mask-token", "mtp")


def sound_cases() -> dict[str, Case]:
    """Every drafter with every rule, chains and trees."""
    makers = {"lookup": lambda target: PromptLookupDrafter(4)}
    makers |= {name: lambda target, name=name: zoo.load_drafter(name, target) for name in HEADS}
    for name in ("model", "eagle3"):
        makers[f"{name}, tree"] = lambda target, name=name: zoo.load_drafter(
            name, target, tree="8x4"
        )
    return {
        f"{drafter}, {rule}": Case(make, RULES[rule])
        for drafter, make in makers.items()
        for rule in RULES
    }


def watch(case: Case, *, most: int, first_seed: int, threshold: float) -> dict:
    """Bets along texts until the e-value passes a threshold: with what the loop drew from, and by
    the texts alone. The curves are of logarithms.
    """
    model, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    texts = zoo.heldout_prompts(ROWS)
    prompts = [tokenizer(text).input_ids[:PROMPT_TOKENS] for text in texts]
    generator = SpeculativeGenerator(case.target(model), case.drafter(model), case.sampler())
    honest = SpeculativeGenerator(model, generator.drafter, RejectionSampler())
    both = {
        name: Sentinel(honest, with_drafts=True, raises=False)
        for name in ("with the loop", "text alone")
    }
    found = {"reached": dict.fromkeys(both), "curves": {name: [] for name in both}, "tokens": []}
    started, count, seed = time.perf_counter(), 0, first_seed
    while count < most and None in found["reached"].values():
        seeds = list(range(seed, seed := seed + ROWS))
        with case.around():
            result = generator.generate(
                *left_padded(prompts, generator.target.device),
                **{**OPTIONS, "max_new_tokens": NEW_TOKENS, "seed": seeds, "output_scores": True},
            )
        new, count = result.new_tokens.tolist(), count + sum(result.lengths)
        found["tokens"].append(count)
        for name, sentinel in both.items():
            if found["reached"][name] is not None:
                continue
            scores = result.scores if name == "with the loop" else None
            sentinel(prompts, new, steps=result.steps, scores=scores, **OPTIONS)
            now = sentinel.found
            found["curves"][name].append(round(now.log_e, 3))
            if now.log_peak > math.log(threshold):
                found["reached"][name] = count
    one = both["with the loop"].found
    found["z"] = {lean.name: round(lean.z, 2) for lean in one.leanings}
    found["detectable"], found["loop_distance"] = one.detectable, one.loop_distance
    return {**found, "seconds": round(time.perf_counter() - started, 1)}


def power(add: Callable, args: argparse.Namespace) -> None:
    """Every planted fault, and one sound generator for the figure."""
    cases = {"sound": Case(drafts())} | FAULTS
    for name in args.only or cases:
        options = {"most": args.tokens, "first_seed": 10**6, "threshold": 1e3}
        add(name, lambda case=cases[name], options=options: watch(case, **options))


def sound(add: Callable, args: argparse.Namespace) -> None:
    """200 runs in all, over all sound generators in turn."""
    cases = sound_cases()
    for run in range(args.runs):
        name = list(cases)[run % len(cases)]
        options = {"most": args.tokens, "first_seed": 10**8 * (1 + run), "threshold": 1e2}
        add(f"{name}, run {run}", lambda case=cases[name], o=options: watch(case, **o))


def half(add: Callable, args: argparse.Namespace) -> None:
    """An 8B shape in bfloat16, 64 rows: what rounding does, and a fault beside it. A copy in
    float32 is a reference where it fits.
    """
    model = shape("8B")
    prompts = prompt(model, PROMPT_TOKENS, rows=64).tolist()
    wide = copy.deepcopy(model).float() if args.wide else None
    ways = {
        "against the loop": ({}, True),
        "own forward, no tolerance": ({"tolerance": 0.0}, False),
        "own forward, tolerance 0.002": ({"tolerance": 0.002}, False),
    }
    if wide is not None:
        ways["float32, no tolerance"] = ({"tolerance": 0.0, "reference": wide}, False)
    samplers = {"sound": RejectionSampler(), "accept draws x 0.95": ScaledDraws(0.95)}
    for name, sampler in samplers.items():

        def run(sampler=sampler) -> dict:
            generator = SpeculativeGenerator(model, eagle3(model), sampler)
            options = {"with_drafts": True, "raises": False}
            all_ways = {n: Sentinel(generator, **options, **more) for n, (more, _) in ways.items()}
            for batch in range(max(1, args.tokens // (len(prompts) * NEW_TOKENS))):
                seeds = list(range(64 * batch, 64 * batch + 64))
                more = {"max_new_tokens": NEW_TOKENS, "seed": seeds, "output_scores": True}
                inputs = left_padded(prompts, generator.target.device)
                result = generator.generate(*inputs, **OPTIONS, **more)
                for way, sentinel in all_ways.items():
                    scores = result.scores if ways[way][1] else None
                    new = result.new_tokens.tolist()
                    sentinel(prompts, new, steps=result.steps, scores=scores, **OPTIONS)
            return {"explain": generator.explain()} | {
                way: {
                    "log_e": one.found.log_e,
                    "z": {lean.name: round(lean.z, 2) for lean in one.found.leanings},
                    "mean": {lean.name: lean.mean for lean in one.found.leanings},
                    "loop_distance": one.found.loop_distance,
                    "far_share": one.found.far_share,
                    "tokens": one.found.num_tokens,
                }
                for way, one in all_ways.items()
            }

        add(name, run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("study", choices=("power", "sound", "half"))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=200_000, help="at most, per run")
    parser.add_argument("--runs", type=int, default=200, help="of sound generators")
    parser.add_argument("--only", nargs="*", help="faults")
    parser.add_argument("--wide", action="store_true", help="half: a float32 copy beside it")
    args = parser.parse_args()
    print(about())
    done = {}
    if args.output.exists():
        lines = map(json.loads, args.output.read_text().splitlines())
        done = {line["name"]: line for line in lines}

    def add(name: str, run: Callable[[], dict]) -> None:
        if name not in done:
            done[name] = {"name": name, **run()}
            with args.output.open("a") as file:
                file.write(json.dumps(done[name]) + "\n")
        line = done[name]
        if "reached" in line:
            peaks = {way: max(curve) for way, curve in line["curves"].items()}
            reached = "   ".join(
                f"{way}: {count or 'not'} (log e at most {peaks[way]:.1f})"
                for way, count in line["reached"].items()
            )
            print(f"{name:<34} {line['tokens'][-1]:>7} tokens   {reached}", flush=True)
        else:
            print(f"{name}\n{json.dumps(line, indent=1)}", flush=True)

    {"power": power, "sound": sound, "half": half}[args.study](add, args)


if __name__ == "__main__":
    main()
