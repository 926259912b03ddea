"""Draft lengths by the draft's own confidence, against those by what was accepted before: does an
estimator on a draft's largest probabilities bring more tokens for the same number of draft tokens?

    PYTHONPATH=. python examples/confident_lengths.py            # the table of docs/generate.md
    PYTHONPATH=. python examples/confident_lengths.py --drafters eagle3 --temperatures 0

The estimator has the form of vllm#52228: a token is accepted with probability
sigmoid(a logit(max q) + b), a = 0.5 and b = -0.2 at the start, learned as the text goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec import (
    Context,
    Draft,
    Drafter,
    Drawing,
    SpeculativeGenerator,
    Verified,
    WrappedDrafter,
    zoo,
)
from specdec.lab.show.table import Table
from specdec.loop.lengths import AutoLength, Timed, time_steps

SLOPE, BIAS = 0.5, -0.2


@dataclass
class Confidence:
    """The inner drafter's state, what was learned of slope and bias `[B, 2]`, and the log-odds of
    the largest probabilities of the last draft `[B, K]`.
    """

    inner: Any
    learned: Tensor
    log_odds: Tensor


class ConfidentDrafter(WrappedDrafter):
    """Ends a draft before the first token that is likely not to be reached: the estimated
    probability that it and all before it are accepted is below a threshold. That is decided by the
    token's distribution, before it is drawn, so lossless rules stay lossless.

    Args:
        inner: of chains, with logits.
        threshold: in [0, 1]; 0 ends no draft.
        rate: of the gradient steps on slope and bias, one for each step.
    """

    reads_outcome = True

    def __init__(self, inner: Drafter, threshold: float, rate: float = 0.05):
        super().__init__(inner)
        self.threshold, self.rate = threshold, rate

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> Confidence:
        """Begins with the same slope and bias in each row."""
        state = super().init_state(batch_size, max_length, vocab_size=vocab_size, device=device)
        learned = torch.zeros(batch_size, 2, device=device)
        log_odds = torch.zeros(batch_size, self.num_draft_tokens, device=device)
        return Confidence(state.inner, learned, log_odds)

    def estimates(self, state: Confidence) -> Tensor:
        """`[B, K]`, the probabilities that tokens are accepted once they are reached."""
        slope, bias = (SLOPE + state.learned[:, :1], BIAS + state.learned[:, 1:])
        return (slope * state.log_odds + bias).sigmoid()

    def propose(self, context: Context, state: Confidence, drawing: Drawing) -> Draft:
        """The inner drafter's draft, as far as it is likely to be reached."""
        largest: list[Tensor] = []

        def note(logits: Tensor) -> Tensor:
            largest.append(logits.float().softmax(dim=-1).amax(dim=-1))
            return logits

        draft = super().propose(context, state, drawing.with_edit(note))
        count = draft.tokens.shape[1]
        state.log_odds[:, :count] = torch.cat(largest, dim=1)[:, :count].logit(eps=1e-6)
        is_likely = self.estimates(state)[:, :count].cumprod(dim=1) >= self.threshold
        return replace(draft, num_valid=(is_likely & draft.is_valid).sum(dim=1))

    def learn(self, verified: Verified, state: Confidence) -> None:
        """A gradient step of the logistic loss on the tokens that were up for decision."""
        super().learn(verified, state)
        count, num_accepted = verified.draft.tokens.shape[1], verified.verdict.num_accepted[:, None]
        index = torch.arange(count, device=num_accepted.device)
        is_decided = (index <= num_accepted) & verified.draft.is_valid
        wrong = (index < num_accepted).float() - self.estimates(state)[:, :count]
        wrong = wrong.where(is_decided & (verified.num_new > 0)[:, None], 0)
        steps = torch.stack([(wrong * state.log_odds[:, :count]).sum(1), wrong.sum(1)], dim=1)
        state.learned.add_(self.rate * steps)


