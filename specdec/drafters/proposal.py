"""`Proposal`: how a drafter's logits become draft tokens, and the law that the sampler is told.

Both come out of one call, so that tokens and law cannot disagree, and each law is written where the
draft keeps it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specdec.samplers.noise import StepNoise
from specdec.samplers.warp import Warp
from specdec.types import Draft

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

    def begin(self, num_draft_tokens: int, warp: Warp, noise: StepNoise) -> Drafting:
        """A draft of K tokens, none of which is drawn yet.

        Args:
            num_draft_tokens: K.
            warp: the target's gate.
            noise: the step's draws.
        """
        return Drafting(self, num_draft_tokens, warp, noise)


class Drafting:
    """A draft in the making: tokens are drawn place after place, their laws written into one table.

    Args:
        proposal: how.
        num_draft_tokens: K.
        warp: the target's gate.
        noise: the step's draws.

    Attributes:
        tokens: of the places that are drawn, `[B, 1]` each.

    Example:
        >>> from specdec.samplers import Noise
        >>> noise = Noise([7]).at(torch.tensor([0]), width=3)
        >>> drafting = Proposal().begin(2, Warp(1), noise)
        >>> tokens = [drafting.draw(torch.zeros(1, 1, 9)) for _ in range(2)]
        >>> drafting.end().probs.shape
        torch.Size([1, 2, 9])
    """

    def __init__(self, proposal: Proposal, num_draft_tokens: int, warp: Warp, noise: StepNoise):
        self._draws = proposal.kind == "sample"
        self._gate, self._noise = proposal.gate(warp), noise
        self._has_laws = self._draws and noise.tells_laws and not self._gate.is_greedy
        self._count, self._laws = num_draft_tokens, None
        self.tokens: list[Tensor] = []

    def draw(self, logits: Tensor) -> Tensor:
        """Tokens `[B, 1]` of the next place.

        Args:
            logits: `[B, 1, V]` over the target's vocabulary.

        Raises:
            TypeError: the noise told a law that is not the one that the draft keeps.
        """
        place, into = len(self.tokens), None
        if self._has_laws:
            if self._laws is None:
                dtype = torch.promote_types(logits.dtype, torch.float32)
                shape = len(logits), self._count, logits.shape[-1]
                self._laws = logits.new_empty(shape, dtype=dtype)
            into = self._laws[:, place : place + 1]
        if self._draws:
            tokens, law = self._noise.propose(logits, self._gate, place, into)
            if law is not into:
                raise TypeError(
                    f"{type(self._noise).__name__}.propose told a law of its own; it must fill the "
                    "table `into` and return it, or have tells_laws = False and return None"
                )
        else:
            tokens = logits.argmax(dim=-1)
        self.tokens.append(tokens)
        return tokens

    def end(self, num_valid: Tensor | None = None) -> Draft:
        """The draft, when all of its K tokens are drawn.

        Args:
            num_valid: `[B]`, how many of them each row proposes; `None` for all.
        """
        return Draft(torch.cat(self.tokens, dim=1), self._laws, num_valid)
