"""Training an EAGLE-3 head for an 8B-shaped target (random weights): tokens per second and memory.

    PYTHONPATH=. python benchmarks/training.py

Two ways to do it take turns. `plain`: the head proposes the target's whole vocabulary, and logits
and probabilities of all unrolled steps are there at once, 4 096 tokens per step. `lean`: 32 000
draft ids, losses in chunks, 16 384 tokens per step. On a CPU the shapes are small and the figures
say nothing; they show that it runs.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specdec.drafters import EagleDrafter
from specdec.training import TrainingTimeTest, new_head
from specdec.training.losses import soft_cross_entropy
from specdec.training.optimizer import MuonAdamW

SHAPES = {
    "cuda": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        max_position_embeddings=131_072,
    ),
    "cpu": dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=4096,
        max_position_embeddings=2048,
    ),
}
SIDES = {
    "cuda": {"plain": (None, 4096), "lean": (32_000, 16_384)},
    "cpu": {"plain": (None, 512), "lean": (1000, 1024)},
}
ROW_TOKENS = {"cuda": 2048, "cpu": 256}


class PlainTrainingTimeTest(TrainingTimeTest):
    """The same loss with everything at once."""

    def forward(self, ids):
        drafter = self.drafter
        logits, features = self._teacher(ids)
        probs = logits.float().softmax(dim=-1)
        steps = [drafter.logits(out) for out in self.unroll(ids, features)]
        weights = [self.step_weight**m for m in range(self.num_steps)]
        losses = [
            weight * soft_cross_entropy(each, probs[:, 1 + m : 1 + m + each.shape[1]])
            for m, (weight, each) in enumerate(zip(weights, steps, strict=True))
        ]
        return sum(losses) / sum(weights)


class Side:
    """A head, its objective and its optimiser."""

    def __init__(self, name: str, target: LlamaForCausalLM, device: str):
        count, self.num_tokens = SIDES[device][name]
        ids = None if count is None else torch.arange(count)
        head = new_head(target, "eagle3", target_ids=ids).to(device)
        kind = PlainTrainingTimeTest if name == "plain" else TrainingTimeTest
        self.objective = kind(EagleDrafter(head, target), target).train()
        self.device, self.vocab_size = device, target.config.vocab_size
        self.rows = self.num_tokens // ROW_TOKENS[device]
        rates = {"lr": 8e-3, "lr_others": 3e-3, "weight_decay": 0.1}
        self.optimizer = MuonAdamW(self.objective, **rates)

    def step(self) -> tuple[float, float]:
        """Tokens per second of one optimiser step, and its peak memory in GB."""
        shape = self.rows, ROW_TOKENS[self.device] + 1
        ids = torch.randint(self.vocab_size, shape, device=self.device)
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        with torch.autocast(self.device, torch.bfloat16):
            loss = self.objective(ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        value = loss.item()  # waits for the device
        seconds = time.perf_counter() - started
        peak = torch.cuda.max_memory_allocated() / 1e9 if self.device == "cuda" else 0.0
        if not value > 0:
            raise SystemExit(f"the loss is {value}")
        return self.num_tokens / seconds, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        torch.set_default_dtype(dtype)
        target = LlamaForCausalLM(LlamaConfig(**SHAPES[device])).eval()
        torch.set_default_dtype(torch.float32)
    sides = {name: Side(name, target, device) for name in SIDES[device]}
    for side in sides.values():
        side.step()  # allocates, and chooses kernels
    measured = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            measured[name].append(side.step())
    print(f"torch {torch.__version__}, {device}, rows of {ROW_TOKENS[device]} tokens")
    for name, figures in measured.items():
        speed = statistics.median(speed for speed, _ in figures)
        peak = max(peak for _, peak in figures)
        ids, tokens = SIDES[device][name]
        print(
            f"{name:<6}{ids or 'all':>8} ids {tokens:>7} tokens/step {speed:>9.0f} tokens/s"
            f" {peak:>7.1f} GB (both heads' weights included)"
        )
    pairs = zip(measured["lean"], measured["plain"], strict=True)
    print(f"lean / plain: {statistics.median(a / b for (a, _), (b, _) in pairs):.2f} x")


if __name__ == "__main__":
    main()
