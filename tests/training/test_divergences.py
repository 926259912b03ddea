"""Losses and weights of steps against their definitions, written out token by token in Python's
floats, and against what they are for: acceptance and the expected length by enumeration.
"""

import math
from functools import partial
from itertools import product

import pytest
import torch
from architectures import VOCAB, build
from eagle_heads import features_and_logits, head_for
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from specdec.drafters import EagleDrafter, MedusaDrafter, MTPDrafter
from specdec.lab.training import (
    Distillation,
    EveryHead,
    FeatureAndToken,
    MaskRollouts,
    MultiTokenPrediction,
    TrainingTimeTest,
    divergences,
    medusa,
    mtp,
    step_weights,
)
from specdec.lab.training.divergences import (
    find_loss,
    js,
    kl,
    lk_hybrid,
    nla,
    soft_ce,
    tv,
    weighted,
)
from specdec.lab.training.losses import losses_of
from specdec.lab.training.step_weights import Decay, DPace, ExpectedLength, find_step_weights
from specdec.lab.training.teacher import SoftLabels

SMALLEST = math.log(torch.finfo(torch.float32).tiny)
seeds = st.integers(0, 2**32 - 1)


def xlog(x, ratio):
    return x * math.log(ratio) if x else 0.0


def accepted(p, q):
    """What rejection sampling accepts: each token is drawn by q and kept with min(1, p / q)."""
    return sum(q[v] * min(1, p[v] / q[v]) for v in range(len(q)))


ENTROPY = {
    "ce": lambda p, q: -math.log(q[max(range(len(q)), key=p.__getitem__)]),
    "soft_ce": lambda p, q: -sum(xlog(a, b) for a, b in zip(p, q, strict=True)),
    "kl": lambda p, q: sum(xlog(a, a / b) for a, b in zip(p, q, strict=True)),
    "reverse_kl": lambda p, q: sum(xlog(b, b / a) for a, b in zip(p, q, strict=True)),
    "tv": lambda p, q: 1 - accepted(p, q),
    "nla": lambda p, q: -math.log(accepted(p, q)),
}


def js_by_hand(p, q):
    """Over all tokens, those that q has not as well."""
    q = [*q, *[0.0] * (len(p) - len(q))]
    pairs = [(a, b, (a + b) / 2) for a, b in zip(p, q, strict=True)]
    return sum(xlog(a, a / m if a else 1) + xlog(b, b / m if b else 1) for a, b, m in pairs) / 2


def hybrid_by_hand(p, q, weight=None):
    weight = math.exp(-3 * accepted(p, q)) if weight is None else weight
    return weight * ENTROPY["kl"](p, q) + (1 - weight) * ENTROPY["tv"](p, q)


def by_hand(name, p, q):
    """Of probabilities of all tokens, and of those that the head can propose, which come first."""
    if name == "js":
        return js_by_hand(p, q)
    short = p[: len(q)]
    return hybrid_by_hand(short, q) if name == "lk_hybrid" else ENTROPY[name](short, q)


def pair(seed, size, kept):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(2, size, generator=generator, dtype=torch.float64)
    return logits[0, :kept].requires_grad_(), logits[1].log_softmax(dim=-1)


