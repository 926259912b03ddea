"""The heads that training starts from: they fit any target, learn from it, and can be saved."""

from functools import partial

import numpy as np
import pytest
import torch
from architectures import VOCAB, build
from eagle_heads import head_for
from mask_heads import random_drafter
from torch import nn
from training_runs import assert_same, objective_of, weights_of

from specdec import zoo
from specdec.drafters import EagleDrafter, MaskTokenDrafter, MTPDrafter
from specdec.lab.training import (
    FeatureAndToken,
    MaskRollouts,
    MultiTokenPrediction,
    NextToken,
    TrainingTimeTest,
    new_head,
)
from specdec.lab.training.eagle import eagle_config
from specdec.lab.training.heads import frequent_ids
from specdec.lab.training.mask_token import mask_token_config
from specdec.lab.training.mask_token import new_head as new_mask
from specdec.lab.training.mtp import new_head as new_mtp
from specdec.lab.training.optimizer import MuonAdamW

FAMILIES = ["llama", "gemma3", "deepseek_v3", "gpt2", "falcon_gqa", "mpt"]
IDS = torch.randint(1, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))


NEW = {
    "eagle3": (partial(new_head, kind="eagle3"), EagleDrafter, TrainingTimeTest),
    "eagle1": (partial(new_head, kind="eagle1"), EagleDrafter, FeatureAndToken),
    "mask-token": (new_mask, MaskTokenDrafter, MaskRollouts),
    "mtp": (new_mtp, MTPDrafter, MultiTokenPrediction),
}
"""How a new head is made, its drafter, and its objective."""


@pytest.mark.parametrize(
    ("family", "kind"),
    [*((family, "eagle3") for family in FAMILIES), *(("llama", kind) for kind in [*NEW][1:])],
)
def test_a_new_head_learns_from_any_target_and_is_the_same_when_loaded(family, kind, tmp_path):
    model, (make, drafter_class, objective_class) = build(family), NEW[kind]
    drafter = drafter_class(make(model, mlp_width=24), model)
    objective = objective_class(drafter, model)
    adamw = torch.optim.AdamW(objective.parameters(), lr=2e-2)
    losses = []
    for _ in range(7):
        torch.manual_seed(0)  # the same anchors and noise
        losses.append(objective(IDS))
        losses[-1].backward()
        grads = [p.grad for p in objective.parameters()]
        assert all(grad.isfinite().all() and grad.abs().sum() > 0 for grad in grads)
        adamw.step()
        adamw.zero_grad()
    assert losses[-1] < 0.97 * losses[0]
    drafter.save_pretrained(tmp_path, **({"verifier": "a/b"} if kind == "mask-token" else {}))
    loaded = drafter_class.from_pretrained(tmp_path, model)
    assert loaded.config == drafter.config
    assert_same(dict(loaded.head.state_dict()), dict(drafter.head.state_dict()))


@pytest.mark.parametrize("kind", NEW)
def test_only_the_head_is_trained_and_kept(kind):
    model, (make, drafter_class, objective_class) = build("llama"), NEW[kind]
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    drafter = drafter_class(make(model, mlp_width=16), model)
    objective = objective_class(drafter, model).train()
    objective(IDS).backward()
    names = {f"drafter.head.{key}" for key, _ in drafter.head.named_parameters()}
    assert {key for key, _ in objective.named_parameters()} == names == set(objective.state_dict())
    assert all(p.grad is not None for p in objective.parameters())
    targets = {p.data_ptr() for p in model.parameters()}
    assert targets.isdisjoint(p.data_ptr() for p in objective.parameters())
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    assert not model.training
    assert_same(before, dict(model.state_dict()))


@pytest.mark.parametrize("kind", NEW)
def test_a_new_head_depends_on_its_seed_alone(kind):
    model, make = build("llama"), NEW[kind][0]
    torch.manual_seed(5)
    expected = torch.rand(2).tolist()
    torch.manual_seed(5)
    first, again, other = (make(model, seed=seed) for seed in (3, 3, 4))
    assert torch.rand(2).tolist() == expected  # the global generator is left alone
    assert_same(weights_of(first), weights_of(again))
    for name, module in first.named_modules():
        if isinstance(module, nn.Linear) and "lm_head" not in name:
            assert not module.weight.equal(other.get_submodule(name).weight), name
    if kind in ("eagle3", "mask-token"):
        assert first.lm_head.weight.equal(model.lm_head.weight)
        assert first.lm_head.weight.data_ptr() != model.lm_head.weight.data_ptr()
    if kind == "mask-token":
        assert not first.mask_hidden.equal(other.mask_hidden)


