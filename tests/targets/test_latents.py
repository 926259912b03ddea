"""Layers whose cache has one latent of a token for all heads: few queries attend to the latents.

The oracles are HF's `generate` of each row alone, and attention over the keys and values that HF's
own method makes of the latents.
"""

import copy
import itertools
from functools import cache

import pytest
import torch
import transformers
from agreement import check_captured
from census.shapes import VOCAB, build
from diagonal import PLACES, case
from drafting import WrongDrafter, perturbed, ragged_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from target_laws import RaggedBatch

from specdec import ModelDrafter, SpeculativeGenerator, Target, Tree
from specdec.kernels import AttentionOptions
from specdec.slots.attention import attend
from specdec.slots.cache import Window
from specdec.targets import wrap_forward
from specdec.targets.edits import latents
from specdec.targets.edits.latents import METHOD, Latents, attend_latents
from specdec.types import Draft

NAMES = ["deepseek_v3", "minicpm3", "kimi_linear", "glm4_moe_lite", "bailing_hybrid", "deepseek_v2"]
BATCH = RaggedBatch(VOCAB - 1, (1, 9, 40, 24), 20)
IDS, OPTIONS = BATCH.ids, BATCH.options


@cache
def model_of(name="deepseek_v3", seed=0):
    """With weights so large that it matters what attention scores are."""
    model = build(name, window=None, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2, generator=generator)
    return model


if not any(hasattr(m, METHOD) for m in model_of().modules()):
    pytest.skip(
        f"transformers {transformers.__version__} caches keys and values", allow_module_level=True
    )


DRAFTERS = {
    "good": lambda model: ModelDrafter(perturbed(model), 4),
    "tree": lambda model: ModelDrafter(perturbed(model), tree=Tree(nodes=9, depth=4, top_k=3)),
    "wrong": lambda model: WrongDrafter(model, 3),
    "none": lambda model: None,
    "lookup": lambda model: "lookup",
}
RECURRENT = {"kimi_linear", "bailing_hybrid"}
WAYS = [*zip(NAMES, itertools.cycle(DRAFTERS), itertools.cycle((512, 4, 1)), strict=False)]


def fitting(name, kind):
    return "good" if kind == "tree" and name in RECURRENT else kind


@pytest.mark.parametrize(
    ("name", "kind", "chunk"),
    [*(case([*way], way[0] not in RECURRENT) for way in WAYS), ("kimi_linear", "wrong", 512)],
)
def test_greedy_text_is_that_of_hf(name, kind, chunk):
    model = model_of(name)
    BATCH.check_greedy(model, DRAFTERS[fitting(name, kind)](model), chunk)
    assert "attention to latents" in SpeculativeGenerator(model, None).explain()


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("name", ["deepseek_v3", "minicpm3"])
def test_captured_steps_are_the_eager_ones(name, device):
    model = copy.deepcopy(model_of(name)).to(device)
    if device == "cpu" and hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # the default waits there
    check_captured(model, DRAFTERS["tree"](model), IDS, BATCH.mask, **OPTIONS)


def test_steps_make_no_keys_and_values_and_long_chunks_do(monkeypatch):
    counts, attention = [], type(model_of().model.layers[0].self_attn)
    expand = getattr(attention, METHOD)

    def counted(self, latents, rotated):
        counts.append(latents.shape[2])
        return expand(self, latents, rotated)

    monkeypatch.setattr(attention, METHOD, counted)
    model = copy.deepcopy(model_of())
    generator = SpeculativeGenerator(model, "lookup")
    counts.clear()
    generation = generator.start(IDS, BATCH.mask, **OPTIONS)
    assert counts  # of the prompts' chunk, which has more tokens than heads are wide
    counts.clear()
    generator.step(generation).fetch().read()
    assert not counts


seeds = st.integers(0, 2**31)


@st.composite
def windows(draw):
    """A window of rows of several lengths, of chains or of trees."""
    rows, count, num_slots = draw(st.integers(1, 3)), draw(st.integers(1, 6)), 16
    starts = torch.tensor(draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows)))
    slots = starts[:, None] + torch.arange(count)
    visible = None
    if draw(st.booleans()):
        generator = torch.Generator().manual_seed(draw(seeds))
        visible = torch.rand(rows, count, count, generator=generator) < 0.5
        visible = visible.tril() | torch.eye(count, dtype=torch.bool)
    return Window(slots, num_slots, visible=visible), num_slots