@pytest.mark.parametrize("name", divergences.LOSSES)
@given(seeds, st.integers(1, 5), st.integers(1, 5))
def test_value_and_gradient_are_those_of_the_definition(name, seed, size, kept):
    """With fewer ids than the target has, p is a part of its probabilities. The gradient is
    compared with differences of the definition; the weight of the hybrid is held.
    """
    logits, log_p = pair(seed, size, min(size, kept))
    loss = divergences.LOSSES[name](logits.log_softmax(dim=-1), log_p[: len(logits)])
    p = log_p.exp().tolist()

    def at(point, weight=None):
        q = point.log_softmax(dim=-1).exp().tolist()
        if weight is not None:
            return hybrid_by_hand(p[: len(q)], q, weight)
        return by_hand(name, p, q)

    assert loss.item() == pytest.approx(at(logits.detach()), rel=1e-9, abs=1e-12)
    (gradient,) = torch.autograd.grad(loss, logits)
    weight = None
    if name == "lk_hybrid":
        weight = math.exp(-3 * accepted(p, logits.detach().softmax(dim=-1).tolist()))
    for v in range(len(logits)):
        step = torch.zeros_like(logits.detach())
        step[v] = 1e-6
        slope = (at(logits.detach() + step, weight) - at(logits.detach() - step, weight)) / 2e-6
        assert gradient[v].item() == pytest.approx(slope, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("zeros", ["target", "head", "both", "nothing shared"])
@pytest.mark.parametrize("name", divergences.LOSSES)
def test_ids_of_exactly_0_leave_every_loss_and_gradient_finite(name, zeros):
    """What is 0 of the target and of the head is as if it were left out."""
    logits, target = torch.randn(2, 6, generator=torch.Generator().manual_seed(3)) * 2
    logits, target = logits.double(), target.double()
    of_target = {"target": [1, 4], "head": [], "both": [1, 4], "nothing shared": [0, 1, 2]}[zeros]
    of_head = {"target": [], "head": [0, 5], "both": [1, 4], "nothing shared": [3, 4, 5]}[zeros]
    target[of_target] = -torch.inf
    mask = torch.zeros(6, dtype=torch.float64)
    mask[of_head] = -torch.inf
    logits.requires_grad_()
    log_q, log_p = (logits + mask).log_softmax(-1), target.log_softmax(-1)
    loss = divergences.LOSSES[name](log_q, log_p)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    p, q = log_p.exp().tolist(), log_q.exp().tolist()
    if zeros == "target" and name != "reverse_kl":  # which is infinite by its definition
        wanted = hybrid_by_hand(p, q) if name == "lk_hybrid" else by_hand(name, p, q)
        assert loss.item() == pytest.approx(wanted, rel=1e-9)
    if zeros == "both":
        own = [logits.detach()[[0, 2, 3, 5]].requires_grad_(), target[[0, 2, 3, 5]]]
        alone = divergences.LOSSES[name](*(each.log_softmax(-1) for each in own))
        assert loss.item() == pytest.approx(alone.item(), rel=1e-9)
        (wanted,) = torch.autograd.grad(alone, own[0])
        torch.testing.assert_close(gradient[[0, 2, 3, 5]], wanted)
        assert gradient[[1, 4]].abs().max() < 1e-9


@given(seeds, st.integers(2, 5), st.integers(1, 4))
def test_lost_mass_counts_as_lost(seed, size, kept):
    """The target's mass of ids that the head has not is rejected, whatever the head does."""
    logits, log_p = pair(seed, size, min(kept, size - 1))
    kept_mass = log_p[: len(logits)].exp().sum().item()
    log_q = logits.log_softmax(dim=-1)
    assert tv(log_q, log_p[: len(logits)]).item() >= 1 - kept_mass - 1e-12
    best = log_p[: len(logits)].log_softmax(dim=-1)  # the head that keeps all that it can
    found = nla(best, log_p[: len(logits)]).item()
    assert found == pytest.approx(-math.log(kept_mass), rel=1e-9, abs=1e-12)


@given(seeds, st.integers(1, 4), st.integers(2, 5))
def test_tv_by_the_weights_of_the_expected_length_has_its_gradient(seed, steps, size):
    """The expected length is enumerated: over every sequence of accepted and rejected tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, steps, size, generator=generator, dtype=torch.float64)
    logits, log_p = logits[0].requires_grad_(), logits[1].log_softmax(dim=-1)
    log_q = logits.log_softmax(dim=-1)
    keeps = torch.minimum(log_q.exp(), log_p.exp()).sum(dim=-1)
    length = 0.0
    for outcome in product([0, 1], repeat=steps):
        probability = torch.stack([k if o else 1 - k for o, k in zip(outcome, keeps, strict=True)])
        first_rejected = next((m for m, o in enumerate(outcome) if not o), steps)
        length = length + first_rejected * probability.prod()
    (wanted,) = torch.autograd.grad(-length, logits, retain_graph=True)
    losses = tv(log_q, log_p)[:, None]
    loss = (ExpectedLength()(losses.detach()) * losses).sum()
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], wanted, rtol=1e-9, atol=1e-12)


def test_a_step_that_is_never_accepted_still_has_a_weight():
    """Products without a division by an acceptance of 0."""
    weights = ExpectedLength()(torch.tensor([[0.0], [1.0], [0.0]]))
    assert weights.flatten().tolist() == [1.0, 2.0, 0.0]


@given(seeds, st.integers(1, 5), st.sampled_from([0.2, 0.5, 1.0]))
def test_weights_of_dpace_are_its_sums_of_products(seed, steps, smoothing):
    generator = torch.Generator().manual_seed(seed)
    nats = torch.rand(steps, 3, 2, generator=generator, dtype=torch.float64)
    found = DPace(smoothing)(nats)
    for row, column in product(range(3), range(2)):
        q = (-nats[:, row, column]).exp().tolist()
        products = [
            math.prod((1 - smoothing) * each + smoothing for each in q[: j + 1])
            for j in range(steps)
        ]
        wanted = [sum(products[m:]) / steps for m in range(steps)]
        assert found[:, row, column].tolist() == pytest.approx(wanted)


def test_decay_is_a_mean_over_steps():
    assert Decay(0)(torch.zeros(3, 2)).tolist() == [[1, 1], [0, 0], [0, 0]]
    assert Decay(1)(torch.zeros(4, 1)).flatten().tolist() == [0.25] * 4


def test_sums_of_losses_compose_like_the_losses():
    log_q, log_p = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    warm = partial(lk_hybrid, eta=5)
    nested = weighted({weighted({tv: 2, js: 1}): 0.5, warm: 1})
    wanted = tv(log_q, log_p) + 0.5 * js(log_q, log_p) + warm(log_q, log_p)
    torch.testing.assert_close(nested(log_q, log_p), wanted)
    torch.testing.assert_close(find_loss("tv:1, js:0.5")(log_q, log_p), wanted - warm(log_q, log_p))
    assert not torch.allclose(warm(log_q, log_p), lk_hybrid(log_q, log_p))
    assert find_loss("kl") is kl
    assert find_loss("kl:2")(log_q, log_p).equal(2 * kl(log_q, log_p))


WRONG = ["", "ce,", "kl_div", "ce:", "ce:x", "ce:-1", "ce:nan", "ce:inf", "ce:0.5,ce:0.5", "ce;tv"]


@pytest.mark.parametrize("text", WRONG)
def test_a_text_that_is_no_loss_is_refused(text):
    if text == "ce:":
        text = "ce:,tv"
    with pytest.raises(ValueError, match=r"like ce:0\.7,tv:0\.3; got"):
        find_loss(text)


@pytest.mark.parametrize("text", ["", "dpace:2", "dpace:0", "half", "-1", "nan", "inf", "length:1"])
def test_a_text_that_is_no_weights_is_refused(text):
    with pytest.raises(ValueError, match="weights of steps must be a number"):
        find_step_weights(text)


@pytest.mark.parametrize("text", ["ce:0", "tv:1e-400", "kl:1e-60", "ce:0,tv:0"])
def test_a_loss_of_0_is_refused(text):
    with pytest.raises(ValueError, match=r"is 0 in float32.*: expected a weight above 0"):
        find_loss(text)
    log_q, log_p = torch.randn(2, 5).log_softmax(-1)
    assert find_loss("ce:0,tv:1")(log_q, log_p).equal(tv(log_q, log_p))


def test_sums_of_nothing_and_negative_weights_are_refused():
    with pytest.raises(ValueError, match="at least one loss"):
        weighted({})
    with pytest.raises(ValueError, match="the weight of a loss"):
        weighted({tv: -1})
    with pytest.raises(ValueError, match="smoothing"):
        DPace(0)


@given(seeds, st.sampled_from(list(divergences.LOSSES)), st.sampled_from([13, 5]))
def test_losses_and_gradients_do_not_depend_on_the_chunks(seed, name, kept):
    generator = torch.Generator().manual_seed(seed)
    head = nn.Linear(6, kept, bias=False)
    head.weight.data.normal_(generator=generator)
    out = torch.randn(2, 5, 6, generator=generator, requires_grad=True)
    logits = 4 * torch.randn(2, 5, 13, generator=generator)
    logits[0, 0, 0] = -torch.inf  # as a padded vocabulary has
    labels = SoftLabels.of(logits, torch.arange(kept))
    loss = divergences.LOSSES[name]
    found = []
    for chunk in (10**9, 3 * kept):
        (rows,) = losses_of(out, head, labels, loss, chunk_elements=chunk)
        found.append((rows, *torch.autograd.grad(rows.mean(), (out, head.weight))))
    dense = loss(head(out).log_softmax(-1), logits.log_softmax(-1)[..., :kept].clamp(min=SMALLEST))
    torch.testing.assert_close(found[0][0], dense, rtol=1e-4, atol=1e-5)
    for whole, chunked in zip(*found, strict=True):
        assert whole.isfinite().all()
        torch.testing.assert_close(whole, chunked, rtol=1e-4, atol=1e-6)


MODEL = build("llama", dtype=torch.float64)
IDS = torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))


def eagle_of(**flags):
    return EagleDrafter(head_for(MODEL, **flags).double(), MODEL)


def mask_of(**flags):
    from mask_heads import head_for as mask_head

    from specdec.drafters import MaskTokenDrafter

    return MaskTokenDrafter(mask_head(MODEL, "p-eagle", **flags).double(), MODEL)


def mtp_of():
    return MTPDrafter(mtp.new_head(MODEL, 3, seed=1).double(), MODEL, num_draft_tokens=3)


OBJECTIVES = {
    "eagle3": lambda **o: TrainingTimeTest(eagle_of(), MODEL, 3, **o),
    "eagle3, fewer ids": lambda **o: TrainingTimeTest(eagle_of(draft_vocab_size=19), MODEL, 3, **o),
    "mtp": lambda **o: MultiTokenPrediction(mtp_of(), MODEL, **o),
    "medusa": lambda **o: EveryHead(
        MedusaDrafter(medusa.new_head(MODEL, 3).double(), MODEL), MODEL, **o
    ),
}
"""Of several steps; each predicts the same positions."""


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("loss", [tv, weighted({divergences.ce: 0.7, tv: 0.3})])
@pytest.mark.parametrize("weights", [0.5, DPace(0.3), ExpectedLength()], ids=str)
def test_objectives_of_steps_take_losses_and_weights(kind, loss, weights):
    """Against the logits of every step at once, draft by draft."""
    weight = {"depth_weight" if kind == "mtp" else "step_weight": weights}
    objective = OBJECTIVES[kind](loss=loss, **weight)
    head = objective.drafter.head
    features, logits = features_and_logits(MODEL, IDS, objective.drafter.feature_layers)
    log_p, ids = logits.log_softmax(dim=-1), getattr(head, "target_ids", None)
    log_p = log_p if ids is None else log_p[..., ids]
    log_q = [
        objective.logits(out, step).log_softmax(dim=-1)
        for step, out in enumerate(objective.unroll(IDS, features))
    ]
    total, count = 0.0, log_q[0].shape[1]
    for row, t in product(range(2), range(count)):
        due = torch.stack([log_p[row, t + 1 + m] for m in range(len(log_q))])
        own = torch.stack([each[row, t] for each in log_q])
        if isinstance(weights, float):
            weight = torch.tensor([0.5**m for m in range(len(log_q))]) / 1.75
        else:
            weight = weights(weights.measure(own, due).detach()[:, None])[:, 0]
        total = total + (weight * loss(own, due)).sum() / (2 * count)
    found = objective(IDS)
    torch.testing.assert_close(found.double(), total.double(), rtol=1e-5, atol=1e-7)
    parts = [part for part in objective.parameters() if part.requires_grad]
    ours = torch.autograd.grad(found, parts, allow_unused=True)
    theirs = torch.autograd.grad(total, parts, allow_unused=True)
    for got, want in zip(ours, theirs, strict=True):
        if want is not None:
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("weights", [0.5, DPace(0.3), ExpectedLength()], ids=str)
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_rollouts_of_masks_take_losses_and_weights(share, weights):
    objective = MaskRollouts(mask_of(), MODEL, 3, share, weights, loss=tv)
    torch.manual_seed(4)
    anchors = objective.draw_anchors(IDS)
    features, logits = features_and_logits(MODEL, IDS, objective.drafter.feature_layers)
    log_p = logits.log_softmax(dim=-1)
    log_q = [
        objective.drafter.logits(out).log_softmax(dim=-1)
        for out in objective.roll_out(IDS, features, anchors)
    ]
    drafts, weigh = [], objective.step_weights
    for row, index in product(range(2), range(anchors.shape[1])):
        a = anchors[row, index]
        own = torch.stack([log_q[0][row, a], *(each[row, index] for each in log_q[1:])])
        due = torch.stack([log_p[row, a + 1 + m] for m in range(len(own))])
        measured = (weigh.measure or tv)(own, due).detach()
        drafts.append((row, a, weigh(measured[:, None])[:, 0], tv(own, due)))
    first = torch.stack([weight[0] for *_, weight, _ in drafts]).mean()
    text = torch.full(log_q[0].shape[:2], first.item(), dtype=torch.float64)
    for row, a, weight, _ in drafts:
        text[row, a] = weight[0]
    total = (text * tv(log_q[0], log_p[:, 1 : 1 + text.shape[1]])).mean()
    for *_, weight, loss in drafts:
        total = total + (weight * loss)[1:].sum() / len(drafts)
    torch.manual_seed(4)
    torch.testing.assert_close(objective(IDS).double(), total, rtol=1e-5, atol=1e-7)


def test_other_objectives_take_a_loss():
    draft = build("qwen3", seed=1, dtype=torch.float64)
    log_p = MODEL(input_ids=IDS[:, :-1]).logits.log_softmax(-1)
    log_q = draft(input_ids=IDS[:, :-1]).logits.log_softmax(-1)
    found = Distillation(draft, MODEL, js)(IDS)
    torch.testing.assert_close(found.double(), js(log_q, log_p).mean(), rtol=1e-5, atol=0)
    drafter = eagle_of(kind="input")
    losses = {
        name: FeatureAndToken(drafter, MODEL, token_weight=1, loss=loss).eval()(IDS)
        for name, loss in {"tv": tv, "soft_ce": soft_ce}.items()
    }
    alone = FeatureAndToken(drafter, MODEL, token_weight=0).eval()(IDS)
    assert 0 < losses["tv"] - alone < 1 < losses["soft_ce"] - alone


def test_names_and_weights_of_the_pages_are_here():
    assert list(divergences.LOSSES) == [
        "ce",
        "soft_ce",
        "kl",
        "reverse_kl",
        "js",
        "tv",
        "nla",
        "lk_hybrid",
    ]
    assert step_weights.weights_of(0.5, "x") == Decay(0.5)
