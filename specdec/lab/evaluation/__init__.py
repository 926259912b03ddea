"""Evaluation: what drafting yields, measured by doing it, and how it is shown."""

from specdec.lab.evaluation.answers import write_answers
from specdec.lab.evaluation.costs import costs, measure_costs
from specdec.lab.evaluation.evaluate import evaluate
from specdec.lab.evaluation.evaluation import Evaluation
from specdec.lab.evaluation.hf_generate import HFGenerate
from specdec.lab.evaluation.intervals import Estimate
from specdec.lab.evaluation.paired import difference
from specdec.lab.evaluation.prompts import Prompt, own_prompts, read_prompts
from specdec.lab.evaluation.study import Study
from specdec.lab.evaluation.sweep import compare, sweep

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
    "measure_costs",
    "own_prompts",
    "read_prompts",
    "sweep",
    "write_answers",
]
