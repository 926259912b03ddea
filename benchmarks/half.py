"""What rounding does to a certificate: an 8B shape in bfloat16, 64 rows, steps captured on a GPU.

The loop, Hugging Face's forward in bfloat16 and one in float32 compute three versions of each p.
Tokens are bet on against each. How far the mean of a direction is off by rounding, its drift, needs
no draws: it is sum_v (p of the loop - p)(v) f(v), averaged over tokens. Its largest one over all
directions is the tolerance that a sound generator needs.

Weights are random. At temperature 0.3 their entropy is that of a language model, and the drafter is
the target's first quarter of layers, so that draft and target overlap.
"""

from __future__ import annotations

import copy
import json
import math
import time
from functools import partial
from pathlib import Path

import torch
from faults import PROMPT_TOKENS, ScaledDraws
from models import prompt, shape
from timing import DEVICE, show, timed
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec import ModelDrafter, RejectionSampler, SpeculativeGenerator
from specdec.lab.certificates.generator.alternatives import Ratios
from specdec.lab.certificates.generator.directions import DIRECTIONS, Directions, Gains
from specdec.lab.certificates.generator.learned import Learned
from specdec.lab.certificates.generator.martingale import Wealth
from specdec.lab.certificates.generator.reading import Reader
from specdec.request.lists import left_padded

OPTIONS = {"temperature": 0.3, "neutral": True, "eos_token_id": []}
ROWS, NEW_TOKENS = 64, 64
PRODUCT = 0.002  # the tolerance of a `Sentinel` in half precision
LOOP, OWN, WIDE = "loop", "bfloat16", "float32"


class Watched(Directions):
    """Keeps what its functions are made of."""

    def before(self, *known):
        """As ever."""
        self.seen = super().before(*known)
        return self.seen


class Way:
    """Bets of a run against one version of p."""

    def __init__(self):
        self.learned, self.gains, self.ratios, self.drifts = Learned(), [], [], []

    def log_e(self, tolerance: float) -> float:
        """At the end of the run so far."""
        wealth = Wealth(len(DIRECTIONS), tolerance=tolerance, last=0.0, alternatives=True)
        for gains, ratios in zip(self.gains, self.ratios, strict=True):
            wealth.add(gains, torch.full((len(gains),), gains.shape[1]), ratios=ratios)
        return round(wealth.log_e, 2)

    def add(self, found: list[Gains], drifts: list[Tensor]) -> None:
        """A chunk, by column."""
        found = Gains(*(torch.stack(each, dim=1).cpu() for each in zip(*found, strict=True)))
        self.gains.append(found.gains)
        self.ratios.append(Ratios(found.ratios, found.spreads))
        self.drifts.append(torch.stack(drifts, dim=1).cpu().flatten(0, 1))

    def found(self, stated: float | None) -> dict:
        """Numbers of the run so far; a sound one states its own tolerance."""
        drifts = torch.cat(self.drifts)  # [tokens, D]
        mean, most = drifts.mean(dim=0), drifts.mean(dim=0).abs().argmax().item()
        needed = mean[most].abs().item()
        if stated is None:  # rounded up to one digit
            scale = 10.0 ** math.floor(math.log10(needed)) if needed else 1.0
            stated = float(f"{math.ceil(needed / scale) * scale:.0e}")
        tolerances = {"0": 0.0, "product": PRODUCT, "stated": stated}
        return {
            "drift": needed,
            "drift_error": (drifts[:, most].std() / len(drifts) ** 0.5).item(),
            "drift_of": list(DIRECTIONS)[most],
            "drifts": dict(zip(DIRECTIONS, mean.tolist(), strict=True)),
            "stated_tolerance": stated,
            "log_e": {name: self.log_e(each) for name, each in tolerances.items()},
        }


