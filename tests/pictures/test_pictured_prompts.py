"""Prompts with pictures and sound: texts are those of HF's own `generate` of each row alone, in
ragged batches of rows with a picture, several and none, whoever drafts and however prompts are cut.
"""

from functools import cache

import pytest
import torch
import transformers
from diagonal import diagonal, first
from drafter_table import WIDE
from eagle_heads import head_for, informed
from pictured_models import (
    BOTH_WAYS,
    FAMILIES,
    GRIDS,
    OTHERS,
    ROWS,
    TEXT,
    build,
    of_row,
    prompts,
    text_of_hf,
)
from transformers import LlamaConfig, LlamaForCausalLM

from specdec import (
    EagleDrafter,
    ExtendedDrafter,
    FirstMatch,
    ModelDrafter,
    PromptLookupDrafter,
    SelfDrafter,
    SpeculativeGenerator,
    WrappedDrafter,
)
from specdec.drafters.tree import Tree

QUICK = ["gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "paligemma", "qwen2_audio"]
SLOW = [name for name in FAMILIES if name not in QUICK]
EVERY = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
SOME = [*first(QUICK, ["gemma3", "qwen2_5_vl", "qwen2_audio"]), *EVERY[len(QUICK) :]]
NUM_NEW = 20
TREE = Tree(nodes=6, depth=3, top_k=2, rates=(0.6, 0.3, 0.2))


def draft_model():
    """A text model of the same vocabulary."""
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**TEXT | {"num_hidden_layers": 2})).eval()


def eagle(model, **options):
    return EagleDrafter(informed(model, head_for(model, **WIDE)), model, **options)


NEVER = PromptLookupDrafter(1, max_ngram=50, min_ngram=50)
DRAFTERS = {
    "nobody": lambda model: None,
    "lookup": lambda model: PromptLookupDrafter(4),
    "lookup, tree": lambda model: PromptLookupDrafter(6, num_continuations=2),
    "text model": lambda model: ModelDrafter(draft_model(), 3),
    "text model, tree": lambda model: ModelDrafter(draft_model(), TREE.nodes, tree=TREE),
    "the model": lambda model: ModelDrafter(model, 3),
    "itself": lambda model: SelfDrafter(model, 3),
    "eagle3": lambda model: eagle(model, num_draft_tokens=3),
    "joined": lambda model: FirstMatch(NEVER, ExtendedDrafter(ModelDrafter(model, 3), NEVER)),
    "wrapped": lambda model: WrappedDrafter(eagle(model, num_draft_tokens=3)),
    "eagle3, tree": lambda model: eagle(model, num_draft_tokens=TREE.nodes, tree=TREE),
}
NOT_RECURRENT = {name for name in DRAFTERS if "tree" in name} | {"itself"}


def of_each(values):
    """Families with each of the values: of quick families the diagonal runs by default."""
    slow = [pytest.param(n, value, marks=pytest.mark.slow) for n in SLOW for value in values]
    return diagonal(QUICK, values) + slow


@cache
def text_alone(name, is_of_rows, index):
    """HF's text of one row of `ROWS` or of `OTHERS`."""
    return text_of_hf(build(name), of_row(name, ROWS if is_of_rows else OTHERS, index), NUM_NEW)[0]


def expected(name, rows):
    """HF's text of each row alone."""
    is_of_rows = rows[0] == ROWS[0]
    return [text_alone(name, is_of_rows, index) for index in range(len(rows))]


