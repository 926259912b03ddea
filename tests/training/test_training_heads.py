"""The heads that training starts from: they fit any target, learn from it, and can be saved."""

import numpy as np
import pytest
import torch
from architectures import VOCAB, build
from eagle_heads import head_for

from specdec import zoo
from specdec.drafters import EagleDrafter, MaskTokenDrafter, MTPDrafter
from specdec.training import (
    FeatureAndToken,
    MaskRollouts,
    MultiTokenPrediction,
    NextToken,
    TrainingTimeTest,
    eagle_config,
    new_head,
)
from specdec.training.heads import frequent_ids
from specdec.training.mask_token import new_head as new_mask
from specdec.training.mtp import new_head as new_mtp

FAMILIES = ["llama", "gemma3", "gpt_oss", "deepseek_v3", "gpt2", "opt", "falcon_gqa", "gptj", "mpt"]
IDS = torch.randint(1, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_head_learns_from_any_target_and_is_the_same_when_loaded(family, kind, tmp_path):
    model = build(family)
    drafter = EagleDrafter(new_head(model, kind, mlp_width=24), model)
    objective = (TrainingTimeTest if kind == "eagle3" else FeatureAndToken)(drafter, model)
    adamw = torch.optim.AdamW(objective.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        losses.append(objective(IDS))
        losses[-1].backward()
        assert all(p.grad.isfinite().all() for p in objective.parameters())
        adamw.step()
        adamw.zero_grad()
    assert losses[-1] < 0.97 * losses[0]
    drafter.save_pretrained(tmp_path)
    loaded = EagleDrafter.from_pretrained(tmp_path, model)
    assert loaded.config == drafter.config
    assert loaded.head.state_dict().keys() == drafter.head.state_dict().keys()
    for key, weight in drafter.head.state_dict().items():
        assert loaded.head.state_dict()[key].equal(weight), key


def test_a_vocabulary_head_starts_as_the_targets_and_the_rest_as_the_seed_says():
    model = build("llama")
    torch.manual_seed(5)
    expected = torch.rand(2).tolist()
    torch.manual_seed(5)
    first, again, other = (new_head(model, "eagle3", seed=s) for s in (3, 3, 4))
    assert torch.rand(2).tolist() == expected  # the global generator is left alone
    assert first.lm_head.weight.equal(model.lm_head.weight)
    assert first.lm_head.weight.data_ptr() != model.lm_head.weight.data_ptr()
    assert first.fc.weight.equal(again.fc.weight)
    assert not first.fc.weight.equal(other.fc.weight)


def test_features_are_three_boundaries_from_low_to_high():
    model = build("llama")
    for count, expected in {3: (1, 2, 3), 6: (1, 2, 5), 7: (2, 3, 4), 32: (2, 16, 29)}.items():
        model.config.num_hidden_layers = count
        assert eagle_config(model, "eagle3").feature_layers == expected
    for count in range(3, 80):
        model.config.num_hidden_layers = count
        layers = eagle_config(model, "eagle3").feature_layers
        assert 0 < layers[0] < layers[1] < layers[2] <= count


def test_a_target_too_shallow_and_an_unknown_kind_are_refused():
    model = build("llama")
    with pytest.raises(ValueError, match="kind must be 'eagle1' or 'eagle3', got 'eagle2'"):
        eagle_config(model, "eagle2")
    model.config.num_hidden_layers = 2
    with pytest.raises(ValueError, match=r"the target has 2 layers; train 'eagle1'"):
        eagle_config(model, "eagle3")
    assert eagle_config(model, "eagle1").feature_layers == ("final",)


@pytest.mark.parametrize("flags", [{}, {"num_layers": 3, "has_qk_norm": True}, {"kind": "input"}])
def test_bfloat16_products_change_loss_and_gradients_a_little(flags):
    model = build("llama")
    drafter = EagleDrafter(head_for(model, **flags), model)
    objective = (FeatureAndToken if flags.get("kind") else TrainingTimeTest)(drafter, model).eval()
    losses, gradients = [], []
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
    for count in (0, VOCAB + 1):
        with pytest.raises(ValueError, match=f"must have 1 to {VOCAB} ids, .* got {count}"):
            frequent_ids(model, documents, count)


def test_a_head_of_fewer_ids_starts_as_the_targets_rows_of_them():
    model, ids = build("llama"), torch.tensor([2, 5, 11])
    head = new_head(model, "eagle3", target_ids=ids)
    assert head.lm_head.weight.equal(model.lm_head.weight[ids])
    assert head.target_ids.equal(ids)
    with pytest.raises(ValueError, match="uses the target's vocabulary head"):
        new_head(model, "eagle1", target_ids=ids)


MODEL = zoo.load_target()
EAGLE3 = EagleDrafter(new_head(MODEL, "eagle3"), MODEL)
EAGLE1 = EagleDrafter(new_head(MODEL, "eagle1"), MODEL)
MASK, MTP = MaskTokenDrafter(new_mask(MODEL), MODEL), MTPDrafter(new_mtp(MODEL), MODEL)
IDS = torch.zeros(2, 17, dtype=torch.long)
OBJECTIVES = [
    NextToken(MODEL),
    TrainingTimeTest(EAGLE3, MODEL),
    FeatureAndToken(EAGLE1, MODEL),
    MaskRollouts(MASK, MODEL),
    MultiTokenPrediction(MTP, MODEL),
]
REFUSED = {
    "seed": (lambda: new_head(MODEL, "eagle3", seed=-1), "seed must be an integer in 0"),
    "seed of masks": (lambda: new_mask(MODEL, seed=2**70), "seed must be an integer in 0"),
    "seed's word": (lambda: new_mtp(MODEL, seed="x"), "seed must be an integer in 0"),
    "width": (lambda: new_head(MODEL, "eagle3", mlp_width=0), "mlp_width must be an integer >= 1"),
    "width's word": (lambda: new_mask(MODEL, mlp_width="x"), "mlp_width must be an integer"),
    "no target": (lambda: new_head(None, "eagle3"), "target must be a PreTrainedModel, got None"),
    "a number": (lambda: new_mask(5), "target must be a PreTrainedModel, got 5"),
    "a word": (lambda: new_mtp("x"), "target must be a PreTrainedModel, got 'x'"),
    "kind": (lambda: new_head(MODEL, "eagle2"), "kind must be 'eagle1' or 'eagle3', got 'eagle2'"),
    "ids": (
        lambda: new_head(MODEL, "eagle3", target_ids=[1, 2]),
        "target_ids must be a Tensor or N",
    ),
    "mask's ids": (lambda: new_mask(MODEL, target_ids="x"), "target_ids must be a Tensor or None"),
    "layers": (
        lambda: new_mask(MODEL, num_layers=1.5),
        "num_layers must be an integer >= 1, got 1.5",
    ),
    "mask": (
        lambda: new_mask(MODEL, mask_token_id="x"),
        "mask_token_id must be an integer or None",
    ),
    "depths": (lambda: new_mtp(MODEL, "x"), "num_depths must be an integer >= 1, got 'x'"),
    "steps": (lambda: TrainingTimeTest(EAGLE3, MODEL, 2.5), "num_steps must be an integer >= 1"),
    "drafter": (
        lambda: TrainingTimeTest(MTP, MODEL),
        "drafter must be an EagleDrafter, got a MTPDr",
    ),
    "mask's drafter": (lambda: MaskRollouts(EAGLE3, MODEL), "drafter must be a MaskTokenDrafter"),
    "depths' drafter": (
        lambda: MultiTokenPrediction(EAGLE3, MODEL),
        "drafter must be a MTPDrafter",
    ),
    "weight": (
        lambda: TrainingTimeTest(EAGLE3, MODEL, step_weight=-1),
        "step_weight must be a num",
    ),
    "nan": (lambda: TrainingTimeTest(EAGLE3, MODEL, step_weight=float("nan")), "must be a number"),
    "mtp's weight": (lambda: MultiTokenPrediction(MTP, MODEL, -1), "depth_weight must be a number"),
    "noise": (lambda: FeatureAndToken(EAGLE1, MODEL, noise=-1), "noise must be a number >= 0"),
    "token weight": (lambda: FeatureAndToken(EAGLE1, MODEL, -1), "token_weight must be a number"),
    "other target": (
        lambda: TrainingTimeTest(EAGLE3, build("llama")),
        "the head reads boundary 8, and this target has . layers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_heads_and_objectives_that_cannot_be_made_are_refused_by_name(case):
    call, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: type(objective).__name__)
def test_ids_that_are_no_rows_of_text_are_refused(objective):
    for ids, message in (
        (None, "ids must be a tensor, got None"),
        (IDS.float(), "ids must be int64, got float32"),
        (IDS[0], r"ids must have shape \[any, any\], got \[17\]"),
        (IDS[:0], "ids must have at least one row"),
        (IDS[:, :1], "rows of 0 tokens are too short"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            objective(ids)
