"""EAGLE heads on prompts with pictures: rotary positions of three axes, heads that see no tokens of
pictures, and training by what drafting will read.

Oracles: HF's rotary modules and forwards, and heads recomputed without a cache.
"""

import copy
from dataclasses import replace

import eagle_reference
import pytest
import torch
from checkpoint_layouts import angelslim, specforge
from diagonal import diagonal
from drafter_table import WIDE
from eagle_heads import head_for, informed
from hypothesis import given, settings
from hypothesis import strategies as st
from pictured_models import IMAGE, OTHERS, ROWS, build, of_row, prompts, text_of_hf
from transformers import Qwen2_5_VLTextConfig, Qwen3VLTextConfig
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as chunked
from transformers.models.qwen3_vl import modeling_qwen3_vl as interleaved

from recipes.pictures.answers import Answered, AnsweredStream, AnswerTimeTest
from specdec import EagleDrafter, SpeculativeGenerator
from specdec.checkpoints import survey_checkpoint
from specdec.checkpoints.eagle import EAGLE
from specdec.drafters.head.layer_config import LayerConfig
from specdec.drafters.head.layers import rotate
from specdec.drafters.head.rotary import angles_at
from specdec.drafters.tree import Tree
from specdec.lab.training import TrainingTimeTest

CHUNKED = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
INTERLEAVED = CHUNKED | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
HF = {
    "chunked": (chunked, "Qwen2_5_VLRotaryEmbedding", Qwen2_5_VLTextConfig),
    "interleaved": (interleaved, "Qwen3VLTextRotaryEmbedding", Qwen3VLTextConfig),
}
HEADS = {
    "plain": {},
    "hidden": {"sees_pictures": False},
    "chunked": {"rope": CHUNKED, "head_dim": 8},
    "interleaved": {"rope": INTERLEAVED, "head_dim": 8},
    "interleaved, hidden": {"rope": INTERLEAVED, "head_dim": 8, "sees_pictures": False},
}
TREE = Tree(nodes=6, depth=3, top_k=2, rates=(0.6, 0.3, 0.2))
NUM_NEW = 16


def hf_rotary(kind, rope, head_dim):
    """HF's module for one of the two orders of sections, and its module of code."""
    code, name, config = HF[kind]
    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "head_dim": head_dim}
    return getattr(code, name)(config(**sizes, rope_parameters=dict(rope))), code


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(HF)), st.data())
def test_queries_are_turned_as_hf_turns_them(kind, data):
    """At positions of three axes, and at those of text, where all three are one."""
    half = data.draw(st.integers(3, 12))
    first = data.draw(st.integers(1, half - 2))
    second = data.draw(st.integers(1, half - first - 1))
    sections = [first, second, half - first - second]
    if kind == "interleaved":  # as many of height and width as there are places for
        sections = [half - 2 * (half // 3), half // 3, half // 3]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    rope |= {"mrope_interleaved": True} if kind == "interleaved" else {}
    rotary, code = hf_rotary(kind, rope, 2 * half)
    layer = LayerConfig(8 * half, 8, 4, 4, 2 * half, rope=rope)
    table = layer.rotary_table(40, dtype=torch.float32)
    positions = torch.randint(40, (3, 2, 7))
    x = torch.randn(2, 4, 7, 2 * half)
    text = positions[:1].expand(3, -1, -1)
    for three, ours in ((positions, positions), (text, text), (text, positions[0])):
        theirs, _ = code.apply_rotary_pos_emb(x, x, *rotary(x, three))
        angles = angles_at(table, ours, layer.axes)[:, None]
        turned = rotate(x, *angles.chunk(2, dim=-1))
        torch.testing.assert_close(turned, theirs, rtol=0, atol=1e-5)
    wrong = rotate(x, *angles_at(table, positions[0], None)[:, None].chunk(2, dim=-1))
    theirs, _ = code.apply_rotary_pos_emb(x, x, *rotary(x, positions))
    assert (wrong - theirs).abs().max() > 1e-2


PUBLIC = {
    "SpecForge, Qwen2.5-VL": (
        specforge(
            target_model_type="qwen2_5_vl",
            rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]},
            rope_theta=1000000,
            **{"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 28},
        ),
        {"mrope_section": [1, 1, 2]},
    ),
    "AngelSlim, Qwen2.5-VL": (
        angelslim(
            target_model_type="qwen2_5_vl",
            num_hidden_layers=1,
            aux_hidden_states_layer_ids=...,
            rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]},
            rope_theta=1000000.0,
            **{"modal_type": "VLM", "image_token_id": 90, "video_token_id": 93},
        ),
        {"mrope_section": [1, 1, 2], "mrope_interleaved": True},  # whatever the file says
    ),
    "AngelSlim, Qwen3-VL": (
        angelslim(
            target_model_type="qwen3_vl",
            num_hidden_layers=1,
            aux_hidden_states_layer_ids=...,
            rope_scaling={
                **{"type": "default", "rope_type": "default", "mrope_interleaved": True},
                "mrope_section": [2, 1, 1],
            },
            rope_theta=1000000,
            modal_type="VLM",
        ),
        {"mrope_section": [2, 1, 1], "mrope_interleaved": True},
    ),
}


