"""Whether a replay and a run of its settings agree."""

import math

from specdec.evaluation import Estimate
from specdec.evaluation.intervals import bootstrap, ratio
from specdec.results import SpeculationStats


def agree(found: Estimate, real: SpeculationStats, *, errors: float) -> bool:
    """Whether an expected acceptance length and a run's are within so many standard errors of their
    difference; both have intervals of 95 %.
    """
    totals = [[s + a, s] for s, a in zip(real.steps, real.accepted, strict=True)]
    (other,) = bootstrap(totals, ratio)
    widths = [(e.high - e.low) / (2 * 1.96) for e in (found, other)]
    return abs(found.value - other.value) < errors * math.hypot(*widths)
