"""An 8B shape that drafts for itself with a part of its text, beside plain decoding.

    PYTHONPATH=. python benchmarks/self_drafting.py            # minutes on an H200; OUT=folder
    PYTHONPATH=. python benchmarks/self_drafting.py --own      # drafters with a cache of their own

First it is checked that captured steps are the eager ones, and that a drafter from which nothing is
hidden is never rejected. Then steps are timed at several contexts and batches: weights are random,
keys and values are noise (prompts are not read), acceptance is synthetic, costs are real. All sides
of a context share one cache; those that do not fit into the device's memory are left out by name.
Without a GPU shapes are small. A short table comes last; all figures are in `$OUT/*.json` too.

`--own` times proposals of an EAGLE-3 head of the 8B shape and of a 0.6B draft model, which see all
of their own keys and values, or sinks and recent ones. First it is checked that captured steps are
the eager ones, and that what is in slots that are not seen changes no bit of a proposal.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import gpu
import torch
from gpu_check import check
from models import DialledSampler, eagle3, prompt, shape
from timing import DEVICE, Turns, about, replay, show

from specdec import (
    EagleDrafter,
    LogitsFilter,
    ModelDrafter,
    Recent,
    SelfDrafter,
    Sinks,
    SpeculativeGenerator,
    Target,
    TopSlots,
)
from specdec.drafters import Drafter
from specdec.samplers.noise import Drawing, Noise, draw_by_inversion
from specdec.slots.cache import SlotCache
from specdec.targets.text import TargetText
from specdec.types import Context

IS_GPU = DEVICE == "cuda"
NUM_DRAFT_TOKENS, ACCEPTANCE, NAME = 3, 0.9, "Qwen3-8B"
NUM_SEEN = 1024 if IS_GPU else 8
RECENT = Sinks(4) + Recent(NUM_SEEN)
CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072) if IS_GPU else (16, 24)
MAIN = 32768 if IS_GPU else 24
ROWS = (8, 1)
FEW = Sinks(4) + Recent(NUM_SEEN // 4)
OWN = ((1, 4096), (1, 32768), (8, 32768), (1, 131072)) if IS_GPU else ((1, 256), (2, 96))
"""Rows and tokens that drafters with a cache of their own are timed at."""
SPARE_BYTES = 12e9  # beside weights and cache: graphs, tables, logits


def check_all() -> Iterator[str]:
    """What was checked, on few layers: replays are eager steps, and the perfect control."""
    target = Target(shape(NAME, num_hidden_layers=4), fuse=IS_GPU)
    drafters = {
        "sinks and recent": {"visible": Sinks(4) + Recent(16)},
        "slots by attention": {"visible": Sinks(2) + TopSlots(8) + Recent(4)},
        "layers": {"layers": (0, 1, 3)},
        "early exit, recent": {"layers": 2, "visible": Recent(16)},
    }
    for name, options in drafters.items():
        drafter = SelfDrafter(target, NUM_DRAFT_TOKENS, **options)
        sampler = DialledSampler(0.8)
        make = SpeculativeGenerator(target, drafter, sampler, graphs=True)
        yield f"captured = eager, {name}: {check(lambda make=make: make)}"
    exact = Target(shape(NAME, num_hidden_layers=4).float())
    ids = prompt(exact.model, 300, 4)
    for name, visible in {"all slots": None, "a table of all": Sinks(4) + Recent(600)}.items():
        drafter = SelfDrafter(exact, NUM_DRAFT_TOKENS, visible=visible)
        generator = SpeculativeGenerator(exact, drafter, graphs=True)
        options = {"max_new_tokens": 200 if IS_GPU else 6, "eos_token_id": None}
        stats = generator.generate(ids, do_sample=False, **options).stats
        if stats.acceptance_rate < 0.995:  # a draw may be lost where two forwards round apart
            raise AssertionError(f"{name}: nothing is hidden, and {stats.acceptance_rate} accepted")
        yield f"nothing hidden, {name}: {sum(stats.accepted)} of {sum(stats.drafted)} accepted"


@contextmanager
def shared_cache(target: Target, rows: int, context: int) -> Iterator[SlotCache]:
    """All generations of the block have one cache, full of noise, and read no prompt."""
    room = (gpu.NUM_STEPS * (gpu.ROUNDS + 1) + 16) * (NUM_DRAFT_TOKENS + 1) + 64
    cache = target.init_cache(rows, context + room)
    same = patch.object(Target, "init_cache", lambda self, *sizes, **options: cache)
    with same, patch("specdec.loop.storage.prefill", lambda *args, **options: None):
        yield cache


def noise(cache: SlotCache) -> None:
    """What keys and values hold instead of a text's."""
    for store in cache.stores:
        store.normal_()


def fits(target: Target, rows: int, context: int) -> bool:
    """Whether the cache does, beside what is there."""
    if not IS_GPU:
        return True
    shapes = target.route.shapes.values()
    of_token = sum(s.num_heads * (s.key_width + s.value_width) * s.dtype.itemsize for s in shapes)
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return rows * (context + 2048) * of_token + SPARE_BYTES < free


