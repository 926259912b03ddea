"""`SelfDrafter`: what it sees is what Hugging Face's own forwards see through a mask."""

import copy

import pytest
import torch
from architectures import VOCAB, build
from assistants import target_of
from diagonal import diagonal
from drafter_table import MODEL, own_target
from drafting import perturbed, ragged_prompts
from refusals import refused
from target_readers import QueryDrafter
from transformers import DynamicCache

from specdec import (
    FirstMatch,
    PromptLookupDrafter,
    Recent,
    SelfDrafter,
    Sinks,
    SpeculativeGenerator,
    Target,
    TopSlots,
)
from specdec.drafters import Visible
from specdec.hf.forward import cache_argument

LENGTHS, NUM_NEW, K = (1, 14, 26, 39), 20, 3
BATCH, MASK = ragged_prompts(VOCAB - 1, *LENGTHS)
OPTIONS = {"max_new_tokens": NUM_NEW, "eos_token_id": None, "pad_token_id": 0}
SEEN = Sinks(2) + Recent(5)
HIDDEN = {
    "recent": {"visible": SEEN},
    "top": {"visible": Sinks(1) + TopSlots(4) + Recent(2)},
    "layers": {"layers": (0, 2)},
    "exit": {"layers": 2},
    "all axes": {"layers": 2, "visible": SEEN, "model": perturbed(MODEL)},
}


def drafts_along(drafter, text, steps=4):
    """Texts of one row, greedily, with the draft that followed each."""
    generator = SpeculativeGenerator(own_target(), drafter)
    generation = generator.start(text, **OPTIONS)
    for _ in range(steps):
        known = generation.tokens[:, : int(generation.lengths)].clone()
        yield known, generator.step(generation)


def seen_through_a_mask(model, text, visible, num_draft_tokens):
    """Greedy draft tokens by HF's forwards over a whole cache, of which a mask shows a part."""
    cache, length = DynamicCache(), text.shape[1] - 1
    name = cache_argument(model)
    model(text[:, :-1], **{name: cache})
    token, drafted = text[:, -1:], []
    for i in range(num_draft_tokens):
        index = torch.arange(length + i + 1)
        is_seen = (index >= length) | (index < visible.sinks) | (index >= length - visible.recent)
        mask = torch.full((1, 1, 1, len(index)), -torch.inf).masked_fill(is_seen, 0)
        options = {"position_ids": torch.tensor([[length + i]]), name: cache}
        token = model(token, attention_mask=mask, **options).logits[:, -1:].argmax(-1)
        drafted.append(int(token))
    return drafted


@pytest.mark.parametrize("visible", [SEEN, Recent(3), Sinks(1) + Recent(20)], ids=str)
@torch.inference_mode()
def test_sinks_and_recent_tokens_are_seen_as_through_a_mask(visible):
    drafter, differing = SelfDrafter(own_target(), K, visible=visible), 0
    for text, step in drafts_along(drafter, BATCH[3:]):
        found = step.draft.tokens[0].tolist()
        assert found == seen_through_a_mask(MODEL, text, visible, K)
        differing += found != seen_through_a_mask(MODEL, text, Recent(100), K)
    assert differing  # something was hidden


@torch.inference_mode()
def test_top_slots_are_those_that_hf_reports_the_most_attention_to(monkeypatch):
    chosen, own = [], Visible.top_slots
    monkeypatch.setattr(Visible, "top_slots", lambda *args: chosen.append(own(*args)) or chosen[-1])
    visible, heads = Sinks(1) + TopSlots(4) + Recent(2), MODEL.config.num_key_value_heads
    drafter = SelfDrafter(own_target(), K, visible=visible)
    eager = type(MODEL)(MODEL.config).eval()
    eager.load_state_dict(MODEL.state_dict())
    eager.set_attn_implementation("eager")
    for text, _ in drafts_along(drafter, BATCH[3:]):
        read = text[:, :-1]  # the root has not been verified yet
        attention = eager(read, output_attentions=True).attentions
        between = slice(visible.sinks, read.shape[1] - visible.recent)
        sums = torch.stack([a[0, :, -1].unflatten(0, (heads, -1)).sum(1) for a in attention])
        best = sums.flatten(0, 1)[:, between].topk(visible.top).indices + visible.sinks
        assert chosen.pop()[0].sort().values.tolist() == best.sort().values.tolist()
        assert not chosen


