"""Whether a generator drafts what a drafter without any state drafts from the text so far.

A lossless sampler hides what is wrong with a draft: a state that lags behind by a token costs
nothing but speed. So single drafts are made once more from Hugging Face's own forward of the text,
without a slot of the target, without a batch, and by a state that has just read the whole text.

Legend: T tokens of a text, D width of the features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specdec.drafters import Drafter
from specdec.generator import SpeculativeGenerator
from specdec.request.lists import left_padded
from specdec.samplers import LogitsFilter
from specdec.targets.activation import ACTIVATED
from specdec.types import Context

MOST_ROWS, MOST_STEPS = 4, 8
"""Rows that are generated, and drafts of each that are made once more, evenly over its text."""


@dataclass(frozen=True)
class DraftsAudit:
    """Drafts of greedy texts beside those that are made anew from each text.

    Args:
        num_drafts: that were made once more.
        num_other: those that are other tokens then.
        accepted, accepted_anew: draft tokens that the greedy text accepts, on average, of the
            generator's drafts and of those that are made anew.
        is_half: the target or the drafter computes in half precision, where other shapes round to
            other drafts: nothing is judged.
    """

    num_drafts: int
    num_other: int
    accepted: float
    accepted_anew: float
    is_half: bool

    @property
    def passed(self) -> bool:
        """One draft of sixteen may differ, by rounding."""
        return self.is_half or 16 * self.num_other <= self.num_drafts

    def __str__(self) -> str:
        means = f"{self.accepted:.2f} tokens accepted; made anew from each text "
        means += f"{self.accepted_anew:.2f}"
        if self.passed:
            return f"drafts: {self.num_drafts} drafts: {means}"
        return (
            f"drafts: {self.num_other} of {self.num_drafts} drafts have other tokens when they are "
            f"made anew from each text ({means}); look at the drafter's prefill, at context.start, "
            "and at what propose leaves in the state"
        )


def audit_drafts(
    generator: SpeculativeGenerator,
    prompts: list[list[int]],
    num: int,
    row_inputs: Mapping[str, Any] | None = None,
) -> DraftsAudit | None:
    """Makes some drafts of greedy texts of `num` tokens once more; `None` without drafts, for
    trees, for a drafter that reads slots, outcomes or earlier requests, for prompts that are more
    than ids, and for adapters that a prompt invokes.
    """
    target, drafter = generator.target, generator.drafter
    known = {*range(target.num_layers), "final"}
    reads_more = drafter.reads_target or drafter.reads_outcome or drafter.has_memory
    k, drafts = drafter.num_draft_tokens, []
    is_chain, is_invoked = k > 0 and not drafter.tree_depth, ACTIVATED in target.own_inputs
    is_text = not row_inputs and not is_invoked and {*drafter.feature_layers} <= known
    if not is_chain or reads_more or not is_text:
        return None
    options = {"temperature": 0, "neutral": True, "eos_token_id": [], "max_new_tokens": num}
    for prompt in prompts[:MOST_ROWS]:
        ids, mask = left_padded([prompt], target.device)
        result = generator.generate(ids, mask, num_draft_tokens=k, **options)
        [new], [steps] = result.texts, result.steps
        starts = [0, *accumulate(len(step.new_tokens) for step in steps)]
        ids = torch.cat([ids, ids.new_tensor([new])], dim=1)
        features = _features(generator, ids)
        for number in {i * (len(steps) - 1) // (MOST_STEPS - 1) for i in range(MOST_STEPS)}:
            start = starts[number]
            anew = _draft(generator, ids[:, : len(prompt) + start], features)
            drafts.append((steps[number].draft_tokens, anew, new[start:]))
    tensors = [*target.model.parameters(), *drafter.parameters()]
    return DraftsAudit(
        num_drafts=len(drafts),
        num_other=sum(one != anew for one, anew, _ in drafts),
        accepted=sum(_accepted(one, rest) for one, _, rest in drafts) / len(drafts),
        accepted_anew=sum(_accepted(anew, rest) for _, anew, rest in drafts) / len(drafts),
        is_half=any(t.is_floating_point() and t.element_size() < 4 for t in tensors),
    )


@torch.inference_mode()
def _features(generator: SpeculativeGenerator, ids: Tensor) -> Tensor | None:
    """`[1, T, D]` of a text, by Hugging Face's own forward without a cache."""
    layers = generator.drafter.feature_layers
    if not layers:
        return None
    output = generator.target.model(ids, use_cache=False, output_hidden_states=True)
    chosen = [output.hidden_states[-1 if layer == "final" else layer] for layer in layers]
    return torch.cat(chosen, dim=-1)


@torch.inference_mode()
def _draft(generator: SpeculativeGenerator, ids: Tensor, features: Tensor | None) -> list[int]:
    """Greedy draft tokens after a text `[1, T]`, by a state that has read nothing before."""
    drafter: Drafter = generator.drafter
    k, size, device = drafter.num_draft_tokens, ids.shape[1], ids.device
    vocab_size = generator.target.vocab_size
    state = drafter.init_state(1, size + k, vocab_size=vocab_size, device=device)

    def context(first: int, num_new: int) -> Context:
        tokens = torch.cat([ids[:, first:], ids[:, -1:]], dim=1)[:, : num_new + 2]
        own = None if features is None else features[:, first : first + tokens.shape[1] - 1]
        return Context(tokens, own, *(ids.new_tensor([n]) for n in (first, num_new)))

    if size > 1:
        drafter.prefill(context(0, size - 2), state)
    first, sampler = max(size - 2, 0), generator.sampler
    noise = sampler.noise_type([0], device=device).at(ids.new_tensor([size - 1]), width=k + 1)
    drawing = sampler.drawing(k, LogitsFilter(1, device=device, temperature=0), noise)
    draft = drafter.propose(context(first, size - 1 - first), state, drawing)
    return draft.tokens[draft.is_valid].tolist()


def _accepted(draft: list[int], rest: list[int]) -> int:
    """How many tokens of a draft are those of the text that follows."""
    pairs = list(zip(draft, rest, strict=False))
    return next((i for i, (one, other) in enumerate(pairs) if one != other), len(pairs))