def read(files, folder):
    return survey_checkpoint(files.write(folder), families=(EAGLE,))


@pytest.mark.parametrize("name", PUBLIC)
def test_public_layouts_keep_the_three_axes(name, tmp_path):
    files, sections = PUBLIC[name]
    checkpoint = read(files, tmp_path)
    assert checkpoint.source.producer == name.partition(",")[0]
    expected = {"rope_type": "default", "rope_theta": 1e6} | sections
    assert checkpoint.config.layer.rope == expected
    assert checkpoint.config.sees_pictures


def test_sections_that_fit_no_head_are_refused(tmp_path):
    for wrong, words in (([1, 1, 1], "add up to 4"), ([1, 1], "three numbers")):
        files = specforge(rope_scaling={"type": "mrope", "mrope_section": wrong})
        with pytest.raises(ValueError, match=words):
            read(files, tmp_path)


class Noting(EagleDrafter):
    """Notes contexts and logits."""

    def prefill(self, context, state):
        self.contexts.append(context)
        super().prefill(context, state)

    def propose(self, context, state, drawing):
        own = {"features": context.features.clone(), "num_new": context.num_new.clone()}
        self.contexts.append(replace(context, **own))
        return super().propose(context, state, drawing)

    def logits(self, out):
        self.seen.append(super().logits(out))
        return self.seen[-1]

    def reset(self):
        self.contexts, self.seen = [], []
        return self


def drafter_of(model, name, cls=EagleDrafter, **options):
    """A random head of some wiring."""
    flags = dict(HEADS[name])
    head = head_for(model, **{"feature_layers": (1, 2, 3)} | flags)
    return cls(head, model, **{"num_draft_tokens": 3} | options)


