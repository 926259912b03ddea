"""Steps of the whole loop on one GPU, beside each other and beside Hugging Face's.

    PYTHONPATH=. python benchmarks/gpu.py step baselines       # see PARTS for the others

Weights are random and of real shapes, built on the GPU. Acceptance is synthetic where a line says
so. The sides of a table take turns: a time is the median over rounds of whole steps, the host's
reading of every record included, and `x` the median ratio within a round to the table's first line.
A part that fails prints its error, and the next one runs. That captured steps are the eager ones is
checked by `gpu_check.py`. Without a GPU shapes are small.
"""

import argparse
import gc
import math
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import lru_cache
from unittest.mock import patch

import torch
from models import DialledSampler, block_head, eagle3, mask_token, mtp, prompt, shape
from timing import (
    DEVICE,
    Side,
    Turns,
    about,
    copies,
    now_ms,
    replay,
    show,
    synchronize,
    timed,
)
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import PreTrainedModel, StaticCache, StoppingCriteriaList
from transformers.utils.import_utils import is_flash_linear_attention_available

from specdec import ModelDrafter, PromptLookupDrafter, SpeculativeGenerator, Target, Tree
from specdec.drafters.head.layer_config import Convolution
from specdec.drafters.mask_token.correction import (
    DominoConfig,
    MarkovConfig,
    SelectorConfig,
    XPressConfig,
)
from specdec.drafters.mask_token.lattice import LiLiCorrConfig
from specdec.hf.forward import cache_argument
from specdec.loop import replay as loop_replay
from specdec.loop.replay import NUM_EAGER
from specdec.targets.edits.memory import _Mixer
from specdec.types import Draft

ROUNDS, NUM_STEPS = (4, 40) if DEVICE == "cuda" else (1, 3)
GREEDY = {"do_sample": False}
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 1}
MODES = {"greedy": GREEDY, "sampled at T = 1": SAMPLED}
Group = tuple[str, dict[str, Side]]


@lru_cache(maxsize=1)
def target_of(name: str, **changed) -> Target:
    """The target that a part measures; only the last one is kept."""
    return Target(shape(name, **changed), fuse=DEVICE == "cuda")


class Steps:
    """Steps of one generation as `generate` runs them: issued one ahead, their records read one
    late. A row that ends costs as much as before.
    """

    def __init__(
        self, target, drafter, ids: Tensor, sampler="auto", *, graphs=True, chunk=2048, **options
    ):
        options_of_loop = {"graphs": graphs, "prefill_chunk_size": chunk}
        self.generator = SpeculativeGenerator(target, drafter, sampler, **options_of_loop)
        drafter, self.num_tokens, self.num_steps = self.generator.drafter, 0, 0
        width = (drafter.tree_depth or drafter.num_draft_tokens) + 1
        room = (NUM_STEPS * (ROUNDS + 1) + NUM_EAGER + 3) * width
        options = {"max_new_tokens": room, "eos_token_id": None, **(options or GREEDY)}
        self.generation = self.generator.start(ids, **options)
        for _ in range(NUM_EAGER + 2):
            self.generator.step(self.generation).fetch().read()

    def __call__(self) -> float:
        """Milliseconds of a step."""
        return timed(self._run)[0] / NUM_STEPS

    def _run(self) -> None:
        unread = None
        for _ in range(NUM_STEPS):
            pending = self.generator.step(self.generation).fetch()
            self._read(unread)
            unread = pending
        self._read(unread)
        self.num_steps += NUM_STEPS

    def _read(self, pending) -> None:
        if pending is not None:
            self.num_tokens += sum(len(row.new_tokens) for row in pending.read())

    def about(self) -> tuple[str, str]:
        """Tokens per step of all rows, and seconds of the capture or why there is none."""
        replay, captured = self.generation.storage.replay, "eager"
        if replay is not None:
            seconds = sum(graph.capture_seconds for graph in replay.graphs.values())
            captured = replay.refusal or f"{seconds:.2f}"
        return f"{self.num_tokens / self.num_steps:.2f}", captured[:60]


