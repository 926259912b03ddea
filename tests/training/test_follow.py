"""A drafter that follows a policy: it learns, the policy does not notice, and a run that goes on
from a checkpoint drafts as it would have done.
"""

import copy
import dataclasses
import subprocess
import sys
from functools import partial

import pytest
import torch
from text_laws import DRAFT, PROMPT, TARGET, p_values_of_texts, tiny
from training_runs import assert_same
from transformers import Trainer, TrainingArguments

from specdec import EagleDrafter, ModelDrafter, RejectionSampler, SpeculativeGenerator, zoo
from specdec.lab.training import (
    Distillation,
    FeatureAndToken,
    FollowTarget,
    MaskRollouts,
    MultiTokenPrediction,
    NextToken,
    TrainingTimeTest,
)
from specdec.lab.training.eagle import new_head

ROWS = torch.tensor([PROMPT] * 32)
CALL = {"max_new_tokens": 16, "do_sample": True, "neutral": True}


def distil(drafter, model):
    """The objective of a draft LM."""
    return Distillation(drafter.model, model)


def generator_of(model, sampler="coupling", **options):
    draft = ModelDrafter(copy.deepcopy(tiny(DRAFT)), 2)
    return SpeculativeGenerator(model, draft, sampler, **options)


def sgd(generator, rate=0.1):
    return torch.optim.SGD(generator.drafter.parameters(), lr=rate)


def copied(module):
    return {key: tensor.clone() for key, tensor in module.state_dict().items()}


def zoo_drafter(kind, target):
    if kind == "eagle1":
        return EagleDrafter(new_head(target, "eagle1"), target)
    return zoo.load_drafter(kind, target)


OBJECTIVES = {
    "model": distil,
    "eagle1": FeatureAndToken,
    "eagle3": partial(TrainingTimeTest, num_steps=3),
    "mask-token": MaskRollouts,
    "mtp": MultiTokenPrediction,
}


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_the_drafter_learns_a_rollout_and_nothing_else_changes(kind):
    target = zoo.load_target().train()
    target.model.embed_tokens.eval().requires_grad_(False)
    generator = SpeculativeGenerator(target.eval(), zoo_drafter(kind, target))
    ids = torch.arange(30, 70).reshape(2, 20)
    result = generator.generate(ids, max_new_tokens=24, do_sample=True, seed=[1, 2])
    target.train().model.embed_tokens.eval()
    for weight in target.parameters():
        weight.grad = torch.ones_like(weight) if weight.requires_grad else None
    before, drafted = copied(target), copied(generator.drafter)
    places = {key: tensor.data_ptr() for key, tensor in generator.drafter.state_dict().items()}
    flags = [weight.requires_grad for weight in target.parameters()]
    modes = [part.training for part in [*target.modules(), *generator.drafter.modules()]]
    numbers = torch.random.get_rng_state()
    follow = FollowTarget(generator, OBJECTIVES[kind])
    losses = [follow(result) for _ in range(6)]
    assert losses[-1] < losses[0]
    assert (follow.rollouts, follow.updates) == (6, 6)
    assert_same(before, copied(target))
    assert [weight.requires_grad for weight in target.parameters()] == flags
    assert False in flags
    assert True in flags
    assert all((weight.grad == 1).all() for weight in target.parameters() if weight.requires_grad)
    parts = [*target.modules(), *generator.drafter.modules()]
    assert [part.training for part in parts] == modes
    assert torch.random.get_rng_state().equal(numbers)
    after = generator.drafter.state_dict()
    assert {key: tensor.data_ptr() for key, tensor in after.items()} == places
    assert any(not after[key].equal(tensor) for key, tensor in drafted.items())
    assert all(weight.grad is None for weight in generator.drafter.parameters())


def test_a_step_is_the_gradient_of_the_divergence_along_the_texts():
    """By hand: texts of one length, the target's probabilities as they are after an update."""
    model = copy.deepcopy(tiny(TARGET))
    generator = generator_of(model)
    follow = FollowTarget(generator, distil, sgd(generator))
    result = generator.generate(ROWS, **CALL)
    own = copy.deepcopy(generator.drafter.model)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)  # what an optimiser of the policy does
        probs = model(result.sequences[:, :-1]).logits.softmax(dim=-1)
    loss = -(probs * own(result.sequences[:, :-1]).logits.log_softmax(dim=-1)).sum(dim=-1).mean()
    loss.backward()
    norm = torch.cat([weight.grad.flatten() for weight in own.parameters()]).norm()
    assert follow(result) == pytest.approx(loss.item(), rel=1e-6)
    pairs = zip(own.parameters(), generator.drafter.model.parameters(), strict=True)
    for weight, found in pairs:
        expected = weight - 0.1 * weight.grad / norm.clamp(min=1)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


