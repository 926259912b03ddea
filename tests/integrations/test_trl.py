"""`speculate` without TRL: what it asks of a trainer, and what `generate` of its model becomes."""

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
from diagonal import first
from transformers import TrainerState

from specdec import (
    FirstMatch,
    PromptLookupDrafter,
    SpeculativeGenerator,
    SuffixDrafter,
    TypicalSampler,
    zoo,
)
from specdec.lab.integrations.trl import Rollouts, speculate

INPUTS = dict(zoo.load_tokenizer()(["def f(x):"] * 3, return_tensors="pt"))
SAMPLED = {"max_new_tokens": 12, "do_sample": True, "top_k": 0, "pad_token_id": 0}
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


def trainer_of(model, **attributes):
    trainer = SimpleNamespace(model=model, use_vllm=False, callbacks=[], **attributes)
    trainer.add_callback = trainer.callbacks.append
    return trainer


def test_the_model_generates_through_the_generator_and_its_greedy_text_stays():
    model = zoo.load_target()
    expected, plain = model.generate(**INPUTS, **GREEDY), model.generate
    generator = speculate(trainer_of(model), "zoo:eagle3")
    assert model.generate(**INPUTS, **GREEDY).equal(expected)
    assert generator.last_result.stats.acceptance_rate > 0
    assert plain(**INPUTS, **GREEDY).equal(expected)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(1, dims=0))
    assert not model.generate(**INPUTS, **GREEDY).equal(expected)
    assert model.generate(**INPUTS, **GREEDY).equal(plain(**INPUTS, **GREEDY))


def test_rows_draw_for_themselves_from_seeds_of_torch_s_generator():
    model = zoo.load_target()
    generator = speculate(trainer_of(model), "lookup")

    def rollout(seed):
        torch.manual_seed(seed)
        return model.generate(**INPUTS, **SAMPLED)

    first = rollout(0)
    assert len({tuple(row) for row in first.tolist()}) == len(first)
    second = model.generate(**INPUTS, **SAMPLED)
    assert not second.equal(first)
    assert rollout(0).equal(first)
    assert not rollout(1).equal(first)
    torch.manual_seed(0)
    seeds = torch.randint(2**63 - 1, (3,)).tolist()
    assert generator.generate(**INPUTS, **SAMPLED, seed=seeds).sequences.equal(first)
    assert model.generate(**INPUTS, **SAMPLED, seed=seeds).equal(first)
    texts = model.generate(**INPUTS, **SAMPLED, num_return_sequences=2)
    assert len({tuple(row) for row in texts.tolist()}) == 6


def test_rollouts_are_remembered_by_their_prompts_and_draft_the_next_ones():
    """Also by a drafter among others; what callers seed is not, and the draws stay."""
    model, suffix = zoo.load_target(), SuffixDrafter(8)
    inputs = zoo.load_tokenizer()(
        ["def f(x):", "import os, sys\n"], return_tensors="pt", padding=True
    )
    generator = speculate(trainer_of(model), FirstMatch(suffix, PromptLookupDrafter(4)))

    def steps(**options):
        model.generate(**inputs, **GREEDY, **options)
        return [len(row) for row in generator.last_result.steps]

    untaught, untouched = steps(seed=[1, 2]), suffix.memory.clone()
    assert steps(seed=[1, 2]) == untaught
    assert suffix.memory.equal(untouched)
    assert steps() == untaught
    assert max(steps()) == 2 < min(untaught)  # 12 tokens, 9 of them in a step
    assert len(set(suffix.prompts.tolist())) == 3
    found = generator.last_result
    expected = SuffixDrafter(8)
    for _ in range(2):
        texts = [row[:n] for row, n in zip(found.new_tokens, found.lengths, strict=True)]
        expected.remember(texts, found.prompts)
    assert suffix.memory.equal(expected.memory)
    assert suffix.prompts.equal(expected.prompts)


