"""Tokens per second of specdec against Hugging Face `generate`, on the zoo and a CPU.

    PYTHONPATH=. python benchmarks/cpu_speed.py

Every round runs every contender once on the same held-out prompts, in turn. All decode greedily and
must produce identical tokens, which is checked. The roof of a contender is the time of the forwards
that it issues: the second table is what a step takes beyond them, with the reading of its record.
"""

import argparse
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from unittest.mock import patch

import torch
from timing import Side, Turns, about, now_ms, show, timed
from transformers import PreTrainedModel
from transformers.utils import logging

from specdec import PromptLookupDrafter, SpeculativeGenerator, zoo


def contenders(
    target: PreTrainedModel, drafters: dict, k: int, options: dict, batch: int
) -> dict[str, Callable]:
    """Ways to decode one batch greedily, by name; each returns sequences."""

    def ours(drafter):
        generator = SpeculativeGenerator(target, drafter)
        return lambda inputs: generator.generate(**inputs, **options).sequences

    def hugging_face(**assistant):
        return lambda inputs: target.generate(**inputs, **options, **assistant)

    ways = {f"specdec, {name}": ours(drafter) for name, drafter in drafters.items()}
    ways["HF generate"] = hugging_face()
    if batch == 1:
        draft = drafters["draft LM"].model
        draft.generation_config.num_assistant_tokens = k
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        ways["HF assisted"] = hugging_face(assistant_model=draft)
    return ways


def compare(ways: dict[str, Callable], batches: list, pad: int, rounds: int) -> None:
    """Prints tokens per second and median ratios for one batch size."""
    expected = [ways["HF generate"](inputs) for inputs in batches]
    pairs = list(zip(batches, expected, strict=True))
    tokens = sum(int((ids[:, i["input_ids"].shape[1] :] != pad).sum()) for i, ids in pairs)

    def side_of(name: str) -> Side:
        def side() -> float:
            ms, found = timed(lambda: [ways[name](inputs) for inputs in batches])
            if not all(map(torch.equal, found, expected)):
                raise SystemExit(f"{name}: output differs from HF generate")
            return ms

        return side

    times = Turns().run({name: side_of(name) for name in ways}, rounds)
    against = [name for name in ("HF generate", "HF assisted") if name in ways]
    rows = [
        [name, f"{1e3 * tokens / times.ms(name):.0f}"]
        + [f"{times.ratio(other, name):.2f}" for other in against]
        for name in ways
    ]
    print(f"\nB = {len(batches[0]['input_ids'])}, {tokens} tokens a round, {rounds} rounds\n")
    show("|".join(["contender", "tokens/s", *(f"x {name}" for name in against)]), rows)


def overhead(generator: SpeculativeGenerator, batches: list, options: dict) -> list[str]:
    """Median milliseconds of a step outside the drafter's `propose` and the target's `verify`: the
    noise, the context, the sampler, the token buffer, the record and its reading; and of the step.
    """
    inside, outside, whole = [0.0], [], []

    def clocked(method: Callable) -> Callable:
        def call(*args, **kwargs):
            ms, result = timed(lambda: method(*args, **kwargs))
            inside[0] += ms
            return result

        return call

    with ExitStack() as patches:
        for owner, name in ((generator.drafter, "propose"), (generator.target, "verify")):
            patches.enter_context(patch.object(owner, name, clocked(getattr(owner, name))))
        for inputs in batches:
            start, inside[0] = now_ms(), 0.0
            for _ in generator.stream(**inputs, **options):
                whole.append(now_ms() - start)
                outside.append(whole[-1] - inside[0])
                start, inside[0] = now_ms(), 0.0
    return [f"{statistics.median(values):.2f}" for values in (outside, whole)]


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
    target, tokenizer, k = zoo.load_target(), zoo.load_tokenizer(), args.num_draft_tokens
    drafters = {
        "EAGLE-3 head": zoo.load_drafter("eagle3", target, num_draft_tokens=k),
        "draft LM": zoo.load_drafter("model", target, num_draft_tokens=k),
        "prompt lookup": PromptLookupDrafter(k),
        "no drafter": None,
    }
    options = {"max_new_tokens": args.new_tokens, "do_sample": False}
    prompts = zoo.heldout_prompts(args.prompts)
    print(f"{about()}, K = {k}, greedy, outputs identical")
    for batch in (1, 8):
        chunks = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
        padded = {"return_tensors": "pt", "padding": True, "padding_side": "left"}
        batches = [tokenizer(chunk, **padded) for chunk in chunks]
        batches = [{key: b[key] for key in ("input_ids", "attention_mask")} for b in batches]
        ways = contenders(target, drafters, k, options, batch)
        compare(ways, batches, tokenizer.pad_token_id, args.rounds)
        if batch == 1:
            generators = {n: SpeculativeGenerator(target, drafters[n]) for n in drafters}
            found = [[n, *overhead(g, batches[:4], options)] for n, g in generators.items()]
            print()
            show("a step at B = 1|beyond drafter and target, ms|whole, ms", found)


if __name__ == "__main__":
    main()
