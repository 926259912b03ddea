"""Evaluation: what drafting yields, measured by doing it, and how it is shown."""

from specdec.evaluation.contexts import acceptance_by_context
from specdec.evaluation.evaluate import Evaluation, evaluate

__all__ = ["Evaluation", "acceptance_by_context", "evaluate"]
