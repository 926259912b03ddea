"""Runs under HF's `Trainer`: they yield acceptance, and a run is the same however it is cut up."""

import math
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import debug_launcher
from architectures import VOCAB, build
from torch import distributed
from training_runs import (
    Bigrams,
    Text,
    arguments_of,
    assert_same,
    objective_of,
    on_a_cpu,
    random_text,
    run,
    train,
    weights_of,
)
from transformers import TrainerCallback

from specdec import SpeculativeGenerator
from specdec.drafters import EagleDrafter
from specdec.lab.evaluation import evaluate
from specdec.lab.training import (
    NextToken,
    ObjectiveTrainer,
    PackedStream,
    TrainingTimeTest,
    callbacks,
    new_head,
)
from specdec.lab.training.trainer import last_checkpoint

PERIOD = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(0))[:9].numpy()


@pytest.fixture(autouse=True)
def _on_a_cpu():
    with on_a_cpu():
        yield


@pytest.fixture(scope="module")
def parrot(tmp_path_factory):
    """A target that has learned one short period by heart; its two tables are one."""
    model, folder = build("llama", tie_word_embeddings=True), tmp_path_factory.mktemp("run")
    with on_a_cpu():
        train(NextToken(model), folder, 60, PackedStream([np.tile(PERIOD, 60)], seed=0))
        other = build("llama", tie_word_embeddings=True)
        train(NextToken(other), folder, 60)  # is finished there: the weights are loaded
    assert_same(weights_of(model), weights_of(other))
    return model.eval()


def test_a_head_that_learns_periodic_text_has_all_its_drafts_accepted(parrot, tmp_path):
    drafter = EagleDrafter(new_head(parrot, "eagle3", seed=1), parrot, 4)
    prompts = torch.from_numpy(np.stack([np.roll(PERIOD, -i) for i in range(4)]))

    def acceptance(temperature):
        generator = SpeculativeGenerator(parrot, drafter)
        options = {"max_new_tokens": 20, "temperature": temperature}
        return evaluate(generator, prompts, **options).stats.acceptance_length

    assert acceptance(0) < 2
    text = PackedStream([np.tile(PERIOD, 60)], seed=0)
    state = train(TrainingTimeTest(drafter, parrot), tmp_path, 100, text)
    first, last = (log["loss"] for log in state.log_history[:2])
    assert last < 0.7 * first
    assert acceptance(0) > 4.5
    assert acceptance(1) > 4


def test_accumulated_batches_are_one_batch_of_all_their_rows(tmp_path):
    one, more = (run("eagle3", tmp_path / str(n), 3, gradient_accumulation_steps=n) for n in (1, 4))
    assert [text.num_taken for _, text, _ in (one, more)] == [3, 12]
    ours, theirs = (state.log_history[-1]["train_loss"] for *_, state in (one, more))
    assert ours == pytest.approx(theirs, rel=1e-5)
    for key, weight in weights_of(more[0]).items():
        # Muon orthogonalises in bfloat16: an update of lr 0.02 may differ by a part in 100.
        torch.testing.assert_close(weight, weights_of(one[0])[key], rtol=0, atol=1e-3)


@pytest.mark.parametrize(("kind", "accumulation", "at"), [("eagle3", 1, 2), ("eagle1", 2, 5)])
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(kind, accumulation, at, tmp_path):
    """Bit for bit, the noise of EAGLE-1's loss included, and from wherever it broke off."""
    options = {"gradient_accumulation_steps": accumulation, "bf16": True}
    whole, text, _ = run(kind, tmp_path / "whole", 5, **options)
    _, cut, state = run(kind, tmp_path / "parts", 5, at=at, **options)
    assert (state, cut.num_taken) == (None, 3 * accumulation)  # the step under way is completed
    torch.manual_seed(99)  # a resumed run starts in another process
    parts, rest, state = run(kind, tmp_path / "parts", 5, head_seed=1, **options)
    assert state.global_step == 5
    assert cut.num_taken + rest.num_taken == text.num_taken
    assert_same(weights_of(whole), weights_of(parts))
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        files = [tmp_path / way / "checkpoint-5" / name for way in ("whole", "parts")]
        assert_same(*(torch.load(file, weights_only=False) for file in files))


def test_a_run_depends_on_its_seed(tmp_path):
    first, again, other = (
        weights_of(run("eagle1", tmp_path / str(i), 1, seed=seed)[0])
        for i, seed in enumerate((0, 0, 1))
    )
    assert_same(first, again)
    assert any((other[key] != first[key]).any() for key in first)