@pytest.mark.swept
def test_epochs_with_other_seeds_accept_more_with_a_memory_of_the_earlier_ones():
    """Two prompts, four texts of each; the first epochs and the seeds are the same."""
    model, drafter = zoo.load_target(), SuffixDrafter(8)
    generator = speculate(trainer_of(model), drafter)
    rows = [text for text in zoo.heldout_prompts(2) for _ in range(4)]
    inputs = zoo.load_tokenizer()(rows, return_tensors="pt", padding=True, padding_side="left")

    def lengths(remembers):
        found = []
        torch.manual_seed(0)
        drafter.forget()
        for _ in range(3):
            model.generate(**inputs, **SAMPLED | {"max_new_tokens": 32, "temperature": 0.6})
            found.append(generator.last_result.stats.acceptance_length)
            if not remembers:
                drafter.forget()
        return found

    with_memory, without = lengths(True), lengths(False)
    assert with_memory[0] == without[0]
    assert sum(with_memory[1:]) > 1.1 * sum(without[1:])


def test_checkpoints_keep_the_memory_of_each_process(tmp_path):
    model, drafter = zoo.load_target(), SuffixDrafter(4)
    trainer = trainer_of(model)
    speculate(trainer, drafter)
    (callback,) = trainer.callbacks
    run = {"output_dir": str(tmp_path), "world_size": 2, "save_only_model": False}
    processes = [SimpleNamespace(process_index=i, **run) for i in range(2)]
    drafted, kept = {}, [TrainerState(global_step=n) for n in (0, 3, 4)]
    start, third, fourth = kept

    def drafts():
        result = drafter_alone.generate(**INPUTS, **GREEDY, trace=True)
        return [[step.draft_tokens for step in row] for row in result.trace]

    drafter_alone = SpeculativeGenerator(zoo.load_target(), drafter)
    for i, process in enumerate(processes):
        drafter.remember([[7, 8, 9 + i]], [[5]])
        model.generate(**INPUTS, **GREEDY)
        drafted[i] = drafter.memory.clone(), drafter.prompts.clone(), drafts()
        callback.on_save(process, third, None)
    model.generate(**INPUTS, **SAMPLED)
    before = drafter.memory.clone()
    assert not before.equal(drafted[1][0])
    callback.on_train_begin(processes[0], start, None)  # a run that begins
    assert drafter.memory.equal(before)
    for i, process in enumerate(processes):
        callback.on_train_begin(process, third, None)
        memory, prompts, tokens = drafted[i]
        assert drafter.memory.equal(memory)
        assert drafter.prompts.equal(prompts)
        assert drafts() == tokens
    # A checkpoint without it, or one of other processes: seeds may be drawn once more.
    first = processes[0]
    callback.on_save(SimpleNamespace(**vars(first) | {"save_only_model": True}), fourth, None)
    callback.on_train_begin(first, fourth, None)
    assert drafter.memory.equal(SuffixDrafter(4).memory)
    drafter.remember([[7, 8]], [[5]])
    callback.on_train_begin(SimpleNamespace(**vars(first) | {"world_size": 1}), third, None)
    assert drafter.memory.equal(SuffixDrafter(4).memory)
    assert not drafter.prompts.any()
    assert drafts() != drafted[0][2]


def test_options_of_hf_s_generate_go_through():
    model, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    stop = {"stop_strings": ["\n"], "tokenizer": tokenizer}
    expected = model.generate(**INPUTS, **GREEDY, **stop)
    scores = model.generate(
        **INPUTS, **GREEDY, return_dict_in_generate=True, output_logits=True
    ).logits
    speculate(trainer_of(model), "zoo:eagle3")
    assert model.generate(**INPUTS, **GREEDY, **stop).equal(expected)
    found = model.generate(**INPUTS, **GREEDY, return_dict_in_generate=True, output_logits=True)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(scores))
    with pytest.raises(ValueError, match="num_beams"):
        model.generate(**INPUTS, **GREEDY, num_beams=2)
    own = set(inspect.signature(Rollouts.decode).parameters)
    hook = set(inspect.signature(SpeculativeGenerator.__call__).parameters)
    assert own - {"inputs", "options"} == hook & own  # HF looks for names of the hook's own
    assert {"stop_strings", "seed", "output_logprobs"} <= own


