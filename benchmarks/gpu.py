"""Steps of the whole loop on one GPU: first that captured steps are the eager ones, then how fast.

    python benchmarks/gpu.py --out results
    python benchmarks/gpu.py --only equality,step --out results     # a part at a time
    python benchmarks/gpu.py --tiny                                 # tiny shapes, any machine

Weights are random and of real shapes, built on the GPU. Acceptance is synthetic where it says so.
A part that fails prints its error, and the next one runs. Times are medians over rounds of whole
steps, the host's reading of every record included.
"""

import argparse
import math
import random
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path

import torch
from gpu_parts import (
    DEVICE,
    TINY,
    CompiledLoop,
    DialledSampler,
    StepTime,
    block_head,
    copy_bandwidth,
    eagle3,
    hf_assisted_ms,
    hf_generate_ms,
    mask_token,
    mtp,
    per_token_ms,
    profile_steps,
    prompt,
    random_model,
    save,
    shape_06b,
    shape_8b,
    shape_9b_hybrid,
    shape_30b_a3b,
    synchronize,
    time_steps,
    weight_bytes,
)
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.import_utils import is_flash_linear_attention_available

from specdec import (
    BlockSampler,
    CouplingSampler,
    EnsembleSampler,
    ModelDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    Target,
    TypicalSampler,
)
from specdec.drafters.tree import Tree
from specdec.heads.correction import DominoConfig, MarkovConfig, SelectorConfig, XPressConfig
from specdec.heads.layers import Convolution
from specdec.target.memory import _Mixer
from specdec.types import Draft

PARTS = (
    "equality",
    "step",
    "trees",
    "corrections",
    "profile",
    "context",
    "plain",
    "calls",
    "lengths",
    "baselines",
    "small",
    "attention",
    "mixture",
    "hybrid",
)
SAMPLERS = [
    BlockSampler(),
    RejectionSampler(),
    CouplingSampler(),
    EnsembleSampler(0.9),
    TypicalSampler(),
]
CALLS = [  # other prompts, seeds and temperatures through one graph
    {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "seed": 1},
    {"do_sample": True, "temperature": 1.3, "top_p": 0.8, "seed": 2},
]


class _Random(PromptLookupDrafter):
    """A drafter that costs nothing and always proposes."""

    def propose(self, context, state, drawing):
        """The ids after the last one."""
        last = context.tokens.gather(1, context.num_new[:, None])
        return Draft(last + 1 + torch.arange(drawing.num_draft_tokens, device=last.device))


def _forgetful(mixer, inputs, record, line):
    """A window from a state that never advances: what a step would take without a replay."""
    return mixer.run(inputs, mixer._copies())[1]