def test_features_are_three_hidden_states_from_low_to_high():
    model = build("llama")
    for count, expected in {3: (1, 2, 3), 6: (1, 2, 5), 7: (2, 3, 4), 32: (2, 16, 29)}.items():
        model.config.num_hidden_layers = count
        assert eagle_config(model, "eagle3").feature_layers == expected


def test_a_target_too_shallow_is_refused():
    model = build("llama")
    model.config.num_hidden_layers = 2
    for make in (partial(eagle_config, kind="eagle3"), mask_token_config):
        with pytest.raises(ValueError, match=r"the target has 2 layers; train 'eagle1'"):
            make(model)
    assert eagle_config(model, "eagle1").feature_layers == ("final",)


def test_bfloat16_products_change_loss_and_gradients_a_little():
    model = build("llama")
    drafter = EagleDrafter(head_for(model, num_layers=3, has_qk_norm=True), model)
    objective, losses, gradients = TrainingTimeTest(drafter, model), [], []
    for is_rounded in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_rounded):
            losses.append(objective(IDS))
        found = torch.autograd.grad(losses[-1], list(objective.parameters()))
        gradients.append(torch.cat([g.flatten() for g in found]))
    assert losses[1].dtype == torch.float32
    assert 0 < abs(losses[1] - losses[0]) < 0.01 * losses[0]
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99


def test_frequent_ids_are_those_of_the_data_and_of_the_targets_own_text():
    """Ids that only the data holds, and ids that only the target would write, both take part."""
    model = build("llama")
    model.config.eos_token_id = 7
    documents = [np.array([3, 3, 3, 4, 4, 5] * 20)]
    logits = model(input_ids=torch.from_numpy(documents[0])[None]).logits[0]
    own = logits.softmax(dim=-1).mean(dim=0).argsort(descending=True)
    chosen = frequent_ids(model, documents, 8).tolist()
    assert chosen == sorted(chosen)
    assert {3, 4, 5, 7} <= set(chosen)
    assert set(chosen) - {3, 4, 5, 7} <= set(own[:8].tolist())
    assert frequent_ids(model, documents, VOCAB).tolist() == list(range(VOCAB))
    read = []
    cut = {"row_tokens": 50, "progress": lambda rows: read.extend(rows) or rows}
    frequent_ids(model, documents, 8, **cut)
    assert torch.cat(read).tolist() == documents[0].tolist()
    begun = []
    hook = lambda module, args, options: begun.append(options["input_ids"][0].tolist())  # noqa: E731
    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    frequent_ids(model, documents, 8, beginning=[9, 8], **cut)
    handle.remove()
    assert [row[:2] for row in begun] == [[9, 8]] * 3
    assert [token for row in begun for token in row[2:]] == documents[0].tolist()


def test_a_head_of_fewer_ids_starts_as_the_targets_rows_of_them():
    model, ids = build("llama"), torch.tensor([2, 5, 11])
    head = new_head(model, "eagle3", target_ids=ids)
    assert head.lm_head.weight.equal(model.lm_head.weight[ids])
    assert head.target_ids.equal(ids)


