"""What a step of quantised targets costs on a GPU: `python benchmarks/quantised.py` (torchao).

Eight layers of the 8B Llama shape in bfloat16, random weights, prompt lookup with K = 3, greedy,
one row. First the checks: every captured step equals the eager one, and each token is the most
likely one of HF's own forward, up to twice the rounding of logits: how far those of HF's forward
over the whole text are from those of its forwards over one token each. Then times of captured
steps, taken in turns; figures are medians over rounds of the ratio to bfloat16 within a round.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from pathlib import Path

import gpu_parts
import torch
import torchao
from torchao.quantization import (
    Float8WeightOnlyConfig,
    Int4WeightOnlyConfig,
    Int8WeightOnlyConfig,
    quantize_,
)

from specdec import PromptLookupDrafter, SpeculativeGenerator, Target
from specdec.loop.runner import NUM_EAGER

SMALL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FORMATS = {
    "bfloat16": None,
    "int8 weights": lambda: Int8WeightOnlyConfig(version=2),
    "float8 weights": Float8WeightOnlyConfig,
    "int4 weights": lambda: Int4WeightOnlyConfig(
        group_size=128, int4_packing_format="tile_packed_to_4d"
    ),
}


class Contender:
    """A generation whose steps are timed.

    Args:
        model: the target.
        ids: the prompt.
        steps: that will be asked for.
        fuse: as `Target`'s.
    """

    def __init__(self, model, ids, steps: int, *, fuse: bool):
        begin = time.perf_counter()
        target = Target(model, fuse=fuse)
        self.generator = SpeculativeGenerator(target, PromptLookupDrafter(3), graphs=True)
        room = steps + 40
        self.generation = self.generator.start(ids, max_new_tokens=room, eos_token_id=None)
        for _ in range(NUM_EAGER + 2):
            self.generator.step(self.generation).fetch().read()
        gpu_parts.synchronize()
        self.seconds = time.perf_counter() - begin
        self.refusal = self.generation.runner.refusal
        self.notes = target.notes

    def ms(self, steps: int) -> float:
        """Of a step, read one late."""
        gpu_parts.synchronize()
        start, unread = time.perf_counter(), None
        for _ in range(steps):
            pending = self.generator.step(self.generation).fetch()
            if unread is not None:
                unread.read()
            unread = pending
        unread.read()
        gpu_parts.synchronize()
        return (time.perf_counter() - start) * 1e3 / steps


def check(model, ids, *, fuse: bool, count: int = 24) -> str:
    """Captured = eager, and the text is HF's own, or parts from it within rounding."""
    target = Target(model, fuse=fuse)
    generator = SpeculativeGenerator(target, PromptLookupDrafter(3), graphs=True)
    call = {"max_new_tokens": count, "eos_token_id": None, "pad_token_id": 0}
    found = generator.generate(ids, **call, check=True).sequences
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids)}
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids)}
    more = {"output_logits": True, "return_dict_in_generate": True}
    theirs = model.generate(ids, **call, **options, **more)
    if found.equal(theirs.sequences):
        return "captured = eager, HF's text"
    with torch.inference_mode():
        start, alone = ids.shape[1], torch.stack(theirs.logits, 1).float()
        rounding, logits = (
            model(text[:, :-1]).logits[:, start - 1 :].float() for text in (theirs.sequences, found)
        )
    rounding = float((rounding - alone).abs().max())
    chosen = logits.gather(2, found[:, start:, None])[..., 0]
    gap = float((logits.amax(-1) - chosen).max())
    if gap > 2 * rounding:
        raise RuntimeError(
            f"a token is {gap:.3f} below HF's best one, whose rounding is {rounding}"
        )
    return (
        f"captured = eager, HF's text up to {gap:.3f} in logits, whose rounding is {rounding:.3f}"
    )


def contenders(model, name: str, ids, steps: int) -> dict[str, Contender]:
    made = {}
    for way, fuse in (("plain", False), ("fuse=True", True)):
        try:
            made[f"{name}, {way}"] = Contender(model, ids, steps, fuse=fuse)
        except Exception as error:  # what cannot be run is a line of the table
            print(f"{name}, {way}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--small", action="store_true", help="a tiny shape, to try the script")
    parser.add_argument("--seconds", type=float, default=270.0, help="no new format after so long")
    options = parser.parse_args()
    begin, everything, checks = time.perf_counter(), {}, {}
    versions = f"torch {torch.__version__}, torchao {torchao.__version__}"
    print(versions, torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu")
    total = options.rounds * options.steps
    for name, config in FORMATS.items():
        if time.perf_counter() - begin > options.seconds:
            print(f"{name}: not reached")
            continue
        sizes = {"num_hidden_layers": options.layers} | (SMALL if options.small else {})
        model = gpu_parts.shape_8b(**sizes)
        ids = gpu_parts.prompt(model, 64)
        try:
            if config is not None:
                quantize_(model, config())
            for fuse in (False, True):
                checks[f"{name}, fuse={fuse}"] = check(model, ids, fuse=fuse)
                print(f"{name}, fuse={fuse}: {checks[f'{name}, fuse={fuse}']}", flush=True)
        except (ImportError, RuntimeError, AssertionError, ValueError) as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        everything |= contenders(model, name, ids, total)
        print(f"{name}: {time.perf_counter() - begin:.0f} s so far", flush=True)
        gc.collect()
    times = {name: [] for name in everything}
    for _ in range(options.rounds):
        for name, contender in everything.items():
            times[name].append(contender.ms(options.steps))
    base = {n: times[f"bfloat16, {n}"] for n in ("plain", "fuse=True")}
    print("\n| weights | ms per step | x bfloat16 | x bfloat16 fused | seconds before |")
    print("|---|---|---|---|---|")
    for name, own in times.items():
        ratios = [
            statistics.median(mine / theirs for mine, theirs in zip(own, other, strict=True))
            for other in base.values()
        ]
        refusal = everything[name].refusal
        print(
            f"| {name} | {statistics.median(own):.2f} | {ratios[0]:.2f} | {ratios[1]:.2f} | "
            f"{everything[name].seconds:.0f} |" + (f" not captured: {refusal}" if refusal else "")
        )
    if "OUT" in os.environ:
        notes = {name: contender.notes for name, contender in everything.items()}
        saved = {"versions": versions, "ms": times, "checks": checks, "notes": notes}
        Path(os.environ["OUT"], "quantised.json").write_text(json.dumps(saved, indent=1))


if __name__ == "__main__":
    main()
