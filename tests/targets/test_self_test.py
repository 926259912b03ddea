"""The self-test believes every sound model, however deep and however coarse its data type, and
refuses a model with one fault in one layer.

Faults are planted into specdec's attention function, under the name that models call it by. In
half precision a 32-layer model differs from itself by percents of its logits' spread, which would
hide any of them; what is compared is therefore each layer, given the same input.
"""

import pytest
import torch
import transformers
from architectures import VOCAB, build
from diagonal import case
from target_laws import without_dense_masks
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from specdec import SpeculativeGenerator, Target
from specdec.slots.cache import Window
from specdec.targets.attention import ATTENTION, slot_attention

DEEP = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}


def deep(seed: int, dtype: torch.dtype, spread: float) -> LlamaForCausalLM:
    """A random 32-layer model whose matrices have the given standard deviation."""
    torch.manual_seed(seed)
    config = LlamaConfig(**DEEP, initializer_range=spread)
    return LlamaForCausalLM(config).to(dtype).eval()


@pytest.mark.parametrize("spread", [0.02, 0.15])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_no_deep_model_in_half_precision_is_refused(dtype, spread):
    Target(deep(0, dtype, spread))


SOUND = {
    torch.bfloat16: ("qwen3", "gpt_oss", "deepseek_v3", "mpt"),
    torch.float16: ("gemma3", "qwen3_moe", "deepseek_v3", "mpt"),
    torch.float64: ("gemma2", "mpt"),  # of which HF computes parts in float32
}


@pytest.mark.parametrize(("dtype", "name"), [(d, name) for d in SOUND for name in SOUND[d]])
def test_no_architecture_is_refused_in_another_precision(name, dtype):
    Target(build(name, dtype=dtype))


def test_a_plain_forward_that_leaves_out_the_cap_of_scores_is_refused_with_the_line_that_works():
    model = build("gemma2")
    Target(model)
    model.config._attn_implementation_internal = "sdpa"  # the default of transformers 5.17
    with pytest.raises(ValueError, match="load it with attn_implementation='eager'"):
        Target(model)


def faulty(fault, layer: int):
    """The attention function with a fault in one layer."""

    def attention(module, query, key, value, mask, **options):
        states = query, key, value
        if module.layer_idx == layer:
            states, options = fault(states, dict(options))
        return slot_attention(module, *states, mask, **options)

    return attention


def sees_the_next_slot(states, options):
    window = options["slot_window"]
    options["slot_window"] = Window(window.slots + 1, window.num_attended)
    return states, options


def misses_its_own_slot(states, options):
    window = options["slot_window"]
    options["slot_window"] = Window(window.slots - 1, window.num_attended)
    return states, options


def larger_scale(states, options):
    options["scaling"] = 1.25 * options["scaling"]
    return states, options


def queries_of_the_position_before(states, options):
    """As if queries had been rotated by another position than their keys."""
    query, key, value = states
    angle = 1.0 / 10000.0 ** (torch.arange(0, 1, 2 / query.shape[-1]))
    cos, sin = angle.cos().repeat(2).to(query), angle.sin().repeat(2).to(query)
    half = query.shape[-1] // 2
    turned = torch.cat([-query[..., half:], query[..., :half]], dim=-1)
    return (query * cos + turned * sin, key, value), options


def values_of_the_slot_before(states, options):
    query, key, value = states
    return (query, key, value.roll(1, dims=2)), options


FAULTS = [
    sees_the_next_slot,
    misses_its_own_slot,
    larger_scale,
    queries_of_the_position_before,
    values_of_the_slot_before,
]


QUICK = [sees_the_next_slot, values_of_the_slot_before]


@pytest.mark.parametrize(
    ("fault", "dtype", "layer"),
    [
        *(case([f, torch.bfloat16, 17], f in QUICK) for f in FAULTS),
        case([larger_scale, torch.float16, 0], False),
        (larger_scale, torch.float32, 31),
    ],
)
def test_one_fault_in_one_layer_of_a_deep_model_is_refused(fault, dtype, layer, monkeypatch):
    model = deep(1, dtype, spread=0.15)
    without_dense_masks(monkeypatch)
    mapping = AttentionInterface._global_mapping
    monkeypatch.setitem(mapping, ATTENTION, faulty(lambda *case: case, layer))
    Target(model)
    monkeypatch.setitem(mapping, ATTENTION, faulty(fault, layer))
    with pytest.raises(ValueError, match=rf"layers.{layer}.self_attn differs from its plain"):
        Target(model)


def shorter_window(states, options):
    window = options["slot_window"]
    windows = {i: w and w - 1 for i, w in window.layer_windows.items()}
    options["slot_window"] = Window(window.slots, window.num_attended, layer_windows=windows)
    return states, options


def no_window(states, options):
    window = options["slot_window"]
    options["slot_window"] = Window(window.slots, window.num_attended)
    return states, options


def no_sinks(states, options):
    return states, options | {"s_aux": None}


@pytest.mark.parametrize(
    ("name", "fault", "layer"),
    [
        ("mistral_sliding", shorter_window, 1),
        ("mistral_sliding", no_window, 2),
        ("gemma3", no_window, 3),
        ("gpt_oss", no_window, 0),
        ("gpt_oss", no_sinks, 1),
    ],
)
def test_a_window_or_a_sink_that_one_layer_forgets_is_refused(name, fault, layer, monkeypatch):
    model = build(name, dtype=torch.bfloat16)
    monkeypatch.setitem(AttentionInterface._global_mapping, ATTENTION, faulty(fault, layer))
    with pytest.raises(ValueError, match=rf"layers.{layer}.self_attn differs from its plain"):
        Target(model)


def phimoe():
    sizes = DEEP | {"num_hidden_layers": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    config = transformers.PhimoeConfig(**sizes, sliding_window=5)
    return transformers.PhimoeForCausalLM(config)


def doge():
    config = transformers.DogeConfig(**DEEP | {"num_hidden_layers": 2}, sliding_window=5)
    return transformers.DogeForCausalLM(config)


@pytest.mark.parametrize("make", [phimoe, doge])
def test_a_window_that_only_the_models_masks_know_is_kept(make):
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    ids = torch.arange(1, 24).view(1, -1)
    try:
        generator = SpeculativeGenerator(model, None)
    except ValueError as error:
        assert "Use HF generate" in str(error)  # noqa: PT017 - to refuse it is right, too
        return
    ours = generator.generate(ids, max_new_tokens=20, eos_token_id=None)
    text = ids
    for _ in range(20):  # HF's own cached path may forget its window; the plain forward does not
        with torch.no_grad():
            logits = model(input_ids=text, use_cache=False).logits
        text = torch.cat([text, logits[:, -1:].argmax(dim=-1)], dim=1)
    assert torch.equal(ours.sequences, text)
