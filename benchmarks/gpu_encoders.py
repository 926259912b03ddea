"""Speech on one GPU: Whisper large-v3 with distil-large-v3 as its draft model, beside Hugging Face.

    PYTHONPATH=. python benchmarks/gpu_encoders.py             # steps calls memory, in this order

Both have random weights in bfloat16, in the shapes of the public checkpoints. distil-large-v3 is
the encoder of large-v3 and two layers of a decoder. Here the draft model has the target's own
encoder and first two layers, and the target's other layers add nothing to its hidden states, so
that the real rules of both libraries accept all drafts, up to rounding. Where a line says
synthetic, coins accept (`models.DialledSampler`). Costs are real, texts are not. A step's time is
that of all rows.

The sides of a table take turns: a time is the median over rounds, and `x` the median ratio within a
round to the table's first line. Without a GPU shapes are small, and times say nothing.
"""

import argparse
import copy
import gc
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache

import torch
from models import DialledSampler
from timing import DEVICE, Side, Turns, about, show, synchronize, timed
from transformers import (
    GenerationConfig,
    GenerationMixin,
    StoppingCriteriaList,
    WhisperConfig,
    WhisperForCausalLM,
    WhisperForConditionalGeneration,
)

from specdec import ModelDrafter, SpeculativeGenerator, Target
from specdec.loop.replay import NUM_EAGER

IS_GPU = DEVICE == "cuda"
ROUNDS, NUM_STEPS, NUM_NEW = (4, 30, 128) if IS_GPU else (1, 3, 12)
K, ACCEPTANCE, KEPT_LAYERS = 5, 0.8, 2
SIZES = {  # of large-v3, with those of a small one
    "vocab_size": (51_866, 320),
    "d_model": (1280, 32),
    "encoder_layers": (32, 2),
    "decoder_layers": (32, 4),
    "encoder_attention_heads": (20, 4),
    "decoder_attention_heads": (20, 4),
    "encoder_ffn_dim": (5120, 48),
    "decoder_ffn_dim": (5120, 48),
    "num_mel_bins": (128, 16),
    "max_source_positions": (1500, 50),
    "max_target_positions": (448, 120),
}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 2}
NONE = {"suppress_tokens": None, "begin_suppress_tokens": None}