def roof(model: PreTrainedModel) -> str:
    """The time of a copy of as many bytes as the weights that a step reads."""
    size = 2**31 if DEVICE == "cuda" else 2**24
    times = Turns().run({"copy": replay(copies(size, 1))}, 8)
    embeddings = model.get_input_embeddings().weight.nbytes  # of which a few rows are read
    num_bytes = sum(weight.nbytes for weight in model.parameters()) - embeddings
    ms, speed = times.ms("copy") * num_bytes / size, size / times.ms("copy") / 1e9
    weights = f"the weights' {num_bytes / 1e9:.1f} GB"
    return f"roof: a copy of as many bytes as {weights}: {ms:.2f} ms ({speed:.2f} TB/s)"


def step() -> Iterator[Group]:
    """The 8B shape with every kind of drafter over K. A step over the first line's is the
    acceptance length from which on the drafter pays.
    """
    target = target_of("8B")
    model, ids = target.model, prompt(target.model, 512)
    print(roof(model))
    head, small = eagle3(model), shape("8B", num_hidden_layers=1)
    drafters = {"no drafter": None, "EAGLE-3, K = 3": head}
    drafters |= {f"EAGLE-3, K = {k}": eagle3(model, k) for k in (1, 5)}
    drafters |= {f"mask-token of four layers, K = {k}": mask_token(model, k) for k in (3, 5, 7)}
    drafters |= {"MTP of three depths, K = 3": mtp(model)}
    drafters |= {"draft model of one layer, K = 3": ModelDrafter(small, 3)}
    sides = {name: Steps(target, drafter, ids) for name, drafter in drafters.items()}
    truncated = {"do_sample": True, "temperature": 0.8, "top_p": 0.9}
    sides["EAGLE-3, K = 3, top-p 0.9"] = Steps(target, head, ids, **truncated)
    sides["EAGLE-3, K = 3, not fused"] = Steps(model, head, ids)
    sides["EAGLE-3, K = 3, eager"] = Steps(target, head, ids, graphs=False)
    yield "8B, B = 1, 512 tokens", sides


def baselines() -> Iterator[Group]:
    """Hugging Face's loops and one over compiled forwards, with a draft model of one layer."""
    target = target_of("8B")
    model, ids, small = target.model, prompt(target.model, 512), shape("8B", num_hidden_layers=1)
    yield (
        "8B, B = 1, 512 tokens, draft model of one layer, K = 3",
        {
            "ours": Steps(target, ModelDrafter(small, 3), ids),
            "ours, no drafter": Steps(target, None, ids),
            "HF generate, eager, per token": hf_generate(model, ids),
            "HF assisted, eager, per pass": hf_generate(model, ids, small, 3),
            "loop over torch.compile(mode='reduce-overhead')": compiled_loop(model, small, ids, 3),
        },
    )


def context() -> Iterator[Group]:
    """Long contexts, and batches."""
    target = target_of("8B")
    sides = {}
    for rows, tokens in ((1, 512), (1, 8192), (8, 512), (8, 8192)):
        ids = prompt(target.model, tokens, rows)
        sides[f"B = {rows}, {tokens} tokens"] = Steps(target, eagle3(target.model), ids)
    yield "8B, EAGLE-3, K = 3, greedy", sides


def trees() -> Iterator[Group]:
    """Trees beside chains of the same depth. Random drafts are hardly accepted: costs alone."""
    target = target_of("8B")
    chain, tree = eagle3(target.model, 5), eagle3(target.model, tree=Tree(nodes=31, depth=5))
    for rows, tokens in ((1, 512), (1, 8192), (8, 512)):
        ids = prompt(target.model, tokens, rows)
        for mode, options in MODES.items():
            sides = {"chain of 5": Steps(target, chain, ids, **options)}
            sides["tree of 31 nodes"] = Steps(target, tree, ids, **options)
            if options is SAMPLED:
                recursive = Steps(target, tree, ids, "rejection", **options)
                sides["tree, recursive rejection"] = recursive
            yield f"8B, EAGLE-3, B = {rows}, {tokens} tokens, {mode}", sides


