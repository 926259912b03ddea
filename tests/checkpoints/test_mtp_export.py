"""Prediction modules written as a part of their target's checkpoint, as producers publish them.

That HF's own code drafts with such a file as the library does is in `drafters/test_mtp_hf.py`, that
vLLM does in `foreign/test_vllm.py`.
"""

from dataclasses import replace

import pytest
import torch
import transformers
from mtp_checkpoints import random_model, write_numbered
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specdec.drafters import EagleDrafter, MTPDrafter
from specdec.lab.training.eagle import new_head as new_eagle
from specdec.lab.training.mtp import MultiTokenPrediction, new_head

WRITTEN = [
    ("Glm4Moe", "DeepSeek", 2),
    ("DeepseekV3", "DeepSeek", 1),
    ("Llama", "DeepSeek", 3),
    ("Qwen2", "MiMo", 2),
    ("Qwen3Next", "Qwen", 1),
]
if hasattr(transformers, "MellumConfig"):
    WRITTEN.append(("Mellum", "Qwen", 1))


def drafter_of(target, layout, num_depths=1, **flags):
    """A new head whose every tensor is drawn anew."""
    head = new_head(target, num_depths, layout=layout)
    head.config = replace(head.config, **flags)
    generator = torch.Generator().manual_seed(1)
    for tensor in (*head.parameters(), *head.buffers()):
        tensor.data.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return MTPDrafter(head, target, 3)


@pytest.mark.parametrize(("family", "layout", "num_depths"), WRITTEN)
def test_target_and_modules_load_back_bit_for_bit(tmp_path, family, layout, num_depths):
    target = random_model(family)
    drafter = drafter_of(target, layout, num_depths)
    for _ in range(2):  # its own file is replaced
        drafter.save_pretrained(tmp_path / "whole", layout, target)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32).eval()
    loaded = MTPDrafter.from_pretrained(tmp_path / "whole", again, 3)
    assert loaded.config.num_layers == num_depths
    for written, read in ((target, again), (drafter.head, loaded.head)):
        ours, theirs = written.state_dict(), read.state_dict()
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert tensor.equal(theirs[name]), name
    for name in set(vars(drafter.config)) - {"layer"}:
        assert getattr(loaded.config, name) == getattr(drafter.config, name), name


@pytest.mark.parametrize("family", ["Glm4Moe", "DeepseekV3"])
def test_names_and_shapes_are_those_of_published_files(tmp_path, family):
    target, published = write_numbered(tmp_path / "published", family, num_depths=2)
    drafter = MTPDrafter.from_pretrained(tmp_path / "published", target, 2)
    drafter.save_pretrained(tmp_path / "ours", "DeepSeek", target)
    found = load_file(tmp_path / "ours" / "model.safetensors")
    assert found.keys() == published.keys()
    for name, tensor in found.items():
        assert tensor.equal(published[name]), name


def test_modules_have_the_targets_data_type_but_for_the_choice_of_experts(tmp_path):
    target = random_model("DeepseekV3").to(torch.bfloat16)
    drafter = drafter_of(target, "DeepSeek")
    assert drafter.head.dtype == torch.float32
    drafter.save_pretrained(tmp_path, "DeepSeek", target)
    found = load_file(tmp_path / "model.safetensors")
    of_module = {name: x for name, x in found.items() if name.startswith("model.layers.3.")}
    exact = "model.layers.3.mlp.gate.e_score_correction_bias"
    assert {name for name, x in of_module.items() if x.dtype != torch.bfloat16} == {exact}