class OnStepEnd(TrainerCallback):
    """Does something after some step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.act()


def trainer_of(folder, steps, act=None, at=2, **options):
    args = arguments_of(folder, steps, **options)
    return ObjectiveTrainer(Bigrams(), args, Text(), callbacks=act and [OnStepEnd(at, act)])


def interrupted_measurement(trainer):
    def measure():
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("a measurement may break off anywhere")

    trainer.interruption.run(measure)


INTERRUPTS = {
    "SIGINT": lambda trainer: signal.raise_signal(signal.SIGINT),
    "SIGTERM": lambda trainer: signal.raise_signal(signal.SIGTERM),
    "in a measurement": interrupted_measurement,
    "twice": lambda trainer: [signal.raise_signal(signal.SIGINT) for _ in range(2)],
}


@pytest.mark.parametrize("way", INTERRUPTS)
def test_an_interrupt_saves_the_step_and_gives_the_signal_back_and_a_second_ends_it(way, tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    trainer = trainer_of(tmp_path, 4, lambda: INTERRUPTS[way](trainer))
    with pytest.raises(KeyboardInterrupt) as error:
        trainer.train_or_resume()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    is_saved = way != "twice"
    assert str(error.value) == (f"step 2 is saved in {tmp_path}" if is_saved else "")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"] * is_saved


def test_a_checkpoint_that_is_not_whole_is_passed_over(tmp_path):
    whole, *_ = run("bigrams", tmp_path / "whole", 5)
    run("bigrams", tmp_path / "parts", 5, at=2, save_steps=1)
    shutil.copytree(tmp_path / "parts" / "checkpoint-3", tmp_path / "parts" / "checkpoint-4")
    (tmp_path / "parts" / "checkpoint-4" / "trainer_state.json").unlink()  # is written last
    parts, text, _ = run("bigrams", tmp_path / "parts", 5)
    assert text.num_taken == 2
    assert_same(weights_of(whole), weights_of(parts))


def test_a_run_goes_on_from_the_largest_step(tmp_path):
    for step in (2, 10, 9):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    assert last_checkpoint(tmp_path).name == "checkpoint-10"


class Steps(TrainerCallback):
    """Remembers the rates of every step, in a world where each takes a second."""

    def __init__(self):
        self.rates, self.now_s = [], 0.0

    def monotonic(self):
        self.now_s += 1.0
        return self.now_s

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.rates.append([group["lr"] for group in optimizer.param_groups])


def paced(monkeypatch, folder, **options):
    """A run over rows of 8 and then of 16 tokens: its state, its rates and the rows' lengths."""
    steps, lengths, text = Steps(), [], Text()
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=steps.monotonic))
    options = {"max_steps": -1, "row_lengths": ((0.5, 8), (1.0, 16)), "warmup_steps": 0.1} | options
    objective = Bigrams()

    def count(module, args, inputs):
        lengths.append(inputs["ids"].shape[1] - 1)

    objective.register_forward_pre_hook(count, with_kwargs=True)
    trainer = ObjectiveTrainer(objective, arguments_of(folder, **{"steps": None} | options), text)
    trainer.add_callback(steps)
    return trainer.train_or_resume(), steps.rates, lengths, trainer


def test_steps_and_minutes_give_the_same_curve(monkeypatch, tmp_path):
    by_steps, rates, lengths, _ = paced(monkeypatch, tmp_path / "steps", max_steps=20)
    by_minutes, others, other_lengths, _ = paced(monkeypatch, tmp_path / "minutes", minutes=1 / 3)
    assert by_steps.global_step == by_minutes.global_step == 20
    assert lengths == other_lengths == [8] * 10 + [16] * 10
    # HF's schedule begins one step, or one tick of the clock, after 0.
    np.testing.assert_allclose(rates[:-1], others[1:], rtol=0, atol=1e-4)
    assert rates[1] == pytest.approx([0.02, 0.01])
    assert rates[-1][0] == pytest.approx(0.02 * 0.02)


def test_a_run_by_minutes_goes_on_with_its_clock(monkeypatch, tmp_path):
    monkeypatch.setattr(Text, "batches", interrupted_at(40))
    with pytest.raises(KeyboardInterrupt):
        paced(monkeypatch, tmp_path, minutes=1.0)
    monkeypatch.undo()
    state, rates, lengths, trainer = paced(monkeypatch, tmp_path, minutes=1.0)
    assert state.global_step == 60
    assert lengths == [16] * 19
    assert trainer.clock.wall_s == 60
    assert rates[0][0] < 0.02 / 2


def interrupted_at(index):
    def batches(self, shapes, *, skip=0):
        for i, rows in enumerate(PackedStream.batches(self, shapes, skip=skip)):
            if i == index:
                signal.raise_signal(signal.SIGINT)
            yield rows

    return batches


def test_checkpoints_come_by_minutes_of_training(monkeypatch, tmp_path):
    paced(monkeypatch, tmp_path, max_steps=20, checkpoint_minutes=0.1, save_total_limit=None)
    assert {path.name for path in tmp_path.iterdir()} == {f"checkpoint-{n}" for n in (7, 14, 20)}


def test_the_precision_of_one_run_says_nothing_about_the_next(tmp_path):
    a, b, c = (
        weights_of(run("eagle3", tmp_path / str(i), 1, bf16=is_half)[0])
        for i, is_half in enumerate((False, True, False))
    )
    assert_same(a, c)
    assert (a["drafter.head.fc.weight"] != b["drafter.head.fc.weight"]).any()


