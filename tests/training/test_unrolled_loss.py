"""The training-time test is drafting: every unrolled step predicts what a draft would.

The oracle for step m at place t is a head that has read the text up to token t + 1 beside the
target's features up to position t, and then m tokens of the text beside its own feedback: once
recomputed straight without a cache, once as `EagleDrafter` itself when it drafts those tokens.
"""

import pytest
import torch
from architectures import VOCAB, build
from drafting import drawing
from eagle_heads import FeatureLoop, features_and_logits, head_for
from eagle_reference import draft_outputs

from specdec.drafters import EagleDrafter
from specdec.lab.training import FeatureAndToken, TrainingTimeTest, new_head
from specdec.lab.training.heads import with_layer
from specdec.samplers import LogitsFilter, Noise

MODEL = build("llama", dtype=torch.float64)
TABLES = [m.weight.detach() for m in (MODEL.get_input_embeddings(), MODEL.get_output_embeddings())]
HEADS = {
    "one layer, GQA": {},
    "two layers": {"num_layers": 2},
    "three layers, qk norm": {"num_layers": 3, "has_qk_norm": True},
    "own embeddings": {"has_embed_tokens": True},
    "feedback norm": {"feedback_norm": True},
    "norm before residual": {"norm_before_residual": True},
    "target's vocabulary head": {"has_lm_head": False},
    "logit scale": {"logit_scale": 0.3},
    "fewer ids": {"draft_vocab_size": 19},
    "windows": {"num_layers": 3, "windows": (3, 2, None)},
    "short window": {"windows": (2,)},
    "eagle1": {"kind": "input"},
    "eagle1, two layers": {"kind": "input", "num_layers": 2, "fc_bias": True},
}


def drafter_of(name, *, seed=0):
    """A random head of some wiring, in float64."""
    return EagleDrafter(head_for(MODEL, seed=seed, **HEADS[name]).double(), MODEL)


def random_ids(seed, rows, length):
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def unrolled(drafter, num_steps, ids, features):
    """Logits `[M, B, R, Vd]` of the objective's steps."""
    outs = TrainingTimeTest(drafter, MODEL, num_steps).unroll(ids, features)
    return torch.stack([drafter.logits(out) for out in outs])


def recomputed(drafter, ids, features, place, num_steps, positions=None):
    """Logits `[M, Vd]` and feedback `[M, H]` of a draft behind a place of one row's text."""
    behind = [*ids[place + 2 :].tolist(), 0][:num_steps]  # nobody reads the last one
    text, known = ids[: place + 2].tolist(), features[: place + 1]
    weights = dict(drafter.head.named_parameters())
    tables = TABLES if drafter.head.target_ids is None else [TABLES[0], None]
    return draft_outputs(drafter.config, weights, tables, text, known, behind, positions)


SHIFTS = {
    "tokens": lambda ids, features: (ids.roll(1), features, None),
    "later tokens": lambda ids, features: (torch.cat([ids[:6], ids[5:-1]]), features, None),
    "features": lambda ids, features: (ids, features.roll(1, 0), None),
    "later positions": lambda ids, features: (ids, features, [*range(5), *range(6, 9)]),
    "positions that stay": lambda ids, features: (ids, features, [*range(5), 4, 4, 4]),
}


@pytest.mark.parametrize("shift", SHIFTS)
@torch.no_grad()
def test_a_token_feature_or_position_that_is_one_off_is_noticed(shift):
    """The comparisons below have no blind spot: place 4, four steps."""
    drafter, ids = drafter_of("two layers"), random_ids(3, 1, 12)
    features, _ = features_and_logits(MODEL, ids, drafter.feature_layers)
    steps = unrolled(drafter, 4, ids, features)[:, 0, 4]
    wrong_ids, wrong_features, positions = SHIFTS[shift](ids[0], features[0])
    right, _ = recomputed(drafter, ids[0], features[0], 4, 4)
    wrong, _ = recomputed(drafter, wrong_ids, wrong_features, 4, 4, positions)
    assert (steps - right).abs().max() < 1e-5
    assert (steps - wrong).abs().amax(dim=1)[-1] > 1e-2


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_the_steps_behind_a_text_have_the_laws_that_the_drafter_draws_from(name):
    """The drafter continues a text, and the unrolled head reads what it drafted."""
    drafter, num_steps, length = drafter_of(name), 4, 9
    drafter.num_draft_tokens = num_steps
    prompts = random_ids(1, 3, length)
    features, _ = features_and_logits(MODEL, prompts, drafter.feature_layers)
    loop = FeatureLoop(prompts.tolist(), num_steps, features)
    state = drafter.init_state(3, 20, vocab_size=VOCAB, device=torch.device("cpu"))
    loop.prefill(drafter, state, 4)
    noise = Noise([1, 2, 3]).at(torch.full((3,), length - 1), num_steps + 1)
    draft = drafter.propose(loop.context(), state, drawing(drafter, LogitsFilter(3), noise))
    ids = torch.cat([prompts, draft.tokens], dim=1)
    features, _ = features_and_logits(MODEL, ids, drafter.feature_layers)
    laws = unrolled(drafter, num_steps, ids, features)[:, :, length - 2].transpose(0, 1)
    laws = drafter.head.over_target_ids(laws).softmax(dim=-1)  # [B, K, V]
    torch.testing.assert_close(draft.probs.double(), laws, rtol=0, atol=1e-5)