@torch.inference_mode()
def test_layers_of_a_sliding_window_see_the_last_of_it():
    """Gemma 3 has layers of both kinds; with a table as long as the window no such layer changes,
    so only what full layers see is hidden, which HF's masks by kind of layer show.
    """
    target = Target(build("gemma3"))
    window = target.config.sliding_window
    drafter = SelfDrafter(target, 1, visible=Recent(window))
    generator = SpeculativeGenerator(target, drafter)
    generation = generator.start(BATCH[3:], **OPTIONS)
    found = generator.step(generation).draft.tokens.item()
    model, length, cache = target.model, LENGTHS[3] - 1, DynamicCache()
    name = cache_argument(model)
    model(BATCH[3:, :-1], **{name: cache})
    is_seen = torch.arange(length + 1) >= length - window
    mask = torch.full((1, 1, 1, length + 1), -torch.inf).masked_fill(is_seen, 0)
    local = mask.clone()
    local[..., length - window] = -torch.inf
    masks = {"full_attention": mask, "sliding_attention": local}
    position = torch.tensor([[length]])
    options = {"position_ids": position, name: cache, "attention_mask": masks}
    assert int(model(BATCH[3:, -1:], **options).logits[0, -1].argmax()) == found


@pytest.mark.parametrize(
    ("kind", "name", "graphs"),
    [
        *diagonal(HIDDEN, ["gemma3", "qwen3", "opt"], [False, True]),
        *diagonal(HIDDEN, ["starcoder2"], [True, False], is_quick=False),
    ],
)
def test_greedy_text_is_that_of_hf_whatever_is_hidden(kind, name, graphs):
    model = build(name)
    target = Target(model)
    options = HIDDEN[kind] | ({"model": perturbed(model)} if "model" in HIDDEN[kind] else {})
    generator = SpeculativeGenerator(target, SelfDrafter(target, K, **options), graphs=graphs)
    greedy = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
    text = model.generate(BATCH, attention_mask=MASK, **greedy)
    found = generator.generate(BATCH, MASK, check=graphs, **greedy)
    assert found.sequences.tolist() == text.tolist()
    assert found.stats.acceptance_rate < 1


@pytest.mark.parametrize(
    ("name", "graphs", "visible"),
    [
        *diagonal(["llama"], [False, True], [None, Sinks(3) + Recent(90), TopSlots(80)]),
        *diagonal(["gemma3"], [True, False], [None, Sinks(3) + Recent(90), TopSlots(80)]),
    ],
)
def test_from_which_nothing_is_hidden_accepts_all(name, graphs, visible):
    """The perfect control, at every length of a draft. A row of one token has no queries yet."""
    target = Target(build(name))
    drafter = SelfDrafter(target, 4, visible=visible)
    generator = SpeculativeGenerator(target, drafter, graphs=graphs, prefill_chunk_size=3)
    rows = slice(1, 4) if visible == TopSlots(80) else slice(0, 4)
    options = OPTIONS | {"max_new_tokens": 60, "do_sample": True, "seed": [1, 2, 3, 4][rows]}
    generation = generator.start(BATCH[rows], MASK[rows], **options)
    for length in (4, 1, 0, 3, 4, 2):
        generation.num_draft_tokens = length
        found = generator.step(generation).fetch().read()
        assert [row.num_accepted for row in found] == [length] * len(found)


@pytest.mark.parametrize("visible", [Sinks(2) + Recent(80), TopSlots(80)], ids=str)
def test_layers_that_read_keys_and_values_of_others_see_their_table(visible):
    """Gemma 4, with heads of two widths and of two kinds of window: nothing is hidden."""
    model = target_of("E2B")
    target = Target(model)
    drafter = SelfDrafter(target, K, visible=visible)
    found = SpeculativeGenerator(target, drafter).generate(BATCH[1:], MASK[1:], **OPTIONS)
    greedy = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
    text = model.generate(BATCH[1:], attention_mask=MASK[1:], eos_token_id=None, **greedy)
    assert found.sequences.equal(text)
    assert found.stats.acceptance_rate == 1
    with pytest.raises(ValueError, match="so none can be left out"):
        SelfDrafter(target, K, layers=2)


def test_queries_of_another_width_reach_the_drafter_that_joined():
    """Beside hidden states, in `FirstMatch`: the same drafts as alone."""
    config = copy.deepcopy(MODEL.config)
    config.head_dim = 16  # queries are twice as wide as the model
    torch.manual_seed(0)
    target = Target(type(MODEL)(config).eval())
    top = SelfDrafter(target, K, **HIDDEN["top"])
    other, lookup = QueryDrafter(target, K), PromptLookupDrafter(1, min_ngram=50, max_ngram=50)
    assert target.feature_widths([*other.feature_layers, *top.feature_layers]) == [32, 64, 64, 64]
    for joined in (FirstMatch(top, other), FirstMatch(lookup, other, top)):
        own = top if joined.drafters[0] is top else other
        found, alone = (
            SpeculativeGenerator(target, drafter).generate(BATCH, MASK, trace=True, **OPTIONS)
            for drafter in (joined, own)
        )
        drafts, expected = (
            [[step.draft_tokens for step in row] for row in result.trace.steps[1:]]
            for result in (found, alone)
        )
        assert drafts == expected