def corrections() -> Iterator[Group]:
    """A DSpark-shaped head of 7 tokens, with each correction and without; the vocabulary is that of
    the public heads. torch's argmax over one row of 128 256 ids takes 26 us, over 151 936 8 us.
    """
    target = target_of("8B", vocab_size=151_936)
    rank = 256 if DEVICE == "cuda" else 16
    kinds = {
        "no correction": (None, {}),
        "Markov": (MarkovConfig(rank), {}),
        "Markov, gated": (MarkovConfig(rank, "gated"), {}),
        "Markov, rnn": (MarkovConfig(rank, "rnn"), {}),
        "Domino": (DominoConfig(rank, 4 * rank), {}),
        "selector and convolutions": (SelectorConfig(rank), {"convolution": Convolution()}),
        "XPress": (XPressConfig(rank), {}),
        "LiLiCorr": (LiLiCorrConfig(8, 4 * rank), {}),  # on a GPU the public recipe
    }
    heads = {name: block_head(target.model, kind, **of) for name, (kind, of) in kinds.items()}
    ids = prompt(target.model, 512)
    for mode, options in MODES.items():
        sides = {name: Steps(target, head, ids, **options) for name, head in heads.items()}
        yield f"8B, block head, K = 7, B = 1, 512 tokens, {mode}", sides


class Calls:
    """24 whole calls through one generator that was warmed up: options, prompts of 30 to 1 540
    tokens in a random order, 128 new tokens each.

    Args:
        target, drafter: of the generator.
        acceptance: of each draft token, by coins.
    """

    def __init__(self, target: Target, drafter, acceptance: float):
        self.model, self.num_new = target.model, 128 if DEVICE == "cuda" else 8
        sampler = DialledSampler(acceptance)
        self.generator = SpeculativeGenerator(target, drafter, sampler, graphs=True)
        self.options = {"do_sample": True, "seed": 0, "eos_token_id": None}
        lengths = torch.logspace(math.log10(30), math.log10(1540), 24).long().tolist()
        random.Random(0).shuffle(lengths)
        self.prompts = [prompt(self.model, n, seed=i) for i, n in enumerate(lengths)]
        room = max(ids.shape[1] for ids in self.prompts) + self.num_new
        ms, _ = timed(lambda: self.generator.warm_up(1, room, **self.options))
        self._before, self._taken = self._made(), (0.0, 1, 1)
        print(f"warm_up: {ms / 1e3:.1f} s, {self._before[0]} captures", flush=True)
        self.call(self.prompts[0], check=True)

    def _made(self) -> tuple[int, int]:
        """Captures that are kept, and what was compiled so far."""
        replays = [storage.replay for storage in self.generator._storages if storage.replay]
        num_graphs = sum(len(replay.all_graphs) for replay in replays)
        return num_graphs, counters["stats"]["unique_graphs"]

    def late(self) -> str:
        """What the calls captured and compiled that `warm_up` had not."""
        captures, compiled = (now - b for now, b in zip(self._made(), self._before, strict=True))
        return f"after warm_up: {captures} captures, {compiled} compilations"

    def call(self, ids: Tensor, **options):
        """One whole call."""
        options = {**self.options, "max_new_tokens": self.num_new, **options}
        return self.generator.generate(ids, **options)

    def step(self) -> float:
        """Milliseconds of a step, everything that a call does besides included."""
        results = [timed(lambda ids=ids: self.call(ids)) for ids in self.prompts]
        steps = sum(found.stats.steps[0] for _, found in results)
        self._taken = sum(ms for ms, _ in results), steps, sum(r.lengths[0] for _, r in results)
        return self._taken[0] / steps

    def token(self) -> float:
        """Milliseconds of a token in the calls that `step` has just timed."""
        return self._taken[0] / self._taken[2]

    def tokens_per_step(self) -> float:
        """Of these calls."""
        return self._taken[2] / self._taken[1]

    def host(self) -> float:
        """Milliseconds of the host's work before the first step; nothing is read."""
        taken = []
        for index in range(24):
            ids = prompt(self.model, 1, seed=index)
            synchronize()
            start = now_ms()
            generation = self.generator.start(ids, **self.options, max_new_tokens=self.num_new)
            taken.append(now_ms() - start)
            generation.close()
        return statistics.median(taken)

    def reading(self, length: int) -> Side:
        """A side: milliseconds of reading a prompt of so many tokens."""
        ids = prompt(self.model, length)

        @torch.inference_mode()
        def side() -> float:
            generation = self.generator.start(ids, **self.options, max_new_tokens=self.num_new)
            read, size = generation.storage.prefill, self.generator.prefill_chunk_size
            taken = [timed(lambda: read(generation.request, size))[0] for _ in range(8)]
            generation.close()
            return statistics.median(taken)

        return side


