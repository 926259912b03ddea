"""Online distillation: the windows that were verified are kept with what the target said of them,
and learned; texts stay the target's.
"""

import pytest
import torch
from architectures import VOCAB
from drafter_table import MODEL
from drafting import perturbed, ragged_prompts

from examples.online_distillation import KeepVerified, OnlineDistillation
from specdec import ModelDrafter, PromptLookupDrafter, SpeculativeGenerator
from specdec.lab.training import FollowTarget

IDS, MASK = ragged_prompts(VOCAB, 5, 1, 9)
OPTIONS = {"max_new_tokens": 12, "do_sample": True, "seed": [1, 2, 3], "eos_token_id": None}


def keeping(**options):
    drafter = perturbed(MODEL).requires_grad_(True)  # a test of this process may have frozen MODEL
    return KeepVerified(ModelDrafter(drafter, 3), **{"top_k": VOCAB, **options})


def windows_of(result):
    """Of each step of each row: the text before its draft, and the draft."""
    for row, steps in enumerate(result.steps):
        text = list(result.prompts[row])
        for step in steps:
            yield list(text), step.draft_tokens
            text += step.new_tokens


@pytest.mark.parametrize("graphs", [False, True])
@torch.no_grad()
def test_windows_are_kept_with_the_targets_distribution_after_each_of_their_tokens(graphs):
    """The oracle is a plain forward over text and draft, cut to the context of a window."""
    drafter = keeping(context=6)
    generator = SpeculativeGenerator(MODEL, drafter, graphs=graphs)
    result = generator.generate(IDS, MASK, **OPTIONS)
    found = {}
    for tokens, ids, probs, rows in zip(*drafter.kept(torch.arange(drafter.num_kept)), strict=True):
        key = tuple((tokens[tokens > 0] - 1).tolist())
        dense = torch.zeros(4, VOCAB).scatter_(1, ids, probs)
        found.setdefault(key, []).append(dense[:rows])
    expected = list(windows_of(result))
    assert drafter.num_kept == len(expected)
    for text, draft in expected:
        logits = MODEL(torch.tensor([text + draft])).logits[0, len(text) - 1 :]
        of_key = found[(*text[-6:], *draft)]
        probs = logits.softmax(dim=-1)
        assert any(len(f) == len(probs) and torch.allclose(f, probs, atol=1e-5) for f in of_key)


def test_the_ring_forgets_the_oldest_and_rows_that_have_ended_are_left_out():
    drafter = keeping(windows=4)
    result = SpeculativeGenerator(MODEL, drafter).generate(IDS, MASK, **OPTIONS)
    assert sum(map(len, result.steps)) > 4
    assert drafter.num_kept == 4
    tokens, _, _, rows = drafter.kept(torch.arange(4))
    assert (tokens > 0).any(dim=1).all()
    assert rows.eq(4).all()


def test_what_was_verified_is_learned_and_the_text_stays_the_targets():
    drafter = keeping()
    generator = SpeculativeGenerator(MODEL, drafter)
    plain = SpeculativeGenerator(MODEL, None).generate(IDS, MASK, max_new_tokens=12)
    follow = FollowTarget(generator, OnlineDistillation, torch.optim.SGD(drafter.parameters(), 0.2))
    before, losses = generator.generate(IDS, MASK, **OPTIONS), []
    for _ in range(8):
        losses.append(follow(before))
    assert losses[-1] < losses[0] - 0.01
    assert generator.generate(IDS, MASK, max_new_tokens=12).sequences.equal(plain.sequences)


def test_a_loss_is_the_cross_entropy_to_the_target_over_the_rows_of_the_window():
    drafter = keeping(context=16)
    generator = SpeculativeGenerator(MODEL, drafter)
    result = generator.generate(IDS[2:], **{**OPTIONS, "seed": 3, "max_new_tokens": 4})
    losses = []
    with torch.no_grad():
        for text, draft in windows_of(result):
            ids = torch.tensor([text + draft])
            p, q = (m(ids).logits[0, len(text) - 1 :] for m in (MODEL, drafter.model))
            losses.append(-(p.softmax(-1) * q.log_softmax(-1)).sum(-1))
        loss = OnlineDistillation(drafter)()
    assert loss.item() == pytest.approx(torch.cat(losses).mean().item(), rel=1e-5)


def test_what_cannot_be_kept_or_learned_is_refused():
    with pytest.raises(TypeError, match="windows of a ModelDrafter, got a PromptLookupDrafter"):
        KeepVerified(PromptLookupDrafter())
    with pytest.raises(ValueError, match="without tree= and vocabulary="):
        KeepVerified(ModelDrafter(MODEL, tree="4x2"))
    with pytest.raises(TypeError, match=r"windows of KeepVerified\(drafter\), got a ModelDrafter"):
        OnlineDistillation(ModelDrafter(MODEL))
    with pytest.raises(ValueError, match="no window has been kept yet"):
        OnlineDistillation(keeping())()
    with pytest.raises(ValueError, match="top_k must be an integer"):
        SpeculativeGenerator(MODEL, keeping(top_k=VOCAB + 1))