def first_layers(model: PreTrainedModel) -> PreTrainedModel:
    """A model of the first quarter of a model's layers, with copies of its weights."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = max(1, config.num_hidden_layers // 4)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    with torch.device(model.device):
        small = AutoModelForCausalLM.from_config(config, dtype=model.dtype).eval()
    missing = small.load_state_dict(model.state_dict(), strict=False).missing_keys
    if missing:
        raise ValueError(f"the first layers lack {missing}")
    return small


def float32_copy(model: PreTrainedModel) -> PreTrainedModel | None:
    """A copy, where there is room for it and for the tables of distributions."""
    if DEVICE == "cuda":
        needed = 4 * model.num_parameters() + 12 * 2**30
        free = torch.cuda.mem_get_info()[0]
        if free < needed:
            print(f"no float32 copy: {free / 2**30:.0f} GiB are free of {needed / 2**30:.0f}")
            return None
    return copy.deepcopy(model).float()


@torch.inference_mode()
def read(generator, wide, prompts, result, ways: dict[str, Way], first: int) -> dict[str, float]:
    """Bets of all ways along a chunk, whose first text has a number; sums over its tokens."""
    texts = result.new_tokens.tolist()
    device = generator.target.device
    columns = Reader(generator).distributions(prompts, texts, OPTIONS, result.scores, first)
    others = [None] * len(texts[0])
    if wide is not None:
        reader = Reader(generator, reference=wide, with_drafts=False)
        others = reader.distributions(prompts, texts, OPTIONS)
    follow = {name: Watched(prompts, texts, device, way.learned) for name, way in ways.items()}
    parts = {name: ([], []) for name in ways}
    sums = dict.fromkeys(("loop to bfloat16", "loop to float32", "bfloat16 to float32", "far"), 0.0)
    rounding = torch.finfo(generator.target.dtype).eps ** 0.5
    for (own, draft, loop), other in zip(columns, others, strict=True):
        versions = {LOOP: loop, OWN: own}
        if other is not None:
            versions[WIDE] = other[0]
            sums["loop to float32"] += _distance(loop, other[0]).sum().item()
            sums["bfloat16 to float32"] += _distance(own, other[0]).sum().item()
        far = _distance(loop, own)
        sums["loop to bfloat16"] += far.sum().item()
        sums["far"] += (far > rounding).sum().item()
        for name, p in versions.items():
            gains, drifts = parts[name]
            gains.append(follow[name].step(p, draft))
            seen = follow[name].seen
            off = [
                ((loop - p) * f.values(seen) * (not f.is_of_draft)).sum(dim=-1)
                for f in DIRECTIONS.values()
            ]
            drifts.append(torch.stack(off, dim=-1))
    for name, way in ways.items():
        way.add(*parts[name])
    return sums


def _distance(p: Tensor, q: Tensor) -> Tensor:
    """`[B]` total variation."""
    return (p - q).abs().sum(dim=-1) / 2


def half(output: Path, tokens: int, seconds: float) -> None:
    """A sound generator and a fault, each until so many tokens or seconds; a line of `output` and a
    table after every chunk.
    """
    began = time.perf_counter()
    model = shape("8B")
    prompts = prompt(model, PROMPT_TOKENS, rows=ROWS).tolist()
    wide, drafter = float32_copy(model), ModelDrafter(first_layers(model), num_draft_tokens=4)
    print(f"models: {time.perf_counter() - began:.1f} s", flush=True)
    output.unlink(missing_ok=True)
    stated: dict[str, float] = {}
    for name, sampler in {"sound": RejectionSampler(), "draws x 0.95": ScaledDraws(0.95)}.items():
        generator = SpeculativeGenerator(model, drafter, sampler)
        ways = {way: Way() for way in (LOOP, OWN, WIDE)[: 3 if wide is not None else 2]}
        sums, count, began = {}, 0, time.perf_counter()
        while count < tokens and time.perf_counter() - began < seconds:
            seeds = list(range(count, count + ROWS))
            more = {"max_new_tokens": NEW_TOKENS, "seed": seeds, "output_scores": True}
            inputs = left_padded(prompts, generator.target.device)
            drawn_ms, result = timed(partial(generator.generate, *inputs, **OPTIONS, **more))
            read_ms, found = timed(partial(read, generator, wide, prompts, result, ways, count))
            count += sum(result.lengths)
            sums = {way: sums.get(way, 0.0) + each for way, each in found.items()}
            line = {
                "name": name,
                "tokens": count,
                "acceptance_length": result.stats.acceptance_length,
                "means": {way: each / count for way, each in sums.items()},
                "ways": {way: one.found(stated.get(way)) for way, one in ways.items()},
            }
            with output.open("a") as file:
                file.write(json.dumps(line) + "\n")
            took = f"drawn in {drawn_ms / 1e3:.1f} s, read in {read_ms / 1e3:.1f} s"
            means = ", ".join(f"{way} {each:.1e}" for way, each in line["means"].items())
            print(f"\n{name}: {count} tokens, {took}; {means}\n", flush=True)
            rows = [_row(way, one) for way, one in line["ways"].items()]
            show(f"p of|log e|tolerance {PRODUCT}|stated|log e|largest drift|of", rows)
        stated = stated or {way: one["stated_tolerance"] for way, one in line["ways"].items()}
        print(generator.explain(), flush=True)


def _row(way: str, one: dict) -> tuple:
    """Of the table: without tolerance, with the product's, with the one that a sound run needs."""
    log_e, drift = one["log_e"], f"{one['drift']:.1e} +- {one['drift_error']:.0e}"
    stated = one["stated_tolerance"], log_e["stated"]
    return way, log_e["0"], log_e["product"], *stated, drift, one["drift_of"]
