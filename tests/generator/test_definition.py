"""The loop over Hugging Face's own forward and cache (`loop.definition`) is HF's text, and drafts,
accepts and emits in every step what the generator does, which has another cache, another forward
and another way to bring texts to drafters.
"""

import pytest
import torch
from architectures import VOCAB, build
from diagonal import diagonal
from drafter_table import CHAINS, MODEL, READERS, make
from drafting import perturbed

from specdec import (
    BlockSampler,
    CouplingSampler,
    LogitsFilter,
    ModelDrafter,
    NoDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    SuffixDrafter,
    WrappedDrafter,
    zoo,
)
from specdec.loop.definition import generate

NUM_NEW = 20
NAMES = [name for name in CHAINS if name not in READERS]
QUICK = ["model", "lookup", "suffix", "lookup or eagle3", "eagle1", "p-eagle", "dflash", "mtp"]
SAMPLED = {"temperature": 0.9, "do_sample": True, "top_k": 0}
RULES = {
    "greedy": (RejectionSampler, {"do_sample": False}),
    "rejection": (RejectionSampler, SAMPLED),
    "block": (BlockSampler, SAMPLED),
    "coupling": (CouplingSampler, SAMPLED),
}


def prompt(length):
    return torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(length))


def both(model, make_drafter, rule, ids, num_new=NUM_NEW):
    """Text and steps of the definition, and of the generator."""
    sampler, options = RULES[rule]
    logits_filter = LogitsFilter(1, temperature=options.get("temperature", 0))
    own = generate(model, make_drafter(), sampler(), ids, logits_filter, num_new, seed=3)
    generator = SpeculativeGenerator(model, make_drafter(), sampler(), prefill_chunk_size=5)
    seed = {"seed": 3} if options["do_sample"] else {}
    found = generator.generate(ids, max_new_tokens=num_new, **options, **seed)
    return own, (found.sequences, found.steps[0])


def check(own, found):
    """Both did the same, step by step."""
    assert [vars(step) for step in own[1]] == [vars(step) for step in found[1]]
    assert own[0].equal(found[0])


@pytest.mark.parametrize(
    ("name", "rule"),
    diagonal(QUICK, RULES)
    + diagonal([name for name in NAMES if name not in QUICK], RULES, is_quick=False),
)
def test_every_drafter_takes_the_steps_of_the_definition(name, rule):
    for length in (1, 2, 13):
        own, found = both(MODEL, lambda: make(name), rule, prompt(length))
        check(own, found)
        if rule == "greedy":
            text = MODEL.generate(prompt(length), max_new_tokens=NUM_NEW, do_sample=False)
            assert own[0].equal(text)


ZOO = {
    **{name: name for name in ("eagle3", "mtp", "mask-token", "model")},
    "lookup": PromptLookupDrafter,
    "suffix": SuffixDrafter,
    "none": NoDrafter,
}


def of_zoo(name, target):
    if isinstance(ZOO[name], str):
        return zoo.load_drafter(name, target, num_draft_tokens=4)
    return ZOO[name]() if name == "none" else ZOO[name](4)


@pytest.mark.parametrize(
    ("name", "rule"),
    diagonal(["eagle3", "mtp", "lookup"], RULES)
    + diagonal(["mask-token", "model", "suffix", "none"], RULES, is_quick=False),
)
def test_the_zoos_drafters_take_them_too(name, rule):
    target, text = zoo.load_target(), zoo.heldout_prompts(1)[0]
    ids = torch.tensor([zoo.load_tokenizer()(text).input_ids[:40]])
    own, found = both(target, lambda: of_zoo(name, target), rule, ids, 32)
    check(own, found)
    if rule == "greedy":
        assert own[0].equal(target.generate(ids, max_new_tokens=32, do_sample=False))
    if name not in ("none", "suffix", "lookup"):  # n-grams need not find anything here
        assert len(own[1]) < 32


class Forgetful(ModelDrafter):
    """Does not read prompts."""

    def prefill(self, context, state):
        pass


def test_the_steps_see_a_fault_that_no_text_shows():
    drafter = lambda: ModelDrafter(MODEL, 4)  # noqa: E731
    own, found = both(MODEL, drafter, "greedy", prompt(13))
    check(own, found)
    forgets, _ = both(MODEL, lambda: Forgetful(MODEL, 4), "greedy", prompt(13))
    assert forgets[0].equal(own[0])
    assert len(forgets[1]) > len(own[1]) == NUM_NEW / 5


class Learns(WrappedDrafter):
    """Drafts the token that came last in the place of a rejected one, all along."""

    reads_outcome = True

    def init_state(self, batch_size, max_length, *, vocab_size, device):
        inner = super().init_state(batch_size, max_length, vocab_size=vocab_size, device=device)
        return {"inner": inner.inner, "bias": torch.zeros(batch_size, vocab_size, device=device)}

    def prefill(self, context, state):
        self.inner.prefill(context, state["inner"])

    def propose(self, context, state, drawing):
        edited = drawing.with_edit(lambda logits: logits + state["bias"][:, None])
        return self.inner.propose(context, state["inner"], edited)

    def learn(self, verified, state):
        state["bias"].scatter_add_(1, verified.extra[:, None], 0.5 * torch.ones(1, 1))


@pytest.mark.parametrize("rule", ["greedy", "block"])
def test_drafters_that_learn_are_told(rule):
    own, found = both(MODEL, lambda: Learns(make("model")), rule, prompt(9))
    check(own, found)
    plain, _ = both(MODEL, lambda: make("model"), rule, prompt(9))
    assert [s.draft_tokens for s in plain[1]] != [s.draft_tokens for s in own[1]]


@pytest.mark.parametrize("name", ["gemma3", "mistral_sliding", "gpt2"])
def test_windows_that_slide_are_moved_back(name):
    """A text that is longer than them."""
    model = build(name)
    own, found = both(model, lambda: ModelDrafter(perturbed(model), 4), "greedy", prompt(13), 48)
    check(own, found)
    assert own[0].equal(model.generate(prompt(13), max_new_tokens=48, do_sample=False))


def test_texts_end_as_hfs_do():
    model = build("llama")
    text = model.generate(prompt(13), max_new_tokens=NUM_NEW, do_sample=False)
    model.generation_config.eos_token_id = [int(text[0, 20]), VOCAB - 1]
    model.generation_config.pad_token_id = 0
    own, found = both(model, lambda: ModelDrafter(perturbed(model), 4), "greedy", prompt(13))
    check(own, found)
    assert own[0].equal(model.generate(prompt(13), max_new_tokens=NUM_NEW, do_sample=False))
    assert own[0].shape[1] <= 21


@pytest.mark.parametrize(
    "name", ["self, recent", "assistant", "model, tree", "eagle3, fewer ids, tree"]
)
def test_drafters_that_need_slots_of_the_target_or_trees_are_refused(name):
    drafter = make(name)
    with pytest.raises(ValueError, match=f"drafter of chains.*got {type(drafter).__name__}; pass"):
        generate(MODEL, drafter, RejectionSampler(), prompt(3), LogitsFilter(1), 4)