class Bench:
    """Models that parts share, and the table.

    Args:
        tiny: tiny shapes, to try the program.
    """

    def __init__(self, tiny: bool):
        self.tiny = tiny
        self.lines: list[str] = []
        self.results: dict = {}
        self._name = ""

    @cached_property
    def model(self):
        """The 8B shape in bfloat16."""
        return shape_8b(**(TINY if self.tiny else {}))

    @cached_property
    def target(self) -> Target:
        """The 8B shape, fused, or as it is where that fails."""
        return Target(self.model, fuse=not self.tiny)

    @cached_property
    def draft_model(self):
        """One layer of the 8B shape with 32 000 ids: the cost of a head."""
        changed = TINY if self.tiny else {"vocab_size": self.model.config.vocab_size}
        return shape_8b(**changed | {"num_hidden_layers": 1})

    @cached_property
    def bandwidth(self) -> float:
        """GB/s of a copy."""
        return copy_bandwidth()

    def length(self, tokens: int) -> int:
        """Of a prompt; short ones with tiny shapes."""
        return min(tokens, 24) if self.tiny else tokens

    def run(self, name: str) -> None:
        """One part; its errors are printed."""
        self._name, start = name, time.perf_counter()
        print(f"\n== {name}", flush=True)
        try:
            getattr(self, f"part_{name}")()
        except Exception as error:
            traceback.print_exc(file=sys.stdout)
            self.results.setdefault(name, {})["error"] = f"{type(error).__name__}: {error}"
            self.lines.append(f"{name:<11}FAILED: {type(error).__name__}: {str(error)[:110]}")
        finally:
            seconds = time.perf_counter() - start
            self.results.setdefault(name, {})["seconds"] = seconds
            print(f"== {name}: {seconds:.0f} s", flush=True)

    def note(self, what: str, value: float, unit: str, goal: str = "", **more) -> None:
        """A line of the table and an entry of the results."""
        line = f"{self._name:<11}{what:<58}{value:>9.3f} {unit:<8}{goal}"
        print(line, flush=True)
        self.lines.append(line)
        entry = {"value": value, "unit": unit, "goal": goal} | more
        self.results.setdefault(self._name, {})[what] = entry

    def note_step(self, what: str, step: StepTime, goal: str = "") -> None:
        """The time of a step, with its capture."""
        self.note(what, step.ms, "ms", goal, **vars(step))
        if step.refusal is not None:
            self.lines.append(f"{'':<11}not captured: {step.refusal[:110]}")

    def _note_seconds(self, what: str, function: Callable, goal: str = "") -> None:
        """The time that a call takes."""
        start = time.perf_counter()
        function()
        synchronize()
        self.note(what, time.perf_counter() - start, "s", goal)

    def part_equality(self) -> None:
        """Captured steps against eager ones, on a small model in two precisions, then on the 8B."""
        sizes = TINY | {"max_position_embeddings": 1024, "vocab_size": 4096}
        sizes |= {"bos_token_id": None, "eos_token_id": None}
        for dtype in (torch.float32, torch.bfloat16):
            model = random_model(LlamaForCausalLM, LlamaConfig(**sizes), dtype)
            worse = random_model(LlamaForCausalLM, LlamaConfig(**sizes), dtype)
            with torch.no_grad():
                for weight in worse.parameters():
                    weight += 0.05 * weight.std() * torch.randn_like(weight)
            drafters = {
                "none": None,
                "lookup": PromptLookupDrafter(3),
                "model": ModelDrafter(worse, 3),
                "eagle3": eagle3(model),
                "mask-token": mask_token(model, 3),
                "mtp": mtp(model),
            }
            samplers = SAMPLERS if dtype == torch.float32 else [SAMPLERS[0], SAMPLERS[2]]
            for name, drafter in drafters.items():
                for sampler in samplers:
                    self._compare(model, name, drafter, sampler, dtype)
        drafter = eagle3(self.model)
        generator = SpeculativeGenerator(self.target, drafter, graphs=True)
        for seed, options in enumerate([{"do_sample": False}, *CALLS]):
            ids = prompt(self.model, self.length(64), rows=2, seed=seed)
            generator.generate(ids, max_new_tokens=60, eos_token_id=None, check=True, **options)
        self.note("8B, EAGLE-3, bf16: steps equal to eager ones", 1.0, "yes", "captured = eager")

    def _compare(self, model, name, drafter, sampler, dtype) -> None:
        generator = SpeculativeGenerator(model, drafter, sampler, graphs=True)
        room = 64 if name == "none" else 100
        for seed, options in enumerate([{"do_sample": False}, *CALLS]):
            ids = prompt(model, 17 + seed, rows=3, seed=seed)
            generator.generate(ids, max_new_tokens=room, eos_token_id=None, check=True, **options)
        counts = [graph.num_calls for r in generator._runners for graph in r.graphs.values()]
        what = f"{str(dtype)[6:]}, {name}, {type(sampler).__name__}: replays compared"
        self.note(what, sum(counts), "steps", f"equal, {max(counts)} of one graph")

    def part_step(self) -> None:
        """The figure of the issue: 8B, EAGLE-3, K = 3, 512 tokens of context."""
        ids = prompt(self.model, self.length(512))
        roof = weight_bytes(self.model) / (self.bandwidth * 1e9) * 1e3
        self.note("roof: weights of the 8B at the speed of a copy", roof, "ms")
        self.note("speed of a copy", self.bandwidth, "GB/s")
        drafter = eagle3(self.model)
        self._note_seconds("first target: weights joined, compiled, self-test", lambda: self.target)
        fused = SpeculativeGenerator(self.target, drafter, graphs=True)
        again = partial(Target, self.model, fuse=not self.tiny)
        self._note_seconds(
            "second generator over the model",
            lambda: SpeculativeGenerator(again(), drafter, graphs=True),
            "<= 0.3",
        )
        print(fused.explain(), flush=True)
        short = partial(fused.generate, ids[:, :100], max_new_tokens=8, eos_token_id=None)
        self._note_seconds("first call, all that it compiles included", short)
        self._note_seconds("second call", short)
        step = time_steps(fused, ids)
        self.note_step("8B, EAGLE-3, K = 3, B = 1, 512 tokens, fused", step, "<= 6.1")
        self.note("  capture", step.capture_seconds, "s", "<= 3")
        share = 100 * step.pool_bytes / max(1, step.cache_bytes)
        self.note("  memory of the graph over that of the caches", share, "%", "<= 10")
        plain = SpeculativeGenerator(self.model, drafter, graphs=True)
        self.note_step("the same, not fused", time_steps(plain, ids, rounds=2))
        eager = SpeculativeGenerator(self.model, drafter, graphs=False)
        self.note_step("the same, eager", time_steps(eager, ids, num_steps=15, rounds=2))
        sampled = time_steps(fused, ids, rounds=2, do_sample=True, temperature=0.8, top_p=0.9)
        self.note_step("the same, captured and fused, top-p 0.9", sampled)
        for acceptance in (0.6, 0.8):
            dialled = SpeculativeGenerator(
                self.target, drafter, DialledSampler(acceptance), graphs=True
            )
            step = time_steps(dialled, ids, rounds=2, room=400, do_sample=True)
            rate = 1e3 * step.tokens_per_step / step.ms
            what = f"synthetic acceptance {acceptance} per token: tokens per second"
            self.note(what, rate, "tok/s", "", **vars(step))

    def part_trees(self) -> None:
        """Trees of 31 nodes beside chains of the same depth; random drafts are hardly accepted, so
        these are costs alone.
        """
        length = 5
        tree = Tree(nodes=31, depth=length)
        chain, branching = eagle3(self.model, length), eagle3(self.model, tree=tree)
        generators = {
            "a chain": SpeculativeGenerator(self.target, chain, graphs=True),
            "a tree": SpeculativeGenerator(self.target, branching, graphs=True),
        }
        rejecting = SpeculativeGenerator(self.target, branching, "rejection", graphs=True)
        sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 1}
        for rows, tokens in ((1, 512), (1, 8192), (8, 512)):
            ids = prompt(self.model, self.length(tokens), rows=rows)
            where = f"EAGLE-3, D = {length}, B = {rows}, {tokens} tokens"
            for gate, options in (("greedy", {"do_sample": False}), ("sampled", sampled)):
                steps = {}
                for name, generator in generators.items():
                    steps[name] = time_steps(generator, ids, rounds=2, **options).ms
                    self.note(f"{where}, {gate}, {name}", steps[name], "ms")
                    generator.release()
                ratio, goal = steps["a tree"] / steps["a chain"], "<= 1.15" if rows == 1 else ""
                self.note("  tree over chain", ratio, "x", goal)
        ids = prompt(self.model, self.length(512))
        step = time_steps(rejecting, ids, rounds=2, **sampled)
        self.note("the sampled tree, B = 1, by recursive rejection", step.ms, "ms")
        for gate, options in (("greedy", {"do_sample": False}), ("sampled", sampled)):
            found = profile_steps(generators["a tree"], ids, **options)
            self.results[self._name][f"profile, {gate}"] = found
            self.note(f"{gate} tree: kernels per step", found["kernels_per_step"], "")
            self.note(f"{gate} tree: device", found["device_ms_per_step"], "ms")
            for kernel in found["five_most_expensive"]:
                what = f"{kernel['per_step']:.0f} x {kernel['kernel'][:50]}"
                self.note(what, kernel["ms_per_step"], "ms")

    def part_corrections(self) -> None:
        """A DSpark-shaped head of 7 tokens, with each correction and without, for a target with the
        vocabulary of the public heads: costs alone. First that captured steps are the eager ones.

        torch's argmax over one row of 128 256 ids takes 26 us, over 151 936 ids 8 us (torch 2.11).
        """
        self.__dict__.pop("target", None)
        model = self.__dict__["model"] = shape_8b(**TINY if self.tiny else {"vocab_size": 151_936})
        rank = 16 if self.tiny else 256
        kinds = {
            "no correction": (None, {}),
            "Markov": (MarkovConfig(rank), {}),
            "Markov, gated": (MarkovConfig(rank, "gated"), {}),
            "Markov, rnn": (MarkovConfig(rank, "rnn"), {}),
            "Domino": (DominoConfig(rank, 4 * rank), {}),
            "selector and convolutions": (SelectorConfig(rank), {"convolution": Convolution()}),
            "XPress": (XPressConfig(rank), {}),
        }
        sampled = {"do_sample": True, "temperature": 1.0, "top_k": 0, "seed": 1}
        generators = {}
        for name, (correction, of_layer) in kinds.items():
            drafter = block_head(model, correction, **of_layer)
            generators[name] = SpeculativeGenerator(self.target, drafter, graphs=True)
            for options in ({"do_sample": False}, sampled):
                short = prompt(model, self.length(64), rows=2)
                options = options | {"max_new_tokens": 40, "eos_token_id": None}
                generators[name].generate(short, check=True, **options)
            generators[name].release()
        self.note("all: steps equal to eager ones", 1.0, "yes", "captured = eager")
        ids, plain = prompt(model, self.length(512)), {}
        for gate, options in (("greedy", {"do_sample": False}), ("sampled", sampled)):
            for name, generator in generators.items():
                step = time_steps(generator, ids, rounds=2, **options)
                self.note_step(f"B = 1, 512 tokens, {gate}, {name}", step)
                goal = "<= 1.04" if name == "Markov" else ""
                self.note(
                    "  over no correction", step.ms / plain.setdefault(gate, step.ms), "x", goal
                )
                generator.release()
        found = profile_steps(generators["Markov"], ids, **sampled)
        self.results[self._name]["profile"] = found
        for kernel in found["five_most_expensive"]:
            what = f"{kernel['per_step']:.0f} x {kernel['kernel'][:50]}"
            self.note(what, kernel["ms_per_step"], "ms")
        del self.__dict__["target"], self.__dict__["model"]

    def part_profile(self) -> None:
        """Launches, synchronisations and kernels of the step."""
        ids = prompt(self.model, self.length(512))
        generator = SpeculativeGenerator(self.target, eagle3(self.model), graphs=True)
        found = profile_steps(generator, ids)
        self.results[self._name] = found
        for name, goal in (
            ("graph_launches_per_step", "1"),
            ("kernel_launches_per_step", "0"),
            ("copies_per_step", "1, the record"),
            ("host_syncs_per_step", "0"),
            ("kernels_per_step", ""),
            ("device_ms_per_step", ""),
        ):
            self.note(name.replace("_", " "), found[name], "", goal)
        for kernel in found["five_most_expensive"]:
            what = f"{kernel['per_step']:.0f} x {kernel['kernel'][:50]}"
            self.note(what, kernel["ms_per_step"], "ms")

    def part_context(self) -> None:
        """Long contexts, and batches."""
        drafter = eagle3(self.model)
        generator = SpeculativeGenerator(self.target, drafter, graphs=True)
        for rows, tokens, goal in (
            (1, 8192, "<= 0.6 more than at 512"),
            (8, 512, ""),
            (8, 8192, "<= 11"),
        ):
            ids = prompt(self.model, self.length(tokens), rows)
            step = time_steps(generator, ids, num_steps=20, rounds=2)
            self.note_step(f"8B, EAGLE-3, K = 3, B = {rows}, {tokens} tokens", step, goal)
            generator.release()

    def part_plain(self) -> None:
        """Plain decoding through the same loop."""
        ids = prompt(self.model, self.length(512))
        generator = SpeculativeGenerator(self.target, None, graphs=True)
        self.note_step("8B, no drafter, 512 tokens, fused", time_steps(generator, ids), "<= 5.0")

    def part_calls(self) -> None:
        """Whole calls: prompts of many lengths, one after the other, everything included."""
        drafter = eagle3(self.model)
        generator = SpeculativeGenerator(self.target, drafter, DialledSampler(0.7), graphs=True)
        lengths = torch.logspace(math.log10(30), math.log10(1550), 24).long().tolist()
        random.Random(0).shuffle(lengths)
        prompts = [prompt(self.model, self.length(n), seed=i) for i, n in enumerate(lengths)]
        room = 16 if self.tiny else 128
        options = {"max_new_tokens": room, "do_sample": True, "seed": 0, "eos_token_id": None}

        def call(ids: Tensor) -> tuple[float, int]:
            synchronize()
            start = time.perf_counter()
            result = generator.generate(ids, **options)
            synchronize()
            return (time.perf_counter() - start) * 1e3, result.stats.steps[0]

        def compiled() -> int:
            return torch._dynamo.utils.counters["stats"]["unique_graphs"]

        taken, _ = call(prompts[0])
        self.note("one call, which compiles and captures", taken / 1e3, "s")
        print(generator.explain(), flush=True)
        for name, goal in (("24 prompts, first time", "<= 8.5"), ("again", "<= 7.6")):
            before = compiled(), sum(len(runner.all_graphs) for runner in generator._runners)
            times = [call(ids) for ids in prompts]
            per_step = sum(ms for ms, _ in times) / sum(steps for _, steps in times)
            self.note(f"{name}, per step", per_step, "ms", goal, calls=times, lengths=lengths)
            after = compiled(), sum(len(runner.all_graphs) for runner in generator._runners)
            self.note("  graphs compiled meanwhile", after[0] - before[0], "", "0")
            self.note("  captures meanwhile", after[1] - before[1], "")
        print(generator.explain(), flush=True)
        ids = prompt(self.model, self.length(512))
        step = time_steps(generator, ids, rounds=2, room=400, do_sample=True)
        self.note_step("replay alone, 512 tokens", step)
        reading = []
        for ids in prompts:
            synchronize()
            start = time.perf_counter()
            generation = generator.start(ids, **options)
            synchronize()
            reading.append((time.perf_counter() - start) * 1e3)
            generation.close()
        self.note(
            "starting a call, its prompt read", statistics.median(reading), "ms", "", all=reading
        )

    def part_lengths(self) -> None:
        """One graph per draft length, changed between steps; and windows of several widths."""
        ids = prompt(self.model, self.length(512))
        times = {}
        for k in (3, 5, 7):
            generator = SpeculativeGenerator(self.target, mask_token(self.model, k), graphs=True)
            times[k] = time_steps(generator, ids, rounds=2)
            self.note_step(f"8B, mask-token head of four layers, K = {k}", times[k])
            generator.release()
        flat = 100 * (times[7].ms / times[3].ms - 1)
        self.note("K = 7 over K = 3", flat, "%", "<= 3, parallel drafting")
        modules = SpeculativeGenerator(self.target, mtp(self.model), graphs=True)
        self.note_step("8B, MTP of three depths, K = 3", time_steps(modules, ids, rounds=2))
        modules.release()
        generator = SpeculativeGenerator(self.target, eagle3(self.model, 5), graphs=True)
        generation = generator.start(ids, max_new_tokens=400, eos_token_id=None)
        for k in (1, 3, 5) * 12:
            generation.num_draft_tokens = k
            generator.step(generation)
        synchronize()
        for k, graph in sorted(generation.runner.graphs.items()):
            start = time.perf_counter()
            for _ in range(20):
                graph()
            synchronize()
            taken = (time.perf_counter() - start) * 1e3 / 20
            self.note(f"8B, EAGLE-3, K = {k} of 5, one of three graphs", taken, "ms")

    def part_baselines(self) -> None:
        """HF eager, HF assisted, and a loop over compiled forwards, on the 8B."""
        ids, k = prompt(self.model, self.length(512)), 3
        ours = SpeculativeGenerator(self.target, eagle3(self.model, k), graphs=True)
        step = time_steps(ours, ids, rounds=2)
        self.note_step("ours, EAGLE-3, K = 3", step)
        drafter = ModelDrafter(self.draft_model, k)
        small = time_steps(SpeculativeGenerator(self.target, drafter, graphs=True), ids, rounds=2)
        self.note_step("ours, one-layer draft model, K = 3", small)
        plain = hf_generate_ms(self.model, ids)
        self.note("HF generate, eager, per token", plain, "ms")
        assisted, tokens = hf_assisted_ms(self.model, self.draft_model, ids, k)
        self.note("HF assisted, eager, the same draft model, per pass", assisted, "ms")
        self.note("  HF assisted over ours, per pass", assisted / small.ms, "x", ">= 3")
        self.note("  tokens per pass: HF assisted", tokens, "")
        self.note("  tokens per pass: ours", small.tokens_per_step, "")
        torch.compiler.reset()
        loop = CompiledLoop(self.model, self.draft_model, k).time(ids)
        self.note("loop over torch.compile(reduce-overhead), per step", loop, "ms")
        self.note("  compiled loop over ours, per step, K = 3", loop / small.ms, "x", ">= 1.15")

    def part_small(self) -> None:
        """The 0.6B shape."""
        changed = TINY | {"num_hidden_layers": 2} if self.tiny else {}
        model = shape_06b(**changed)
        ids = prompt(model, self.length(512))
        target = Target(model, fuse=not self.tiny)
        step = time_steps(SpeculativeGenerator(target, None, graphs=True), ids)
        self.note_step("0.6B, no drafter, fused", step)
        plain = hf_generate_ms(model, ids)
        self.note("HF generate, eager, per token", plain, "ms")
        self.note("  HF generate over ours, plain decoding", plain / step.ms, "x")
        drafter = eagle3(model)
        dialled = SpeculativeGenerator(target, drafter, DialledSampler(0.7), graphs=True)
        step = time_steps(dialled, ids, rounds=2, room=400, do_sample=True)
        self.note_step("0.6B, EAGLE-3, K = 3, synthetic acceptance 0.7", step)
        faster = plain / (step.ms / step.tokens_per_step)
        self.note("  HF generate over ours, per token", faster, "x", ">= 5")

    def part_attention(self) -> None:
        """The attention function that a step calls, over valid slots only."""
        from types import SimpleNamespace

        from specdec.graphs import Captured
        from specdec.target.attention import slot_attention
        from specdec.target.cache import KeyValueShape, SlotCache

        rows, width, heads, kv_heads, dim = 16, 4, 32, 8, 128
        dtype, device = torch.bfloat16, torch.device(DEVICE)
        module = SimpleNamespace(layer_idx=0, num_key_value_groups=heads // kv_heads)
        for allocated, valid in ((4352, 4096), (16384, 4096)):
            if self.tiny:
                allocated, valid = 64, 32
            shape = KeyValueShape(kv_heads, dim, dim, dtype, device)
            cache = SlotCache(rows, allocated, {0: shape})
            for table in (*cache.keys.values(), *cache.values.values()):
                table.normal_()
            query = torch.randn(rows, heads, width, dim, dtype=dtype, device=device)
            new = torch.randn(rows, kv_heads, width, dim, dtype=dtype, device=device)
            slots = valid - width + torch.arange(width, device=device).expand(rows, -1)

            def attend(query, new, slots, cache=cache):
                window = cache.open_window(slots, num_attended=cache.num_slots)
                keys, values = cache.update(new, new, 0)
                return slot_attention(module, query, keys, values, None, slot_window=window)[0]

            captured = Captured(attend, (query, new, slots))
            captured(query, new, slots)
            synchronize()
            start = time.perf_counter()
            for _ in range(50):
                captured._graph.replay() if captured._graph else captured(query, new, slots)
            synchronize()
            taken = (time.perf_counter() - start) / 50
            num_bytes = 2 * rows * valid * kv_heads * dim * 2
            rate = 100 * num_bytes / taken / 1e9 / self.bandwidth
            what = f"B = 16, {valid} valid of {allocated} slots, write and attend"
            self.note(what, taken * 1e3, "ms")
            self.note("  bytes of valid slots over the speed of a copy", rate, "%", ">= 60")

    def part_hybrid(self) -> None:
        """A target with recurrent layers: what taking back costs, and whole calls beside HF's."""
        model = shape_9b_hybrid(**(TINY if self.tiny else {}))
        kernels = "fla's kernels" if is_flash_linear_attention_available() else "HF's torch path"
        target = Target(model)
        drafter = PromptLookupDrafter(4)
        small = SpeculativeGenerator(target, drafter, graphs=True)
        for seed, options in enumerate([{"do_sample": False}, *CALLS]):
            ids = prompt(model, 40, rows=3, seed=seed)
            small.generate(ids, max_new_tokens=40, eos_token_id=None, check=True, **options)
        self.note(f"{kernels}: captured steps equal to eager ones", 1.0, "yes", "captured = eager")
        small.release()
        for rows in (1, 8):
            ids, steps = prompt(model, self.length(512), rows), []
            for is_replayed in (True, False):
                read = _Mixer.read_both
                if not is_replayed:
                    _Mixer.read_both = _forgetful
                generator = SpeculativeGenerator(target, drafter, graphs=True)
                steps.append(time_steps(generator, ids, rounds=2))
                _Mixer.read_both = read
                generator.release()
            whole, without = steps
            self.note_step(f"9B hybrid, {kernels}, K = 4, B = {rows}", whole)
            share = 100 * (whole.ms - without.ms) / whole.ms
            self.note("  share of the replay", share, "%", "<= 10")
        ids = prompt(model, self.length(512))
        dialled = SpeculativeGenerator(target, _Random(4), DialledSampler(0.72), graphs=True)
        options = {"do_sample": True, "seed": 0, "eos_token_id": None}
        result = dialled.generate(ids, max_new_tokens=64, **options)
        ours = per_token_ms(lambda n: dialled.generate(ids, max_new_tokens=n, **options), 16, 144)
        theirs = hf_generate_ms(model, ids)
        length = result.stats.acceptance_length
        self.note("synthetic acceptance: tokens per step", length, "", "3")
        self.note("  per token", ours, "ms")
        self.note("  HF generate, per token", theirs, "ms")
        self.note("  HF over ours", theirs / ours, "x", ">= 1.6")

    def part_mixture(self) -> None:
        """A mixture of experts, 30B-A3B."""
        self.__dict__.pop("target", None)
        self.__dict__.pop("model", None)
        self.__dict__.pop("draft_model", None)
        if DEVICE == "cuda":
            torch.cuda.empty_cache()
        sizes = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        model = shape_30b_a3b(**(TINY | sizes if self.tiny else {}))
        ids = prompt(model, self.length(512))
        generator = SpeculativeGenerator(model, PromptLookupDrafter(3), graphs=True)
        if self.tiny and DEVICE == "cpu":
            model.set_experts_implementation("batched_mm")
            generator = SpeculativeGenerator(model, PromptLookupDrafter(3), graphs=True)
        print(generator.explain(), flush=True)
        generator.generate(ids[:, :32], max_new_tokens=40, eos_token_id=None, check=True)
        self.note("30B-A3B, lookup, K = 3: steps equal to eager ones", 1.0, "yes")
        self.note_step("30B-A3B, lookup, K = 3", time_steps(generator, ids, rounds=2))
        eager = SpeculativeGenerator(model, PromptLookupDrafter(3), graphs=False)
        self.note_step("the same, eager", time_steps(eager, ids, num_steps=10, rounds=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, to try the program")
    args = parser.parse_args()
    names = [name.strip() for name in args.only.split(",")]
    unknown = sorted(set(names) - set(PARTS))
    if unknown:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU"
    print(f"{device}, torch {torch.__version__}", flush=True)
    torch.backends.cuda.matmul.allow_tf32 = False
    bench = Bench(args.tiny)
    for name in names:
        bench.run(name)
        save(args.out, {"device": device, "torch": torch.__version__, "parts": bench.results})
    print("\n" + "\n".join(bench.lines))


if __name__ == "__main__":
    main()