@settings(max_examples=30, deadline=None)
@given(windows(), st.sampled_from([0, 6]), st.sampled_from([None, 0.3]), st.booleans(), seeds)
@torch.no_grad()
def test_attention_to_latents_is_that_to_the_keys_and_values_of_hf(
    window, rotary, scale, is_masked, seed
):
    (window, num_slots), generator = window, torch.Generator().manual_seed(seed)
    rows, count = window.slots.shape
    attention = copy.deepcopy(model_of().model.layers[0].self_attn).double()
    heads, size = attention.num_heads, attention.qk_nope_head_dim
    attention.qk_rope_head_dim = rotary

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    query = random(rows, heads, count, size + rotary)
    parts = random(rows, 1, num_slots, attention.kv_lora_rank), random(rows, 1, num_slots, rotary)
    options = AttentionOptions(scale)
    mask = random(rows, 1, count, num_slots) if is_masked else None
    expand = getattr(attention, METHOD)
    expected = attend(window, query, *expand(*parts), options, mask)
    found = attend_latents(
        attention, never_called, window, query, parts[1], parts[0], options, mask
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def never_called(*args):
    raise AssertionError("keys and values were made")


@pytest.mark.parametrize("poison", [7.0, -3e4, torch.inf, -torch.inf, torch.nan])
@torch.no_grad()
def test_what_stands_beyond_a_length_changes_nothing(poison):
    target, tokens = Target(model_of()), IDS[1:, -12:]
    lengths, found = torch.tensor([2, 7, 4]), []
    for value in (0.0, poison):
        cache = target.init_cache(3, 32)
        for buffer in (*cache.keys.values(), *cache.values.values()):
            buffer.fill_(value)
        for start in range(0, 7, 2):  # few queries, as those of a step
            target.prefill(cache, tokens[:, start : min(start + 2, 7)], lengths, offset=start)
        found.append(target.verify(cache, lengths, tokens[:, 7], Draft(tokens[:, 8:11])).logits)
    # A product in float32 rounds by where its tensors lie in memory.
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=2e-5)


@torch.no_grad()
def test_what_is_seen_and_no_number_is_no_number():
    attention = model_of().model.layers[0].self_attn
    query = torch.ones(1, attention.num_heads, 1, attention.qk_head_dim)
    states = torch.ones(1, 1, 8, attention.kv_lora_rank)
    states[0, 0, 3] = torch.nan
    rotated = torch.ones(1, 1, 8, attention.qk_rope_head_dim)
    for slot, is_seen in ((2, False), (3, True)):
        window = Window(torch.tensor([[slot]]), 8)
        given = window, query, rotated, states, AttentionOptions()
        assert attend_latents(attention, never_called, *given).isnan().all() == is_seen


@torch.no_grad()
def test_half_precision_is_as_near_to_the_truth_as_hf_is():
    attention = copy.deepcopy(model_of().model.layers[0].self_attn)
    generator = torch.Generator().manual_seed(0)
    attention.kv_b_proj.weight.normal_(0, 0.3, generator=generator)
    window = Window(torch.arange(60, 64)[None], 64)
    sizes = attention.qk_nope_head_dim + attention.qk_rope_head_dim, attention.kv_lora_rank
    query = 2 * torch.randn(1, attention.num_heads, 4, sizes[0], generator=generator)
    states = torch.randn(1, 1, 64, sizes[1], generator=generator)
    rotated = torch.randn(1, 1, 64, attention.qk_rope_head_dim, generator=generator)
    given = [x.bfloat16() for x in (query, states, rotated)]
    attention.bfloat16()
    exact = copy.deepcopy(attention).double()
    wide = [x.double() for x in given]
    truth = attend(window, wide[0], *getattr(exact, METHOD)(*wide[1:]), AttentionOptions())
    window = Window(window.slots, 64)  # a mask of the other data type
    theirs = attend(window, given[0], *getattr(attention, METHOD)(*given[1:]), AttentionOptions())
    ours = attend_latents(
        attention, never_called, window, given[0], given[2], given[1], AttentionOptions()
    )
    errors = [float((found.double() - truth).norm()) for found in (ours, theirs)]
    assert errors[0] < 1.5 * errors[1]


# What is left alone.


def doubled(forward, x):
    return 2 * forward(x)


def test_what_is_changed_by_somebody_else_is_called():
    """A hook, a forward in the place of the matrix's, and an edit of the user."""
    for change in (
        lambda layer: layer.register_forward_hook(lambda module, args, out: 2 * out),
        lambda layer: setattr(layer, "forward", lambda x, forward=layer.forward: 2 * forward(x)),
    ):
        model = copy.deepcopy(model_of())
        change(model.model.layers[1].self_attn.kv_b_proj)
        generator = SpeculativeGenerator(model, "lookup")
        assert "attention to latents in 3 of 4 layers" in generator.explain()
        alone = IDS[2:3, -40:]
        expected = model.generate(alone, do_sample=False, **OPTIONS)
        assert generator.generate(alone, **OPTIONS).sequences.equal(expected)
        assert expected[0, 40:].tolist() != BATCH.texts(model_of())[2]

    def edit(view):
        wrap_forward(view.model.layers[1].self_attn.kv_b_proj, doubled)

    generator = SpeculativeGenerator(Target(model_of(), edits=(edit,)), "lookup")
    assert generator.generate(alone, **OPTIONS).sequences.equal(expected)