MODEL = zoo.load_target()
EAGLE3 = EagleDrafter(new_head(MODEL, "eagle3"), MODEL)
EAGLE1 = EagleDrafter(new_head(MODEL, "eagle1"), MODEL)
MASK, MTP = MaskTokenDrafter(new_mask(MODEL), MODEL), MTPDrafter(new_mtp(MODEL), MODEL)
DFLASH = random_drafter("dflash")
FROZEN = nn.Linear(2, 2).requires_grad_(False)
OBJECTIVES = [
    NextToken(MODEL),
    TrainingTimeTest(EAGLE3, MODEL),
    FeatureAndToken(EAGLE1, MODEL),
    MaskRollouts(MASK, MODEL),
    MultiTokenPrediction(MTP, MODEL),
]
REFUSED = {
    "mlp_width": lambda: new_head(MODEL, "eagle3", mlp_width=0),
    "num_steps": lambda: TrainingTimeTest(EAGLE3, MODEL, 0),
    "step_weight": lambda: TrainingTimeTest(EAGLE3, MODEL, step_weight=float("nan")),
    "noise": lambda: FeatureAndToken(EAGLE1, MODEL, noise=-1),
    "num_depths must": lambda: MaskRollouts(MASK, MODEL, 0),
    "anchor_share": lambda: MaskRollouts(MASK, MODEL, anchor_share=1.5),
    "hidden state 8": lambda: TrainingTimeTest(EAGLE3, build("llama")),
    "draft ids must be an integer in 1..2048": lambda: frequent_ids(MODEL, [np.arange(9)], 0),
    "4 tokens are too short for 5 unrolled": lambda: TrainingTimeTest(EAGLE3, MODEL)(IDS[:, :5]),
    "2 tokens are too short for 8 depths": lambda: MaskRollouts(MASK, MODEL)(IDS[:, :3]),
    "uses the target's vocabulary head": lambda: new_head(MODEL, "eagle1", target_ids=IDS[0, :3]),
    "'eagle1' or 'eagle3', got 'eagle2'": lambda: eagle_config(MODEL, "eagle2"),
    "alignment 'shifted'.*got 'same-position'": lambda: MaskRollouts(
        random_drafter("dflash"), MODEL
    ),
    "nothing to train": lambda: MuonAdamW(FROZEN, lr=1, lr_others=1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_heads_and_objectives_that_cannot_be_made_are_refused_by_name(name):
    with pytest.raises(ValueError, match=name):
        REFUSED[name]()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: type(objective).__name__)
def test_rows_without_a_label_are_refused(objective):
    with pytest.raises(ValueError, match="rows of 0 tokens are too short"):
        objective(IDS[:, :1])


def test_muon_has_the_hidden_matrices_and_adamw_the_rest():
    head = objective_of("eagle3").drafter.head
    muon, adamw = MuonAdamW(head, lr=0.02, lr_others=0.01).param_groups
    assert (muon["lr"], adamw["lr"]) == (0.02, 0.01)
    name_of = {id(p): key for key, p in head.named_parameters()}
    names = [{name_of[id(p)] for p in group["params"]} for group in (muon, adamw)]
    norms = {"input_layernorm", "hidden_norm", "post_attention_layernorm"}
    assert names[1] == {f"layers.0.{n}.weight" for n in norms} | {"norm.weight", "lm_head.weight"}
    assert names[0] == set(name_of.values()) - names[1]
    # GPT-2 names its tables otherwise; one is tied to the vocabulary head, one is of positions.
    model = build("gpt2")
    transformer = model.transformer
    tables = {id(m.weight) for m in (transformer.wte, transformer.wpe, model.lm_head)}
    muon, adamw = MuonAdamW(model, lr=0.02, lr_others=0.01).param_groups
    assert tables <= {id(p) for p in adamw["params"]}
    assert all(p.ndim == 2 for p in muon["params"])


def test_the_optimiser_is_muon_and_adamw_side_by_side_and_goes_on_from_its_state():
    ours, theirs, loaded = (objective_of("bigrams") for _ in range(3))
    one = MuonAdamW(ours, lr=0.02, lr_others=0.01, weight_decay=0.1)
    options = {"weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}
    rest = [theirs.embed_tokens.weight, theirs.lm_head.weight, theirs.lm_head.bias]
    muon = torch.optim.Muon([theirs.proj.weight], lr=0.02, **options)
    two = [muon, torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.98), weight_decay=0.0)]

    def step(objective, *optimizers):
        objective(IDS).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(3):
        step(ours, one)
        step(theirs, *two)
    assert_same(weights_of(ours), weights_of(theirs))
    loaded.load_state_dict(ours.state_dict())
    other = MuonAdamW(loaded, lr=1.0, lr_others=1.0)
    other.load_state_dict(one.state_dict())
    step(loaded, other)
    step(theirs, *two)
    assert_same(weights_of(loaded), weights_of(theirs))
