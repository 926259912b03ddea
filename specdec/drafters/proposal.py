"""`Proposal`: how a drafter's logits become draft tokens and the probabilities that come with them.

Both come out of one call, so that they cannot disagree, and the probabilities of each token are
written where the draft keeps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specdec.arguments import check_number, check_tensor, check_type, shown
from specdec.samplers.drawing import Drawing
from specdec.samplers.warp import Warp
from specdec.types import Draft

Kind = Literal["sample", "argmax"]


@dataclass(frozen=True)
class Proposal:
    """Shared by all drafters that have logits.

    Args:
        kind: `"sample"` draws each draft token from the drafter's distribution and returns that
            distribution; `"argmax"` proposes the most likely token, a point mass.
        temperature: of the drafter's distribution where the target samples; `None` is the target's
            own. The truncations (top-k, top-p, min-p) are the target's in any case.

    Raises:
        TypeError: a temperature that is no number.
        ValueError: another kind, or a temperature that is not positive.

    Example:
        >>> Proposal("argmax")
        Proposal(kind='argmax', temperature=None)
    """

    kind: Kind = "sample"
    temperature: float | None = None

    def __post_init__(self):
        check_type("proposal", self.kind, Kind)
        if self.temperature is None:
            return
        advice = "None is the target's, and proposal='argmax' the limit at 0"
        check_number("draft_temperature", self.temperature, above=0, advice=advice)
        if self.kind == "argmax":
            raise ValueError("draft_temperature has no meaning with proposal='argmax'; drop one")

    def warp(self, of_target: Warp) -> Warp:
        """From the drafter's logits to its probabilities, given the target's warp."""
        if self.temperature is None or of_target.is_greedy:
            return of_target
        return of_target.at_temperature(self.temperature)

    def begin(self, drawing: Drawing) -> Drafting:
        """A draft of K tokens, none of which is drawn yet."""
        return Drafting(self, drawing)


class Drafting:
    """A draft in the making: token after token, the probabilities written into one table.

    Args:
        proposal: of the drafter.
        drawing: of the step.

    Attributes:
        tokens: drawn so far, `[B, n]` of each call of `draw`.

    Example:
        >>> from specdec.samplers import Noise, draw_by_inversion
        >>> noise = Noise([7]).at(torch.tensor([0]), width=3)
        >>> drafting = Proposal().begin(Drawing(2, Warp(1), noise, draw_by_inversion))
        >>> tokens = [drafting.draw(torch.zeros(1, 1, 9)) for _ in range(2)]
        >>> drafting.end().probs.shape
        torch.Size([1, 2, 9])
    """

    def __init__(self, proposal: Proposal, drawing: Drawing):
        self._drawing, self._warp = drawing, proposal.warp(drawing.warp)
        self._samples = proposal.kind == "sample"
        self._probs: Tensor | None = None
        self.tokens: list[Tensor] = []
        self._num_drawn = 0

    def draw(self, logits: Tensor) -> Tensor:
        """The next n tokens `[B, n]` of every row: one, or all K that one pass predicts.

        Args:
            logits: `[B, n, V]` over the target's vocabulary.
        """
        index, drawing = self._num_drawn, self._drawing
        self._num_drawn += logits.shape[1]
        if self._samples:
            wants_probs = drawing.wants_probs and not self._warp.is_greedy
            out = self._rows(index, logits) if wants_probs else None
            options = {"wants_probs": wants_probs, "out": out}
            drawn = drawing.rule(logits, self._warp, drawing.noise, index, **options)
            tokens, probs = _checked_draw(drawn, logits.shape[:2])
            if probs is None:
                self._probs = None
        else:
            tokens = logits.argmax(dim=-1)
        self.tokens.append(tokens)
        return tokens

    def end(self, num_valid: Tensor | None = None) -> Draft:
        """The draft, when all of its K tokens are drawn.

        Args:
            num_valid: `[B]`, how many of them each row proposes; `None` for all.
        """
        return Draft(torch.cat(self.tokens, dim=1), self._probs, num_valid)

    def _rows(self, index: int, logits: Tensor) -> Tensor:
        """Where the probabilities `[B, n, V]` of the tokens are kept."""
        if self._probs is None:
            dtype = torch.promote_types(logits.dtype, torch.float32)
            shape = len(logits), self._drawing.num_draft_tokens, logits.shape[-1]
            self._probs = logits.new_empty(shape, dtype=dtype)
        return self._probs[:, index : index + logits.shape[1]]


def _checked_draw(drawn: object, shape: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """What a sampler's rule drew, if it is tokens and probabilities."""
    is_pair = isinstance(drawn, tuple) and len(drawn) == 2
    if not is_pair or not isinstance(drawn[0], Tensor):
        raise TypeError(
            "the sampler's draw_draft must return (tokens [B, n], probabilities [B, n, V] or None),"
            f" got {shown(drawn)}; see specdec.samplers.draw_by_inversion"
        )
    check_tensor("tokens of the sampler's draw_draft", drawn[0], shape, (torch.long,))
    return drawn