def rules(name: str, longest: int) -> Iterator[tuple[str, Drafter, Any]]:
    """What chooses the lengths: its name, a drafter, and `draft_length`."""
    target = zoo.load_target()
    for k in (1, 2, 3, 4, 6, longest):
        yield f"K = {k}", zoo.load_drafter(name, target, num_draft_tokens=k), None
    for cost in (0.4, 0.25, 0.15, 0.05):  # of a draft token, in steps without any
        costs = {k: [1 + cost * k] for k in range(longest + 1)}
        drafter = zoo.load_drafter(name, target, num_draft_tokens=longest)
        yield f"acceptance, {cost}", drafter, AutoLength({(1, 64): costs})
    for threshold in (0.5, 0.2, 0.1, 0.05):
        drafter = zoo.load_drafter(name, target, num_draft_tokens=longest)
        yield f"estimator, {threshold}", ConfidentDrafter(drafter, threshold), None


def measure(
    drafter: Drafter, choose: Any, prompts: list, temperature: float, seeds: int
) -> tuple[float, float]:
    """Draft tokens and new tokens per step."""
    generator = SpeculativeGenerator(zoo.load_target(), drafter, draft_length=choose)
    drafted, counts = 0, np.zeros(2)
    options = {"max_new_tokens": 64, "do_sample": temperature > 0, "eos_token_id": None}
    for seed in range(seeds if temperature else 1):
        for prompt in prompts:
            options["seed"] = seed
            steps = generator.generate(torch.tensor([prompt]), **options).steps[0]
            drafted += sum(len(step.draft_tokens) for step in steps)
            counts += len(steps), sum(step.num_accepted + 1 for step in steps)
    return drafted / counts[0], counts[1] / counts[0]


def step_times(name: str, longest: int) -> tuple[np.ndarray, float]:
    """Milliseconds of a step with 0..K draft tokens, and of one with K tokens and the estimator."""
    ids, target = torch.tensor([[5, 6, 7, 8]]), zoo.load_target()
    plain = zoo.load_drafter(name, target, num_draft_tokens=longest)
    runs = {}
    for key, drafter in (("plain", plain), ("estimator", ConfidentDrafter(plain, 0.3))):
        generator = SpeculativeGenerator(target, drafter)
        for k in range(longest + 1) if key == "plain" else [longest]:
            runs[key, k] = Timed(generator.start(ids, max_new_tokens=200), k)
    found = {key: float(np.median(ms)) for key, ms in time_steps(runs, rounds=15).items()}
    return np.array([found["plain", k] for k in range(longest + 1)]), found["estimator", longest]


def main() -> None:
    """As on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--drafters", nargs="+", default=["model", "eagle3"])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--longest", type=int, default=8, help="K of the drafters; default: 8")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=2, help="at temperature 1; default: 2")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = zoo.load_tokenizer()
    prompts = [tokenizer(text).input_ids for text in zoo.heldout_prompts(args.prompts)]
    header = ["drafter", "T", "rule", "draft tokens per step", "tokens per step", "at fixed K"]
    header += ["tokens per ms", "if steps could end early"]
    rows = []
    for name in args.drafters:
        ms, with_estimator = step_times(name, args.longest)
        print(
            f"{name}: ms of steps {ms.round(2).tolist()}, with the estimator {with_estimator:.2f}"
        )
        for temperature in args.temperatures:
            curve: list[tuple[float, float]] = [(0.0, 1.0)]
            for rule, drafter, choose in rules(name, args.longest):
                drafted, tokens = measure(drafter, choose, prompts, temperature, args.seeds)
                if rule.startswith("K"):
                    curve.append((drafted, tokens))
                cost = np.interp(drafted, np.arange(len(ms)), ms)
                real = with_estimator if rule.startswith("estimator") else cost
                fixed = np.interp(drafted, *np.array(curve).T)
                numbers = drafted, tokens, fixed, tokens / real, tokens / cost
                rows.append([name, f"{temperature:g}", rule, *(f"{n:.3f}" for n in numbers)])
                print(" | ".join(rows[-1]), flush=True)
    print(Table(header, rows).markdown())


if __name__ == "__main__":
    main()
