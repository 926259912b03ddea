"""Rollouts of masks are drafting: what a rollout predicts is what the drafter would.

The oracle for an anchor is a head that has read the text up to the token after the anchor beside
the target's features up to the anchor, and then masks: once recomputed straight without a cache,
once as `MaskTokenDrafter` itself.
"""

import pytest
import torch
from architectures import VOCAB, build
from drafting import drawing
from eagle_heads import FeatureLoop, features_and_logits, tables_of
from hypothesis import given, settings
from hypothesis import strategies as st
from mask_heads import head_for, random_drafter
from mask_reference import draft_logits

from specdec.drafters import MaskTokenDrafter
from specdec.samplers import Noise, Warp
from specdec.training import MaskRollouts, mask_token_config

MODEL = build("llama", dtype=torch.float64)
HEADS = {
    "two layers, GQA": {},
    "three layers, qk norm": {"num_layers": 3, "has_qk_norm": True},
    "own embeddings": {"has_embed_tokens": True},
    "learned embedding": {"mask_token_id": None},
    "norm per feature": {"fc_norm": True},
    "norm before residual": {"norm_before_residual": True, "norm_before_fc": True},
    "target's vocabulary head": {"has_lm_head": False},
    "fewer ids": {"draft_vocab_size": 19, "logit_scale": 0.3},
}
seeds = st.integers(0, 2**32 - 1)


def drafter_of(name, *, seed=0, num_draft_tokens=4):
    """A random head of some wiring, in float64."""
    head = head_for(MODEL, "p-eagle", seed=seed, **HEADS[name]).double()
    return MaskTokenDrafter(head, MODEL, num_draft_tokens, proposal="sample")


def random_ids(seed, rows, length):
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits_of(objective, ids, features, anchors):
    """What every depth predicts."""
    return [objective.drafter.logits(out) for out in objective.roll_out(ids, features, anchors)]


@pytest.mark.parametrize("name", HEADS)
@settings(max_examples=4)
@given(seeds, st.integers(1, 5), st.integers(1, 7), st.data())
@torch.no_grad()
def test_a_rollout_is_a_draft_after_its_anchor(name, seed, depths, count, data):
    drafter, ids = drafter_of(name, seed=seed), random_ids(seed, 2, depths + count)
    features, _ = features_and_logits(MODEL, ids, drafter.feature_layers)
    objective = MaskRollouts(drafter, MODEL, depths, anchor_share=1.0)
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.stack([torch.randperm(count, generator=generator) for _ in range(2)])
    anchors = anchors[:, : max(1, count - 1)]
    text, *rollouts = logits_of(objective, ids, features, anchors)
    assert text.shape[:2] == (2, ids.shape[1] - 1)
    assert len(rollouts) == depths - 1
    row = data.draw(st.integers(0, 1))
    which = data.draw(st.integers(0, anchors.shape[1] - 1))
    anchor = int(anchors[row, which])
    seen = torch.stack([text[row, anchor], *(logits[row, which] for logits in rollouts)])
    weights, tables = drafter.head.state_dict(), tables_of(MODEL)
    known = ids[row, : anchor + 2].tolist(), features[row, : anchor + 1]
    expected = draft_logits(drafter.config, weights, tables, *known, depths)
    torch.testing.assert_close(seen, expected, rtol=0, atol=1e-9)
    # The control: an anchor one later predicts something else.
    if anchor + 3 <= ids.shape[1]:
        other = ids[row, : anchor + 3].tolist(), features[row, : anchor + 2]
        wrong = draft_logits(drafter.config, weights, tables, *other, depths)
        assert (seen - wrong).abs().max() > 1e-2


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_rollouts_have_the_distributions_that_the_drafter_draws_from(name):
    drafter, length = drafter_of(name), 9
    prompts = random_ids(1, 3, length)
    features, _ = features_and_logits(MODEL, prompts, drafter.feature_layers)
    loop = FeatureLoop(prompts.tolist(), 4, features)
    state = drafter.init_state(3, 20, vocab_size=VOCAB, device=torch.device("cpu"))
    loop.prefill(drafter, state, 4)
    noise = Noise([1, 2, 3]).at(torch.full((3,), length - 1), 5)
    draft = drafter.propose(loop.context(), state, drawing(drafter, Warp(3), noise))
    objective = MaskRollouts(drafter, MODEL, 4)
    anchors = torch.full((3, 1), length - 2)
    text, *rollouts = logits_of(objective, prompts, features, anchors)
    logits = torch.stack([text[:, length - 2], *(r[:, 0] for r in rollouts)], dim=1)
    probs = drafter.head.over_target_ids(logits).softmax(dim=-1)
    torch.testing.assert_close(draft.probs.double(), probs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_the_loss_is_the_cross_entropy_to_the_target_at_every_depth(share):
    drafter, ids = drafter_of("fewer ids"), random_ids(2, 2, 14)
    objective = MaskRollouts(drafter, MODEL, 4, anchor_share=share, depth_weight=0.5)
    torch.manual_seed(3)
    anchors = objective.draw_anchors(ids)
    torch.manual_seed(3)
    loss = objective(ids)
    features, teacher = features_and_logits(MODEL, ids, drafter.feature_layers)
    probs = teacher.float().softmax(-1)[..., drafter.head.target_ids]
    text, *rollouts = logits_of(objective, ids, features, anchors)
    total, weights = 0.0, 0.0
    for depth, logits in enumerate([text, *rollouts]):
        nats = []
        for b in range(2):
            places = range(13) if depth == 0 else anchors[b].tolist()
            for i, place in enumerate(places):
                log_probs = logits[b, i].float().log_softmax(-1)
                nats.append(-(probs[b, place + depth + 1] * log_probs).sum())
        total += 0.5**depth * torch.stack(nats).mean()
        weights += 0.5**depth
    torch.testing.assert_close(loss, total / weights, rtol=1e-5, atol=1e-6)


def test_anchors_are_distinct_ascending_and_have_a_label_at_every_depth():
    objective = MaskRollouts(drafter_of("two layers, GQA"), MODEL, 4, 0.5)
    ids = random_ids(0, 9, 24)
    seen = set()
    for _ in range(30):
        anchors = objective.draw_anchors(ids)
        assert anchors.shape == (9, 10)
        assert bool((anchors.diff(dim=1) > 0).all())
        seen |= set(anchors.flatten().tolist())
    assert seen == set(range(20))  # the deepest row of anchor 19 predicts token 24: teacher row 23


def test_masks_have_the_embedding_of_padding_or_of_the_end_or_of_the_last_id():
    model = build("llama")
    for ids, expected in (
        ({"pad_token_id": 3, "eos_token_id": 5}, 3),
        ({"pad_token_id": None, "eos_token_id": [5, 6]}, 5),
        ({"pad_token_id": None, "eos_token_id": None}, VOCAB - 1),
    ):
        for name, value in ids.items():
            setattr(model.config, name, value)
        assert mask_token_config(model).mask_token_id == expected
    assert mask_token_config(model, mask_token_id=9).mask_token_id == 9


def test_other_alignments_and_short_rows_are_refused():
    with pytest.raises(ValueError, match=r"alignment 'shifted'.*got 'same-position'"):
        MaskRollouts(random_drafter("dflash"), MODEL)
    with pytest.raises(ValueError, match="rows of 4 tokens are too short for 5 depths"):
        MaskRollouts(drafter_of("fewer ids"), MODEL, 5)(random_ids(0, 1, 5))
