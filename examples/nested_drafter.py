"""A drafter that holds a generator: the draft model itself decodes speculatively.

The inner call reads values on the host, so the generator around this drafter needs `graphs=False`.
It reads the whole text again in each step: this shows the interface, and is not a speed-up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec import Context, Draft, Drafter, Drawing, SpeculativeGenerator
from specdec.drafters.lookup import remember


class NestedDrafter(Drafter):
    """Drafts the greedy text of another generator. The state is the text, `[B, max_length + 1]`.

    Args:
        inner: over the draft model, which shares the target's tokenizer, with a drafter of its own.
        num_draft_tokens: K.

    Example:
        >>> from specdec import zoo
        >>> target = zoo.load_target()
        >>> inner = SpeculativeGenerator(zoo.load_drafter("model", target).model, "lookup")
        >>> generator = SpeculativeGenerator(target, NestedDrafter(inner), graphs=False)
        >>> generator.generate(torch.tensor([[5, 6]]), max_new_tokens=8).lengths
        [8]
    """

    def __init__(self, inner: SpeculativeGenerator, num_draft_tokens: int = 4):
        super().__init__()
        self.inner, self.num_draft_tokens = inner, num_draft_tokens

    def validate(self, *, vocab_size: int, device: torch.device) -> None:
        """Raises `ValueError` where the inner generator writes ids that the target lacks."""
        if self.inner.target.vocab_size > vocab_size:
            raise ValueError(
                f"the inner generator must have at most the target's {vocab_size} ids, got "
                f"{self.inner.target.vocab_size}; take a draft model of the same tokenizer"
            )

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> Tensor:
        """The text of each row; the last column takes what is not known yet."""
        return torch.zeros(batch_size, max_length + 1, dtype=torch.long, device=device)

    def prefill(self, context: Context, text: Tensor) -> None:
        """Writes the context's tokens at their positions."""
        remember(context, context.tokens, text)

    def propose(self, context: Context, text: Tensor, drawing: Drawing) -> Draft:
        """What the inner generator writes after each row's text."""
        self.prefill(context, text)
        k, lengths = drawing.num_draft_tokens, context.num_committed.tolist()
        options = {"max_new_tokens": k, "min_new_tokens": k, "do_sample": False}
        rows = [row[None, :length] for row, length in zip(text, lengths, strict=True)]
        return Draft(torch.cat([self.inner.generate(row, **options).new_tokens for row in rows]))
