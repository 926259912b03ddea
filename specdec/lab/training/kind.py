"""`Kind`: a kind of head that `specdec train` makes, trains and says how to serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specdec.drafters.head.drafter import HeadDrafter
from specdec.lab.training.losses import HeadObjective


@dataclass(frozen=True)
class Kind:
    """One kind of head of a family.

    Args:
        new: (target, K, `seed=` and those of `options` that were given) -> a drafter with an
            untrained head, and the objective that trains it.
        family: of its files, the word before the path in a drafter's name (`"eagle:PATH"`).
        served: vLLM's `--speculative-config` of the head as it is saved, without its path.
        options: which options of the command line it has, beside those of every kind.
        weights: name of the objective's argument for `--step-weights`.

    Example:
        >>> from specdec.lab.training.medusa import KINDS
        >>> KINDS["medusa"].served
        {'method': 'medusa'}
    """

    new: Callable[..., tuple[HeadDrafter, HeadObjective]]
    family: str
    served: Mapping[str, Any]
    options: tuple[str, ...]
    weights: str = "step_weight"
