"""`SourceLookupDrafter`: the source of an encoder-decoder drafts for its text."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.drafters.lookup import SKIPPED, PromptLookupDrafter, PromptLookupState
from specdec.samplers.noise import Drawing
from specdec.types import Context, Draft


class SourceLookupDrafter(PromptLookupDrafter):
    """Finds the longest n-gram that ends the text, in the source that the encoder has read and in
    the text so far, and proposes what followed it there.

    Summaries, corrections and translations of names and numbers copy from their source, of which
    `PromptLookupDrafter` sees nothing: the prompt of a decoder is a token or two. The text is
    looked up as if the source stood before it.

    Args and Raises: as `PromptLookupDrafter`; and ValueError by a call whose source has no ids of
    the decoder's vocabulary, such as sound.

    Example:
        >>> drafter = SourceLookupDrafter(num_draft_tokens=2)
        >>> state = drafter.init_state(1, 16, vocab_size=10, device=torch.device("cpu"))
        >>> rows = {"source_ids": torch.tensor([[5, 6, 7, 8, -1]])}
        >>> text = torch.tensor([[2, 6]])
        >>> context = Context(text, None, torch.tensor([0]), torch.tensor([1]), row_inputs=rows)
        >>> drafter.propose(context, state, Drawing(2, None, None, None)).tokens
        tensor([[7, 8]])
    """

    row_inputs = ("source_ids",)

    def propose(self, context: Context, state: PromptLookupState, drawing: Drawing) -> Draft:
        """Looks the end of the text up in the source and the text."""
        self.prefill(context, state)
        source = context.row_inputs.get("source_ids")
        if source is None:
            raise ValueError(
                "expected a target with an encoder and a source of ids, and the call brought none; "
                "use PromptLookupDrafter for sound, pictures and decoder-only targets"
            )
        text = torch.cat([_without_padding(source), state.text], dim=1)
        length = source.shape[1] + 1 + context.num_committed[:, None]
        return self.look_up(text, length, drawing)


def _without_padding(source: Tensor) -> Tensor:
    """`[B, S + 1]`: ids that match nothing, and end what is drafted, in the place of padding and
    behind the source.
    """
    ids = source.masked_fill(source < 0, SKIPPED)
    return torch.cat([ids, ids.new_full((len(ids), 1), SKIPPED)], dim=1)