def sides_of(target: Target, is_main: bool) -> dict[str, SelfDrafter | None]:
    """Drafters by name, the one that is asked for first."""
    found = {"plain": None, f"recent {NUM_SEEN}": {"visible": RECENT}}
    if is_main:
        depth = target.num_layers
        top = Sinks(4) + TopSlots(NUM_SEEN // 4) + Recent(NUM_SEEN // 4)
        found |= {
            "all slots": {},
            f"recent {NUM_SEEN // 4}": {"visible": Sinks(4) + Recent(NUM_SEEN // 4)},
            "top slots": {"visible": top},
            f"{depth // 2} of {depth} layers": {"layers": depth // 2},
            f"{depth // 2} layers, recent": {"layers": depth // 2, "visible": RECENT},
        }
    return {
        name: None if options is None else SelfDrafter(target, NUM_DRAFT_TOKENS, **options)
        for name, options in found.items()
    }


def gathering(target: Target, cache: SlotCache, rows: int, context: int) -> float:
    """Milliseconds of gathering the table of visible slots."""
    drafter = SelfDrafter(target, NUM_DRAFT_TOKENS, visible=RECENT)
    sizes = {"vocab_size": target.vocab_size, "device": target.device}
    state = drafter.init_state(rows, context, **sizes)
    lengths = torch.full((rows,), context - 1, device=target.device)
    text = TargetText(target, cache, lengths)
    zeros = torch.zeros(rows, 2, dtype=torch.long, device=target.device)
    seen = Context(zeros, None, lengths, zeros[:, 0], target=text)
    side = replay([lambda: (drafter._visible_text(seen, state).lengths,)] * 4)
    return Turns().run({"take": side}, 5).ms("take")


@torch.inference_mode()
def measure(target: Target, rows: int, context: int) -> list[dict]:
    """Every side of one context and batch."""
    found = []
    with shared_cache(target, rows, context) as cache:
        ids, sides = prompt(target.model, context, rows), {}
        for name, drafter in sides_of(target, context == MAIN).items():
            sampler = DialledSampler(ACCEPTANCE)
            sides[name] = gpu.Steps(
                target, drafter, ids, sampler, do_sample=True, seed=[*range(rows)]
            )
        noise(cache)
        take = gathering(target, cache, rows, context)
        for side in sides.values():
            side.num_tokens = side.num_steps = 0
        times = Turns().run(sides, gpu.ROUNDS)
        plain = sides["plain"]
        for name, side in sides.items():
            per_step, of_plain = (s.num_tokens / s.num_steps for s in (side, plain))
            speedup = times.ratio("plain", name) * per_step / of_plain
            found.append(
                {
                    **{"rows": rows, "context": context, "drafter": name},
                    **{"step_ms": times[name], "tokens_per_step": per_step},
                    "tokens_per_s": per_step / times.ms(name) * 1e3,
                    **{"x": speedup, "gathering_ms": take, "captured": side.about()[1]},
                }
            )
            print(json.dumps(found[-1]), flush=True)
    return found


class Proposals:
    """Proposals of a drafter with a cache of its own, behind texts of noise.

    Args:
        drafter: whose prompts are not read.
        vocab_size: of the target.
        rows, context: sizes of the texts.
    """

    def __init__(self, drafter: Drafter, vocab_size: int, rows: int, context: int):
        device, count = torch.device(DEVICE), drafter.num_draft_tokens
        self.drafter = drafter
        self.state = drafter.init_state(
            rows, context + 2 * count, vocab_size=vocab_size, device=device
        )
        torch.manual_seed(3)
        noise(self.state.cache)
        start, num_new = torch.full((rows,), context - 2, device=device), 1
        tokens, features = torch.randint(vocab_size, (rows, count + 2), device=device), None
        if drafter.feature_layers:
            size = rows, count + 1, drafter.config.feature_width
            features = torch.randn(size, dtype=drafter.head.dtype, device=device)
        numbers = Noise([*range(rows)], device=device).at(start, count + 1)
        logits_filter = LogitsFilter(rows, device=device)
        self.seen = Context(tokens, features, start, torch.full_like(start, num_new))
        self.drawing = Drawing(count, logits_filter, numbers, draw_by_inversion)

    @torch.inference_mode()
    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and probabilities."""
        draft = self.drafter.propose(self.seen, self.state, self.drawing)
        return draft.tokens, draft.probs

    def check(self, context: int) -> str:
        """Slots that are not seen hold other numbers, and the proposal has the same bits."""
        near, before = self.state.cache.near, self()
        hidden = slice(near.sinks, context - near.recent - 2)
        for store in self.state.cache.stores:
            store[:, :, hidden].normal_()
        if not all(map(torch.equal, before, self())):
            raise AssertionError("a proposal read slots that are not visible")
        for store in self.state.cache.stores:
            store[:, :, near.sinks - 1].normal_()
        if torch.equal(self()[1], before[1]):
            raise AssertionError("a proposal did not read the last of the sinks")
        return f"{hidden.stop - hidden.start} of {context} slots not seen: the same bits"


def own(out: Path | None, start_s: float) -> None:
    """Proposals of drafters with a cache of their own, with and without windows."""
    most = max(context for _, context in OWN)
    target = shape("8B", num_hidden_layers=4, max_position_embeddings=most + 1024)
    small = shape("0.6B", max_position_embeddings=most + 1024)
    head = eagle3(target).head
    makes = {
        "EAGLE-3 head, 8B": (target, lambda seen: EagleDrafter(head, target, 4, visible=seen)),
        "draft model, 0.6B": (small, lambda seen: ModelDrafter(small, 4, visible=seen)),
    }
    report = {"about": about(), "checks": [], "measured": []}
    for name, (model, make) in makes.items():
        few, sampler = make(Sinks(4) + Recent(16)), DialledSampler(0.8)
        generator = SpeculativeGenerator(model, few, sampler, graphs=True)
        found = [f"captured = eager: {check(lambda one=generator: one)}"]
        proposals = Proposals(make(RECENT), model.config.vocab_size, 2, most // 8)
        found.append(proposals.check(most // 8))
        report["checks"] += [f"{name}, {one}" for one in found]
        print(
            *report["checks"][-2:], f"{time.perf_counter() - start_s:.0f} s", sep="\n", flush=True
        )
    del generator, proposals
    for rows, context in OWN:
        for name, (model, make) in makes.items():
            sides = {}
            for visible in (None, RECENT, FEW):
                proposals = Proposals(make(visible), model.config.vocab_size, rows, context)
                sides["all" if visible is None else f"{visible.count}"] = replay([proposals] * 4)
            times = Turns().run(sides, 9 if IS_GPU else 1)
            report["measured"] += [
                {"drafter": name, "rows": rows, "tokens": context, "seen": seen}
                | {"ms": times.ms(seen), "x": times.ratio("all", seen)}
                for seen in sides
            ]
            del sides, proposals
            gc.collect()
            if IS_GPU:
                torch.cuda.empty_cache()
    if out is not None:
        (out / "own_windows.json").write_text(json.dumps(report, indent=1))
    print(f"\na proposal of K = 4, {report['about']}\n")
    rows = [
        [m["drafter"], m["rows"], m["tokens"], m["seen"], f"{m['ms']:.3f}", f"{m['x']:.2f}"]
        for m in report["measured"]
    ]
    show("drafter|rows|tokens|of them seen|ms|x", rows)
    print(f"{time.perf_counter() - start_s:.0f} s")


def main() -> int:
    """As on the command line; 1 where something failed or was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=330, help="no context begins later")
    parser.add_argument("--own", action="store_true", help="drafters with a cache of their own")
    options, start = parser.parse_args(), time.perf_counter()
    seconds, out = options.seconds, Path(os.environ["OUT"]) if os.environ.get("OUT") else None
    if options.own:
        own(out, start)
        return 0
    report = {"about": about(), "checks": [], "measured": [], "left_out": []}
    print(report["about"], flush=True)
    gpu.NUM_STEPS, gpu.ROUNDS = (24, 3) if IS_GPU else (2, 1)
    for said in check_all():
        report["checks"].append(said)
        print(f"{said} ({time.perf_counter() - start:.0f} s)", flush=True)
    target = Target(shape(NAME, max_position_embeddings=max(CONTEXTS) + 4096), fuse=IS_GPU)
    order = [(rows, MAIN) for rows in ROWS]
    order += [(rows, context) for context in CONTEXTS for rows in ROWS if context != MAIN]
    for rows, context in order:
        late = time.perf_counter() - start > seconds
        if late or not fits(target, rows, context):
            why = "no time left" if late else "the cache does not fit"
            report["left_out"].append(f"{rows} rows of {context} tokens: {why}")
            continue
        report["measured"] += measure(target, rows, context)
        if out is not None:
            (out / "self_drafting.json").write_text(json.dumps(report, indent=1))
        gc.collect()
    print(f"\n{NAME}, K = {NUM_DRAFT_TOKENS}, acceptance {ACCEPTANCE}, {report['about']}\n")
    rows = [
        [m["rows"], m["context"], m["drafter"], f"{Turns(a=m['step_ms']).ms('a'):.2f}"]
        + [f"{m[name]:.2f}" for name in ("tokens_per_step", "tokens_per_s", "x", "gathering_ms")]
        + [m["captured"]]
        for m in sorted(report["measured"], key=lambda m: (-m["rows"], m["context"]))
    ]
    show("rows|context|drafter|ms|tokens per step|tokens/s|x plain|gathering, ms|captured", rows)
    print(*report["left_out"], f"{time.perf_counter() - start:.0f} s", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
