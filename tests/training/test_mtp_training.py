"""The objective of prediction modules: what it trains is what drafting runs, it falls, and what is
frozen stays.
"""

import pytest
import torch
from architectures import VOCAB, build
from drafting import drawing
from eagle_heads import features_and_logits
from mtp_heads import head_for, random_drafter, randomise

from specdec.drafters import MTPConfig, MTPDrafter, MTPHead
from specdec.drafters.head.hf_layer import HFLayerConfig
from specdec.lab.training.mtp import MultiTokenPrediction, mtp_config
from specdec.samplers import LogitsFilter, Noise
from specdec.types import Context

LLAMA = build("llama")
IDS = torch.randint(1, VOCAB, (2, 14), generator=torch.Generator().manual_seed(3))


def drafted_logits(drafter, tokens, features, monkeypatch):
    """Draft tokens after a text, and the logits of every depth, from a fresh state."""
    seen, logits = [], MTPDrafter.logits

    def spy(self, out, depth=0):
        seen.append(logits(self, out, depth))
        return seen[-1]

    with monkeypatch.context() as patched:
        patched.setattr(MTPDrafter, "logits", spy)
        state = drafter.init_state(1, 40, vocab_size=VOCAB, device=torch.device("cpu"))
        count = torch.tensor([tokens.shape[1] - 1])
        context = Context(tokens, features, 0 * count, count)
        noise = Noise([0]).at(count, drafter.num_draft_tokens + 1)
        draft = drafter.propose(
            context, state, drawing(drafter, LogitsFilter(1, temperature=0), noise)
        )
    return draft.tokens, [row[:, -1] for row in seen]


def logits_of(objective, ids, features):
    """What every depth predicts."""
    outs = objective.unroll(ids, features)
    return [objective.drafter.logits(out, depth) for depth, out in enumerate(outs)]


def of_hf_layers():
    """A head of the target's own decoder layers."""
    config = MTPConfig(HFLayerConfig.of(LLAMA, like=1), VOCAB, num_layers=3)
    return randomise(MTPHead(config).eval(), seed=1)


HEADS = {
    "chain": lambda: head_for(LLAMA),
    "target": lambda: head_for(LLAMA, semantics="target"),
    "raw feedback": lambda: head_for(LLAMA, feedback_norm=False, hidden_first=True),
    "position 0": lambda: head_for(
        LLAMA, zero_first_embedding=True, centred_norms=True, target_state=3
    ),
    "own heads": lambda: head_for(LLAMA, has_lm_head=True, lm_head_per_depth=True),
    "HF's layers": of_hf_layers,
}


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_the_training_forms_logits_are_the_drafters_own(name, monkeypatch):
    """Teacher-forced on the drafter's own tokens, depth d at the last known index predicts what the
    drafter drafts with.
    """
    drafter = MTPDrafter(HEADS[name](), LLAMA, 3)
    objective = MultiTokenPrediction(drafter, LLAMA)
    for length in (2, 3, 6, 11):
        text = IDS[:1, :length]
        features, _ = features_and_logits(LLAMA, text, ("final",))
        drafted, logits = drafted_logits(drafter, text, features[:, :-1], monkeypatch)
        whole = torch.cat([text, drafted], dim=1)[:, : length + 2]
        known, _ = features_and_logits(LLAMA, whole, ("final",))
        unrolled = logits_of(objective, whole, known)
        for depth, ours in enumerate(logits):
            torch.testing.assert_close(unrolled[depth][:, length - 2], ours, rtol=0, atol=1e-5)


@torch.no_grad()
def test_the_loss_is_the_cross_entropy_to_the_target_at_every_depth():
    drafter = MTPDrafter(head_for(LLAMA), LLAMA, 3)
    objective = MultiTokenPrediction(drafter, LLAMA, depth_weight=0.5)
    features, teacher = features_and_logits(LLAMA, IDS, ("final",))
    total = torch.zeros(())
    for depth, logits in enumerate(logits_of(objective, IDS, features)):
        for index in range(IDS.shape[1] - 3):
            probs = teacher[:, index + depth + 1].softmax(-1)
            nats = -(probs * logits[:, index].log_softmax(-1)).sum(-1)
            total += 0.5**depth * nats.mean() / (IDS.shape[1] - 3)
    torch.testing.assert_close(objective(IDS), total / 1.75)
    alone = MultiTokenPrediction(drafter, LLAMA, depth_weight=0.0)(IDS)
    assert float((alone - objective(IDS)).abs()) > 1e-4


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(ValueError, match="uses 2 of its head's 3 depths"):
        MultiTokenPrediction(random_drafter("chain", 2), LLAMA)
    with pytest.raises(ValueError, match="num_depths must be"):
        mtp_config(LLAMA, 0)


def test_sizes_and_wiring_are_those_asked_for():
    config = mtp_config(LLAMA, 4, semantics="target", mlp_width=20)
    found = config.num_layers, config.semantics, config.layer.intermediate_size, config.hidden_size
    assert found == (4, "target", 20, LLAMA.config.hidden_size)