@cache
def models() -> tuple[WhisperForConditionalGeneration, WhisperForConditionalGeneration]:
    """large-v3's shape, and distil-large-v3's with the same encoder."""
    sizes = {name: pair[not IS_GPU] for name, pair in SIZES.items()}
    config = WhisperConfig(**sizes, **IDS, **NONE, eos_token_id=2)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        target = WhisperForConditionalGeneration._from_config(config, dtype=torch.bfloat16).eval()
        small = copy.deepcopy(config)
        small.decoder_layers = KEPT_LAYERS
        draft = WhisperForConditionalGeneration._from_config(small, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        target.get_decoder().embed_tokens.weight.normal_(0, 1)  # or texts repeat one token
        for layer in target.get_decoder().layers[KEPT_LAYERS:]:
            for last in (layer.self_attn.out_proj, layer.encoder_attn.out_proj, layer.fc2):
                last.weight.zero_(), last.bias.zero_()
    draft.get_decoder().load_state_dict(target.get_decoder().state_dict(), strict=False)
    draft.model.encoder = target.model.encoder
    for model in (target, draft):
        model.tie_weights()
        model.generation_config = GenerationConfig(**IDS, eos_token_id=None)
    return target, draft


@cache
def kept() -> Target:
    """The target, with what the self-test found."""
    return Target(models()[0])


@cache
def drafter() -> ModelDrafter:
    """distil-large-v3's shape as a draft model."""
    return ModelDrafter(models()[1], K)


def assistant(draft: WhisperForConditionalGeneration) -> WhisperForCausalLM:
    """The same as Hugging Face's users load it: its decoder alone, which reads the states of the
    target's encoder.
    """
    with torch.device("meta"):
        found = WhisperForCausalLM(copy.deepcopy(draft.config))
    found.model.decoder, found.proj_out = draft.get_decoder(), draft.proj_out
    found.generation_config = config = GenerationConfig(**IDS, eos_token_id=None)
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = K, "constant"
    config.assistant_confidence_threshold = 0.0
    return found.eval()


def sources(rows: int) -> dict[str, torch.Tensor]:
    """Windows of 30 seconds of noise, and the four tokens that a text begins with."""
    config, generator = models()[0].config, torch.Generator().manual_seed(rows)
    shape = rows, config.num_mel_bins, 2 * config.max_source_positions
    features = torch.randn(shape, generator=generator).to(DEVICE, torch.bfloat16)
    start = torch.tensor([[2, 5, 6, 7]]).repeat(rows, 1).to(DEVICE)
    return {"input_features": features, "decoder_input_ids": start}


class Steps:
    """Steps of one window's text, issued one ahead, their records read one late. Each round is a
    call of its own, since a text has 448 positions at most; its reading is not timed.
    """

    def __init__(self, rows: int, drafter=None, sampler="auto", *, graphs=True, **options):
        self.generator = SpeculativeGenerator(kept(), drafter, sampler, graphs=graphs)
        most = (NUM_STEPS + NUM_EAGER + 3) * (K + 1)
        self.inputs = {**sources(rows), **(options or {"do_sample": False})}
        room = kept().model.config.max_position_embeddings - 4
        self.inputs |= {"max_new_tokens": min(most, room), "eos_token_id": []}
        self.rows, self.num_tokens, self.num_steps, self.captured = rows, 0, 0, "eager"

    def __call__(self) -> float:
        """Milliseconds of a step."""
        generation = self.generator.start(**self.inputs)
        for _ in range(NUM_EAGER + 2):
            self.generator.step(generation).fetch().read()
        ms, _ = timed(lambda: self._run(generation))
        replay = generation.storage.replay
        if replay is not None:
            seconds = sum(graph.capture_seconds for graph in replay.graphs.values())
            self.captured = replay.refusal or f"{seconds:.2f}"
        generation.close()
        return ms / NUM_STEPS

    def _run(self, generation) -> None:
        unread = []
        for _ in range(NUM_STEPS):
            unread.append(self.generator.step(generation).fetch())
            if len(unread) > 1:
                self._read(unread.pop(0))
        self._read(unread.pop())
        self.num_steps += NUM_STEPS

    def _read(self, pending) -> None:
        self.num_tokens += sum(len(row.new_tokens) for row in pending.read())

    def tokens(self) -> float:
        """Of a row, per step."""
        return self.num_tokens / self.num_steps / self.rows


class HFSteps:
    """Passes of the target in HF's own `generate`, eager: the difference of two lengths."""

    def __init__(self, rows: int, assistant_model=None):
        self.inputs, self.passes = sources(rows), []
        self.options = {"do_sample": False, "stopping_criteria": [self._count]}
        if assistant_model is not None:
            self.options["assistant_model"] = assistant_model
        self.captured, self.found = "eager", []

    def _count(self, ids, scores):
        """Stops nothing: it is asked once after every pass."""
        self.passes.append(1)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def __call__(self) -> float:
        """Milliseconds of a pass."""
        self.found = []
        for count in (8, 8 + NUM_STEPS * (K + 1 if "assistant_model" in self.options else 1)):
            self.passes.clear()
            given = {**self.inputs, **self.options, "max_new_tokens": count}
            given["stopping_criteria"] = StoppingCriteriaList(given["stopping_criteria"])
            run = lambda given=given: GenerationMixin.generate(models()[0], **given)  # noqa: E731
            self.found.append((timed(run)[0], len(self.passes), count))
        (short, few, less), (long, many, more) = self.found
        self.per_pass = (more - less) / max(1, many - few)
        return (long - short) / max(1, many - few)

    def tokens(self) -> float:
        """Of a row, per pass."""
        return self.per_pass


def steps() -> None:
    """A step of all rows, and what it yields."""
    for rows in (1, 8):
        sampled = {"do_sample": True, "seed": 1}
        dialled = DialledSampler(ACCEPTANCE)
        sides = {
            "HF generate": HFSteps(rows),
            "plain, eager": Steps(rows, graphs=False),
            "plain": Steps(rows),
            f"drafted, K = {K}, eager": Steps(rows, drafter(), graphs=False),
            f"drafted, K = {K}": Steps(rows, drafter()),
            f"drafted, synthetic {ACCEPTANCE}": Steps(rows, drafter(), dialled, **sampled),
        }
        if rows == 1:  # HF assists one row
            sides[f"HF assisted, K = {K}"] = HFSteps(rows, assistant(models()[1]))
        times, lines = Turns().run(sides, ROUNDS), []
        for name, side in sides.items():
            ms, spread = times.ms(name), max(times[name]) - min(times[name])
            per_token = ms / side.tokens()
            found = ms, spread, times.ratio(name, "HF generate"), side.tokens(), per_token
            lines.append([name, *(f"{value:.2f}" for value in found), side.captured[:60]])
        print(f"\nSteps, B = {rows}\n")
        show("|ms|spread|x|tokens of a row|ms per token of a row|captured in, s", lines)
        del sides, side
        gc.collect()


def calls() -> None:
    """Whole calls, the encoder and everything else included."""
    target, draft = models()
    own = {"do_sample": False, "max_new_tokens": NUM_NEW}
    for rows in (1, 8):
        inputs, texts = sources(rows), {}
        plain = SpeculativeGenerator(kept(), None, graphs=True)
        drafted = SpeculativeGenerator(kept(), drafter(), graphs=True)

        def of_hf(name: str, inputs=inputs, texts=texts, **more) -> Side:
            def side() -> float:
                work = lambda: GenerationMixin.generate(target, **inputs, **own, **more)  # noqa: E731
                ms, texts[name] = timed(work)
                return ms

            return side

        def ours(name: str, generator, inputs=inputs, texts=texts) -> Side:
            def side() -> float:
                work = lambda: generator.generate(**inputs, **own, eos_token_id=[])  # noqa: E731
                ms, result = timed(work)
                texts[name] = result.sequences
                return ms

            return side

        name = f"drafted, K = {K}"
        sides = {
            "HF generate": of_hf("HF generate"),
            "plain": ours("plain", plain),
            name: ours(name, drafted),
            f"{name}, through HF's hook": of_hf(
                f"{name}, through HF's hook", custom_generate=drafted
            ),
            "the encoder alone": lambda inputs=inputs: timed(
                torch.no_grad()(lambda: target.get_encoder()(inputs["input_features"]))
            )[0],
        }
        if rows == 1:
            name = f"HF assisted, K = {K}"
            sides[name] = of_hf(name, assistant_model=assistant(draft))
        times, lines = Turns().run(sides, ROUNDS), []
        for name in sides:
            same = ""
            if name in texts:
                same = f"{(texts[name] == texts['HF generate'])[:, 4:].float().mean():.3f}"
            spread, x = max(times[name]) - min(times[name]), times.ratio(name, "HF generate")
            lines.append([name, f"{times.ms(name):.1f}", f"{spread:.1f}", f"{x:.2f}", same])
        print(f"\nWhole calls of {NUM_NEW} new tokens, B = {rows}\n")
        show("|ms|spread|x|tokens equal to HF's", lines)
        del sides, plain, drafted
        gc.collect()


def memory() -> None:
    """Keys and values of the cross attention as `explain()` has them, beside what the allocator
    counts: in a call, and by the encoder alone.
    """
    target = kept()
    for rows in (1, 8):
        inputs = sources(rows)
        generator = SpeculativeGenerator(target, None, graphs=False)
        said = [line for line in generator.explain().splitlines() if "cross attention" in line]
        with torch.no_grad():
            encoder = target.model.whole.get_encoder()
            _, *of_encoder = counted(lambda e=encoder, x=inputs["input_features"]: e(x))

        def first_step(generator=generator, inputs=inputs):
            options = {"max_new_tokens": NUM_NEW, "eos_token_id": []}
            generation = generator.start(**inputs, **options)
            generator.step(generation).fetch().read()
            return generation

        generation, *of_call = counted(first_step)
        cache = generation.storage.state.cache
        lines = [(name, table.nbytes / 1e6) for name, table in cache.row_inputs.items()]
        slots = sum(store.nbytes for store in cache.stores)
        lines += [("keys and values of the slots", slots / 1e6)]
        for name, (held, peak) in (("encoder", of_encoder), ("first step", of_call)):
            lines += [(f"held after the {name}, by the allocator", held)]
            lines += [(f"at most during the {name}", peak)]
        print(f"\nMemory, B = {rows}\n")
        show("|MB", [[name, f"{value:.3f}"] for name, value in lines])
        print("\n".join(["", *said]))
        generation.close()
        del generation, generator


def counted(work: Callable) -> tuple[object, float, float]:
    """The result of a call, MB that it holds, and MB that it had at most; 0 without a GPU."""
    gc.collect()
    if not IS_GPU:
        return work(), 0.0, 0.0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    synchronize()
    held, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    return result, (held - before) / 1e6, (peak - before) / 1e6


PARTS = {part.__name__: part for part in (steps, calls, memory)}


def main() -> int:
    """As on the command line; 1 where a part fails."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    parts, failed = parser.parse_args().parts, []
    if unknown := sorted(set(parts) - PARTS.keys()):
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    print(about(), flush=True)
    print("random weights in the shapes of Whisper large-v3 and distil-large-v3, bfloat16")
    for name in parts:
        start = time.perf_counter()
        try:
            PARTS[name]()
        except Exception:
            traceback.print_exc(file=sys.stdout)
            failed.append(name)
        print(f"\n== {name}: {time.perf_counter() - start:.0f} s", flush=True)
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main())