def calls() -> Iterator[Group]:
    """Whole calls, everything included, and their parts: the host's work before the first step, the
    reading of prompts, a step alone. First it is checked that replayed steps are the eager ones.
    """
    target, size = target_of("Qwen3-8B"), 256 if DEVICE == "cuda" else 16
    heads = {
        "EAGLE-3, K = 3, acceptance 0.7": (eagle3(target.model), 0.7),
        "DSpark's shape, K = 7, acceptance 0.925": (
            block_head(target.model, MarkovConfig(size)),
            0.925,
        ),
    }
    ids = prompt(target.model, 512)
    for name, (head, acceptance) in heads.items():
        whole = Calls(target, head, acceptance)
        synthetic = DialledSampler(acceptance)
        sides = {"a step alone, 512 tokens": Steps(target, head, ids, synthetic, do_sample=True)}
        sides |= {"a step of 24 whole calls": whole.step, "a token of theirs": whole.token}
        sides |= {"the host before a call": whole.host}
        sides |= {f"reading {n} tokens": whole.reading(n) for n in (500, 1500)}
        yield f"Qwen3-8B, {name}, B = 1", sides
        print(f"\n{whole.tokens_per_step():.2f} tokens per step; {whole.late()}")
        print(whole.generator.explain())
        del whole, sides  # the tensors of the next head take their place
    sides = {}
    for sizes in ((64, 256), (64, 256, 1024), (64, 256, 512, 1024), (64, 128, 256, 512, 1024)):
        with patch.object(loop_replay, "CAPTURED_CHUNKS", sizes):
            whole = Calls(target, head, acceptance)
        for length in (100, 500, 900, 1500):
            sides[f"{length} tokens, chunks of {sizes}"] = whole.reading(length)
    yield "Qwen3-8B, reading prompts in captured chunks of other sizes", sides


def small() -> Iterator[Group]:
    """The 0.6B shape beside Hugging Face's."""
    target = target_of("0.6B")
    ids, sampler = prompt(target.model, 512), DialledSampler(0.7)
    synthetic = Steps(target, eagle3(target.model), ids, sampler, do_sample=True)
    sides = {"no drafter": Steps(target, None, ids), "EAGLE-3, synthetic 0.7": synthetic}
    yield "0.6B, B = 1", sides | {"HF generate, eager, per token": hf_generate(target.model, ids)}


def mixture() -> Iterator[Group]:
    """A mixture of experts, which needs an H200."""
    target_of.cache_clear()
    model = shape("30B-A3B")
    if DEVICE == "cpu":
        model.set_experts_implementation("batched_mm")
    ids, lookup = prompt(model, 512), PromptLookupDrafter(3)
    sides = {"captured": Steps(model, lookup, ids)}
    yield "30B-A3B, lookup, K = 3", sides | {"eager": Steps(model, lookup, ids, graphs=False)}


