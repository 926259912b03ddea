"""Training an EAGLE-3 head for an 8B-shaped target (random weights): tokens per second and memory.

    PYTHONPATH=. python benchmarks/training.py

Two ways to do it take turns. `plain`: the head proposes the target's whole vocabulary, and logits
and probabilities of all unrolled steps are there at once, 4 096 tokens per step. `lean`: 32 000
draft ids, losses in chunks, 16 384 tokens per step.
"""

import argparse

import torch
from models import shape
from timing import DEVICE, Turns, about, show, timed

from specdec.drafters import EagleDrafter
from specdec.lab.training import TrainingTimeTest, new_head
from specdec.lab.training.divergences import soft_ce
from specdec.lab.training.optimizer import MuonAdamW

ROW_TOKENS, WAYS = 2048, {"plain": (None, 4096), "lean": (32_000, 16_384)}
if DEVICE == "cpu":
    ROW_TOKENS, WAYS = 64, {"plain": (None, 128), "lean": (100, 256)}


class PlainTrainingTimeTest(TrainingTimeTest):
    """The same loss with everything at once."""

    def forward(self, ids):
        drafter = self.drafter
        logits, features = self._teacher(ids)
        log_p = logits.float().log_softmax(dim=-1)
        steps = [drafter.logits(out) for out in self.unroll(ids, features)]
        losses = [
            soft_ce(each.float().log_softmax(dim=-1), log_p[:, 1 + m : 1 + m + each.shape[1]])
            for m, each in enumerate(steps)
        ]
        rows = torch.stack(losses)
        return (self.step_weights(rows) * rows).mean(dim=(1, 2)).sum()


class Way:
    """A side: a head, its objective and its optimiser."""

    def __init__(self, name: str, target):
        self.num_ids, self.num_tokens = WAYS[name]
        ids = None if self.num_ids is None else torch.arange(self.num_ids)
        head = new_head(target, "eagle3", target_ids=ids).to(DEVICE)
        kind = PlainTrainingTimeTest if name == "plain" else TrainingTimeTest
        self.objective = kind(EagleDrafter(head, target), target).train()
        self.shape, self.peak = (self.num_tokens // ROW_TOKENS, ROW_TOKENS + 1), 0.0
        rates = {"lr": 8e-3, "lr_others": 3e-3, "weight_decay": 0.1}
        self.optimizer = MuonAdamW(self.objective, **rates)
        self.vocab_size = target.config.vocab_size

    def __call__(self) -> float:
        """Milliseconds per token of one optimiser step."""
        ids = torch.randint(self.vocab_size, self.shape, device=DEVICE)
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
        ms, loss = timed(lambda: self._step(ids))
        if DEVICE == "cuda":
            self.peak = max(self.peak, torch.cuda.max_memory_allocated() / 1e9)
        if not loss > 0:
            raise SystemExit(f"the loss is {loss}")
        return ms / self.num_tokens

    def _step(self, ids) -> float:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = self.objective(ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    target = shape("8B")
    ways = {name: Way(name, target) for name in WAYS}
    times = Turns().run(ways, parser.parse_args().rounds)
    print(f"{about()}, rows of {ROW_TOKENS} tokens; memory holds both heads' weights\n")
    rows = []
    for name, way in ways.items():
        speed, faster = f"{1e3 / times.ms(name):.0f}", f"{times.ratio('plain', name):.2f} x"
        ids = way.num_ids or "all"
        rows.append([name, ids, way.num_tokens, speed, faster, f"{way.peak:.0f} GB"])
    show("way|draft ids|tokens per step|tokens/s|faster|peak memory", rows)


if __name__ == "__main__":
    main()