def new_tokens(name, rows, sequences):
    return sequences[:, prompts(name, rows)["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize(("name", "drafter"), of_each(DRAFTERS))
def test_text_is_that_of_hf_for_each_row_alone(name, drafter):
    if name == "qwen3_5" and drafter in NOT_RECURRENT:
        pytest.skip("recurrent layers read no trees and nothing behind the text")
    model = build(name)
    generator = SpeculativeGenerator(model, DRAFTERS[drafter](model), prefill_chunk_size=5)
    for rows in (ROWS, OTHERS):
        result = generator.generate(**prompts(name, rows), max_new_tokens=NUM_NEW)
        assert new_tokens(name, rows, result.sequences) == expected(name, rows)
    # Over the keys and values of the pictures, and by a draft model that reads them, too.
    if drafter == "itself" or (drafter in ("the model", "joined") and name not in BOTH_WAYS):
        assert result.stats.acceptance_rate == 1


@pytest.mark.parametrize(("name", "size"), of_each([1, 2, 3, 100, 7]))
def test_a_border_of_chunks_changes_nothing(name, size):
    generator = SpeculativeGenerator(build(name), None, prefill_chunk_size=size)
    result = generator.generate(**prompts(name), max_new_tokens=NUM_NEW)
    assert new_tokens(name, ROWS, result.sequences) == expected(name, ROWS)


@pytest.mark.parametrize("name", EVERY)
def test_chunks_end_where_no_token_sees_further(name):
    target = SpeculativeGenerator(build(name), None).target
    inputs = prompts(name)
    ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask")
    read = target.read_prompts(ids, mask, inputs)
    sizes = read.chunk_sizes(3)
    assert sum(sizes) == max(read.lengths) - (name not in BOTH_WAYS)
    assert (max(sizes) <= 3) == (name not in BOTH_WAYS)
    if name == "paligemma":
        assert len(sizes) == 1  # the whole prompt sees itself


@pytest.mark.smoke
@pytest.mark.parametrize("name", EVERY)
def test_positions_go_on_behind_pictures_as_in_hf(name):
    """Pictures of Qwen-like models take fewer positions than slots: the offset is negative."""
    target = SpeculativeGenerator(build(name), None).target
    inputs = prompts(name)
    ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask")
    offsets = target.read_prompts(ids, mask, inputs).position_offset.tolist()
    if name in GRIDS:
        assert offsets == [-2, 0, -5]  # 2 of 4 slots, and then 3 of 6: 4 x 4 and 4 x 6 patches
    else:
        assert offsets == [1 if name == "paligemma" else 0] * 3


def towers_of(model):
    endings = "visual", "vision_tower", "vision_model", "audio_tower"
    return [module for path, module in model.named_modules() if path.endswith(endings)][:1]


@pytest.mark.parametrize("name", SOME)
def test_towers_run_once_natively_and_through_the_hook(name):
    model, calls = build(name), []
    (tower,) = towers_of(model)
    handle = tower.register_forward_hook(lambda *args: calls.append(1))
    try:
        generator = SpeculativeGenerator(model, "lookup")
        for _ in range(2):  # the first prompts of a kind are tried, too
            result = generator.generate(**prompts(name), max_new_tokens=NUM_NEW)
            hooked = {"do_sample": False, "pad_token_id": 0, "custom_generate": generator}
            out = model.generate(**prompts(name), max_new_tokens=NUM_NEW, **hooked)
            assert torch.equal(out, result.sequences)
            assert len(calls) == 2
            calls.clear()
    finally:
        handle.remove()
    assert new_tokens(name, ROWS, result.sequences) == expected(name, ROWS)


@pytest.mark.parametrize("name", SOME)
def test_a_call_of_the_model_between_prompt_and_steps_changes_nothing(name):
    """It overwrites `rope_deltas`, which are state of the model's module."""
    model = build(name)
    generator = SpeculativeGenerator(model, "lookup")
    generation = generator.start(**prompts(name), max_new_tokens=NUM_NEW)
    text_of_hf(model, prompts(name, OTHERS), 2)
    while not generation.has_ended.all():
        generator.step(generation)
    rows = zip(generation.tokens, generation.lengths, strict=True)
    assert [row[:length].tolist()[-NUM_NEW:] for row, length in rows] == expected(name, ROWS)


def _hooks(module):
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


@pytest.mark.parametrize("name", EVERY)
def test_a_call_leaves_the_model_as_it_was(name):
    model = build(name)
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    hooks = {id(module): _hooks(module) for module in model.modules()}
    SpeculativeGenerator(model, "lookup").generate(**prompts(name), max_new_tokens=4)
    for path, module in model.named_modules():
        assert vars(module).keys() == before[path].keys()
        assert all(value is before[path][key] for key, value in vars(module).items())
    assert {id(module): _hooks(module) for module in model.modules()} == hooks


@pytest.mark.parametrize("name", first(QUICK, ["qwen3_5", "qwen2_audio"]))
def test_stream_trace_and_processors_output_read_them_too(name):
    generator = SpeculativeGenerator(build(name), "lookup")
    texts = [[], [], []]
    for record in generator.stream(**prompts(name), max_new_tokens=NUM_NEW):
        for text, step in zip(texts, record.rows, strict=True):
            text += step.new_tokens if step else []
    assert texts == expected(name, ROWS)
    whole = transformers.BatchFeature(prompts(name))
    result = generator.generate(whole, max_new_tokens=NUM_NEW, trace=True)
    assert new_tokens(name, ROWS, result.sequences) == texts
    assert result.texts == texts


@pytest.mark.parametrize("name", first(QUICK, ["gemma3", "qwen3_vl"]))
def test_captured_steps_are_the_eager_ones(name):
    generator = SpeculativeGenerator(build(name), "lookup", graphs=True)
    for rows in (ROWS, OTHERS, ROWS[:2]):  # into the same tensors; the last are filled up
        result = generator.generate(**prompts(name, rows), max_new_tokens=NUM_NEW, check=True)
        assert new_tokens(name, rows, result.sequences) == expected(name, rows)


@pytest.mark.parametrize("name", first(QUICK, ["paligemma", "qwen2_5_vl"]))
def test_several_samples_of_a_prompt_read_its_picture_once(name):
    generator = SpeculativeGenerator(build(name), "lookup")
    options = {"temperature": 1.0, "top_k": 1, "num_return_sequences": 2, "seed": 0}
    result = generator.generate(**prompts(name), max_new_tokens=NUM_NEW, **options)
    texts = new_tokens(name, ROWS, result.sequences)
    assert texts[::2] == texts[1::2] == expected(name, ROWS)


def test_text_alone_is_read_as_before():
    model = build("qwen3_vl")
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    generator = SpeculativeGenerator(model, "lookup")
    result = generator.generate(ids, max_new_tokens=NUM_NEW)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert result.sequences[:, 5:].tolist() == text_of_hf(model, inputs, NUM_NEW)
    hooked = {"do_sample": False, "pad_token_id": 0, "custom_generate": generator}
    out = model.generate(ids, max_new_tokens=NUM_NEW, **hooked)
    assert torch.equal(out, result.sequences)
