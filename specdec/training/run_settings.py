"""What a training run is: all that decides the weights which it arrives at."""

from __future__ import annotations

from typing import Any

from torch import nn

from specdec.drafters.head import HeadDrafter
from specdec.settings import plain, settings_of
from specdec.training.data import PackedStream
from specdec.training.plan import TrainingPlan
from specdec.training.teacher import Teacher

_FREE = ("steps", "minutes", "accumulation", "checkpoint_minutes", "evaluate_every", "compiled")
"""Fields of a plan that a run may go on with changed: its length (the schedule then follows the new
one), and what changes speed and memory. `accumulation` may cut the rows of a step into other
batches; the rows themselves must stay as many.
"""


def run_settings(
    objective: nn.Module, stream: PackedStream, plan: TrainingPlan, num_processes: int
) -> dict[str, Any]:
    """The settings of a run, by whose names another run is refused.

    Args:
        objective: its public plain attributes are settings; so are the configuration of a head that
            it trains and the weights of its teacher.
        stream: the text.
        plan: without the fields that may change.
        num_processes: that share the rows of a step.
    """
    own = {name: value for name, value in vars(plan).items() if name not in _FREE}
    starts = [0.0, *(end for end, _ in plan.lengths[:-1])]
    own["rows_per_step"] = [
        plan.rows_at(start, num_processes) * plan.accumulation for start in starts
    ]
    return {"plan": plain(own), "objective": _settings_of(objective), "data": stream.settings()}


def _settings_of(objective: nn.Module) -> dict[str, Any]:
    """Those of an objective, whose weights change while it is trained: their shapes alone count."""
    settings = settings_of(objective, with_weights=False)
    trained = [(n, p) for n, p in objective.named_parameters() if p.requires_grad]
    settings["parameters"] = {name: list(parameter.shape) for name, parameter in trained}
    for part in vars(objective).values():
        if isinstance(part, Teacher):
            settings["teacher"] = settings_of(part.target)
    for part in objective.children():
        if isinstance(part, HeadDrafter):
            settings["head"] = plain(part.config)
    return settings
