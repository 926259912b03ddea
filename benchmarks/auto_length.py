"""`draft_length="auto"` against every fixed K: `python benchmarks/auto_length.py`.

On the zoo, five drafters at temperature 0 and 1, one row and eight, on held-out code ("code") and
on a mixture of code, prose, reasoning and dialogue ("mixed", `own_prompts`). One generator runs
both: a call with `num_draft_tokens=K` has a fixed length, all others choose theirs. Contenders take
turns within each round, and what is shown are medians over rounds of ratios within a round. The
best fixed K is chosen by the same rounds, so noise favours it. Costs are measured before the first
round. With one thread on a CPU, times are those of the thread, so that other programs have no part
in them.

On a GPU the target is of an 8B shape with random weights and drafts are accepted by chance:

    python benchmarks/auto_length.py --device cuda --rows 1 8 64

There a drafter of one layer drafts, and a sampler accepts each token with a probability that
changes every 64 tokens of a text (`--rates`), whatever was drafted; texts are nonsense, step times
are real.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable

import numpy as np
import torch
from tqdm import tqdm

from specdec import (
    Drafter,
    ModelDrafter,
    PromptLookupDrafter,
    Sampler,
    SpeculativeGenerator,
    Stream,
    Verdict,
    zoo,
)
from specdec.evaluation import own_prompts
from specdec.request.prompts import left_padded
from specdec.types import PAD_TOKEN

DRAFTERS = ("model", "eagle3", "mask-token", "mtp", "lookup")
AUTO = "auto"


class ByChance(Sampler):
    """Accepts each draft token with a rate that changes along the text, for times alone."""

    lossless = False

    def __init__(self, rates: Iterable[float], every: int = 64):
        super().__init__()
        self.rates, self.every = tuple(rates), every

    def accept(self, draft, target_logits, warp, noise) -> Verdict:
        """The next tokens are the draft's, and one more."""
        width = draft.tokens.shape[1]
        rates = torch.tensor(self.rates, device=draft.tokens.device, dtype=torch.float64)
        period = (noise._start // self.every) % len(rates)
        is_accepted = noise.uniform(Stream.ACCEPT)[:, :width] < rates[period][:, None]
        count = is_accepted.long().cumprod(dim=1).sum(dim=1)
        extra = target_logits.argmax(dim=-1)
        tokens = torch.cat([draft.tokens, extra[:, -1:]], dim=1)
        index = torch.arange(width + 1, device=tokens.device)
        tokens = torch.where(index == count[:, None], extra, tokens)
        tokens = tokens.masked_fill(index > count[:, None], PAD_TOKEN)
        return Verdict(tokens, count, faults=torch.zeros_like(count))


def race(
    generator: SpeculativeGenerator,
    batches: list,
    lengths: list[int],
    options: dict,
    rounds: int,
    bar: tqdm,
) -> dict[int | str, np.ndarray]:
    """Seconds `[r]` of all batches, by fixed length and `AUTO`."""
    contenders: list[int | str] = [*lengths, AUTO]
    is_alone = generator.target.device.type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if is_alone else time.perf_counter
    seconds: dict[int | str, list[float]] = {name: [] for name in contenders}
    for round_ in range(rounds + 1):
        shift = round_ % len(contenders)
        for name in contenders[shift:] + contenders[:shift]:
            fixed = {} if name == AUTO else {"num_draft_tokens": name}
            taken = 0.0
            for ids, mask in batches[: None if round_ else 1]:  # the first one measures costs
                # Others in every round, or the luck of one text would count as a length's.
                seeds = range(round_ * len(ids), (round_ + 1) * len(ids))
                seeds = {"seed": list(seeds)} if options["do_sample"] else {}
                started = clock()
                generator.generate(ids, mask, neutral=True, **options, **seeds, **fixed)
                taken += clock() - started
            if round_:
                seconds[name].append(taken)
            bar.update()
    return {name: np.array(each) for name, each in seconds.items()}


def line(cell: list[str], seconds: dict[int | str, np.ndarray]) -> str:
    """A line of the table: the best fixed K, and speeds over that of the best."""
    fixed = [name for name in seconds if name != AUTO]
    best = min(fixed, key=lambda name: np.median(seconds[name]))
    ratios = [np.median(seconds[best] / seconds[name]) for name in seconds]
    return f"| {' | '.join([*cell, str(best), *(f'{ratio:.2f}' for ratio in ratios)])} |"


def zoo_cells(arguments: argparse.Namespace):
    """Name, generator, batches and options of every cell."""
    target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    count = arguments.prompts
    mixed = [prompt.turns[0] for prompt in own_prompts()]
    texts = {"code": zoo.heldout_prompts(count), "mixed": mixed[:: max(1, len(mixed) // count)]}
    for name in arguments.drafters:
        if name == "lookup":
            drafter: Drafter = PromptLookupDrafter(max(arguments.k))
        else:
            drafter = zoo.load_drafter(name, target, num_draft_tokens=max(arguments.k))
        generator = SpeculativeGenerator(target, drafter, draft_length=AUTO)
        for temperature in arguments.temperatures:
            options = {"max_new_tokens": arguments.new_tokens, "do_sample": temperature > 0}
            options["eos_token_id"] = []
            if temperature:
                options["temperature"] = temperature
            for rows in arguments.rows:
                for kind in arguments.texts:
                    ids = [tokenizer(text).input_ids for text in texts[kind][:count]]
                    starts = range(0, len(ids), rows)
                    batches = [left_padded(ids[i : i + rows], target.device) for i in starts]
                    yield [name, f"{temperature:g}", str(rows), kind], generator, batches, options


def synthetic_cells(arguments: argparse.Namespace):
    """The same of an 8B shape with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def model(layers: int) -> LlamaForCausalLM:
        config = LlamaConfig(
            vocab_size=128_256,
            hidden_size=4096,
            intermediate_size=14_336,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            eos_token_id=None,
        )
        with torch.device(arguments.device):
            torch.set_default_dtype(torch.bfloat16)
            made = LlamaForCausalLM(config).eval()
            torch.set_default_dtype(torch.float32)
        return made

    drafter = ModelDrafter(model(1), max(arguments.k))
    sampler = ByChance(arguments.rates)
    generator = SpeculativeGenerator(model(32), drafter, sampler, draft_length=AUTO)
    options = {"max_new_tokens": arguments.new_tokens, "do_sample": True, "eos_token_id": []}
    for rows in arguments.rows:
        generator.release()
        draws = torch.Generator().manual_seed(rows)
        ids = torch.randint(0, 128_256, (rows, 512), generator=draws).to(arguments.device)
        batches = [(ids, torch.ones_like(ids))]
        yield ["8B shape", "1", str(rows), "by chance"], generator, batches, options


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", default="cpu")
    add("--drafters", nargs="+", default=DRAFTERS, choices=DRAFTERS)
    add("--temperatures", type=float, nargs="+", default=[0, 1])
    add("--rows", type=int, nargs="+", default=[1, 8])
    add("--texts", nargs="+", default=["code", "mixed"], choices=["code", "mixed"])
    add("--k", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8])
    add("--prompts", type=int, default=8)
    add("--new-tokens", type=int, default=96)
    add("--rounds", type=int, default=3)
    add("--rates", type=float, nargs="+", default=[0.9, 0.4], help="of acceptance, on a GPU")
    add("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    cells = list((zoo_cells if arguments.device == "cpu" else synthetic_cells)(arguments))
    titles = [*(f"K = {k}" for k in arguments.k), AUTO]
    print(f"| drafter | temperature | rows | texts | best K | {' | '.join(titles)} |")
    print(f"|---|{'---:|' * 2}---|{'---:|' * (1 + len(titles))}", flush=True)
    with tqdm(total=len(cells) * len(titles) * (arguments.rounds + 1), disable=None) as bar:
        for cell, generator, batches, options in cells:
            seconds = race(generator, batches, arguments.k, options, arguments.rounds, bar)
            print(line(cell, seconds), flush=True)


if __name__ == "__main__":
    main()
