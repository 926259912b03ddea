"""Drafts and logits that cannot be right stop a generation before a token of the step is emitted.

The checks run on the device beside the decision (`Fault`), and the host raises when it reads the
step, so that a step still waits for nothing.
"""

import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts

from specdec import (
    BlockSampler,
    CouplingSampler,
    EnsembleSampler,
    ModelDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    TypicalSampler,
)
from specdec.drafters.proposal import Proposal
from specdec.samplers import Drawing, Noise, Warp, draw_by_inversion
from specdec.types import Draft

IDS, MASK = ragged_prompts(VOCAB, 5, 2, 6)
SAMPLED = {"do_sample": True, "seed": 3}
CHECKING = [BlockSampler(), RejectionSampler(), EnsembleSampler(0.5), TypicalSampler()]


class Tampered(ModelDrafter):
    """A draft model whose draft is changed on the way out, from its third proposal on."""

    def __init__(self, change, after=2):
        super().__init__(perturbed(build("llama")), 3)
        self.change, self.left = change, after

    def propose(self, *args):
        """The draft model's own, then the changed one."""
        draft = super().propose(*args)
        self.left -= 1
        return draft if self.left >= 0 else self.change(draft)


def told(draft, probs):
    return Draft(draft.tokens, probs, draft.num_valid)


def with_a_negative_entry(draft):
    """The sums stay 1."""
    least, most = draft.probs.argmin(-1, keepdim=True), draft.probs.argmax(-1, keepdim=True)
    half = torch.full_like(draft.probs[..., :1], 0.5)
    return told(draft, draft.probs.scatter_add(-1, least, -half).scatter_add(-1, most, half))


def impossible_token(draft):
    probs = draft.probs.scatter(-1, draft.tokens[..., None], 0)
    return told(draft, probs / probs.sum(-1, keepdim=True))


CHANGES = {
    "logits instead of probabilities": (
        lambda d: told(d, d.probs.log()),
        "negative or do not sum to 1",
    ),
    "a law scaled by 0.9": (lambda d: told(d, d.probs * 0.9), "negative or do not sum to 1"),
    "a law of NaN": (lambda d: told(d, d.probs * torch.nan), "negative or do not sum to 1"),
    "a negative probability": (with_a_negative_entry, "negative or do not sum to 1"),
    "a token of probability 0": (impossible_token, "probability 0 in Draft.probs"),
    "another vocabulary": (lambda d: told(d, d.probs[..., :-1]), "vocabulary"),
}


@pytest.mark.parametrize(
    ("change", "sampler"),
    [
        *((change, BlockSampler()) for change in CHANGES),
        *(("a law scaled by 0.9", sampler) for sampler in CHECKING[1:]),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_wrong_draft_law_stops_the_generation_before_its_step_is_emitted(change, sampler):
    tamper, message = CHANGES[change]
    sound = SpeculativeGenerator(build("llama"), Tampered(None, after=99), sampler)
    expected = sound.generate(IDS, MASK, max_new_tokens=16, trace=True, **SAMPLED)
    generator = SpeculativeGenerator(build("llama"), Tampered(tamper), sampler)
    seen = []
    with pytest.raises(ValueError, match=message):
        seen.extend(generator.stream(IDS, MASK, max_new_tokens=16, **SAMPLED))
    assert len(seen) == 2
    for index, record in enumerate(seen):
        for row, step in enumerate(record.rows):
            assert step.new_tokens == expected.trace[row][index].new_tokens


def test_a_law_that_is_not_told_cannot_be_wrong():
    def with_a_law(draft):  # which nobody asked for
        return told(draft, torch.full((*draft.tokens.shape, VOCAB), 0.9))

    generator = SpeculativeGenerator(build("llama"), Tampered(with_a_law))
    result = generator.generate(IDS, MASK, max_new_tokens=16, draft_probs=False, **SAMPLED)
    assert result.lengths == [16] * len(IDS)


@pytest.mark.parametrize(
    ("sampler", "value", "options"),
    [
        *((sampler, torch.nan, SAMPLED) for sampler in [*CHECKING, CouplingSampler()]),
        *((BlockSampler(), value, SAMPLED) for value in (torch.inf, -torch.inf)),
        *((s, torch.nan, {"do_sample": False}) for s in (BlockSampler(), CouplingSampler())),
    ],
    ids=str,
)
def test_logits_that_are_no_law_stop_the_generation_whatever_the_sampler(sampler, value, options):
    model = build("llama")

    drafter = ModelDrafter(perturbed(build("llama")), 3)
    generator = SpeculativeGenerator(model, drafter, sampler)
    model.lm_head.register_forward_hook(lambda module, args, logits: logits * 0 + value)
    with pytest.raises(ValueError, match=r"row 0 after 0 new tokens.*the target's logits"):
        generator.generate(IDS, MASK, max_new_tokens=8, **options)


@pytest.mark.parametrize("sampler", CHECKING, ids=lambda s: type(s).__name__)
def test_rounding_of_a_wide_law_is_no_fault(sampler):
    vocab, generator = 150_000, torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(1, 3, vocab, generator=generator)
    warp, noise = Warp(1), Noise([1]).at(torch.tensor([4]), 3)
    drafting = Proposal().begin(Drawing(2, warp, noise, draw_by_inversion))
    for i in (0, 1):
        drafting.draw(logits[:, i : i + 1])
    draft = drafting.end()
    assert sampler(draft, logits, warp, noise).faults.tolist() == [0]
