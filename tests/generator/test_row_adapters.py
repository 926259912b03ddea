"""A LoRA adapter for each row: the text is HF's of that adapter alone, with PEFT's own layers."""

from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod

import pytest
import torch
from architectures import VOCAB, build
from diagonal import diagonal, first
from drafter_table import make
from drafting import ragged_prompts

from specdec import Draft, SelfDrafter, SpeculativeGenerator, Target
from specdec.targets.edits.fusion import Fusion

peft = pytest.importorskip("peft")

LENGTHS, NUM_NEW = (1, 4, 6, 9, 3), 9
BATCH, MASK = ragged_prompts(VOCAB, *LENGTHS)
NAMES = ["wide", "__base__", "narrow", "wide", "narrow"]
GREEDY = {"max_new_tokens": NUM_NEW, "eos_token_id": None}
PLACES = {
    "llama": (["q_proj", "v_proj", "down_proj", "lm_head"], ["v_proj", "up_proj"]),
    "gpt2": (["c_attn", "c_fc"], ["c_attn"]),
    "mamba": (["in_proj", "x_proj"], ["in_proj"]),
}


def adapted(name="llama", **options):
    """A model with two adapters of random weights, of other ranks, scales and layers."""
    wide, narrow = PLACES.get(name, (None, None))
    torch.manual_seed(1)
    wide = {"target_modules": wide, "r": 6, "lora_alpha": 9} | options
    narrow = {"target_modules": narrow or wide["target_modules"], "r": 2, "lora_alpha": 20}
    first, second = (peft.LoraConfig(init_lora_weights=False, **own) for own in (wide, narrow))
    model = peft.get_peft_model(build(name), first, adapter_name="wide")
    model.add_adapter("narrow", second)
    return model.eval()


def text_alone(model, row, name, num_new=NUM_NEW, **options):
    """HF's greedy text of one row, with one adapter."""
    ids = BATCH[row : row + 1, -LENGTHS[row] :]
    options = {"max_new_tokens": num_new, "do_sample": False, "pad_token_id": 0, **options}
    if name == "__base__":
        with model.disable_adapter():
            return model.generate(input_ids=ids, **options)[0].tolist()
    model.set_adapter(name)
    text = model.generate(input_ids=ids, **options)[0].tolist()
    model.set_adapter("wide")
    return text


@pytest.mark.parametrize(
    ("drafter", "graphs"), diagonal(["lookup", "model", "eagle3", "model, tree"], [True, False])
)
def test_text_is_that_of_hf_with_the_rows_own_adapter(drafter, graphs):
    model = adapted()
    moved = NAMES[-1:] + NAMES[:-1]
    generator, texts = SpeculativeGenerator(model, make(drafter), graphs=graphs), []
    for names in (NAMES, moved):  # loaded anew, into the same tensors
        result = generator.generate(BATCH, MASK, row_inputs={"adapter": names}, **GREEDY)
        texts.append([text_alone(model, row, name) for row, name in enumerate(names)])
        for row, text in enumerate(texts[-1]):
            assert result.sequences[row, -len(text) :].tolist() == text
    assert all(own != other for own, other in zip(*texts, strict=True))
    active = generator.generate(BATCH, MASK, **GREEDY).sequences
    assert active[0, -len(texts[0][0]) :].tolist() == texts[0][0]  # of `wide`