def indexed() -> Iterator[Group]:
    """Layers that read 2 048 chosen keys, in contexts four and sixteen times as long."""
    target_of.cache_clear()
    model = shape("V3.2, five layers", max_position_embeddings=40_960)
    if DEVICE == "cpu":
        model.set_experts_implementation("batched_mm")
    chunk = 128  # HF's indexer scores all keys for all tokens of a call, 64 times
    model.generation_config.prefill_chunk_size = chunk
    print(roof(model))
    for tokens in (8192, 32_768):
        ids, lookup = prompt(model, tokens), PromptLookupDrafter(3)
        yield (
            f"five layers of DeepSeek-V3.2, B = 1, {tokens} tokens",
            {
                "no drafter": Steps(model, None, ids, chunk=chunk),
                "lookup, K = 3": Steps(model, lookup, ids, chunk=chunk),
                "lookup, K = 3, eager": Steps(model, lookup, ids, graphs=False, chunk=chunk),
                "HF generate, per token": hf_generate(model, ids),
            },
        )


class Successors(PromptLookupDrafter):
    """A drafter that costs nothing and always proposes the ids after the last one."""

    def propose(self, context, state, drawing):
        last = context.tokens.gather(1, context.num_new[:, None])
        return Draft(last + 1 + torch.arange(drawing.num_draft_tokens, device=last.device))


def forgetful(mixer, inputs, record, line):
    """A window from a state that never advances: a step without taking back."""
    return mixer.run(inputs, mixer._copies())[1]


def hybrid() -> Iterator[Group]:
    """A target with recurrent layers: what taking back costs."""
    target = target_of("9B hybrid")
    kernels = "fla's kernels" if is_flash_linear_attention_available() else "HF's torch path"
    for rows in (1, 8):
        ids, sides = prompt(target.model, 512, rows), {}
        for name in ("whole step", "state never advances"):
            is_whole = name == "whole step"
            change = patch.object(_Mixer, "read_both", forgetful)
            with nullcontext() if is_whole else change:  # the graph keeps what is captured here
                sides[name] = Steps(target, PromptLookupDrafter(4), ids)
        if rows == 1:
            options = Successors(4), ids, DialledSampler(0.72)
            sides["synthetic acceptance 0.72"] = Steps(target, *options, do_sample=True)
            sides["HF generate, per token"] = hf_generate(target.model, ids)
        yield f"9B hybrid, {kernels}, K = 4, B = {rows}", sides


def profile() -> Iterator[Group]:
    """What a step launches, and the kernels that take the most time."""
    target = target_of("8B")
    ids, tree = prompt(target.model, 512), eagle3(target.model, tree=Tree(nodes=31, depth=5))
    for name, drafter in {"EAGLE-3, K = 3": eagle3(target.model), "tree of 31 nodes": tree}.items():
        side = Steps(target, drafter, ids)
        activities = [getattr(torch.profiler.ProfilerActivity, DEVICE.upper())]
        with torch.profiler.profile(activities=[*activities]) as found:
            side()
        events = [event for event in found.key_averages() if event.self_device_time_total]
        events.sort(key=lambda event: -event.self_device_time_total)
        count, ms = (
            sum(e.count for e in events),
            sum(e.self_device_time_total for e in events) / 1e3,
        )
        print(f"{name}: {count / NUM_STEPS:.0f} kernels, {ms / NUM_STEPS:.3f} ms of the device")
        for e in events[:5]:
            each = e.self_device_time_total / 1e3 / NUM_STEPS
            print(f"    {each:.3f} ms, {e.count / NUM_STEPS:.0f} x {e.key[:70]}")
        yield f"8B, {name}", {"a step": side}


def hf_generate(model: PreTrainedModel, ids: Tensor, assistant=None, k: int = 0) -> Side:
    """HF's `generate` in eager mode, per pass of the target: the difference of two lengths."""
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    if assistant is not None:
        config = assistant.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = k, "constant"
        config.assistant_confidence_threshold = 0.0
        options["assistant_model"] = assistant

    passes = []

    def counted(ids: Tensor, scores: object) -> Tensor:
        """A criterion that stops nothing: it is asked once after every pass."""
        passes.append(1)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def side() -> float:
        found = []
        for count in (4, 24):
            passes.clear()
            work = {"max_new_tokens": count, "min_new_tokens": count, **options}
            work["stopping_criteria"] = StoppingCriteriaList([counted])
            found.append((timed(lambda work=work: model.generate(ids, **work))[0], len(passes)))
        return (found[1][0] - found[0][0]) / max(1, found[1][1] - found[0][1])

    return side


