"""The heads that training starts from: they fit any target, learn from it, and can be saved."""

import numpy as np
import pytest
import torch
from architectures import VOCAB, build
from eagle_heads import head_for

from specdec.drafters import EagleDrafter
from specdec.training import FeatureAndToken, TrainingTimeTest, eagle_config, new_head
from specdec.training.heads import frequent_ids

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
