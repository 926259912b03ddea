"""A sentinel beside the rollouts of a run: sound policies go on, other texts end it before a step.

The trainer is a policy gradient over HF's `Trainer`, as TRL's are: texts of the policy, their
log-probabilities as the generator gives them, and a reward.
"""

import copy
from dataclasses import replace

import pytest
import torch
from architectures import build
from diagonal import first
from text_laws import DRAFT, PROMPT, TARGET, tiny
from transformers import Trainer, TrainingArguments

from specdec import ModelDrafter, RejectionSampler, SpeculativeGenerator, Stream
from specdec.lab.certificates import CertificateError
from specdec.lab.certificates.generator.witness import Witness
from specdec.lab.training import SentinelCallback
from specdec.samplers import Noise, StepNoise

ROLLOUT = {"max_new_tokens": 16, "temperature": 1.1, "top_k": 5, "neutral": True}


class Policy(Trainer):
    """Learns to write token 2; its generator writes rollouts."""

    generator: SpeculativeGenerator

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        """Rollouts have the probabilities that the policy says, from the same weights."""
        seed = torch.randint(2**62, inputs["input_ids"].shape[:1])
        options = {**ROLLOUT, "seed": seed, "output_logprobs": True}
        result = self.generator.generate(inputs["input_ids"], **options)
        width = inputs["input_ids"].shape[1]
        logits = model(result.sequences).logits[:, width - 1 : -1].log_softmax(dim=-1)
        logprobs = logits.gather(2, result.new_tokens[..., None])[..., 0]
        if self.generator.target.model is model:
            torch.testing.assert_close(logprobs, result.raw_logprobs, rtol=0, atol=1e-5)
        reward = (result.new_tokens == 2).float().mean(dim=1)
        ratios = (logprobs - logprobs.detach()).exp()
        self.rewards = [*getattr(self, "rewards", []), reward.mean().item()]
        return -(ratios * (reward - reward.mean())[:, None]).mean()


class ScaledStep(StepNoise):
    """Accept draws times a factor, which keeps too few drafts or too many."""

    factor = 1.0

    def uniform(self, stream):
        """The step's uniforms."""
        draws = super().uniform(stream)
        return (draws * self.factor).clamp(max=1 - 1e-9) if stream is Stream.ACCEPT else draws


def scaled(by: float) -> RejectionSampler:
    """A rule whose accept draws are off by a factor."""
    step = type("Step", (ScaledStep,), {"factor": by})

    class Scaled(Noise):
        """Opens such steps."""

        def at(self, start, width):
            return step(self._key, start, width)

    sampler = RejectionSampler()
    sampler.noise_type = Scaled
    return sampler


def drafted(model, sampler="auto"):
    return SpeculativeGenerator(model, ModelDrafter(tiny(DRAFT), 2), sampler)


def run(tmp_path, generator, model, *, steps, accumulate=1, rate=0.02, **options):
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=steps,
        learning_rate=rate,
        per_device_train_batch_size=64,
        gradient_accumulation_steps=accumulate,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
    )
    prompts = [{"input_ids": torch.tensor(PROMPT), "labels": torch.tensor(PROMPT)}] * 4096
    trainer = Policy(model=model, args=arguments, train_dataset=prompts)
    trainer.generator, callback = generator, SentinelCallback(generator, **options)
    trainer.add_callback(callback)
    try:
        trainer.train()
    finally:
        assert model.training  # as the trainer left it
    return trainer, callback


@pytest.mark.parametrize("accumulate", first([1, 2], [2]))
def test_a_policy_that_learns_from_its_own_texts_goes_on(tmp_path, accumulate):
    model = copy.deepcopy(tiny(TARGET))
    options = {"accumulate": accumulate, "steps": 16 // accumulate, "texts": 48}
    trainer, callback = run(tmp_path, drafted(model), model, **options)
    found = callback.sentinel.found
    assert found.num_texts == 16 * 48, "each rollout is read once"
    assert found.passed
    assert trainer.rewards[-1] > trainer.rewards[0] + 0.1, "the policy has moved"


def test_texts_of_stale_weights_end_the_run(tmp_path):
    """The generator has a copy of the first weights, which the optimiser does not change."""
    model = copy.deepcopy(tiny(TARGET))
    stale = drafted(copy.deepcopy(model))
    with pytest.raises(CertificateError, match="do not have the target's distribution"):
        run(tmp_path, stale, model, steps=24, reference=model)


def test_a_rule_that_keeps_too_much_ends_the_run(tmp_path):
    model = copy.deepcopy(tiny(TARGET))
    with pytest.raises(CertificateError):
        run(tmp_path, drafted(model, scaled(0.5)), model, steps=60, with_drafts=True)


def test_greedy_rollouts_are_passed_over_and_processors_refused(tmp_path, monkeypatch):
    model = copy.deepcopy(tiny(TARGET))
    monkeypatch.setitem(ROLLOUT, "temperature", 0.0)
    monkeypatch.delitem(ROLLOUT, "top_k")
    _, callback = run(tmp_path, drafted(model), model, steps=2)
    with pytest.raises(ValueError, match="no text was bet on yet"):
        _ = callback.sentinel.found
    monkeypatch.setitem(ROLLOUT, "temperature", 1.0)
    monkeypatch.setitem(ROLLOUT, "logits_processor", [_same])
    with pytest.raises(ValueError, match="logits processors"):
        run(tmp_path, drafted(model), model, steps=2)
    with pytest.raises(ValueError, match="texts must be"):
        SentinelCallback(drafted(model), texts=0)


def test_rollouts_with_offsets_are_read_with_them_and_adapters_refused():
    generator = SpeculativeGenerator(build("gpt2"), "lookup")
    callback = SentinelCallback(generator, texts=3)
    ids, own = torch.tensor([PROMPT] * 4), {"position_offset": [9, 0, 3, 1]}
    options = {"max_new_tokens": 8, "temperature": 1.0, "neutral": True, "eos_token_id": []}
    result = generator.generate(ids, row_inputs=own, **options)
    assert result.row_inputs["position_offset"].tolist() == [9, 0, 3, 1]
    read = []
    real = Witness.logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Witness, "logits", lambda w, text: read.append(text.offset) or real(w, text))
        callback.on_pre_optimizer_step(None, None, None)
    assert read == [9, 0, 3]
    assert callback.sentinel.found.num_texts == 3
    generator.generate(ids, **options)
    generator.last_result = replace(generator.last_result, row_inputs={"adapter": torch.ones(4)})
    with pytest.raises(ValueError, match=r"a result has numbers and no names; call a Sentinel"):
        callback.on_pre_optimizer_step(None, None, None)


def _same(ids, scores):
    return scores


_same.is_stateless = True


@pytest.mark.slow
def test_accept_draws_times_1_05_end_the_run(tmp_path):
    """False alarm 1e-6; found after 70 000 tokens where the policy stands still."""
    model = copy.deepcopy(tiny(TARGET))
    with pytest.raises(CertificateError):
        run(tmp_path, drafted(model, scaled(1.05)), model, steps=400, rate=1e-5, with_drafts=True)


@pytest.mark.slow
def test_no_honest_run_of_200_is_stopped(tmp_path):
    """Of 2 rollouts each; at a false alarm of 1e-6 one among them has odds of 2e-4."""
    for number in range(200):
        model = copy.deepcopy(tiny(number))
        options = {"steps": 2, "texts": 24, "with_drafts": True}
        _, callback = run(tmp_path, drafted(model), model, **options)
        assert callback.sentinel.found.num_tokens == 2 * 24 * 16