def first_draft(model, drafter, inputs, size=3):
    """Logits `[K, V]` and tokens of the first draft after a prompt, read in chunks."""
    drafter.reset()
    generator = SpeculativeGenerator(model, drafter, prefill_chunk_size=size)
    result = generator.generate(**inputs, max_new_tokens=6, trace=True)
    assert result.texts[0] == text_of_hf(model, inputs, 6)[0]
    logits = torch.cat(drafter.seen[: drafter.num_draft_tokens], dim=1)[0]
    return logits, result.trace[0][0].draft_tokens


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_the_first_draft_is_that_of_a_head_without_a_cache(name, monkeypatch):
    """Positions are HF's `get_rope_index`, turned by HF's module; features HF's hidden states."""
    model = build("qwen2_5_vl")
    inputs = of_row("qwen2_5_vl", ROWS, 2)  # two pictures
    drafter = drafter_of(model, name, Noting)
    logits, drafted = first_draft(model, drafter, inputs)
    config, ids = drafter.config, inputs["input_ids"][0]
    states = model(**inputs, output_hidden_states=True).hidden_states
    features = torch.cat([states[i][0] for i in config.feature_layers], dim=-1)
    positions = torch.arange(len(ids)).expand(3, -1)
    if config.layer.axes is not None:
        positions, _ = model.model.get_rope_index(
            ids[None], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
        )
        positions = positions[:, 0]
    assert positions.shape == (3, len(ids))
    rows = torch.arange(len(ids) - 1)
    if not config.sees_pictures:
        rows = rows[ids[1:] != IMAGE]
    later = positions[:, -1:] + torch.arange(len(drafted))
    at = torch.cat([positions[:, rows], later], dim=1)

    def turned(config, x, numbers):
        rope = config.layer.rope
        kind = "interleaved" if rope.get("mrope_interleaved") else "chunked"
        rope = {"mrope_section": [x.shape[-1] // 2, 0, 0]} | rope
        rotary, code = hf_rotary(kind, rope, x.shape[-1])
        x = x.transpose(0, 1)[None]
        out, _ = code.apply_rotary_pos_emb(x, x, *rotary(x, at[:, None, numbers]))
        return out[0].transpose(0, 1)

    monkeypatch.setattr(eagle_reference, "rotated", turned)
    weights = dict(drafter.head.named_parameters())
    tables = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    text = [int(ids[0]), *ids[rows + 1].tolist()]
    case = config, weights, tables, text, features[rows], drafted
    theirs, _ = eagle_reference.draft_outputs(*case)
    torch.testing.assert_close(logits, theirs, rtol=1e-4, atol=1e-4)
    if name != "plain":  # the slots' own positions, and pictures seen, are something else
        at = torch.arange(len(at[0])).expand(3, -1)
        wrong, _ = eagle_reference.draft_outputs(*case)
        if name != "hidden":
            assert (wrong - theirs).abs().max() > 1e-3


@pytest.mark.parametrize(("family", "head"), diagonal(["qwen3_vl", "llava", "gemma3"], HEADS))
@torch.no_grad()
def test_training_reads_what_drafting_reads(family, head):
    """Features, positions, embeddings and what is seen: the logits of every step are equal."""
    model, row = build(family), 2 if family != "gemma3" else 0
    inputs = of_row(family, ROWS, row)
    drafter = drafter_of(model, head, Noting)
    logits, drafted = first_draft(model, drafter, inputs)
    count = inputs["input_ids"].shape[1]
    example = answered(inputs, drafted)
    objective = AnswerTimeTest(drafter, model, num_steps=3)
    (text,) = texts = objective.texts([example])
    place = int((text.is_learned.long().cumsum(0) == 1).nonzero()[0]) - 1
    outs = objective.unroll_texts(texts)
    ours = torch.stack([drafter.logits(out)[0, place] for out in outs])
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)
    # The features that prompts' chunks brought, in order, but for those of pictures.
    brought = torch.cat([c.features[0, : max(int(c.num_new[0]), 0)] for c in drafter.contexts])
    is_seen = torch.ones(count - 1, dtype=torch.bool)
    if not drafter.config.sees_pictures:
        is_seen = inputs["input_ids"][0, 1:] != IMAGE
    learned = text.features[: int(is_seen.sum())]
    torch.testing.assert_close(learned, brought[: count - 1][is_seen], rtol=1e-4, atol=1e-4)
    whole = model(**example.inputs).logits[0, count - 1 : -1]
    torch.testing.assert_close(text.logits[text.is_learned], whole, rtol=0, atol=1e-5)


@torch.no_grad()
def test_placeholders_beyond_the_vocabulary_are_the_same_token_in_training():
    model, beyond = copy.deepcopy(build("gemma3")), 120
    model.config.image_token_id = model.model.config.image_token_id = beyond
    inputs = of_row("gemma3", ROWS, 0)
    inputs["input_ids"] = inputs["input_ids"].where(inputs["input_ids"] != IMAGE, beyond)
    drafter = drafter_of(model, "plain", Noting)
    logits, drafted = first_draft(model, drafter, inputs)
    objective = AnswerTimeTest(drafter, model, num_steps=3)
    texts = objective.texts([answered(inputs, drafted)])
    place = inputs["input_ids"].shape[1] - 2
    outs = objective.unroll_texts(texts)
    ours = torch.stack([drafter.logits(out)[0, place] for out in outs])
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)


