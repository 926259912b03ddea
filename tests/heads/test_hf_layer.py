"""HF's own decoder layers as a head's: their index, their model, their gradients.

That they compute over slots what they do in their own model's forward is shown in two steps: over
whole texts in `checkpoints/test_mtp_checkpoints.py`, and over windows in `drafters/test_parity.py`.
"""

import pytest
import torch
from architectures import build

from specdec.drafters.head.causal import attend_causally
from specdec.drafters.head.hf_layer import HFLayerConfig


def test_a_layer_writes_under_its_own_index_and_leaves_its_model_alone():
    model = build("deepseek_v3")
    before = model.config._attn_implementation
    layer = HFLayerConfig.of(model, like=1).build(9)
    assert {m.layer_idx for m in layer.modules() if hasattr(m, "layer_idx")} == {9}
    assert model.config._attn_implementation == before
    assert [m.layer_idx for m in model.modules() if hasattr(m, "layer_idx")] == [0, 1, 2]
    model(input_ids=torch.tensor([[1, 2, 3]]))  # by its own attention, with its own mask


def test_a_layer_learns():
    config = HFLayerConfig.of(build("qwen3"), like=0)
    layer, table = config.build(0), config.rotary_table(6, dtype=torch.float32)
    layer(torch.randn(2, 6, 32), table[None, None], attend_causally).sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_a_model_without_rotary_positions_is_refused():
    with pytest.raises(ValueError, match="model of GPT2Block has no module rotary_emb"):
        HFLayerConfig.of(build("gpt2"), like=0).rotary_table(4, dtype=torch.float32)
