"""Small training runs on a CPU, shared by the tests of training."""

import math
import signal
from contextlib import contextmanager, suppress

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState
from architectures import VOCAB, build
from eagle_heads import head_for
from torch import nn

from specdec.drafters import EagleDrafter
from specdec.lab.training import (
    FeatureAndToken,
    ObjectiveArguments,
    ObjectiveTrainer,
    PackedStream,
    TrainingTimeTest,
)


@contextmanager
def on_a_cpu():
    """As in a fresh process without a GPU: accelerate keeps what it found in the first one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        AcceleratorState._reset_state(reset_partial_state=True)
        yield
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


def arguments_of(folder, steps, **options):
    """A few steps of four rows of 16 tokens."""
    sizes = {"tokens_per_step": 64, "row_lengths": ((1.0, 16),), "max_steps": steps}
    rest = {"learning_rate": 0.02, "lr_ratio": 0.5, "use_cpu": True, "disable_tqdm": True}
    return ObjectiveArguments(str(folder), **sizes | rest | options)


def random_text(seed=0, count=12):
    """Documents of 50 random tokens."""
    generator = np.random.default_rng(seed)
    return [generator.integers(0, VOCAB, 50) for _ in range(count)]


class Bigrams(nn.Module):
    """The smallest language model: the next token's logits are a row of a product."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed_tokens = nn.Embedding(VOCAB, 4)
        self.proj = nn.Linear(4, 4, bias=False)
        self.lm_head = nn.Linear(4, VOCAB)
        for parameter in self.parameters():
            parameter.data.normal_(generator=generator)

    def forward(self, ids):
        """Mean nats per token."""
        logits = self.lm_head(self.proj(self.embed_tokens(ids[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def objective_of(kind, *, seed=0):
    """A random head and its objective."""
    if kind == "bigrams":
        return Bigrams()
    model = build("llama")
    is_first = kind == "eagle1"
    head = head_for(model, kind="input" if is_first else "attention", seed=seed)
    drafter = EagleDrafter(head, model, 3)
    return FeatureAndToken(drafter, model) if is_first else TrainingTimeTest(drafter, model, 3)


class Text(PackedStream):
    """Random text that interrupts the run when one more batch than `at` is asked for."""

    def __init__(self, at=math.inf):
        super().__init__(random_text(), seed=5)
        self.num_taken, self.at = 0, at

    def batches(self, shapes, *, skip=0):
        """As `PackedStream`."""
        for rows in super().batches(shapes, skip=skip):
            if self.num_taken == self.at:
                signal.raise_signal(signal.SIGINT)
            self.num_taken += 1
            yield rows


def run(kind, folder, steps, *, at=math.inf, head_seed=0, **options):
    """Trains until the end or an interruption: objective, text and state (`None` if cut)."""
    objective, text, state = objective_of(kind, seed=head_seed), Text(at), None
    trainer = ObjectiveTrainer(objective, arguments_of(folder, steps, **options), text)
    with suppress(KeyboardInterrupt):
        state = trainer.train_or_resume()
    return objective, text, state


def train(objective, folder, steps, text=None, **options):
    """The state of a run of an objective."""
    args = arguments_of(folder, steps, **options)
    return ObjectiveTrainer(objective, args, text or Text()).train_or_resume()


def weights_of(objective):
    return {key: tensor.clone() for key, tensor in objective.state_dict().items()}


def assert_same(a, b, place=""):
    """Bit for bit, in any nesting."""
    assert type(a) is type(b), place
    if isinstance(a, dict):
        assert a.keys() == b.keys(), place
        for key in a:
            assert_same(a[key], b[key], f"{place}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), place
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{place}/{i}")
    elif isinstance(a, torch.Tensor | np.ndarray):
        assert a.shape == b.shape, place
        assert (a == b).all(), place
    else:
        assert a == b, place