def compiled_loop(model: PreTrainedModel, draft: PreTrainedModel, ids: Tensor, k: int) -> Side:
    """A loop over `torch.compile` forwards of HF's modules with static caches: the target over the
    root and K tokens, the draft model K times, greedy comparison on the host. Every step reads
    K + 1 new slots, whatever is accepted. With K = 0 it is plain decoding.
    """

    class Compiled:
        """The most likely tokens after each of a window, by one forward."""

        def __init__(self, module: PreTrainedModel):
            self.module, self.name = module, cache_argument(module)
            room = ids.shape[1] + (NUM_STEPS + 1) * (k + 1)
            self.cache = StaticCache(config=module.config, max_cache_len=room)
            self.run = torch.compile(self.forward, mode="reduce-overhead", dynamic=False)

        def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
            inputs = {"input_ids": tokens, "position_ids": positions, self.name: self.cache}
            return self.module(**inputs, use_cache=True).logits.argmax(dim=-1)

        def restart(self) -> None:
            self.cache.reset()
            self.forward(ids)

        def __call__(self, *window: Tensor) -> Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            return self.run(*window).clone()

    target, drafter = Compiled(model), Compiled(draft)

    def run() -> None:
        window = torch.zeros(len(ids), k + 1, dtype=torch.long, device=ids.device)
        for start in range(ids.shape[1], ids.shape[1] + NUM_STEPS * (k + 1), k + 1):
            where = (start + torch.arange(k + 1, device=ids.device)).expand(len(ids), -1)
            for i in range(k):
                window[:, i + 1 : i + 2] = drafter(window[:, i : i + 1], where[:, i : i + 1])
            best = target(window, where)
            int((best[:, :-1] == window[:, 1:]).long().cumprod(1).sum(1).max())  # the host decides
            window[:, :1] = best[:, -1:]

    @torch.inference_mode(False)
    @torch.no_grad()
    def side() -> float:
        target.restart()
        drafter.restart()
        return timed(run)[0] / NUM_STEPS

    return side


PARTS = (
    step,
    baselines,
    context,
    trees,
    corrections,
    calls,
    small,
    hybrid,
    profile,
    mixture,
    indexed,
)


def run(part: Callable[[], Iterator[Group]]) -> None:
    """Times every group of a part, and prints its table."""
    for title, sides in part():
        times, first, rows = Turns().run(sides, ROUNDS), next(iter(sides)), []
        for name, side in sides.items():
            spread = max(times[name]) - min(times[name])
            found = times.ms(name), spread, times.ratio(name, first)
            more = side.about() if isinstance(side, Steps) else ("", "")
            rows.append([name, *(f"{value:.2f}" for value in found), *more])
        print(f"\n{title}\n")
        show("|ms|spread|x|tokens per step|captured in, s", rows)
        del sides, side  # and their graphs, before the next group makes its own
        gc.collect()


def main() -> int:
    """As on the command line; 1 where a part fails."""
    names = {part.__name__: part for part in PARTS}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", default=list(names), help=", ".join(names))
    parts, num_failed = parser.parse_args().parts, 0
    if unknown := sorted(set(parts) - names.keys()):
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(names)}")
    print(about(), flush=True)
    for name in parts:
        start = time.perf_counter()
        try:
            run(names[name])
        except Exception:
            traceback.print_exc(file=sys.stdout)
            num_failed += 1
        gc.collect()
        torch.cuda.empty_cache()
        print(f"\n== {name}: {time.perf_counter() - start:.0f} s", flush=True)
    return min(num_failed, 1)


if __name__ == "__main__":
    sys.exit(main())