@pytest.mark.smoke
@pytest.mark.parametrize("name", HEADS)
def test_loss_and_gradients_are_those_of_all_drafts_one_by_one(name):
    num_steps, count = 3, 4
    drafter, ids = drafter_of(name), random_ids(2, 2, num_steps + count)
    objective = TrainingTimeTest(drafter, MODEL, num_steps, step_weight=0.5)
    parameters = dict(drafter.head.named_parameters())
    features, logits = features_and_logits(MODEL, ids, drafter.feature_layers)
    laws = logits.softmax(dim=-1)
    if drafter.head.target_ids is not None:
        laws = laws[..., drafter.head.target_ids]
    expected = 0.0
    for row in range(2):
        for t in range(count):
            drafts, _ = recomputed(drafter, ids[row], features[row], t, num_steps)
            for m in range(num_steps):
                law = laws[row, t + m + 1]
                nats = -(law * drafts[m].log_softmax(dim=-1)).sum()
                expected += 0.5**m / 1.75 * nats / (2 * count)
    loss = objective(ids)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    ours = torch.autograd.grad(loss, list(parameters.values()))
    theirs = torch.autograd.grad(expected, list(parameters.values()))
    for key, got, want in zip(parameters, ours, theirs, strict=True):
        assert want.abs().max() > 0, f"{key} takes no part"
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6, msg=lambda m, k=key: k + m)


def test_a_new_head_with_a_window_is_saved_and_read_with_it(tmp_path):
    drafter = EagleDrafter(new_head(MODEL, "eagle3", window=7), MODEL)
    assert drafter.config.layer.windows == (7,)
    drafter.save_pretrained(tmp_path, verifier="target")
    found = EagleDrafter.from_pretrained(tmp_path, MODEL)
    assert found.config.layer.windows == (7,)
    assert new_head(MODEL, "eagle3").config.layer.windows == ()
    with pytest.raises(ValueError, match=r"EAGLE-1 heads with a window; train 'eagle3'"):
        new_head(MODEL, "eagle1", window=7)
    with pytest.raises(ValueError, match=r"a window of LayerConfig.windows.*got 0"):
        new_head(MODEL, "eagle3", window=0)


@torch.no_grad()
def test_a_head_with_another_layer_has_the_weights_and_draws_as_that_layer_says():
    drafter, ids = drafter_of("two layers"), random_ids(3, 1, 12)
    rope = {"rope_type": "linear", "factor": 3.0, "rope_theta": 10000.0}
    features, _ = features_and_logits(MODEL, ids, drafter.feature_layers)
    before = unrolled(drafter, 4, ids, features)[:, 0, 4]
    for fields in ({"windows": (3, 2)}, {"rope": rope}):
        head = with_layer(drafter.head, **fields)
        assert (head.dtype, head.training) == (drafter.head.dtype, drafter.head.training)
        own = EagleDrafter(head, MODEL)
        steps = unrolled(own, 4, ids, features)[:, 0, 4]
        expected, _ = recomputed(own, ids[0], features[0], 4, 4)
        torch.testing.assert_close(steps, expected, rtol=0, atol=1e-5)
        assert (steps - before).abs().max() > 1e-3
    assert unrolled(drafter, 4, ids, features)[:, 0, 4].equal(before)
    with pytest.raises(TypeError, match="window"):
        with_layer(drafter.head, window=3)


def test_angles_are_made_anew_for_longer_rows_and_for_another_data_type():
    drafter = drafter_of("one layer, GQA")
    objective = TrainingTimeTest(drafter, MODEL, 2)
    short, long = random_ids(1, 1, 5), random_ids(1, 1, 30)
    losses = [objective(ids).item() for ids in (short, long, short)]
    assert losses[0] == losses[2]
    assert losses[1] == TrainingTimeTest(drafter, MODEL, 2)(long).item()
    drafter.head.float()
    assert objective(long).item() == pytest.approx(losses[1], rel=1e-5)


def test_feature_and_token_losses_are_those_of_one_draft_per_place():
    objective = FeatureAndToken(drafter_of("eagle1, two layers"), MODEL, token_weight=0.3).eval()
    ids = random_ids(7, 2, 8)
    features, logits = features_and_logits(MODEL, ids, ("final",))
    nats, errors = [], []
    for row in range(2):
        for t in range(7):
            draft, feedback = recomputed(objective.drafter, ids[row], features[row], t, 1)
            law = logits[row, t + 1].softmax(dim=-1)
            nats.append(-(law * draft[0].log_softmax(dim=-1)).sum())
            error = (feedback[0] - features[row, t + 1]).abs()
            errors.append(torch.where(error < 1, error**2 / 2, error - 0.5).mean())
    expected = torch.stack(errors).mean() + 0.3 * torch.stack(nats).mean()
    torch.testing.assert_close(objective(ids).double(), expected, rtol=1e-5, atol=0)


def test_noise_moves_features_a_little_and_only_in_training(monkeypatch):
    objective = FeatureAndToken(drafter_of("eagle1, two layers"), MODEL, noise=0.25)
    ids, seen = random_ids(7, 2, 30), []
    fuse = objective.drafter.head.fuse
    monkeypatch.setattr(objective.drafter.head, "fuse", lambda x: seen.append(x) or fuse(x))
    features, _ = features_and_logits(MODEL, ids, ("final",))
    for is_training in (False, True, True):
        objective.train(is_training)(ids)
    exact, first, second = ((x - features[:, :-1]).abs() for x in seen)
    assert exact.max() < 1e-9
    assert 0.24 < first.max() <= 0.25
    assert (first - second).abs().max() > 0.1
    FeatureAndToken(objective.drafter, MODEL, noise=0.0).train()(ids)
    assert (seen[-1] - features[:, :-1]).abs().max() < 1e-9


def test_a_head_that_cannot_predict_its_features_is_sent_to_the_other_loss():
    with pytest.raises(ValueError, match=r"width 96 and its output is 32.*TrainingTimeTest"):
        FeatureAndToken(drafter_of("one layer, GQA"), MODEL)
