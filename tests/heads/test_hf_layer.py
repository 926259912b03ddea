"""An HF decoder layer over slots computes what it computes in its own model's plain forward.

Texts arrive in blocks of another length in every row, over a cache of garbage; the reference is the
layer of the model itself, called by the model's own forward over the whole text.
"""

import pytest
import torch
from architectures import VOCAB, build

from specdec.heads.hf_layer import HFLayerConfig
from specdec.heads.layers import attend_causally
from specdec.heads.window import WindowPlan
from specdec.target.cache import SlotCache

LENGTH, SLOTS = 14, 32
# Architecture and layer; of DeepSeek-V3 the first layer is dense and the others are mixtures.
LAYERS = {
    "llama": ("llama", 1),
    "qwen3": ("qwen3", 2),
    "deepseek_v3, dense": ("deepseek_v3", 0),
    "deepseek_v3, mixture of experts": ("deepseek_v3", 2),
}


def case_of(name):
    """The making of a layer, a copy of a model's, its inputs `[B, T, H]` and its outputs."""
    architecture, like = LAYERS[name]
    model = build(architecture)
    config = HFLayerConfig.of(model, like=like)
    layer = config.build(5).eval()
    layer.layer.load_state_dict(model.model.layers[like].state_dict())
    seen = []
    handle = model.model.layers[like].register_forward_hook(
        lambda _, args, kwargs, out: seen.extend((args[0], out)), with_kwargs=True
    )
    ids = torch.randint(0, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(2))
    model(input_ids=ids, use_cache=False)
    handle.remove()
    return config, layer, *seen


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_layer_over_ragged_windows_is_that_of_a_plain_forward(name):
    config, layer, hidden, expected = case_of(name)
    where = {"dtype": torch.float32, "device": torch.device("cpu")}
    table = config.rotary_table(SLOTS + 1, **where)
    cache = SlotCache(3, SLOTS, {5: config.key_value_shape(**where)})
    garbage = torch.arange(SLOTS).expand(3, SLOTS)
    first = WindowPlan(cache, garbage, num_attended=SLOTS, table=table).open(0)
    layer(torch.full((3, SLOTS, hidden.shape[-1]), 7.0), first.angles, first.attend)
    done = [0, 0, 0]
    while min(done) < LENGTH:
        counts = [min(LENGTH - d, n) for d, n in zip(done, (1, 4, 2), strict=True)]
        offsets = torch.arange(5)
        real = offsets < torch.tensor(counts)[:, None]
        positions = torch.tensor(done)[:, None] + offsets
        slots = torch.where(real, positions, cache.trash)
        plan = WindowPlan(cache, slots, num_attended=max(done) + 5, table=table)
        step = plan.open(0)
        rows = torch.arange(3)[:, None]
        out = layer(hidden[rows, positions.clamp(max=LENGTH - 1)], step.angles, step.attend)
        for b, count in enumerate(counts):
            wanted = expected[b, done[b] : done[b] + count]
            torch.testing.assert_close(out[b, :count], wanted, rtol=0, atol=1e-5)
            done[b] += count


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_layer_without_a_cache_is_that_of_a_plain_forward(name):
    config, layer, hidden, expected = case_of(name)
    table = config.rotary_table(LENGTH, dtype=torch.float32)
    out = layer(hidden, table[None, None], attend_causally)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    wrong = layer(hidden, table.roll(1, 0)[None, None], attend_causally)
    assert (wrong - expected).abs().max() > 1e-3


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
