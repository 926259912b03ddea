"""Two processes train as one does, on batches of the same rows; the first of them evaluates."""

import math
from contextlib import suppress

import pytest
import torch
from accelerate import debug_launcher
from torch import distributed
from training_runs import Counted, objective_of, on_a_cpu, plan_of, weights_of

from specdec.training import train


@pytest.fixture(autouse=True)
def _on_a_cpu():
    with on_a_cpu():
        yield


def train_and_report(kind, plan, folder, at=math.inf):
    """Trains as one of the processes, or alone, and leaves in a folder what this one saw."""
    objective, stream, evaluated = objective_of(kind), Counted(at), []
    objective.noise = 0.0  # which every process draws for itself

    def evaluate():
        evaluated.append(1)
        return {"number": 1.0}

    progress = train(objective, stream, plan=plan, work_dir=folder / "run", evaluate=evaluate)
    rank = distributed.get_rank() if distributed.is_initialized() else None
    report = vars(progress) | {"evaluated": len(evaluated), "weights": weights_of(objective)}
    torch.save(report | stream.state_dict(), folder / f"{rank}.pt")


@pytest.mark.parametrize(("kind", "accumulation"), [("eagle3", 1), ("eagle3", 2), ("eagle1", 1)])
def test_two_processes_train_as_one_does(kind, accumulation, tmp_path):
    plan = plan_of(4, accumulation=accumulation, evaluate_every=2, checkpoint_minutes=0)
    alone, together, handed_over = folders = [tmp_path / str(i) for i in range(3)]
    for folder in folders:
        folder.mkdir()
    train_and_report(kind, plan, alone)
    with suppress(KeyboardInterrupt):
        train_and_report(kind, plan, handed_over, at=2 * accumulation)
    for folder in (together, handed_over):
        with on_a_cpu():  # what is forked must not know that it was alone
            debug_launcher(train_and_report, (kind, plan, folder), num_processes=2)
    one = torch.load(alone / "None.pt", weights_only=False)
    assert one["evaluated"] == 2
    for folder in (together, handed_over):
        first, second = (torch.load(folder / f"{i}.pt", weights_only=False) for i in range(2))
        assert first["wall_s"] == second["wall_s"]
        assert [e["step"] for e in first["evaluations"]] == [2, 4]
        assert first["evaluated"] == (2 if folder is together else 1)
        assert second["evaluated"] == 0
        for seen in (first, second):
            for key in ("num_steps", "num_tokens", "epoch", "position"):
                assert seen[key] == one[key]
            assert seen["loss"] == pytest.approx(one["loss"], rel=1e-5)
            for key, weight in seen["weights"].items():
                assert weight.equal(first["weights"][key])
                # Muon orthogonalises in bfloat16, see the test of accumulated batches.
                torch.testing.assert_close(weight, one["weights"][key], rtol=0, atol=1e-3)
