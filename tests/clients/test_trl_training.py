"""TRL trains the target while specdec generates with it: the text is that of the model as it is at
that moment.

TRL lives in an environment of its own (CONTRIBUTING.md). Its trainers put a forward of theirs on
the model, an attribute whose closure holds the model's own bound forward, and accelerate puts
autocast around that, when training starts. The model's class stays as it is.
"""

from functools import partial

import pytest
import torch
from autocast_text import is_own_text, logits_of
from transformers import TrainerCallback

from specdec import SpeculativeGenerator, zoo

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.slow

STEPS, GROUP = 5, 4
PROMPTS = zoo.heldout_prompts(16)
CALL = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
DRAFTERS = {
    "none": lambda target: "none",
    "lookup": lambda target: "lookup",
    "eagle3": lambda target: zoo.load_drafter("eagle3", target),
}
MOMENTS = ["before", "before and used", "after", "in training"]
"""When the generator is made; the trainer is what it is before or after."""


def reward(completions, **_):
    """Not constant in a group, so that there is something to learn."""
    return [float(len(set(text))) for text in completions]


def trainer_of(kind, model, folder, *, bf16=False, callbacks=(), **more):
    """SFT or GRPO with settings that change the model's text within a few steps."""
    texts = datasets.Dataset.from_dict({"text" if kind == "SFT" else "prompt": PROMPTS})
    settings = {"SFT": {"max_length": 64}, "GRPO": {"num_generations": GROUP}}[kind]
    settings |= {"max_completion_length": 12} if kind == "GRPO" else {}
    config = getattr(trl, f"{kind}Config")(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=GROUP,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        bf16=bf16,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    more = ({"reward_funcs": reward} if kind == "GRPO" else {}) | more
    return getattr(trl, f"{kind}Trainer")(
        model,
        args=config,
        train_dataset=texts,
        processing_class=zoo.load_tokenizer(),
        callbacks=list(callbacks),
        **more,
    )


def prompts():
    return zoo.load_tokenizer()(PROMPTS[:3], return_tensors="pt", padding=True, padding_side="left")


class AfterEveryStep(TrainerCallback):
    """Calls `check(model)` in eval mode, which generation needs wherever dropout is."""

    def __init__(self, check):
        self.check, self.num_calls = check, 0

    def on_step_end(self, args, state, control, model=None, **_):
        was_training = model.training
        model.eval()
        try:
            self.check(model)
        finally:
            model.train(was_training)
        self.num_calls += 1


def texts_of_model(model):
    """HF's own greedy texts, each prompt alone."""
    batch = prompts()
    rows = zip(batch.input_ids, batch.attention_mask.bool(), strict=True)
    return torch.cat([model.generate(row[mask][None], **CALL)[:, -24:] for row, mask in rows])


def check_rounded(model, texts, found):
    """Texts are the model's own up to rounding, and their logits `found` are rounded as much."""
    assert is_own_text(model, prompts(), texts)
    exact = logits_of(model, prompts(), texts, autocast=False)
    rounding = (logits_of(model, prompts(), texts, autocast=True) - exact).abs().max()
    assert 0.1 * rounding < (found - exact).abs().max() < 3 * rounding


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("kind", ["SFT", "GRPO"])
def test_text_is_that_of_the_model_in_training(kind, bf16, moment, drafter, tmp_path):
    """Float32: HF's text token for token. With bf16=True the weights are float32, and the model's
    own `generate` runs each forward under autocast.
    """
    model = zoo.load_target()
    generators = []

    def make():
        generators.append(SpeculativeGenerator(model, DRAFTERS[drafter](model)))

    def texts():
        return generators[0].generate(**prompts(), **CALL).new_tokens

    def check(trained):
        assert trained is model
        assert ("_original_forward" in vars(model)) == bf16  # accelerate has wrapped TRL's
        if not generators:
            make()
        if not bf16:
            assert texts().equal(texts_of_model(model))
            return
        result = generators[0].generate(**prompts(), **CALL, output_logits=True)
        check_rounded(model, result.new_tokens, torch.stack(result.logits, dim=1))

    untrained = texts_of_model(model)
    if moment.startswith("before"):
        make()
    if moment == "before and used":
        assert texts().equal(untrained)
    callback = AfterEveryStep(check)
    trainer = trainer_of(kind, model, tmp_path, bf16=bf16, callbacks=[callback])
    assert "forward" in vars(model)  # TRL's
    if moment == "after":
        make()
    trainer.train()
    assert callback.num_calls == STEPS
    model.eval()
    # Weights of an earlier step write other texts, so they would have been noticed.
    assert not texts_of_model(model).equal(untrained)
    assert not bf16 or not is_own_text(model, prompts(), untrained)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize("kind", ["SFT", "GRPO"])
def test_text_is_that_of_the_adapted_model_in_training(kind, bf16, tmp_path):
    """LoRA: accelerate puts autocast around the wrapper, whose forward `generate` does not call, so
    with bf16=True the model's own text is computed in float32, too.
    """
    model = zoo.load_target()
    untrained = texts_of_model(model)
    too_early = SpeculativeGenerator(model, zoo.load_drafter("eagle3", model))

    def check(trained):
        assert isinstance(trained, peft.PeftModel)
        assert "_original_forward" not in vars(model)
        assert generator.generate(**prompts(), **CALL).new_tokens.equal(texts_of_model(trained))

    callback = AfterEveryStep(check)
    adapter = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    trainer = trainer_of(
        kind, model, tmp_path, bf16=bf16, callbacks=[callback], peft_config=adapter
    )
    generator = SpeculativeGenerator(trainer.model, zoo.load_drafter("eagle3", model))
    trainer.train()
    assert callback.num_calls == STEPS
    model.eval()
    assert not texts_of_model(trainer.model).equal(untrained)
    with pytest.raises(ValueError, match="was edited after specdec wrapped it"):
        too_early.generate(**prompts(), **CALL)


def check_rollouts(rollouts, seen):
    """TRL rewards what the generator has written, up to the first end of sequence, and rows of a
    group, which share a prompt, are drawn each for itself.
    """
    assert len(rollouts) == len(seen) == STEPS
    for rollout, completions in zip(rollouts, seen, strict=True):
        for row, kept in zip(rollout.tolist(), completions, strict=True):
            assert len(kept) > 0
            assert row[: len(kept)] == kept
        assert len({tuple(row) for row in completions}) > 1


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
def test_rollouts_of_grpo_through_custom_generate(bf16, drafter, tmp_path):
    """TRL looks `generate` up on the model, so a partial of it writes the rollouts. The model is in
    training mode then, and has no dropout.
    """
    model, rollouts, seen = zoo.load_target(), [], []
    generator = SpeculativeGenerator(model, DRAFTERS[drafter](model))
    plain = model.generate
    through = partial(plain, custom_generate=generator)

    def generate(*, input_ids, attention_mask, **options):
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        assert model.training
        if not bf16:
            assert through(**inputs, **CALL).equal(plain(**inputs, **CALL))
        out = through(**inputs, **options)
        rollouts.append(generator.last_result.new_tokens)
        return out

    def noted_reward(completions, completion_ids, **_):
        seen.append(completion_ids)
        return reward(completions)

    model.generate = generate
    before = model.lm_head.weight.detach().clone()
    trainer_of("GRPO", model, tmp_path, bf16=bf16, reward_funcs=noted_reward).train()
    check_rollouts(rollouts, seen)
    assert not model.lm_head.weight.equal(before)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
def test_rollouts_of_grpo_through_rollout_func(bf16, tmp_path):
    """TRL's own place for another generator (experimental, as TRL says): called in training mode,
    with every prompt as often as it wants texts of it.
    """
    model, rollouts, seen = zoo.load_target(), [], []
    generator = SpeculativeGenerator(model, zoo.load_drafter("eagle3", model))
    tokenizer = zoo.load_tokenizer()

    def rollout(texts, trainer):
        batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
        trainer.model.eval()
        try:
            options = {"max_new_tokens": 12, "do_sample": True, "top_k": 0}
            result = generator.generate(**batch, **options)
        finally:
            trainer.model.train()
        rollouts.append(result.new_tokens)
        rows = zip(result.new_tokens.tolist(), result.lengths, strict=True)
        written = [row[:length] for row, length in rows]
        ids = tokenizer(texts).input_ids
        return {"prompt_ids": ids, "completion_ids": written, "logprobs": None}

    def noted_reward(completions, completion_ids, **_):
        seen.append(completion_ids)
        return reward(completions)

    before = model.lm_head.weight.detach().clone()
    options = {"reward_funcs": noted_reward, "rollout_func": rollout}
    trainer_of("GRPO", model, tmp_path, bf16=bf16, **options).train()
    check_rollouts(rollouts, seen)
    assert not model.lm_head.weight.equal(before)