def test_a_loss_or_a_weight_that_is_not_finite_ends_the_run_and_is_not_saved(tmp_path):
    objective = Bigrams()
    objective.embed_tokens.weight.data[random_text()[0][0]] = math.inf
    with pytest.raises(FloatingPointError, match=r"loss of step 1 is nan; .*lower learning rates"):
        train(objective, tmp_path, 2)
    broken = trainer_of(tmp_path, 2, lambda: broken.model.proj.weight.data.fill_(math.nan))
    with pytest.raises(FloatingPointError, match="step 2 has made weights NaN or infinite"):
        broken.train_or_resume()
    assert not list(tmp_path.iterdir())


def test_only_what_requires_a_gradient_is_trained(tmp_path):
    objective = Bigrams()
    objective.lm_head.requires_grad_(False)
    before = weights_of(objective)
    train(objective, tmp_path, 2)
    after = weights_of(objective)
    changed = {key for key, tensor in after.items() if (tensor != before[key]).any()}
    assert changed == {"embed_tokens.weight", "proj.weight"}


@pytest.mark.slow
def test_a_compiled_loss_trains_alike(tmp_path):
    """Slow: compiling takes half a minute on a CPU."""
    weights = []
    for is_compiled in (False, True):
        objective = objective_of("eagle3")
        train(objective, tmp_path / str(is_compiled), 3, torch_compile=is_compiled)
        weights.append(weights_of(objective))
    for key, weight in weights[1].items():
        torch.testing.assert_close(weight, weights[0][key], rtol=0, atol=1e-3)


REFUSED = {
    "max_steps": {"max_steps": -1},
    "minutes": {"minutes": 2.0},
    "minutes must": {"max_steps": -1, "minutes": -1.0},
    "tokens_per_step = 0 has not a row": {"tokens_per_step": 0},
    "tokens_per_step = 64 has not a row of 16": {"gradient_accumulation_steps": 5},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 0},
    "a batch takes 641 tokens and the text has 600": {"tokens_per_step": 640},
    "the tokens per row": {"row_lengths": ((1.0, 0),)},
    "row_lengths": {"row_lengths": ((0.5, 8), (0.4, 9), (1.0, 9))},
    "row_lengths must": {"row_lengths": ((0.5, 8),)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_that_cannot_be_made_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match=name):
        train(Bigrams(), tmp_path, 1, **REFUSED[name])


def train_and_report(kind, folder, at, options):
    """Trains as one of the processes, or alone, and leaves in a folder what this one saw."""
    objective, text = objective_of(kind), Text(at)
    objective.noise = 0.0  # which every process draws for itself
    trainer = ObjectiveTrainer(objective, arguments_of(folder / "run", 3, **options), text)
    try:
        trainer.train_or_resume()
    except KeyboardInterrupt:
        return
    rank = distributed.get_rank() if distributed.is_initialized() else None
    torch.save((trainer.state.global_step, weights_of(objective)), folder / f"{rank}.pt")


def test_two_processes_train_as_one_does(tmp_path):
    kind, accumulation = "eagle3", 2
    options = {"gradient_accumulation_steps": accumulation}
    alone, together, handed_over = folders = [tmp_path / str(i) for i in range(3)]
    for folder in folders:
        folder.mkdir()
    train_and_report(kind, alone, math.inf, options)
    train_and_report(kind, handed_over, 2 * accumulation - 1, options)
    for folder in (together, handed_over):
        with on_a_cpu():  # what is forked must not know that it was alone
            debug_launcher(train_and_report, (kind, folder, math.inf, options), num_processes=2)
    _, one = torch.load(alone / "None.pt")
    for folder in (together, handed_over):
        (steps, first), (_, second) = (torch.load(folder / f"{i}.pt") for i in range(2))
        assert steps == 3
        for key, weight in first.items():
            assert weight.equal(second[key])
            # Muon orthogonalises in bfloat16, see the test of accumulated batches.
            torch.testing.assert_close(weight, one[key], rtol=0, atol=1e-3)


def interrupt_one(folder):
    """The second of two processes is asked to stop."""
    rank = distributed.get_rank() if distributed.is_initialized() else None
    at = 2 if rank == 1 else math.inf
    try:
        trainer = ObjectiveTrainer(Bigrams(), arguments_of(folder / "run", 4), Text(at))
        assert trainer.args.world_size == 2
        trainer.train_or_resume()
    except KeyboardInterrupt as error:
        (folder / f"{trainer.args.process_index}.txt").write_text(str(error))


def test_a_signal_to_one_process_stops_all(tmp_path):
    debug_launcher(interrupt_one, (tmp_path,), num_processes=2)
    for rank in range(2):
        assert "is saved in" in (tmp_path / f"{rank}.txt").read_text()
