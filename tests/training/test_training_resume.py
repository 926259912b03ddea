"""A run that was interrupted goes on from its checkpoint as if nothing had happened."""

import math
import shutil
import signal
from pathlib import Path

import pytest
import torch
from training_runs import (
    Bigrams,
    Counted,
    assert_same,
    objective_of,
    on_a_cpu,
    plan_of,
    random_text,
    run,
    weights_of,
)

from specdec.training import PackedStream, train


@pytest.fixture(autouse=True)
def _on_a_cpu():
    with on_a_cpu():
        yield


def checkpoint_of(folder: Path):
    """Everything that a checkpoint holds but the clock."""
    loaded = {path.name: torch.load(path, weights_only=False) for path in folder.glob("*.[bp]*")}
    loaded["custom_checkpoint_0.pkl"].pop("wall_s")
    return loaded


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
@pytest.mark.parametrize(("accumulation", "at"), [(1, 5), (2, 8), (2, 9)])
def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(kind, accumulation, at, tmp_path):
    """Bit for bit, the noise of EAGLE-1's loss included, and from wherever it broke off."""
    options = {"accumulation": accumulation, "checkpoint_minutes": 0, "evaluate_every": 3}
    plan = plan_of(7, **options, precision="bf16")
    evaluated = []

    def evaluate():
        evaluated.append(1)
        return {"number": len(evaluated)}

    whole, stream, progress = run(kind, tmp_path / "whole", plan, evaluate=evaluate)
    evaluated.clear()
    run(kind, tmp_path / "parts", plan, at=at, evaluate=evaluate)
    torch.manual_seed(99)  # a resumed run starts in another process
    parts, other_stream, other = run(kind, tmp_path / "parts", plan, head_seed=1, evaluate=evaluate)
    assert other.num_steps == progress.num_steps == 7
    assert other.num_tokens == 7 * 64
    assert [e["step"] for e in other.evaluations] == [3, 6, 7]
    assert_same(weights_of(whole), weights_of(parts))
    assert stream.state_dict() == other_stream.state_dict()
    checkpoints = [checkpoint_of(tmp_path / name / "checkpoint") for name in ("whole", "parts")]
    assert len(checkpoints[0]) == 5  # two optimisers, generators, progress, stream
    assert_same(*checkpoints)


class Signalled(Counted):
    """Text that sends the process a signal with some batch."""

    def __init__(self, number, at):
        super().__init__()
        self.number, self.signalled_at = number, at

    def take(self, batch_size, length):
        """As `PackedStream`."""
        if self.num_taken == self.signalled_at:
            signal.raise_signal(self.number)
        return super().take(batch_size, length)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_the_step_under_way(number, tmp_path):
    plan, before = plan_of(7, accumulation=2), signal.getsignal(number)
    whole, _, _ = run("eagle3", tmp_path / "whole", plan)
    objective = objective_of("eagle3")
    with pytest.raises(KeyboardInterrupt, match=f"step 3 is saved in {tmp_path}"):
        train(objective, Signalled(number, at=4), plan=plan, work_dir=tmp_path)
    assert signal.getsignal(number) is before
    resumed, stream, progress = run("eagle3", tmp_path, plan, head_seed=1)
    assert progress.num_steps == 7
    assert stream.num_taken == 2 * (7 - 3)
    assert_same(weights_of(whole), weights_of(resumed))


def test_a_second_interrupt_ends_the_step_at_once(tmp_path):
    class Impatient(Signalled):
        def take(self, batch_size, length):
            if self.num_taken == self.signalled_at:
                signal.raise_signal(self.number)
            return super().take(batch_size, length)

    with pytest.raises(KeyboardInterrupt) as error:
        train(
            objective_of("bigrams"), Impatient(signal.SIGINT, 2), plan=plan_of(4), work_dir=tmp_path
        )
    assert str(error.value) == ""
    assert not (tmp_path / "checkpoint").exists()


def test_an_interrupted_evaluation_is_left_out_and_the_step_saved(tmp_path):
    def evaluate():
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("an evaluation may break off anywhere")

    plan = plan_of(4, evaluate_every=2)
    with pytest.raises(KeyboardInterrupt, match="step 2 is saved"):
        train(objective_of("bigrams"), Counted(), plan=plan, work_dir=tmp_path, evaluate=evaluate)
    _, stream, progress = run("bigrams", tmp_path, plan)
    assert (progress.num_steps, stream.num_taken) == (4, 2)
    assert progress.evaluations == []