@pytest.mark.parametrize("kind", ["bias", "class", "meta", "method"])
def test_a_matrix_that_cannot_be_read_is_called(kind):
    model = copy.deepcopy(model_of())
    attention = model.model.layers[0].self_attn
    layer = attention.kv_b_proj
    if kind == "bias":
        layer.bias = torch.nn.Parameter(torch.zeros(layer.out_features))
    elif kind == "class":
        attention.kv_b_proj = torch.nn.Sequential(layer)
    elif kind == "meta":
        layer.to("meta")
    else:
        setattr(attention, METHOD, getattr(attention, METHOD))
    edit, note = Latents.of(model)
    assert "attention to latents in 3 of 4 layers" in note
    assert not edit.fits(model_of())
    assert edit.fits(model)


def test_an_attention_function_of_somebody_else_gets_keys_and_values():
    def sharp(module, query, key, value, mask, scaling=None, **_):
        scores = 1.5 * scaling * (query @ key.mT) + mask
        return (scores.softmax(dim=-1) @ value).transpose(1, 2), None

    transformers.AttentionInterface.register("sharp_for_latents", sharp)
    transformers.AttentionMaskInterface.register(
        "sharp_for_latents", transformers.masking_utils.eager_mask
    )
    model = copy.deepcopy(model_of())
    model.set_attn_implementation("sharp_for_latents")
    alone = IDS[2:3, -40:]
    generator = SpeculativeGenerator(model, "lookup")
    assert "attention to latents" not in generator.explain()
    expected = model.generate(alone, do_sample=False, **OPTIONS)
    assert generator.generate(alone, **OPTIONS).sequences.equal(expected)
    assert expected[0, 40:].tolist() != BATCH.texts(model_of())[2]


def test_a_model_without_latents_has_no_note():
    assert Latents.of(build("llama")) == (None, None)


# Faults.


def with_products(change):
    products = latents._products
    calls = []

    def faulty(queries, keys):
        calls.append(1)
        return change(products(queries, keys), len(calls) % 2)

    return faulty


FAULTS = {
    "keys without their positions": lambda found, is_first: found if is_first else 0 * found,
    "a slot late": lambda found, is_first: found.roll(1, dims=-1) if is_first else found,
    "of another head": lambda found, is_first: found.roll(1, dims=1) if is_first else found,
    "scores that are 1 % too large": lambda found, is_first: 1.01 * found,
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_self_test_gives_up_what_is_wrong(name, monkeypatch):
    monkeypatch.setattr(latents, "_products", with_products(FAULTS[name]))
    target = Target(copy.deepcopy(model_of()))
    assert target.route.edits == ()
    (note,) = (note for note in target.notes if note.startswith(Latents.given_up))
    assert "differs from its plain forward" in note
    monkeypatch.undo()
    assert Target(copy.deepcopy(model_of())).route.edits


def test_without_it_a_text_in_bfloat16_is_that_of_hf_to_the_token():
    model = copy.deepcopy(model_of("minicpm3", seed=1)).to(torch.bfloat16)
    prompts = [ragged_prompts(VOCAB - 1, length)[0] for length in (9, 40, 24, 13)]
    options = {**OPTIONS, "max_new_tokens": 30}

    def hf(ids):
        mask = torch.ones_like(ids)
        return model.generate(ids, attention_mask=mask, do_sample=False, **options)

    def differing(fuse):
        generator = SpeculativeGenerator(Target(model, fuse=fuse), None)
        found = [generator.generate(ids, **options).sequences for ids in prompts]
        return sum(not ours.equal(text) for ours, text in zip(found, expected, strict=True))

    expected = [hf(ids) for ids in prompts]
    assert differing(None) == 0
    assert differing(False) > 0  # the negative control: rounding of equal size, another text


def test_without_it_there_is_neither_an_edit_nor_a_note():
    target = Target(model_of(), fuse=None)
    assert not target.route.edits
    assert not any("latents" in note for note in target.notes)
    assert any("latents" in note for note in Target(model_of()).notes)
    with refused("fuse must be True, False or None"):
        Target(model_of(), fuse="latents")
