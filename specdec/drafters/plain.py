"""`NoDrafter`: plain decoding through the same loop."""

from __future__ import annotations

from typing import Any

import torch

from specdec.drafters.base import Drafter
from specdec.drafters.settable import OF_LOGITS
from specdec.samplers.noise import Drawing
from specdec.types import Context, Draft


class NoDrafter(Drafter):
    """Proposes nothing, so that the same loop decodes plainly: every step emits one bonus token.

    Example:
        >>> import torch
        >>> from specdec import SpeculativeGenerator, zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), NoDrafter())
        >>> generator.generate(torch.tensor([[5, 6]]), max_new_tokens=4).stats.steps
        [4]
    """

    num_draft_tokens = 0
    _not_set = OF_LOGITS

    def validate(self, *, vocab_size: int, device: torch.device) -> None:
        """Fits every target."""

    def init_state(self, batch_size: int, max_length: int, *, vocab_size: int, device) -> Any:
        """There is nothing to remember."""

    def prefill(self, context: Context, state: Any) -> None:
        """There is nothing to read."""

    def propose(self, context: Context, state: Any, drawing: Drawing) -> Draft:
        """An empty draft."""
        return Draft(context.tokens[:, :0])
