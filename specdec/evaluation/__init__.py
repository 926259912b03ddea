"""Evaluation: what drafting yields, measured by doing it, and how it is shown."""

from specdec.evaluation.costs import CostCurve, costs, measure_costs
from specdec.evaluation.evaluate import evaluate
from specdec.evaluation.evaluation import Evaluation
from specdec.evaluation.hf_generate import HFGenerate
from specdec.evaluation.intervals import Estimate, bootstrap
from specdec.evaluation.paired import difference, quotient
from specdec.evaluation.plan import settings_of_run
from specdec.evaluation.positions import every_position, with_draft_length
from specdec.evaluation.prompts import Prompt, find_set, own_prompts, read_prompts
from specdec.evaluation.protocols import Figures, Protocol, Reproduction, reproduce
from specdec.evaluation.replay import Replay, replay
from specdec.evaluation.run_file import EvaluatedBatch, EvaluatedRow
from specdec.evaluation.self_drafts import choose_layers, plan_draft_caches
from specdec.evaluation.study import Study
from specdec.evaluation.sweep import compare, read_study, sweep
from specdec.show.table import Table

__all__ = [
    "CostCurve",
    "Estimate",
    "EvaluatedBatch",
    "EvaluatedRow",
    "Evaluation",
    "Figures",
    "HFGenerate",
    "Prompt",
    "Protocol",
    "Replay",
    "Reproduction",
    "Study",
    "Table",
    "bootstrap",
    "choose_layers",
    "compare",
    "costs",
    "difference",
    "evaluate",
    "every_position",
    "find_set",
    "measure_costs",
    "own_prompts",
    "plan_draft_caches",
    "quotient",
    "read_prompts",
    "read_study",
    "replay",
    "reproduce",
    "settings_of_run",
    "sweep",
    "with_draft_length",
]
