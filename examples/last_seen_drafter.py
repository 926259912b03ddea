"""A drafter with a state of its own: what followed each token the last time, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec import Context, Draft, Drafter, Drawing


class LastSeenDrafter(Drafter):
    """Drafts what followed each token the last time in the row's own text. The state is codes
    `[B, V + 1]`: where each token was followed last, times V, plus by what. It is changed in place,
    and 0, of which the loop makes a state, means that nothing was seen.

    Args:
        num_draft_tokens: K.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), LastSeenDrafter(2))
        >>> result = generator.generate(torch.tensor([[5, 6, 5]]), max_new_tokens=4)
        >>> result.steps[0][0].draft_tokens
        [6, 5]
    """

    def __init__(self, num_draft_tokens: int = 4):
        super().__init__()
        self.num_draft_tokens = num_draft_tokens

    def validate(self, *, vocab_size: int, device: torch.device) -> None:
        """Fits every target."""

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> Tensor:
        """Codes; the last column takes what is not new."""
        return torch.zeros(batch_size, vocab_size + 1, dtype=torch.long, device=device)

    def prefill(self, context: Context, codes: Tensor) -> None:
        """Writes what followed the context's tokens."""
        before, after = context.tokens[:, :-1], context.tokens[:, 1:]  # the root is `before` only
        index = torch.arange(after.shape[1], device=after.device)
        is_new = index < context.num_new[:, None]  # nothing, where num_new is 0 or -1
        spare = codes.shape[1] - 1  # V; that column takes what is not new
        new = (context.start[:, None] + 1 + index) * spare + after
        ids, new = before.where(is_new, spare), new.where(is_new, 0)
        codes.scatter_reduce_(1, ids, new, "amax")  # the last place, in whatever order

    def propose(self, context: Context, codes: Tensor, drawing: Drawing) -> Draft:
        """What followed, token after token: no probabilities, a deterministic choice."""
        self.prefill(context, codes)  # first what is committed, also what no step has drafted
        tokens = [context.tokens.gather(1, context.num_new.clamp(min=0)[:, None])]
        for _ in range(drawing.num_draft_tokens):
            tokens.append(codes.gather(1, tokens[-1]) % (codes.shape[1] - 1))
        return Draft(torch.cat(tokens, dim=1)[:, 1:])