def answered(inputs, new_tokens):
    """A prompt with its answer, as a processor would return both."""
    ids, more = inputs["input_ids"], torch.tensor([new_tokens])
    longer = {"input_ids": torch.cat([ids, more], dim=1)}
    for name in ("attention_mask", "mm_token_type_ids", "token_type_ids"):
        if name in inputs:
            value = torch.full_like(more, int(name == "attention_mask")).to(inputs[name])
            longer[name] = torch.cat([inputs[name], value], dim=1)
    return Answered({**inputs, **longer}, ids.shape[1])


@pytest.mark.parametrize(
    ("options", "head"),
    diagonal([{}, {"num_draft_tokens": TREE.nodes, "tree": TREE}], HEADS),
    ids=str,
)
def test_text_is_that_of_hf_whatever_heads_see(head, options):
    model = build("qwen3_vl")
    flags = HEADS[head]
    wide = dict(WIDE)
    drafter = EagleDrafter(informed(model, head_for(model, **wide | flags)), model, **options)
    for size, rows in ((1, ROWS), (4, OTHERS)):
        generator = SpeculativeGenerator(model, drafter, prefill_chunk_size=size)
        result = generator.generate(**prompts("qwen3_vl", rows), max_new_tokens=NUM_NEW)
        alone = [of_row("qwen3_vl", rows, i) for i in range(3)]
        assert result.texts == [text_of_hf(model, each, NUM_NEW)[0] for each in alone]
    assert result.stats.acceptance_rate > 0


def test_rows_of_a_batch_draft_as_each_alone():
    """Rows with two pictures, one and none leave out as many slots as they have."""
    model = build("qwen3_vl")
    for head in ("hidden", "interleaved, hidden"):
        drafter = drafter_of(model, head)
        generator = SpeculativeGenerator(model, drafter, prefill_chunk_size=4)
        options = {"max_new_tokens": 8, "trace": True}
        batch = generator.generate(**prompts("qwen3_vl"), **options)
        for row in range(3):
            alone = generator.generate(**of_row("qwen3_vl", ROWS, row), **options)
            theirs = [step.draft_tokens for step in alone.trace[0]]
            assert [step.draft_tokens for step in batch.trace[row]] == theirs


@pytest.mark.parametrize("options", [{}, {"num_draft_tokens": TREE.nodes, "tree": TREE}], ids=str)
def test_replayed_steps_are_the_eager_ones(options):
    """`check` compares them; the storage of one call is that of the next, with other pictures."""
    model = build("qwen3_vl")
    flags = WIDE | HEADS["interleaved, hidden"]
    drafter = EagleDrafter(informed(model, head_for(model, **flags)), model, **options)
    replayed = SpeculativeGenerator(model, drafter, graphs=True, prefill_chunk_size=4)
    for rows in (ROWS, OTHERS):
        batch = prompts("qwen3_vl", rows)
        result = replayed.generate(**batch, max_new_tokens=16, check=True)
        eager = SpeculativeGenerator(model, drafter, graphs=False, prefill_chunk_size=4)
        again = eager.generate(**batch, max_new_tokens=16)
        assert result.texts == again.texts
        assert result.stats.steps == again.stats.steps
        assert result.stats.acceptance_rate == again.stats.acceptance_rate > 0


def examples(family="qwen3_vl", count=4, length=6):
    made = []
    for index in range(count):
        inputs = of_row(family, (ROWS, OTHERS)[index % 2], index % 3)
        made.append(answered(inputs, list(range(5, 5 + length + index))))
    return made