@pytest.mark.parametrize("backend", first([None, "eager", "inductor"], [None, "eager"]))
def test_logits_are_those_of_pefts_own_mixed_batch(backend, monkeypatch):
    """With fused work, layers that have no adapter are one product."""
    model = adapted(target_modules=["q_proj", "down_proj"])
    monkeypatch.setattr(Fusion, "__init__", partialmethod(Fusion.__init__, backend))
    target, ids = Target(model, fuse=backend is not None), torch.arange(15).view(5, 3)
    numbers = torch.tensor(target.adapter_indices(NAMES))
    assert numbers.tolist() == [1, 0, 2, 1, 2]
    cache, start = target.init_cache(5, 4), torch.zeros(5, dtype=torch.long)
    cache.row_inputs["adapter"] = numbers
    with torch.inference_mode():
        expected = model(input_ids=ids, adapter_names=NAMES).logits
        found = target.verify(cache, start, ids[:, 0], Draft(ids[:, 1:])).logits
        cache.row_inputs["adapter"] = numbers.roll(1)
        moved = target.verify(cache, start, ids[:, 0], Draft(ids[:, 1:])).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert (moved - expected).abs().amax(dim=(1, 2)).min() > 1e-2  # the negative control


@pytest.mark.parametrize("name", ["gpt2", "mamba"])
def test_rows_that_end_and_chunks_of_prompts_keep_the_rows_own(name):
    """GPT-2's layers are HF's `Conv1D`, and Mamba's are inside of a recurrence."""
    model, ends = adapted(name), list(range(0, VOCAB, 6))
    generator = SpeculativeGenerator(model, make("lookup"), prefill_chunk_size=2)
    options = GREEDY | {"eos_token_id": ends, "pad_token_id": 0}
    result = generator.generate(BATCH, MASK, row_inputs={"adapter": NAMES}, **options)
    lengths = set()
    for row, name in enumerate(NAMES):
        text = text_alone(model, row, name, eos_token_id=ends)
        lengths.add(len(text) - LENGTHS[row])
        assert result.sequences[row, BATCH.shape[1] - LENGTHS[row] :][: len(text)].tolist() == text
    assert len(lengths) > 2


@torch.no_grad()
def test_a_sampled_row_is_the_same_alone_and_weights_may_change_in_place():
    model, texts = adapted(), []
    generator = SpeculativeGenerator(model, make("model"))
    for _ in range(2):
        options = GREEDY | {"do_sample": True, "seed": list(range(5))}
        result = generator.generate(BATCH, MASK, row_inputs={"adapter": NAMES}, **options)
        texts.append(result.sequences)
        for row, name in enumerate(NAMES):
            one, inputs = slice(row, row + 1), {"adapter": [name]}
            options |= {"seed": row, "row_inputs": inputs}
            alone = generator.generate(BATCH[one], MASK[one], **options).sequences[0]
            assert alone.equal(texts[-1][row])
        for path, weight in model.named_parameters():
            if "lora_B.wide" in path:
                weight.mul_(-1)
    is_same = (texts[0] == texts[1]).all(dim=1)
    assert is_same.tolist() == [name != "wide" for name in NAMES]


def test_an_adapter_that_is_broken_spoils_its_own_rows_only():
    model = adapted()
    target, rows = Target(model), torch.zeros(5, dtype=torch.long)
    numbers = torch.tensor(target.adapter_indices(NAMES))
    for path, weight in model.named_parameters():
        if "lora_" in path and ".wide" in path:
            weight.data.fill_(torch.nan)
    cache, draft = target.init_cache(5, 4), Draft(rows[:, None])
    cache.row_inputs["adapter"] = numbers
    with torch.inference_mode():
        logits = target.verify(cache, rows, rows, draft).logits
    assert logits.isfinite().all(dim=-1).all(dim=-1).tolist() == [name != "wide" for name in NAMES]


def test_rows_of_one_prompt_share_its_adapter():
    model = adapted()
    generator = SpeculativeGenerator(model, None)
    options = GREEDY | {"num_return_sequences": 2, "row_inputs": {"adapter": NAMES}}
    options |= {"do_sample": True, "temperature": 1e-6}
    result = generator.generate(BATCH, MASK, **options)
    for row, name in enumerate(NAMES):
        for copy in (2 * row, 2 * row + 1):
            text = result.sequences[copy, -LENGTHS[row] - NUM_NEW :].tolist()
            assert text == text_alone(model, row, name)


