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
from mask_heads import head_for
from mask_reference import draft_logits

from specdec.drafters import MaskTokenDrafter
from specdec.drafters.mask_token.correction import (
    DominoConfig,
    DraftRow,
    MarkovConfig,
    SelectorConfig,
)
from specdec.lab.training import MaskRollouts
from specdec.lab.training import mask_token as training
from specdec.lab.training.mask_token import mask_token_config
from specdec.samplers import LogitsFilter, Noise

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


def drafted(drafter, length):
    """Random prompts, the target's features of them, and what is drafted after them."""
    prompts = random_ids(1, 3, length)
    features, _ = features_and_logits(MODEL, prompts, drafter.feature_layers)
    loop = FeatureLoop(prompts.tolist(), 4, features)
    state = drafter.init_state(3, 20, vocab_size=VOCAB, device=torch.device("cpu"))
    loop.prefill(drafter, state, 4)
    noise = Noise([1, 2, 3]).at(torch.full((3,), length - 1), 5)
    draft = drafter.propose(loop.context(), state, drawing(drafter, LogitsFilter(3), noise))
    return prompts, features, draft


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_rollouts_have_the_distributions_that_the_drafter_draws_from(name):
    drafter, length = drafter_of(name), 9
    prompts, features, draft = drafted(drafter, length)
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


CORRECTIONS = {
    "markov": MarkovConfig(3),
    "gated": MarkovConfig(3, "gated"),
    "rnn": MarkovConfig(3, "rnn"),
    "domino": DominoConfig(5, 7, first=1),
}
OURS = {**HEADS, **{name: {"correction": each} for name, each in CORRECTIONS.items()}}
OURS["rnn, fewer ids"] = OURS["rnn"] | {"draft_vocab_size": VOCAB - 4}


def corrected_drafter(name):
    head = head_for(MODEL, "p-eagle", **OURS[name]).double()
    return MaskTokenDrafter(head, MODEL, 4, proposal="sample")


@torch.no_grad()
def by_hand(objective, ids, anchors, *, rolled_out):
    """The loss, row by row with a path of one token each: `{depth: [(nats, probability of the path
    that the text is)]}`.
    """
    drafter, head = objective.drafter, objective.drafter.head
    features, teacher = features_and_logits(MODEL, ids, drafter.feature_layers)
    kept = range(VOCAB) if head.target_ids is None else head.target_ids.tolist()
    outs = objective.roll_out(ids, features, anchors)
    found = [[] for _ in outs]
    for b, row in enumerate(ids.tolist()):
        for start in range(len(row) - 1):
            state, path = head.correction.begin(outs[0][b : b + 1], ids[b : b + 1, :2]), 1.0
            is_anchor = start in anchors[b].tolist()
            for depth in range(len(outs) if is_anchor else 1):
                index = anchors[b].tolist().index(start) if depth else start
                hidden = head.normed(outs[depth][b, index])[None, None]
                logits = head.unembed(hidden, MODEL.lm_head)
                before = torch.tensor([[row[start + depth + 1]]])
                at = DraftRow(depth, logits, hidden, before, state, drafter.embed)
                logits, state = head.correction(at)
                log_probs = logits[0, 0].float().log_softmax(-1)
                probs = teacher[b, start + depth + 1].float().softmax(-1)[list(kept)]
                found[depth].append((-(probs * log_probs).sum(), path if depth else 1.0))
                if depth + 1 < len(outs):
                    following = row[start + depth + 2] if start + depth + 2 < len(row) else None
                    is_known = following in kept
                    chosen = log_probs[list(kept).index(following)].exp() if is_known else 0.0
                    path = path * float(chosen)
    total, weights = 0.0, 0.0
    for depth, rows in enumerate(found):
        nats = torch.stack([each for each, _ in rows])
        shares = torch.tensor([share if rolled_out else 1.0 for _, share in rows])
        total += objective.step_weights.rate**depth * (nats * shares).sum() / shares.sum()
        weights += objective.step_weights.rate**depth
    return total / weights


@pytest.mark.parametrize("rolled_out", [False, True])
@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("name", [*CORRECTIONS, "rnn, fewer ids"])
def test_the_loss_of_corrected_logits_is_that_of_paths_of_the_text(
    name, chunk, rolled_out, monkeypatch
):
    if chunk is not None:
        monkeypatch.setattr(training, "CHUNK_ELEMENTS", chunk * VOCAB)
    drafter, ids = corrected_drafter(name), random_ids(2, 2, 14)
    options = {"anchor_share": 0.5, "depth_weight": 0.7, "rolled_out": rolled_out}
    objective = MaskRollouts(drafter, MODEL, 4, **options)
    torch.manual_seed(3)
    anchors = objective.draw_anchors(ids)
    torch.manual_seed(3)
    loss = objective(ids)
    expected = by_hand(objective, ids, anchors, rolled_out=rolled_out)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    other = by_hand(objective, ids, anchors, rolled_out=not rolled_out)
    assert (loss - other).abs() > 1e-3
    loss.backward()
    for part in drafter.head.correction.parameters():
        assert part.grad.abs().max() > 1e-6
    assert all(part.grad is not None for part in drafter.head.layers.parameters())