@pytest.mark.parametrize(
    ("layout", "flags", "message"),
    [
        ("DeepSeek", {"semantics": "target"}, "DeepSeek's layout cannot have semantics='target'"),
        ("MiMo", {"feedback_norm": False}, "MiMo's layout cannot have feedback_norm=False"),
        ("MiMo", {"has_lm_head": True}, "MiMo's layout cannot have has_lm_head=True"),
        ("Step", {}, "must be 'Qwen', 'MiMo' or 'DeepSeek', got 'Step'"),
    ],
)
def test_what_a_layout_does_not_mean_is_refused(tmp_path, layout, flags, message):
    target = random_model("Qwen2")
    drafter = drafter_of(target, "DeepSeek" if layout == "Step" else layout, **flags)
    with pytest.raises(ValueError, match=message):
        drafter.save_pretrained(tmp_path / "whole", layout, target)
    assert not (tmp_path / "whole").exists()


def test_what_cannot_be_written_is_refused(tmp_path):
    target = random_model("Llama")
    drafter = drafter_of(target, "DeepSeek", 2)
    with pytest.raises(ValueError, match="lie in their target's checkpoint: pass target="):
        drafter.save_pretrained(tmp_path / "whole", "DeepSeek")
    for make in (
        lambda: drafter.save_pretrained(tmp_path / "whole", "MiMo", target),
        lambda: new_head(target, layout="MiMo"),
    ):
        with pytest.raises(ValueError, match="of model_type qwen2 or mimo, got llama; use 'Deep"):
            make()
    qwen = random_model("Qwen2")
    with pytest.raises(ValueError, match="layers other than the target's as LayerConfig; train"):
        drafter_of(qwen, "DeepSeek").save_pretrained(tmp_path / "whole", "MiMo", qwen)
    other = MTPDrafter(new_head(target, 1), target, 3)
    with pytest.raises(ValueError, match="decoder layers other than LlamaDecoderLayer; train a"):
        other.save_pretrained(tmp_path / "whole", "DeepSeek", target)
    with pytest.raises(ValueError, match="Qwen's layout cannot have num_layers=2"):
        drafter.save_pretrained(tmp_path / "whole", "Qwen", target)
    longer = random_model("Llama", rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    with pytest.raises(ValueError, match="decoder layers other than LlamaDecoderLayer"):
        drafter.save_pretrained(tmp_path / "whole", "DeepSeek", longer)
    assert not (tmp_path / "whole").exists()
    with pytest.raises(ValueError, match="semantics and mlp_width are DeepSeek's own"):
        new_head(target, layout="DeepSeek", mlp_width=24)


def test_another_model_is_not_written_over(tmp_path):
    target = random_model("Qwen2")
    drafter = drafter_of(target, "MiMo")
    target.save_pretrained(tmp_path / "plain")
    EagleDrafter(new_eagle(target, "eagle1"), target).save_pretrained(tmp_path / "head")
    drafter_of(target, "DeepSeek").save_pretrained(tmp_path / "other", "DeepSeek", target)
    for folder in ("plain", "head", "other"):
        before = (tmp_path / folder / "model.safetensors").read_bytes()
        with pytest.raises(ValueError, match="holds another model"):
            drafter.save_pretrained(tmp_path / folder, "MiMo", target)
        assert (tmp_path / folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize(("family", "layout"), [("DeepseekV3", "DeepSeek"), ("Qwen2", "MiMo")])
def test_a_new_head_of_a_layout_depends_on_its_seed_alone_and_learns(family, layout):
    target = random_model(family)
    first, again, other = (new_head(target, layout=layout, seed=seed) for seed in (3, 3, 4))
    for name, tensor in first.state_dict().items():
        assert tensor.isfinite().all()
        assert tensor.equal(again.state_dict()[name]), name
        assert tensor.dim() < 2 or not tensor.equal(other.state_dict()[name]), name
    objective = MultiTokenPrediction(MTPDrafter(first, target, 2), target)
    adamw = torch.optim.AdamW(objective.parameters(), lr=1e-2)
    ids = torch.randint(60, (4, 24), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(8):
        losses.append(objective(ids))
        losses[-1].backward()
        assert all(p.grad.isfinite().all() and p.grad.any() for p in objective.parameters())
        adamw.step()
        adamw.zero_grad()
    assert losses[-1] < 0.97 * losses[0]