def test_a_caller_gets_the_log_probabilities_of_its_rollout():
    model = zoo.load_target()
    generator = speculate(trainer_of(model), "zoo:eagle3")
    options = SAMPLED | {"temperature": 0.7, "output_logprobs": True}
    ids = model.generate(**INPUTS, **options)
    found, width = generator.last_result, INPUTS["input_ids"].shape[1]
    logits = model(ids).logits[:, width - 1 : -1]
    for kept, scores in ((found.raw_logprobs, logits), (found.logprobs, logits / 0.7)):
        expected = scores.log_softmax(dim=-1).gather(-1, ids[:, width:, None])[..., 0]
        for row, length in enumerate(found.lengths):
            torch.testing.assert_close(kept[row, :length], expected[row, :length])
    record = model.generate(**INPUTS, **options, return_dict_in_generate=True, seed=found.seeds)
    assert record.logprobs.equal(found.logprobs)
    model.generate(**INPUTS, **SAMPLED)
    assert generator.last_result.logprobs is None


def test_dropout_is_off_in_rollouts_and_as_it_was_after_them():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_dropout=0.5, init_lora_weights=False)
    model = peft.get_peft_model(zoo.load_target(), config)
    expected = model.eval().generate(**INPUTS, **GREEDY)
    speculate(trainer_of(model), "lookup")
    model.train()
    frozen = model.get_base_model().lm_head.eval()
    modes = [module.training for module in model.modules()]
    assert model.generate(**INPUTS, **GREEDY).equal(expected)
    with pytest.raises(ValueError, match="num_beams"):
        model.generate(**INPUTS, **GREEDY, num_beams=2)
    assert [module.training for module in model.modules()] == modes
    assert modes.count(True) > 100
    assert not frozen.training


def test_replaced_weights_raise_until_the_generator_is_refreshed(monkeypatch):
    """Nothing is compiled here, which would take a minute."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    model, other = zoo.load_target(), zoo.load_target()
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.roll(1, dims=0))
    expected = other.generate(**INPUTS, **GREEDY)
    generator = speculate(trainer_of(model), "lookup", fuse=True)
    assert not model.generate(**INPUTS, **GREEDY).equal(expected)
    model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
    with pytest.raises(ValueError, match=r"weights replaced or moved .*generator.refresh\(\)"):
        model.generate(**INPUTS, **GREEDY)
    generator.refresh()
    assert model.generate(**INPUTS, **GREEDY).equal(expected)


# What runs in a model is tried by HF's code.
@pytest.mark.parametrize("is_hooked", first([False, True], [False]))
def test_again_is_instead_and_a_copy_of_the_model_generates_by_its_own_weights(is_hooked):
    model = zoo.load_target()
    if is_hooked:
        model.model.layers[0].register_forward_hook(lambda module, args, out: out)
    expected = model.generate(**INPUTS, **GREEDY)
    first = speculate(trainer_of(model), "lookup")
    second = speculate(trainer_of(model), "zoo:eagle3")
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    assert other.generate(**INPUTS, **GREEDY).equal(expected)
    assert first.last_result is second.last_result is None
    assert not model.generate(**INPUTS, **GREEDY).equal(expected)
    assert first.last_result is None
    assert second.last_result is not None


@pytest.mark.parametrize(
    "name", ["use_vllm", "use_transformers_continuous_batching", "rollout_func"]
)
def test_a_trainer_that_writes_its_rollouts_another_way_is_refused(name):
    model = zoo.load_target()
    with pytest.raises(ValueError, match=rf"\({name} is set\).*make it with"):
        speculate(SimpleNamespace(model=model, **{name: True}), "lookup")
    assert "generate" not in vars(model)


def test_a_lossy_sampler_is_refused():
    model = zoo.load_target()
    with pytest.raises(ValueError, match=r"TypicalSampler is lossy: .* choose a lossless sampler"):
        speculate(trainer_of(model), "lookup", TypicalSampler())
    assert "generate" not in vars(model)


@pytest.mark.parametrize("trainer", [None, SimpleNamespace(model=torch.nn.Linear(2, 2))])
def test_something_without_a_model_that_generates_is_refused(trainer):
    with pytest.raises(TypeError, match="trainer must have a model that generates"):
        speculate(trainer, "lookup")
