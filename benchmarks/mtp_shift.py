"""What shift-and-cache costs a step, and what it is worth.

    python benchmarks/mtp_shift.py

The first table is the cost at several batch sizes: the time of a whole step, that of making the
window and remembering its rows (`MTPDrafter.shift`), and that of making it without (`NaiveRoll`),
each the median over steps of one generation, measured in turn. The second table is acceptance by
position on held-out prompts, greedy, of three ways to run one head: with repair; with a naive roll,
where entries that were computed from rejected tokens stay; and with the first depth alone, looped.

The head is the zoo's, or that of `--head`, or one trained on the spot for `--train-steps`, where
the package holds none. Everything runs on a GPU if there is one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import replace

import torch

from recipes.zoo import models
from specdec import MTPDrafter, SpeculativeGenerator, zoo
from specdec.heads.mtp import MTPHead
from specdec.heads.shift_window import PastRows, ShiftedWindow, shift_window
from specdec.training import (
    MultiTokenPrediction,
    ObjectiveArguments,
    ObjectiveTrainer,
    PackedStream,
)
from specdec.training.data import encode_texts
from specdec.zoo import corpus

NUM_DEPTHS = 3


class NaiveRoll(MTPDrafter):
    """Reads new tokens only, and remembers none."""

    def shift(self, context, state, width, num_later=0) -> ShiftedWindow:
        """The new rows at the right end of the window, and nothing before them."""
        context = replace(context, features=self.head.fuse(context.features))
        nothing = PastRows(*(table[:, :0] for table in state.past))
        trash = state.cache.trash
        return shift_window(context, nothing, width, trash=trash, num_later=num_later)


def first_depth(head: MTPHead) -> MTPHead:
    """A head of the first depth alone."""
    config = replace(head.config, num_layers=1)
    with torch.device("meta"):
        alone = MTPHead(config)
    tensors = {name: t for name, t in head.state_dict().items() if name in alone.state_dict()}
    alone.load_state_dict(tensors, assign=True)
    return alone.eval()


def now(device: torch.device) -> float:
    """Seconds, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def cost(target, head: MTPHead, batch_size: int, steps: int) -> dict[str, float]:
    """Median milliseconds of a step and of its parts."""
    device, k = target.device, NUM_DEPTHS
    prompts = (zoo.heldout_prompts(32) * (batch_size // 32 + 1))[:batch_size]
    inputs = zoo.load_tokenizer()(prompts, return_tensors="pt", padding=True, padding_side="left")
    drafter, naive = MTPDrafter(head, target, k), NaiveRoll(head, target, k)
    generator = SpeculativeGenerator(target, drafter)
    room = (steps + 5) * (k + 1)
    generation = generator.start(
        inputs.input_ids.to(device),
        inputs.attention_mask.to(device),
        max_new_tokens=room,
        eos_token_id=None,
    )
    times: dict[str, list[float]] = {"step": [], "shift": [], "naive": []}
    for index in range(steps + 4):
        state = generation.state
        context = state.context()
        own = state.drafter_state
        spare = replace(own, past=PastRows(*(table.clone() for table in own.past)))
        seconds = {}
        for name, way in (("shift", drafter), ("naive", naive)):
            start = now(device)
            for _ in range(10):
                way.shift(context, spare, k + 1)
            seconds[name] = (now(device) - start) / 10
        start = now(device)
        generator.step(generation)
        seconds["step"] = now(device) - start
        generation.synchronize()
        if index >= 4:  # after the first steps nothing is compiled or allocated any more
            for name, value in seconds.items():
                times[name].append(1e3 * value)
    return {name: statistics.median(values) for name, values in times.items()}


def acceptance(target, drafter, num_prompts: int, new_tokens: int):
    """Statistics of greedy generations from held-out prompts."""
    prompts = zoo.heldout_prompts(num_prompts)
    inputs = zoo.load_tokenizer()(prompts, return_tensors="pt", padding=True, padding_side="left")
    ids, mask = inputs.input_ids.to(target.device), inputs.attention_mask.to(target.device)
    options = {"max_new_tokens": new_tokens, "do_sample": False}
    return SpeculativeGenerator(target, drafter).generate(ids, mask, **options)


def trained_head(target, steps: int, device: torch.device) -> MTPHead:
    """A head trained on the library for a moment, where the package holds none."""
    head = models.build_mtp_head(target, num_depths=NUM_DEPTHS, mlp_width=256, seed=1).to(device)
    drafter = MTPDrafter(head, target, NUM_DEPTHS)
    texts = map(corpus.read_source, corpus.library_files()[:80])
    documents = encode_texts(texts, zoo.load_tokenizer())
    sizes = {"tokens_per_step": 1024, "row_lengths": ((1.0, 128),), "learning_rate": 1e-2}
    with tempfile.TemporaryDirectory() as folder:
        args = ObjectiveArguments(folder, max_steps=steps, use_cpu=device.type == "cpu", **sizes)
        objective = MultiTokenPrediction(drafter, target, 0.8)
        ObjectiveTrainer(objective, args, PackedStream(documents, seed=1)).train()
    return head.eval()


def load_head(options: argparse.Namespace, target) -> tuple[MTPHead, str]:
    """The head, and where it is from."""
    if options.head:
        return MTPDrafter.from_pretrained(options.head, target, NUM_DEPTHS).head, options.head
    try:
        return zoo.load_drafter("mtp", target, num_draft_tokens=NUM_DEPTHS).head, "the zoo's"
    except FileNotFoundError:
        head = trained_head(target, options.train_steps, target.device)
        return head, f"trained here for {options.train_steps} steps"


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", help="folder of an MTP head for the zoo's target")
    parser.add_argument("--batch-sizes", default="1,8,64")
    parser.add_argument("--steps", type=int, default=40, help="timed steps per batch size")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--train-steps", type=int, default=300, help="of 1024 tokens")
    parser.add_argument("--threads", type=int, default=2, help="of torch, on a CPU")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = zoo.load_target().to(device)
    head, origin = load_head(options, target)
    print(f"head: {origin}; on {device}, K = {NUM_DEPTHS}\n")

    print("| B | step (ms) | shift (ms) | naive (ms) | shift / step | (shift - naive) / step |")
    print("|---|---|---|---|---|---|")
    for batch_size in map(int, options.batch_sizes.split(",")):
        ms = cost(target, head, batch_size, options.steps)
        extra = ms["shift"] - ms["naive"]
        print(
            f"| {batch_size} | {ms['step']:.2f} | {ms['shift']:.3f} | {ms['naive']:.3f} | "
            f"{ms['shift'] / ms['step']:.2%} | {extra / ms['step']:.2%} |"
        )

    ways = {
        "repair": MTPDrafter(head, target, NUM_DEPTHS),
        "naive roll": NaiveRoll(head, target, NUM_DEPTHS),
        "first depth, looped": MTPDrafter(first_depth(head), target, NUM_DEPTHS),
    }
    print("\n| way | acceptance length | accepted at 1, 2, 3, given those before |")
    print("|---|---|---|")
    texts = []
    for name, drafter in ways.items():
        result = acceptance(target, drafter, options.prompts, options.new_tokens)
        texts.append(result.sequences)
        rates = ", ".join(f"{rate:.3f}" for rate in result.stats.conditional_rates)
        print(f"| {name} | {result.stats.acceptance_length:.3f} | {rates} |")
    assert all(text.equal(texts[0]) for text in texts), "greedy text depends on the drafter"


if __name__ == "__main__":
    main()
