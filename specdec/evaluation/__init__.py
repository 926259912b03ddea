"""Evaluation: what drafting yields, measured by doing it, and how it is shown."""

from specdec.evaluation.answers import write_answers
from specdec.evaluation.costs import costs, measure_costs
from specdec.evaluation.evaluate import evaluate
from specdec.evaluation.evaluation import Evaluation
from specdec.evaluation.hf_generate import HFGenerate
from specdec.evaluation.intervals import Estimate
from specdec.evaluation.paired import difference
from specdec.evaluation.positions import every_position
from specdec.evaluation.prompts import Prompt, own_prompts, read_prompts
from specdec.evaluation.replay import replay
from specdec.evaluation.study import Study
from specdec.evaluation.sweep import compare, sweep

__all__ = [
    "Estimate",
    "Evaluation",
    "HFGenerate",
    "Prompt",
    "Study",
    "compare",
    "costs",
    "difference",
    "evaluate",
    "every_position",
    "measure_costs",
    "own_prompts",
    "read_prompts",
    "replay",
    "sweep",
    "write_answers",
]