def test_what_cannot_be_drafted_with_is_refused():
    target, chunked, latent = own_target(), Target(build("llama4")), Target(build("deepseek_v3"))
    other, wide, fine = build("gemma3"), build("falcon_gqa"), copy.deepcopy(MODEL).double()
    cases = [
        ("keeps a recurrent state", ValueError, (Target(build("qwen3_5")),), {}),
        ("layers must be", ValueError, (target,), {"layers": (0, 3)}),
        ("layers must be", ValueError, (target,), {"layers": 4}),
        ("None runs all", ValueError, (target,), {"layers": ()}),
        ("visible must be like", TypeError, (target,), {"visible": 1024}),
        ("attend by chunks", ValueError, (chunked,), {"visible": SEEN}),
        ("queries are not known", ValueError, (wide,), {"visible": TopSlots(4)}),
        ("stores latents", ValueError, (latent,), {"visible": TopSlots(4)}),
        ("stores others", ValueError, (target,), {"model": other}),
        ("float64.*same architecture", ValueError, (target,), {"model": fine}),
        ("num_draft_tokens must be", ValueError, (target, -1), {}),
    ]
    for message, kind, arguments, options in cases:
        with pytest.raises(kind, match=message):
            SelfDrafter(*arguments, **options)
    with pytest.raises(ValueError, match="needs to see something"):
        Recent(0)
    with pytest.raises(ValueError, match="recent must be"):
        Sinks(4) + Recent(-1)
    with pytest.raises(TypeError):
        Sinks(4) + 3
    drafter = SelfDrafter(target, K)
    with pytest.raises(ValueError, match="make it with the generator's target"):
        SpeculativeGenerator(other, drafter)


@pytest.mark.parametrize("cast", [None, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"visible": SEEN}, {"layers": 2}])
def test_a_drafter_of_another_target_is_refused_where_the_generator_is_built(options, cast):
    """Also where all shapes are equal, and where the generator's target was cast since."""
    drafter = SelfDrafter(perturbed(MODEL), K, **options)
    target = copy.deepcopy(MODEL).to(cast) if cast else MODEL
    joined = FirstMatch(PromptLookupDrafter(2, min_ngram=3), drafter)
    for one in (drafter, joined):
        with pytest.raises(ValueError, match="drafts with the target that it was made with, a Ll"):
            SpeculativeGenerator(target, one)
    generator = SpeculativeGenerator(own_target(), None)
    with refused("is built of its drafter; make a new SpeculativeGenerator"):
        generator.drafter = drafter


def test_a_model_that_was_cast_alone_is_refused_before_it_runs():
    for part in ("target", "model"):
        target, model = build("llama"), perturbed(MODEL)
        wrapped = Target(target)
        drafter = SelfDrafter(wrapped, K, model=model)
        generator = SpeculativeGenerator(wrapped, drafter)
        (target if part == "target" else model).to(torch.bfloat16)
        generator.refresh()
        with pytest.raises(ValueError, match=r"over its target's keys.*cast both to one"):
            generator.generate(BATCH, MASK, **OPTIONS)
        (model if part == "target" else target).to(torch.bfloat16)
        generator.refresh()
        generator.generate(BATCH, MASK, **OPTIONS)


class EverySecond(Visible):
    """A rule of one's own."""

    def slots(self, lengths, width, top=None):
        return super().slots(lengths, width, top) // 2 * 2


def test_what_is_visible_may_be_set_later_unless_other_queries_are_needed():
    """Drafts are those of a drafter that was made so; a generator that reads no queries says it."""

    def accepted(generator):
        return generator.generate(BATCH, MASK, **OPTIONS).stats.accepted

    drafter = SelfDrafter(own_target(), K, visible=Recent(3))
    generator, found = SpeculativeGenerator(own_target(), drafter), []
    for visible in (SEEN, None, HIDDEN["top"]["visible"]):
        drafter.visible = visible
        if visible and visible.top:
            with refused("SelfDrafter reads the features .. make a new SpeculativeGenerator"):
                accepted(generator)
            generator = SpeculativeGenerator(own_target(), drafter)
        other = SelfDrafter(own_target(), K, visible=visible)
        found.append(accepted(generator))
        assert found[-1] == accepted(SpeculativeGenerator(own_target(), other))
    assert len(set(map(str, found))) == 3


@pytest.mark.parametrize("order", [0, 1])
def test_a_rule_of_ones_own_is_not_lost_in_a_sum(order):
    parts = [EverySecond(recent=8), Sinks(4)]
    with pytest.raises(TypeError, match=r"got EverySecond with a rule of its own.*write one class"):
        parts[order] + parts[1 - order]
    assert Sinks(4) + Recent(3) == Visible(sinks=4, recent=3)
