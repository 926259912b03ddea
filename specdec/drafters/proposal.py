"""`Proposal`: how a drafter's logits become draft tokens, and the law that the sampler is told.

Both come out of one call, so that tokens and law cannot disagree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from specdec.samplers.noise import StepNoise
from specdec.samplers.warp import Warp

Kind = Literal["sample", "argmax"]


@dataclass(frozen=True)
class Proposal:
    """Shared by all drafters that have logits.

    Args:
        kind: `"sample"` draws each draft token from the drafter's law and tells the sampler that
            law; `"argmax"` proposes the most likely token, a point mass.
        temperature: of the drafter's law where the target samples; `None` is the target's own. The
            truncations (top-k, top-p, min-p) are the target's in any case.

    Raises:
        ValueError: another kind, or a temperature that is not positive.

    Example:
        >>> Proposal("argmax")
        Proposal(kind='argmax', temperature=None)
    """

    kind: Kind = "sample"
    temperature: float | None = None

    def __post_init__(self):
        if self.kind not in ("sample", "argmax"):
            raise ValueError(f"proposal must be 'sample' or 'argmax', got {self.kind!r}")
        t = self.temperature
        if t is None:
            return
        if isinstance(t, bool) or not isinstance(t, int | float) or not 0 < t < math.inf:
            raise ValueError(
                f"draft_temperature must be a number > 0 or None for the target's, got {t!r}; "
                "proposal='argmax' is the limit at 0"
            )
        if self.kind == "argmax":
            raise ValueError("draft_temperature has no meaning with proposal='argmax'; drop one")

    def gate(self, warp: Warp) -> Warp:
        """The gate of the drafter's logits, given that of the target's."""
        if self.temperature is None or warp.is_greedy:
            return warp
        return warp.at_temperature(self.temperature)

    def draw(
        self, logits: Tensor, gate: Warp, noise: StepNoise, index: int
    ) -> tuple[Tensor, Tensor | None]:
        """Proposes the token of one place.

        Args:
            logits: `[B, 1, V]` over the target's vocabulary.
            gate: from `gate`, once per step.
            noise: the step's draws.
            index: the place, 0..K - 1.

        Returns:
            Tokens `[B, 1]`, and the law `[B, 1, V]` that they were drawn from; `None` for a point
            mass.
        """
        if self.kind == "argmax":
            return logits.argmax(dim=-1), None
        return noise.propose(logits, gate, index)