@pytest.mark.parametrize("name", CORRECTIONS)
@torch.no_grad()
def test_corrected_rollouts_have_the_distributions_that_the_drafter_draws_from(name):
    """Teacher forced by what the drafter drew, the objective has the drafter's probabilities."""
    drafter, length = corrected_drafter(name), 9
    prompts, _, draft = drafted(drafter, length)
    objective, seen = MaskRollouts(drafter, MODEL, 4), []
    text = torch.cat([prompts, draft.tokens], dim=1)

    def keep(at):
        logits, after = forward(at)
        seen.append(logits)
        return logits, after

    forward, drafter.head.correction.forward = drafter.head.correction.forward, keep
    objective.draw_anchors = lambda ids: torch.full((3, 1), length - 2)
    objective(text)
    first, *later = seen
    first = first.unflatten(0, (3, -1))[:, length - 2]
    probs = torch.stack([first, *later], dim=1).softmax(dim=-1)
    torch.testing.assert_close(draft.probs.double(), probs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CORRECTIONS)
@torch.no_grad()
def test_a_head_with_a_new_correction_drafts_as_without(name):
    plain, ids = head_for(MODEL, "p-eagle"), random_ids(2, 2, 14)
    before = {key: each.clone() for key, each in plain.state_dict().items()}
    heads = [training.with_correction(plain, CORRECTIONS[name], seed=seed) for seed in (4, 4, 5)]
    first, again, other = (head.state_dict() for head in heads)
    assert all(each.equal(again[key]) for key, each in first.items())
    assert any(not each.equal(other[key]) for key, each in first.items())
    assert all(each.equal(first[key]) for key, each in before.items())
    assert all(each.equal(plain.state_dict()[key]) for key, each in before.items())
    losses_of = []
    for head in (plain, heads[0]):
        objective = MaskRollouts(MaskTokenDrafter(head.double(), MODEL, 4), MODEL, 4)
        torch.manual_seed(1)
        losses_of.append(objective(ids))
    torch.testing.assert_close(*losses_of)
    once_more = training.with_correction(heads[0], CORRECTIONS["domino"])  # another in its place
    assert not hasattr(once_more.correction, "markov_w1")
    without = training.with_correction(heads[0], None)
    assert without.config == plain.config
    assert all(
        each.equal(without.state_dict()[key].double()) for key, each in plain.state_dict().items()
    )


def test_new_heads_take_a_correction_and_training_it_alone_leaves_the_rest():
    head = training.new_head(MODEL, correction=MarkovConfig(3))
    plain = training.new_head(MODEL)
    assert all(each.equal(head.state_dict()[key]) for key, each in plain.state_dict().items())
    head.requires_grad_(False).correction.requires_grad_(True)
    objective = MaskRollouts(MaskTokenDrafter(head.double(), MODEL, 4), MODEL, 4)
    names = {name for name, each in objective.named_parameters() if each.requires_grad}
    start = "drafter.head.correction.markov_"
    assert names == {f"{start}w1.weight", f"{start}w2.weight"}
    objective(random_ids(0, 2, 14)).backward()
    assert head.correction.markov_w2.weight.grad.abs().max() > 0


def test_corrections_and_layers_that_rollouts_cannot_train_are_refused():
    with pytest.raises(ValueError, match=r"a MarkovConfig or a DominoConfig .* got SelectorConfig"):
        training.with_correction(head_for(MODEL, "p-eagle"), SelectorConfig(3, 4))
    selector = head_for(MODEL, "p-eagle", correction=SelectorConfig(3, 4))
    with pytest.raises(ValueError, match="got SelectorConfig"):
        MaskRollouts(MaskTokenDrafter(selector, MODEL), MODEL)
    with pytest.raises(ValueError, match=r"rolled_out .* the head has none"):
        MaskRollouts(drafter_of("fewer ids"), MODEL, rolled_out=True)
    windowed = head_for(MODEL, "p-eagle", windows=(3, None))
    with pytest.raises(ValueError, match=r"see all of the text, got windows=\(3, None\)"):
        MaskRollouts(MaskTokenDrafter(windowed, MODEL), MODEL)
