"""A run that was interrupted goes on from its checkpoint as if nothing had happened."""

import math
import shutil
import signal
from pathlib import Path

import pytest
import torch
from architectures import build
from safetensors.torch import save_file
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

from specdec.training import PackedStream, TrainingTimeTest, train


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
        self._calls, self._at = 0, at

    def forward(self, ids):
        """Adds 0 sqrt(0), whose derivative is 0 inf."""
        self._calls += 1
        weight = self.proj.weight
        nothing = 0 * (weight - weight.detach()).abs().sum().sqrt()
        return super().forward(ids) + (nothing if self._calls == self._at else 0)


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
        progress = train(BrokenUpdate(at=9), Counted(), plan=plan, work_dir=tmp_path)
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
    message = r"checkpoint in .*checkpoint is of another run, delete .* differ in objective.class"
    with pytest.raises(ValueError, match=message):
        run("eagle1", tmp_path, plan_of(2))


def other_teacher():
    model = build("llama")
    model.lm_head.weight.data.neg_()
    return TrainingTimeTest(objective_of("eagle3").drafter, model, 3)


def with_steps(num_steps, step_weight=0.8):
    whole = objective_of("eagle3")
    return TrainingTimeTest(whole.drafter, whole._teacher.target, num_steps, step_weight)


OTHER_RUNS = {
    "seed": ({"seed": 5}, None, None, r"plan.seed \(0 there, 5 here\)"),
    "rate": ({"lr_matrices": 0.5}, None, None, r"plan.lr_matrices \(0.02 there, 0.5 here\)"),
    "decay": ({"weight_decay": 0.9}, None, None, "plan.weight_decay"),
    "warm-up": ({"warmup_fraction": 0.5}, None, None, "plan.warmup_fraction"),
    "clipping": ({"clip_norm": 2.0}, None, None, "plan.clip_norm"),
    "precision": ({"precision": "bf16"}, None, None, "plan.precision"),
    "lengths": ({"lengths": ((1.0, 8),)}, None, None, "plan.lengths"),
    "rows": ({"tokens_per_step": 128}, None, None, r"plan.rows_per_step \(\[4\] there, \[8\] here"),
    "cut rows": ({"accumulation": 3}, None, None, r"plan.rows_per_step \(\[4\] there, \[3\] here"),
    "text": ({}, None, lambda: PackedStream(random_text(1), seed=5), "data.sha256"),
    "less text": ({}, None, lambda: PackedStream(random_text(count=11), seed=5), "data.documents"),
    "order": ({}, None, lambda: PackedStream(random_text(), seed=6), r"data.seed \(5 there, 6 her"),
    "teacher": ({}, other_teacher, None, "objective.teacher.weights"),
    "unrolled": ({}, lambda: with_steps(2), None, r"objective.num_steps \(3 there, 2 here\)"),
    "weights": ({}, lambda: with_steps(3, 0.5), None, "objective.step_weight"),
}


@pytest.fixture(scope="module", name="begun")
def _begun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("begun")
    run("eagle3", folder, plan_of(1))
    return folder


@pytest.mark.parametrize("case", OTHER_RUNS)
def test_a_run_with_other_settings_does_not_go_on(case, begun):
    options, objective, stream, difference = OTHER_RUNS[case]
    files = {p: p.stat().st_mtime_ns for p in begun.rglob("*")}
    objective = objective_of("eagle3") if objective is None else objective()
    before = weights_of(objective)
    stream = Counted() if stream is None else stream()
    with pytest.raises(ValueError, match=f"is of another run, delete .* differ in .*{difference}"):
        train(objective, stream, plan=plan_of(2, **options), work_dir=begun)
    assert_same(before, weights_of(objective))
    assert files == {p: p.stat().st_mtime_ns for p in begun.rglob("*")}


def test_a_run_goes_on_with_its_rows_in_other_batches(tmp_path):
    run("eagle3", tmp_path, plan_of(1))
    changes = {"accumulation": 2, "checkpoint_minutes": 0, "evaluate_every": 1}
    _, _, progress = run("eagle3", tmp_path, plan_of(2, **changes))
    assert progress.num_steps == 2


def write_all(files, change):
    """Changes the bytes of all files but the settings."""
    for file in files:
        if file.name != "settings.json":
            file.write_bytes(change(file.read_bytes()))


def named(files, part):
    return next(file for file in files if part in file.name)


DAMAGES = {
    "one file missing": lambda files: files[0].unlink(),
    "model missing": lambda files: named(files, "safetensors").unlink(),
    "cut": lambda files: write_all(files, lambda content: content[:50]),
    "empty": lambda files: write_all(files, lambda content: b""),
    "noise": lambda files: write_all(files, lambda content: b"x" * 99),
    "shapes": lambda files: save_file({"w": torch.zeros(2)}, named(files, "safetensors")),
    "position": lambda files: torch.save({"epoch": 0}, named(files, "custom_checkpoint_1")),
    "progress": lambda files: torch.save({"steps": 0}, named(files, "custom_checkpoint_0")),
    "no settings": lambda files: named(files, "settings").unlink(),
    "cut settings": lambda files: named(files, "settings").write_text("{"),
    "no dictionary": lambda files: named(files, "settings").write_text("[]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_its_folder(damage, begun, tmp_path):
    shutil.copytree(begun, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoint"
    DAMAGES[damage](sorted(folder.iterdir()))
    with pytest.raises(ValueError, match=f"the checkpoint in {folder} .* delete it or choose"):
        run("eagle3", tmp_path / "run", plan_of(2))