def test_the_loss_is_the_mean_over_answers_of_each_text_alone():
    model = build("qwen3_vl")
    objective = AnswerTimeTest(drafter_of(model, "interleaved"), model, num_steps=2, step_weight=1)
    rows = examples()
    alone = [objective(each) for each in ([row] for row in rows)]
    # A step learns one token less of each answer than the one before, but for the prompt's last.
    counts = torch.tensor([float(len(row.ids) - row.num_prompt) for row in rows])
    together = objective(rows)
    torch.testing.assert_close(together, (torch.stack(alone) * counts).sum() / counts.sum())
    gradient = torch.autograd.grad(together, list(objective.parameters()))
    assert all(bool(g.isfinite().all()) and g.abs().max() > 0 for g in gradient)


def test_a_call_of_the_model_and_training_do_not_touch_each_other():
    model = build("qwen3_vl")
    objective = AnswerTimeTest(drafter_of(model, "chunked"), model, num_steps=2)
    before = objective(examples())
    text_of_hf(model, prompts("qwen3_vl", OTHERS), 2)
    deltas = model.model.rope_deltas.clone()
    assert objective(examples()).equal(before)
    assert model.model.rope_deltas.equal(deltas)


def test_streams_bring_every_example_once_an_epoch_and_find_their_place():
    rows = [answered(of_row("llava", ROWS, 0), [5] * (3 + i)) for i in range(5)]
    stream = AnsweredStream(rows, seed=3)
    shapes = [(2, 64)] * 5
    every = [row for batch in stream.batches(shapes) for row in batch]
    assert {id(row) for row in every[:5]} == {id(row) for row in every[5:]} == set(map(id, rows))
    assert [id(row) for row in every[:5]] != [id(row) for row in every[5:]]
    later = [row for batch in stream.batches(shapes, skip=2) for row in batch]
    assert list(map(id, later)) == list(map(id, every[4:]))


def test_what_cannot_be_learned_is_refused():
    model, rows = build("qwen3_vl"), examples()
    drafter = drafter_of(model, "plain")
    with pytest.raises(ValueError, match="longer than a row of 8; pictures are never cut"):
        next(AnsweredStream(rows, seed=0).batches([(2, 8)]))
    with pytest.raises(ValueError, match="nothing to train on"):
        AnsweredStream([], seed=0)
    with pytest.raises(ValueError, match=r"input_ids \[1, T\]"):
        Answered(prompts("qwen3_vl"), 4)
    with pytest.raises(ValueError, match="num_prompt"):
        Answered(rows[0].inputs, len(rows[0].ids))
    with pytest.raises(TypeError, match="AnswerTimeTest trains on answered prompts"):
        AnswerTimeTest(drafter, model)(torch.zeros(2, 9, dtype=torch.long))
    with pytest.raises(ValueError, match="no text is long enough for step"):
        AnswerTimeTest(drafter, model, num_steps=99)([answered(of_row("qwen3_vl", ROWS, 0), [5])])
    with pytest.raises(TypeError, match=r"learns rows of ids .* of PackedStream"):
        TrainingTimeTest(drafter, model)(rows)
    pali = build("paligemma")
    with pytest.raises(ValueError, match="both ways in one forward"):
        AnswerTimeTest(drafter_of(pali, "plain"), pali)


def test_a_head_that_sees_no_pictures_is_saved_with_a_warning(tmp_path):
    model = build("llava")
    drafter = drafter_of(model, "hidden")
    notes = drafter.save_pretrained(tmp_path)
    assert any("tokens of pictures all the same" in note for note in notes)
    again = EagleDrafter.from_pretrained(tmp_path, model)
    assert again.config == replace(drafter.config, layer=again.config.layer)
    assert not again.config.sees_pictures
    assert EagleDrafter.from_pretrained(tmp_path, model, sees_pictures=True).config.sees_pictures
