"""Tokens per second of specdec against Hugging Face `generate`, on the zoo, interleaved in one run.

    python benchmarks/cpu_speed.py

Every round runs every contender once on the same held-out prompts, in turn, so a drift of the
machine meets all of them; figures are medians over rounds of the ratio within a round. All
contenders decode greedily and must produce identical tokens, which is checked. The roof of a
contender is the time of the forwards it issues: `overhead` is what its step takes beyond them.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from specdec import PromptLookupDrafter, SpeculativeGenerator, zoo


def seconds_of(run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Wall seconds of a call, and what it returned."""
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def batch_of(prompts: list[str], tokenizer, size: int) -> list[dict]:
    """Prompts as left-padded batches."""
    chunks = [prompts[i : i + size] for i in range(0, len(prompts), size)]
    return [
        tokenizer(chunk, return_tensors="pt", padding=True, padding_side="left") for chunk in chunks
    ]


def contenders(
    target: PreTrainedModel, drafters: dict, k: int, new_tokens: int, batch: int
) -> dict[str, Callable[[dict], Tensor]]:
    """Ways to decode one batch greedily, by name."""
    draft = drafters["draft LM"].model
    common = dict(max_new_tokens=new_tokens, do_sample=False)

    def ours(drafter):
        generator = SpeculativeGenerator(target, drafter)
        return lambda inputs: (
            generator.generate(inputs["input_ids"], inputs["attention_mask"], **common).sequences
        )

    def hugging_face(**kwargs):
        return lambda inputs: target.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            **common,
            **kwargs,
        )

    draft.generation_config.num_assistant_tokens = k
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    ways = {
        **{f"specdec, {name}": ours(drafter) for name, drafter in drafters.items()},
        "HF generate": hugging_face(),
    }
    if batch == 1:
        ways["HF assisted"] = hugging_face(assistant_model=draft)
    return ways


def compare(target, drafters, tokenizer, prompts, *, batch, k, new_tokens, rounds) -> None:
    """Prints tokens per second and median ratios for one batch size."""
    batches = batch_of(prompts, tokenizer, batch)
    ways = contenders(target, drafters, k, new_tokens, batch)
    reference = [ways["HF generate"](inputs) for inputs in batches]
    tokens = sum(
        int((sequence[inputs["input_ids"].shape[1] :] != tokenizer.pad_token_id).sum())
        for inputs, sequences in zip(batches, reference, strict=True)
        for sequence in sequences
    )
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_ in range(rounds + 1):  # the first round warms up
        for name, run in ways.items():
            total = 0.0
            for inputs, expected in zip(batches, reference, strict=True):
                seconds, sequences = seconds_of(functools.partial(run, inputs))
                total += seconds
                if not torch.equal(sequences, expected):
                    raise SystemExit(f"{name}: output differs from HF generate")
            if round_:
                times[name].append(total)
    print(f"\nB = {batch}, K = {k}, {tokens} tokens a round, {rounds} rounds; outputs identical")
    against = [name for name in ("HF generate", "HF assisted") if name in times]
    print(f"  {'':<24}{'tokens/s':>10}" + "".join(f"{'x ' + name:>16}" for name in against))
    for name, seconds in times.items():
        rate = tokens / statistics.median(seconds)
        ratios = [
            statistics.median(o / b for o, b in zip(times[other], seconds, strict=True))
            for other in against
        ]
        print(f"  {name:<24}{rate:>10.0f}" + "".join(f"{ratio:>16.2f}" for ratio in ratios))


class CallClock:
    """Adds up the seconds spent inside some methods of some objects."""

    def __init__(self, *methods: tuple[object, str]):
        self.seconds = 0.0
        self._methods = methods
        for owner, name in methods:
            object.__setattr__(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable) -> Callable:
        @functools.wraps(method)
        def timed(*args, **kwargs):
            start = time.perf_counter()
            result = method(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            return result

        return timed

    def remove(self) -> None:
        for owner, name in self._methods:
            object.__delattr__(owner, name)


def overhead(target, drafters, tokenizer, prompts, *, new_tokens, rounds) -> None:
    """Prints what a step of the whole loop, reading included, takes beyond what it issues.

    B = 1, greedy. `generator` is the generator's own part: everything outside the drafter's
    `propose` and the target's `verify`. `total` is everything outside the forwards of the HF
    models, so it holds the drafter's and the target's own work too (slots, draws).
    """
    for name in ("draft LM", "no drafter"):
        drafter = drafters[name]
        generator = SpeculativeGenerator(target, drafter)
        measured = {"forwards": [], "total": [], "generator": []}
        for prompt in prompts * rounds:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            for kind in ("total", "generator"):
                records = generator.stream(ids, max_new_tokens=new_tokens, do_sample=False)
                if kind == "total":
                    runners = generator.target, drafters["draft LM"]._slot_model
                    clock = CallClock(*((runner._view, "forward") for runner in runners))
                else:
                    parts = (generator.drafter, "propose"), (generator.target, "verify")
                    clock = CallClock(*parts)
                while True:
                    before = clock.seconds
                    seconds, record = seconds_of(functools.partial(next, records, None))
                    if record is None:
                        break
                    measured[kind].append(seconds - (clock.seconds - before))
                    if kind == "total":
                        measured["forwards"].append(clock.seconds - before)
                clock.remove()
        ms = {kind: statistics.median(values) * 1e3 for kind, values in measured.items()}
        print(
            f"  {name:<12} generator {ms['generator']:.3f} ms, total {ms['total']:.3f} ms; "
            f"forwards {ms['forwards']:.3f} ms per step"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--num-draft-tokens", type=int, default=4)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    logging.set_verbosity_error()

    target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    k = args.num_draft_tokens
    drafters = {
        "EAGLE-3 head": zoo.load_drafter("eagle3", target, num_draft_tokens=k),
        "draft LM": zoo.load_drafter("model", target, num_draft_tokens=k),
        "prompt lookup": PromptLookupDrafter(k),
        "no drafter": None,
    }
    prompts = zoo.heldout_prompts(args.prompts)
    print(f"zoo target {target.num_parameters() / 1e6:.1f} M parameters, float32, ", end="")
    print(f"torch {torch.__version__}, {args.threads} threads")
    sizes = dict(new_tokens=args.new_tokens, rounds=args.rounds)
    compare(target, drafters, tokenizer, prompts, batch=1, k=k, **sizes)
    compare(target, drafters, tokenizer, prompts, batch=8, k=k, **sizes)
    print("\nOverhead of the loop, B = 1, greedy")
    overhead(target, drafters, tokenizer, prompts[:4], **sizes)


if __name__ == "__main__":
    main()
