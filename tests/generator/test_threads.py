"""What may run at the same time: generations over one model, and the model's own calls.

specdec runs private views of a model, so no call can see another one's attention function, masks or
features; and tensors that are kept for the next call are handed to one call at a time.
"""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from architectures import VOCAB, build
from diagonal import diagonal
from drafting import ragged_prompts
from eagle_heads import head_for, informed
from fingerprint import fingerprint

from specdec import (
    EagleDrafter,
    ModelDrafter,
    PromptLookupDrafter,
    SpeculativeGenerator,
)

MODEL = build("llama")
HEAD = head_for(MODEL, hidden_size=128, intermediate_size=256, has_embed_tokens=True)
DRAFTERS = {
    "itself": lambda: ModelDrafter(MODEL, 3),
    "lookup": lambda: PromptLookupDrafter(3),
    "eagle": lambda: EagleDrafter(informed(MODEL, HEAD), MODEL, 3),
}
PROMPTS = [ragged_prompts(VOCAB, 3, 7, seed=seed) for seed in range(4)]


def texts(generator):
    return [generator.generate(*prompt, max_new_tokens=12).sequences for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("name", "graphs"),
    [("lookup", False), ("eagle", True), *diagonal(["itself", "eagle"], [False], is_quick=False)],
)
def test_generators_over_one_model_write_in_threads_what_they_write_alone(name, graphs):
    expected = texts(SpeculativeGenerator(MODEL, DRAFTERS[name]()))
    before = fingerprint(MODEL)
    shared, other = (SpeculativeGenerator(MODEL, DRAFTERS[name](), graphs=graphs) for _ in range(2))
    generators = [shared, shared, shared, other]
    with ThreadPoolExecutor(len(generators)) as pool:
        found = list(pool.map(texts, generators))
    for mine in found:
        assert all(map(torch.equal, mine, expected))
    assert fingerprint(MODEL) == before


def test_the_models_own_calls_go_on_in_the_middle_of_a_forward():
    """Another thread calls HF's `generate` and the plain forward while a layer of ours runs."""
    ids, mask = PROMPTS[0]
    options = dict(attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    expected = MODEL.generate(ids, **options)
    logits = MODEL(input_ids=ids).logits
    found = []

    def call():
        found.append((MODEL.generate(ids, **options), MODEL(input_ids=ids).logits))

    def interrupt(module, args, out):
        if not found and threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=call)
            other.start()
            other.join()

    handle = MODEL.model.layers[1].self_attn.register_forward_hook(interrupt)
    generator = SpeculativeGenerator(MODEL, DRAFTERS["eagle"]())
    ours = generator.generate(ids, mask, max_new_tokens=6)
    handle.remove()
    assert torch.equal(found[0][0], expected)
    assert torch.equal(found[0][1], logits)
    assert torch.equal(ours.sequences, expected)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))])
def test_a_generator_that_was_copied_or_pickled_writes_the_same_texts(duplicate):
    """Without its graphs and kept storage."""
    model = build("llama")  # HF's hooks, on a model that was asked for hidden states, do not pickle
    drafter = EagleDrafter(copy.deepcopy(DRAFTERS["eagle"]().head), model, 3)
    generator = SpeculativeGenerator(model, drafter, graphs=True)
    expected = texts(generator)
    other = duplicate(generator)
    assert len(list(generator._storages)) == 1
    assert not list(other._storages)
    assert other.target.model is not model
    found = [texts(other), texts(generator), texts(other)]
    for mine in found:
        assert all(map(torch.equal, mine, expected))