class Noted(torch.nn.Module):
    """An objective that notes the rows that it is given."""

    rows = []  # noqa: RUF012

    def __init__(self, drafter, model):
        super().__init__()
        self.weight = next(drafter.parameters())

    def forward(self, ids):
        """A loss of no use."""
        self.rows.append(ids.tolist())
        return self.weight.square().sum()


def test_rows_are_whole_texts_without_padding_and_texts_and_every_bound_them():
    generator = generator_of(copy.deepcopy(tiny(TARGET)))
    prompts, mask = torch.tensor([[0, 0, 5], [1, 2, 3]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    result = generator.generate(prompts, mask, max_new_tokens=4)
    short, long = [5, *result.new_tokens[0].tolist()], [1, 2, 3, *result.new_tokens[1].tolist()]
    Noted.rows.clear()
    follow = FollowTarget(generator, Noted, every=2)
    assert [follow(result) is None for _ in range(4)] == [True, False, True, False]
    assert (follow.rollouts, follow.updates) == (4, 2)
    assert Noted.rows == [[short + long[:2], long]] * 2
    assert follow.load_state_dict(follow.state_dict()) is None
    FollowTarget(generator, Noted, texts=1)(result)
    assert Noted.rows[-1] == [short]


def drift(follows, updates=30, **options):
    """Texts and acceptance lengths of a policy that learns to count, with equal seeds."""
    model = copy.deepcopy(tiny(TARGET))
    generator = generator_of(model, **options)
    adam = torch.optim.AdamW(generator.drafter.parameters(), lr=0.01)
    follow = FollowTarget(generator, distil, adam) if follows else lambda result: None
    learn, loss_of = torch.optim.AdamW(model.parameters(), lr=0.01), NextToken(model)
    text, found, texts = torch.arange(24).remainder(6).repeat(4, 1), [], []
    for update in range(updates):
        result = generator.generate(ROWS, **CALL, seed=[32 * update + row for row in range(32)])
        learn.zero_grad()
        loss_of(text).backward()
        learn.step()
        follow(result)
        found.append(result.stats.acceptance_length)
        texts.append(result.new_tokens)
    return texts, found, model.state_dict()


def test_a_drafter_that_follows_is_accepted_more_and_texts_and_policy_stay():
    texts, followed, weights = drift(True)
    plain, alone, own = drift(False)
    assert all(map(torch.equal, texts, plain))
    assert_same(dict(weights), dict(own))
    assert sum(followed[-10:]) / 10 > sum(alone[-10:]) / 10 + 0.3
    captured = drift(True, updates=12, graphs=True)  # replayed steps draft with the newest weights
    assert captured[1] == followed[:12]
    assert followed[11] != followed[0]
    assert all(map(torch.equal, texts, captured[0]))


def test_texts_keep_the_target_s_distribution_while_the_drafter_learns():
    """New seeds for every rollout; the drafter depends on all texts before."""
    generator = generator_of(tiny(TARGET), RejectionSampler())
    adam = torch.optim.AdamW(generator.drafter.parameters(), lr=0.05)
    follow, results = FollowTarget(generator, distil, adam), []
    for first in range(0, 4000, 400):
        seeds = list(range(first, first + 400))
        ids = torch.tensor([PROMPT]).expand(400, -1)
        results.append(generator.generate(ids, **{**CALL, "max_new_tokens": 3}, seed=seeds))
        follow(results[-1])
    every = [number for result in results for number in result.lengths]
    sequences = torch.cat([result.sequences for result in results])
    whole = dataclasses.replace(results[0], sequences=sequences, lengths=every)
    assert results[-1].stats.acceptance_length > results[0].stats.acceptance_length + 0.2
    assert min(p_values_of_texts(whole, "plain").values()) > 1e-6
    assert min(p_values_of_texts(whole, "truncated").values()) < 1e-6  # not this temperature's


class Policy(Trainer):
    """Learns to write token 2 from a rollout before every step, as TRL's trainers do."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        """A policy gradient."""
        seeds = torch.randint(2**62, (len(inputs["input_ids"]),)).tolist()
        with torch.no_grad():
            result = self.generator.generate(inputs["input_ids"], **CALL, seed=seeds)
        self.texts.append(result.new_tokens)
        logits = model(result.sequences).logits[:, len(PROMPT) - 1 : -1].log_softmax(dim=-1)
        logprobs = logits.gather(2, result.new_tokens.clone()[..., None])[..., 0]
        reward = (result.new_tokens == 2).float().mean(dim=1)
        return -(logprobs * (reward - reward.mean())[:, None]).mean()


def train(folder, resume=None):
    generator = generator_of(copy.deepcopy(tiny(TARGET)))
    model = generator.target.model
    adam = torch.optim.AdamW(generator.drafter.parameters(), lr=0.01)
    follow = FollowTarget(generator, distil, adam, every=2)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=7,
        save_steps=3,
        learning_rate=0.02,
        per_device_train_batch_size=8,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    data = [{"input_ids": torch.tensor(PROMPT), "labels": torch.tensor(PROMPT)}] * 64
    trainer = Policy(model=model, args=arguments, train_dataset=data, callbacks=[follow])
    trainer.generator, trainer.texts = generator, []
    trainer.train(resume_from_checkpoint=resume)
    return trainer.texts, follow


def test_a_run_that_goes_on_from_a_checkpoint_ends_in_the_same_drafter(tmp_path):
    texts, follow = train(tmp_path)
    assert (follow.rollouts, follow.updates) == (7, 3)
    late, resumed = train(tmp_path, resume=str(tmp_path / "checkpoint-3"))
    assert all(map(torch.equal, texts[3:], late))
    assert_same(follow.state_dict(), resumed.state_dict())
    for key, tensor in tiny(DRAFT).state_dict().items():
        assert not tensor.equal(follow.drafter.model.state_dict()[key]), key
    (tmp_path / "checkpoint-3" / "drafter-process-0-of-1.pt").unlink()
    _, fresh = train(tmp_path, resume=str(tmp_path / "checkpoint-3"))
    assert (fresh.rollouts, fresh.updates) == (4, 2)


def test_what_cannot_follow_is_refused():
    model = copy.deepcopy(tiny(TARGET))
    with pytest.raises(ValueError, match=r"PromptLookupDrafter has no weights to train"):
        FollowTarget(SpeculativeGenerator(model, "lookup"), distil)
    itself = SpeculativeGenerator(model, ModelDrafter(model, 2))
    with pytest.raises(ValueError, match=r"ModelDrafter has weights of the target's"):
        FollowTarget(itself, distil)
    half = ModelDrafter(copy.deepcopy(tiny(DRAFT)).bfloat16(), 2)
    with pytest.raises(ValueError, match=r"has weights in torch.bfloat16; make it of float32"):
        FollowTarget(SpeculativeGenerator(model, half), distil)
    generator = generator_of(model)
    for options in ({"every": 0}, {"texts": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
            FollowTarget(generator, distil, **options)
    learned = SpeculativeGenerator(zoo.load_target(), "zoo:eagle3")
    short = learned.generate(ROWS[:1, :1], max_new_tokens=3)
    with pytest.raises(ValueError, match="rows of 3 tokens are too short for 5 unrolled steps"):
        FollowTarget(learned, TrainingTimeTest)(short)
    assert all(weight.requires_grad for weight in model.parameters())


def test_a_head_in_float32_learns_from_a_target_in_bfloat16():
    target = zoo.load_target().bfloat16()
    drafter = zoo.load_drafter("eagle3", target)
    drafter.head.float()
    generator = SpeculativeGenerator(target, drafter)
    follow = FollowTarget(generator, TrainingTimeTest)
    result = generator.generate(torch.arange(30, 50)[None], max_new_tokens=20)
    losses = [follow(result) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert {weight.dtype for weight in target.parameters()} == {torch.bfloat16}


def test_a_gradient_that_is_not_finite_changes_nothing():
    generator = generator_of(copy.deepcopy(tiny(TARGET)))
    result, before = generator.generate(ROWS, **CALL), copied(generator.drafter)
    follow = FollowTarget(generator, distil)
    with torch.no_grad():
        generator.target.model.lm_head.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="a gradient of the drafter is nan; take a lower"):
        follow(result)
    assert follow.updates == 0
    assert_same(before, copied(generator.drafter))
    assert all(weight.grad is None for weight in generator.drafter.parameters())


AVERAGE = """
import sys, torch
from torch import distributed
from specdec.processes import average
rank = int(sys.argv[1])
distributed.init_process_group("gloo", f"file://{sys.argv[2]}", rank=rank, world_size=2)
tensors = [torch.tensor([1.0, 2.0]) * (1 + 2 * rank), torch.tensor(float(rank))]
average(tensors)
assert [t.tolist() for t in tensors] == [[2.0, 4.0], 0.5], tensors
distributed.barrier()
distributed.destroy_process_group()
"""


def test_gradients_of_two_processes_are_averaged(tmp_path):
    call = [sys.executable, "-c", AVERAGE]
    started = [subprocess.Popen([*call, str(rank), str(tmp_path / "meet")]) for rank in (0, 1)]
    assert [process.wait(timeout=120) for process in started] == [0, 0]
