"""`Proposal`: how a drafter's logits become draft tokens and the probabilities that come with them.

Both come out of one call, so that they cannot disagree, and the probabilities of each token are
written where the draft keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from specdec.samplers.logits_filter import LogitsFilter, logprobs_of
from specdec.samplers.noise import Drawing, EditDraftLogits
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
        edit: changes the drafter's logits `[B, n, V]`, over the target's vocabulary, before
            anything is drawn from them: alike for sampled and most likely tokens, in chains and in
            trees. The probabilities that the sampler sees are those of the edited logits, so
            lossless rules stay lossless. It runs in the step, on the device, once for each pass.

    Example:
        >>> Proposal("argmax")
        Proposal(kind='argmax', temperature=None, edit=None)
        >>> from specdec import SelfDrafter, zoo
        >>> drafter = SelfDrafter(zoo.load_target(), 2, layers=14)
        >>> drafter.proposal = Proposal(edit=lambda logits: logits / 2)  # from the next call on
    """

    kind: Kind = "sample"
    temperature: float | None = None
    edit: EditDraftLogits | None = None

    def __post_init__(self):
        from specdec.drafters.proposal_check import check_proposal

        check_proposal(self)

    def logits_filter(self, of_target: LogitsFilter) -> LogitsFilter:
        """From the drafter's logits to its probabilities, given the target's logits_filter."""
        if self.temperature is None or of_target.is_greedy:
            return of_target
        return of_target.at_temperature(self.temperature)

    def edit_in(self, drawing: Drawing) -> EditDraftLogits | None:
        """What changes the logits of a step: this edit, and then those of its drawing."""
        return drawing.edit if self.edit is None else drawing.with_edit(self.edit).edit

    def begin(self, drawing: Drawing) -> Drafting:
        """A draft of K tokens, none of which is drawn yet."""
        return Drafting(self, drawing)


class Drafting:
    """A draft in the making: token after token, the probabilities written into one table.

    Attributes:
        tokens: drawn so far, `[B, n]` of each call of `draw`.

    Example:
        >>> from specdec.samplers import Noise, draw_by_inversion
        >>> noise = Noise([7]).at(torch.tensor([0]), width=3)
        >>> drafting = Proposal().begin(Drawing(2, LogitsFilter(1), noise, draw_by_inversion))
        >>> tokens = [drafting.draw(torch.zeros(1, 1, 9)) for _ in range(2)]
        >>> drafting.end().probs.shape
        torch.Size([1, 2, 9])
    """

    def __init__(self, proposal: Proposal, drawing: Drawing):
        self._drawing, self._logits_filter = drawing, proposal.logits_filter(drawing.logits_filter)
        self._edit = proposal.edit_in(drawing)
        self._samples = proposal.kind == "sample"
        self._wants_probs = drawing.wants_probs and not self._logits_filter.is_greedy
        self._probs: Tensor | None = None
        self.tokens: list[Tensor] = []
        self._raw: list[Tensor] = []
        self._num_drawn = 0

    def draw(
        self,
        logits: Tensor,
        *,
        depth: int | None = None,
        path: Tensor | int = 0,
        whole: Tensor | None = None,
    ) -> Tensor:
        """The next n tokens `[B, n]` of every row: one, or all K that one pass predicts.

        Args:
            logits: `[B, n, V]` over the target's vocabulary.
            depth: of the tokens that they follow in a tree, 0 for the root.
            path: int64 `[n]` of tokens of independent paths, which each is on.
            whole: `logits` with the tokens of earlier siblings, which these lack; `None` where they
                lack none.
        """
        if self._edit is not None:  # of a tree it ran before, once for all siblings: `TreePlan`
            from specdec.drafters.proposal_check import edited

            logits = edited(logits, self._edit)
        index, count = self._num_drawn, logits.shape[1]
        self._num_drawn += count
        tokens = (
            logits.argmax(dim=-1) if not self._samples else self._draw(logits, index, depth, path)
        )
        self.tokens.append(tokens)
        if self._drawing.wants_raw:
            self._raw.append(logprobs_of(tokens, logits if whole is None else whole).exp())
        return tokens

    def _draw(self, logits: Tensor, index: int, depth: int | None, path: Tensor | int) -> Tensor:
        """By the sampler's rule, which writes the probabilities where the draft keeps them."""
        drawing, out, count = self._drawing, None, logits.shape[1]
        noise = drawing.noise if depth is None else drawing.noise.at_depths(depth, path)
        if self._wants_probs:
            if self._probs is None:
                dtype = torch.promote_types(logits.dtype, torch.float32)
                shape = len(logits), drawing.num_draft_tokens, logits.shape[2]
                self._probs = logits.new_empty(shape, dtype=dtype)
            out = self._probs[:, index : index + count]
        options = {"wants_probs": self._wants_probs, "out": out}
        drawn = drawing.rule(logits, self._logits_filter, noise, index, **options)
        is_pair = isinstance(drawn, tuple) and len(drawn) == 2 and isinstance(drawn[0], Tensor)
        if not is_pair or drawn[0].shape != logits.shape[:2] or drawn[0].dtype != torch.long:
            from specdec.drafters.proposal_check import refuse_drawn

            refuse_drawn(drawn)
        tokens, probs = drawn
        if probs is None:
            self._probs = None
        return tokens

    def end(self, num_valid: Tensor | None = None, **tree: Any) -> Draft:
        """The draft, when all of its K tokens are drawn.

        Args:
            num_valid: `[B]`, how many of them each row proposes; `None` for all.
            tree: `parents`, `depth` and `runs` of a tree; see `Draft`.
        """
        raw = torch.cat(self._raw, dim=1) if self._raw else None
        return Draft(torch.cat(self.tokens, dim=1), self._probs, num_valid, raw_probs=raw, **tree)