def test_a_target_that_drafts_for_itself_does_so_with_the_rows_own():
    target = Target(adapted())
    generator = SpeculativeGenerator(target, SelfDrafter(target, 3))
    result = generator.generate(BATCH, MASK, row_inputs={"adapter": NAMES}, **GREEDY)
    assert result.stats.acceptance_rate == 1


LAYERS = [
    ({"use_dora": True}, r"q_proj is a DoraLinearVariant"),
    ({"lora_bias": True}, r"q_proj is one with a bias"),
    ({"target_modules": ["q_proj", "embed_tokens"]}, r"embed_tokens is a Embedding"),
    ({"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}, r"lm_head is a ModulesToSave"),
]


@pytest.mark.parametrize(("options", "message"), LAYERS, ids=[str(o) for o, _ in LAYERS])
def test_layers_whose_rows_cannot_have_their_own_are_refused_by_name(options, message):
    generator = SpeculativeGenerator(adapted(**options), None)
    with pytest.raises(ValueError, match=rf"needs plain LoRA.*{message}.*one adapter at a time"):
        generator.generate(BATCH, MASK, row_inputs={"adapter": NAMES}, **GREEDY)
    assert generator.last_result is None


@pytest.mark.parametrize(("name", "place"), [("opt", "fc1"), ("mamba2", "in_proj")])
def test_layers_that_get_tokens_otherwise_than_by_rows_are_refused(name, place):
    """OPT's get all rows' tokens in one list, and Mamba 2's every row twice."""
    generator = SpeculativeGenerator(adapted(name, target_modules=[place]), None)
    with pytest.raises(ValueError, match=rf"{place} gets \[.*for 3 rows; generate with one"):
        generator.generate(BATCH, MASK, row_inputs={"adapter": NAMES}, **GREEDY)
    assert generator.last_result is None


def offload(model):
    """The weights are somewhere else, as accelerate has it."""
    model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj.lora_A").to("meta")


CHANGES = {
    "offloaded": offload,
    "merged": lambda model: model.merge_adapter(["wide"]),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
}


@pytest.mark.parametrize("state", CHANGES)
def test_adapters_whose_weights_cannot_be_gathered_are_refused(state):
    model = adapted()
    generator = SpeculativeGenerator(model, None)
    CHANGES[state](model)
    with pytest.raises(ValueError, match=f"q_proj is {state}; generate with one adapter"):
        generator.generate(BATCH, MASK, row_inputs={"adapter": NAMES}, **GREEDY)


NAMED = [
    ("wide", TypeError, "must be a sequence of names"),
    ([1, 0, 2, 1, 2], TypeError, "must be a sequence of names"),
    (3, TypeError, "must be a sequence of names"),
    (torch.tensor([1, 0, 2, 1, 2]), TypeError, "must be a sequence of names"),
    (["wide", "other"] * 2, ValueError, "names 'other', and the model has '__base__', 'wide'"),
    (["wide"] * 4, ValueError, "shape \\[4\\] for a batch of 5 rows"),
]


@pytest.mark.parametrize(("names", "error", "message"), NAMED, ids=range(len(NAMED)))
def test_what_is_no_adapter_of_the_rows_is_refused(names, error, message):
    generator = SpeculativeGenerator(adapted(), None)
    with pytest.raises(error, match=message):
        generator.generate(BATCH, MASK, row_inputs={"adapter": names}, **GREEDY)
    assert generator.last_result is None


def test_calls_in_two_threads_have_adapters_of_their_own():
    model = adapted()
    generator = SpeculativeGenerator(model, make("lookup"))
    texts = {name: text_alone(model, 3, name) for name in ("wide", "narrow", "__base__")}

    def run(name):
        inputs = {"row_inputs": {"adapter": [name]}}
        return generator.generate(BATCH[3:4], MASK[3:4], **inputs, **GREEDY).sequences[0].tolist()

    with ThreadPoolExecutor(3) as pool:
        names = list(texts) * 2
        assert list(pool.map(run, names)) == [texts[name] for name in names]
