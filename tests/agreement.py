"""Whether two runs agree: a replay and a run of its settings, captured steps and eager ones."""

import math

from specdec import SpeculativeGenerator
from specdec.lab.evaluation import Estimate
from specdec.lab.evaluation.intervals import bootstrap, ratio
from specdec.statistics import SpeculationStats


def agree(found: Estimate, real: SpeculationStats, *, errors: float) -> bool:
    """Whether an expected acceptance length and a run's are within so many standard errors of their
    difference; both have intervals of 95 %.
    """
    totals = [[s + a, s] for s, a in zip(real.steps, real.accepted, strict=True)]
    (other,) = bootstrap(totals, ratio)
    widths = [(e.high - e.low) / (2 * 1.96) for e in (found, other)]
    return abs(found.value - other.value) < errors * math.hypot(*widths)


def check_captured(model, drafter, ids, mask, **options) -> None:
    """Captured steps, each compared with the same step run eagerly, write what eager ones write:
    four rows, greedy and sampled ones.
    """
    sampled = {"do_sample": True, "temperature": [0.0, 0.8, 1.3, 1.0], "seed": [1, 2, 3, 4]}
    results = [
        SpeculativeGenerator(model, drafter, graphs=graphs).generate(
            ids.to(model.device), mask.to(model.device), check=graphs, **options, **sampled
        )
        for graphs in (False, True)
    ]
    assert results[0].sequences.equal(results[1].sequences)
    assert results[0].stats.to_dict() == results[1].stats.to_dict()
