"""A sampler that writes given texts, one token per step, so that every token becomes a root."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.samplers.base import Sampler
from specdec.samplers.logits_filter import LogitsFilter
from specdec.samplers.noise import Noise, StepNoise
from specdec.types import PAD_TOKEN, Draft, Verdict

ROW_BITS = 32
"""Row r of the texts is named by a seed whose low bits are r; the others are free."""


class GivenText(Sampler):
    """Commits the next token of each row's text, whatever was drafted.

    Args:
        texts: ids of each row, its prompt included. Row r is the one whose seed is r in its lowest
            32 bits, so that rows may leave the batch.
        device: of the target.
        drafts_text: the drafter's draws are the text's tokens, too; else its own.
    """

    lossless = True
    takes_trees = True
    uses_accept_draws = False

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        device: torch.device,
        *,
        drafts_text: bool = False,
    ):
        super().__init__()
        table = torch.zeros(len(texts), max(map(len, texts)) + 1, dtype=torch.long, device="cpu")
        for row, ids in enumerate(texts):
            table[row, : len(ids)] = torch.tensor(ids, device="cpu")
        table = table.to(device)

        class TextNoise(Noise):
            """The numbers of a row, and its text."""

            def at(self, start: Tensor, width: int) -> _TextStep:
                return _TextStep(self._key, start, width, table)

        self.noise_type = TextNoise
        if drafts_text:
            self.draw_draft = _draw_text

    def accept(
        self, draft: Draft, target_logits: Tensor, logits_filter: LogitsFilter, noise: _TextStep
    ) -> Verdict:
        """The text's next token."""
        return emit(noise.tokens(0, 1), draft)

    forward = accept  # in rows at temperature 0, too


def emit(token: Tensor, draft: Draft) -> Verdict:
    """A verdict that accepts nothing and emits a token `[B, 1]`."""
    none = torch.zeros_like(token[:, 0])
    rest = token.new_full((len(token), draft.depth), PAD_TOKEN)
    path = none[:, None].expand(-1, draft.depth + 1)
    # No token is up for decision: it may be the text's, which draft.probs need not allow.
    return Verdict(torch.cat([token, rest], dim=1), none, num_drafted=none, path=path)


class _TextStep(StepNoise):
    """The numbers of a step, and the text after its root."""

    def __init__(self, key: Tensor, start: Tensor, width: int, text: Tensor):
        super().__init__(key, start, width)
        self._text, self._rows, self._first = text, key[:, 0], start + 1

    def tokens(self, index: int, count: int) -> Tensor:
        """`[B, count]` of the text, from `index` tokens after the root's successor on."""
        offsets = torch.arange(index, index + count, device=self._text.device)
        columns = (self._first[:, None] + offsets).clamp(max=self._text.shape[1] - 1)
        return self._text[self._rows[:, None], columns]


def _draw_text(
    logits: Tensor, logits_filter: LogitsFilter, noise: _TextStep, index: int, **options: Any
):
    """The text's tokens and the drafter's whole distributions."""
    probs = logits_filter(logits)
    if options.get("out") is not None:
        probs = options["out"].copy_(probs)
    return noise.tokens(index, logits.shape[1]), probs
