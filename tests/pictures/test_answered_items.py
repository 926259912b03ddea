"""Answers of unequal length: every token of an answer weighs the same in a step of the optimiser,
however its answers are spread over batches and processes.

The oracle for a step is one batch of all its answers; for a batch, each text alone.
"""

import pytest
import torch
from architectures import VOCAB, build
from eagle_heads import head_for
from training_runs import arguments_of, on_a_cpu
from transformers import Trainer, TrainerCallback

from recipes.pictures.answers import Answered, AnsweredStream, AnswerTimeTest
from specdec.drafters import EagleDrafter
from specdec.lab.training import ObjectiveArguments, ObjectiveTrainer

MODEL = build("llama", dtype=torch.float64)
ANSWERS = (3, 55, 8, 20)
STEPS = 3


@pytest.fixture(autouse=True)
def _on_a_cpu():
    with on_a_cpu():
        yield


def answered(seed, num_prompt, length):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (1, num_prompt + length), generator=generator)
    return Answered({"input_ids": ids}, num_prompt)


EXAMPLES = [answered(i, 6 + i, length) for i, length in enumerate(ANSWERS)]


def objective_of(num_steps=STEPS):
    drafter = EagleDrafter(head_for(MODEL).double(), MODEL)
    return AnswerTimeTest(drafter, MODEL, num_steps, step_weight=0.7)


class Gradient(TrainerCallback):
    """The gradient of a run's first step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.found = torch.cat([weight.grad.flatten() for weight in weights]).clone()


def gradient_of(trainer):
    trainer.add_callback(callback := Gradient())
    trainer.train()
    return callback.found, trainer.state.log_history[0]["loss"]


SIZES = {"tokens_per_step": 256, "row_lengths": ((1.0, 64),), "logging_steps": 1}
SIZES |= {"max_grad_norm": 0.0, "save_strategy": "no", "report_to": []}


def trained(folder, **options):
    arguments = arguments_of(folder, 1, **SIZES, **options)
    return ObjectiveTrainer(objective_of(), arguments, AnsweredStream(EXAMPLES, seed=0))


@pytest.mark.parametrize("batches", [2, 4])
def test_accumulated_batches_have_the_gradient_of_one_batch(batches, tmp_path):
    whole, loss = gradient_of(trained(tmp_path))
    parts, same = gradient_of(trained(tmp_path, gradient_accumulation_steps=batches))
    assert whole.abs().max() > 0
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-7)
    assert same == pytest.approx(loss, rel=1e-6)


class OneOfTwo(ObjectiveArguments):
    """A process of two, of which this one is asked at a time."""

    index = 0

    @property
    def world_size(self):
        """As under a launcher."""
        return 2

    @property
    def process_index(self):
        """As under a launcher."""
        return self.index


def test_processes_have_together_the_gradient_of_one(tmp_path, monkeypatch):
    whole, _ = gradient_of(trained(tmp_path))
    monkeypatch.setattr("training_runs.ObjectiveArguments", OneOfTwo)
    own = []
    for index in (0, 1):
        monkeypatch.setattr(OneOfTwo, "index", index)
        trainer = trained(tmp_path)
        counts = []

        def gather(count, counts=counts):
            counts.append(int(count))
            return torch.tensor([int(count), sum(ANSWERS) - int(count)])

        trainer.accelerator.gather = gather
        own.append(gradient_of(trainer)[0])
        assert counts[0] < sum(ANSWERS)
    torch.testing.assert_close(sum(own) / 2, whole, rtol=1e-4, atol=1e-7)  # as DDP averages


def test_hfs_own_trainer_divides_as_ours(tmp_path):
    """`labels` of a batch are what HF counts; the objective says that it takes the number."""
    whole, _ = gradient_of(trained(tmp_path))

    class Plain(Trainer):
        def compute_loss(self, model, inputs, num_items_in_batch=None, **kwargs):
            return model(inputs["ids"], num_items_in_batch=num_items_in_batch)

        def get_train_dataloader(self):
            for rows in AnsweredStream(EXAMPLES, seed=0).batches([(1, 64)] * 4):
                labels = torch.zeros(sum(len(row.ids) - row.num_prompt for row in rows))
                yield {"ids": rows, "labels": labels}

    options = {**SIZES, "gradient_accumulation_steps": 4}
    arguments = arguments_of(tmp_path, 1, **options)
    trainer = Plain(objective_of(), arguments, train_dataset=[0] * 4)
    assert trainer.model_accepts_loss_kwargs
    parts, _ = gradient_of(trainer)
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("num_steps", [1, 3, 5])
def test_an_answer_is_learned_alike_whatever_stands_beside_it(num_steps):
    """The shortest answer is shorter than a draft, and the longest row has no other rights."""
    objective = objective_of(num_steps)
    together = objective(EXAMPLES) * sum(ANSWERS)
    alone = [objective([each]) * length for each, length in zip(EXAMPLES, ANSWERS, strict=True)]
    torch.testing.assert_close(together, sum(alone), rtol=1e-5, atol=0)
    number = torch.tensor(1000)
    torch.testing.assert_close(objective(EXAMPLES, number) * 1000, together, rtol=1e-5, atol=0)