def test_an_evaluation_saves(tmp_path):
    plan = plan_of(5, evaluate_every=2, checkpoint_minutes=60)
    run("bigrams", tmp_path, plan, at=3, evaluate=lambda: {"x": 1.0})
    _, stream, progress = run("bigrams", tmp_path, plan, evaluate=lambda: {"x": 1.0})
    assert stream.num_taken == 3
    assert [e["step"] for e in progress.evaluations] == [2, 4, 5]


class BrokenUpdate(Bigrams):
    """The loss of every step is sound; the gradient of one of them is NaN."""

    def __init__(self, at):
        super().__init__()
        self.calls, self.at = 0, at

    def forward(self, ids):
        """Adds 0 sqrt(0), whose derivative is 0 inf."""
        self.calls += 1
        weight = self.proj.weight
        nothing = 0 * (weight - weight.detach()).abs().sum().sqrt()
        return super().forward(ids) + (nothing if self.calls == self.at else 0)


@pytest.mark.parametrize("checkpoint_minutes", [0, 60])
def test_weights_that_the_last_update_broke_are_not_saved(checkpoint_minutes, tmp_path):
    plan = plan_of(3, checkpoint_minutes=checkpoint_minutes)
    evaluated = []
    with pytest.raises(FloatingPointError, match=r"step 3 has made weights NaN .* not saved"):
        train(
            BrokenUpdate(at=3),
            Counted(),
            plan=plan,
            work_dir=tmp_path,
            evaluate=lambda: evaluated.append(1) or {},
        )
    assert not evaluated
    if checkpoint_minutes:
        assert not (tmp_path / "checkpoint").exists()
    else:
        _, _, progress = run("bigrams", tmp_path, plan)
        assert progress.num_steps == 3


def test_a_finished_run_is_not_run_again(tmp_path):
    first, stream, progress = run("eagle3", tmp_path, plan_of(3))
    again, other, returned = run("eagle3", tmp_path, plan_of(3), at=0, head_seed=1)
    assert_same(weights_of(first), weights_of(again))
    assert stream.state_dict() == other.state_dict()
    assert returned == progress
    _, _, longer = run("eagle3", tmp_path, plan_of(5))
    assert longer.num_steps == 5
    assert longer.wall_s > progress.wall_s


def test_wherever_saving_breaks_off_a_whole_checkpoint_is_left(tmp_path, monkeypatch):
    """Every file operation fails once; a folder that is being deleted is then half gone."""
    remaining = math.inf

    def failing(action, before=lambda path: None):
        def act(*args, **kwargs):
            nonlocal remaining
            remaining -= 1
            if remaining < 0:
                before(args[0])
                raise KeyboardInterrupt
            return action(*args, **kwargs)

        return act

    def lose_half(folder):
        for file in sorted(Path(folder).glob("*"))[::2]:
            file.unlink()

    plan = plan_of(4, checkpoint_minutes=0)
    expected = weights_of(run("bigrams", tmp_path / "whole", plan)[0])
    monkeypatch.setattr(shutil, "rmtree", failing(shutil.rmtree, lose_half))
    monkeypatch.setattr(Path, "rename", failing(Path.rename))
    monkeypatch.setattr(torch, "save", failing(torch.save))
    for moment in range(1000):
        remaining = moment
        _, first, progress = run("bigrams", tmp_path / str(moment), plan)
        if progress is not None:
            break
        remaining = math.inf
        resumed, second, _ = run("bigrams", tmp_path / str(moment), plan)
        assert_same(weights_of(resumed), expected, f"moment {moment}")
        assert second.num_taken <= plan.steps - first.num_taken + 1, f"a step lost, {moment}"
    assert moment > 30


def test_a_checkpoint_of_another_run_is_refused_by_name(tmp_path):
    run("eagle3", tmp_path, plan_of(1))
    with pytest.raises(ValueError, match=r"checkpoint in .*checkpoint is of another run, delete"):
        run("eagle1", tmp_path, plan_of(2))
    with pytest.raises(ValueError, match=r"another run.*a text of 600 tokens, this one has 550"):
        train(
            objective_of("eagle3"),
            PackedStream(random_text(count=11), seed=5),
            plan=plan_of(2),
            work_dir=tmp_path,
        )
