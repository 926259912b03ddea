"""A drafter that proposes what a grammar forces: keys, quotes and brackets of a JSON schema.

The grammar's own processor must run beside it, so that the target's distribution is that of the
grammar, too. Forced text is accepted unless the target prefers other tokens for it. Matchers run on
the host, so the generator around this drafter captures no steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec import Context, Draft, Drafter, Drawing
from specdec.drafters.lookup import remember
from specdec.types import PAD_TOKEN


@dataclass(eq=False)
class WithText:
    """`[B, S + 1]` the text of each row, and `[B]` where its new tokens begin, 0 before them."""

    text: Tensor
    begin: Tensor


class GrammarDrafter(Drafter):
    """Drafts the tokens that llguidance says must come next; none where there is a choice. Before a
    head, `FirstMatch(GrammarDrafter(...), head)`, the head drafts what is free.

    Args:
        grammar: as of `specdec.lab.integrations.grammars.llguidance_processor`.
        tokenizer: of the target.
        vocab_size: V of the target's logits.
        num_draft_tokens: K.

    Reference: "fast-forward" tokens of llguidance; "jump-forward decoding" of SGLang and xgrammar.
    """

    def __init__(self, grammar: str, tokenizer, vocab_size: int, num_draft_tokens: int = 8):
        super().__init__()
        from llguidance import LLMatcher
        from llguidance.hf import from_tokenizer

        self.grammar, self.num_draft_tokens = grammar, num_draft_tokens
        self._start = LLMatcher(from_tokenizer(tokenizer, vocab_size), grammar)

    def validate(self, *, vocab_size: int, device: torch.device) -> None:
        """The mask of the processor fits or raises an error itself."""

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> WithText:
        """The last column of the text takes what is not known yet."""
        text = torch.zeros(batch_size, max_length + 1, dtype=torch.long, device=device)
        return WithText(text, text.new_zeros(batch_size))

    def prefill(self, context: Context, state: WithText) -> None:
        """Writes the context's tokens at their positions."""
        remember(context, context.tokens, state.text)

    def propose(self, context: Context, state: WithText, drawing: Drawing) -> Draft:
        """What must follow each row's new tokens."""
        self.prefill(context, state)
        end, count = context.num_committed, drawing.num_draft_tokens
        state.begin.copy_(state.begin.where(state.begin > 0, end))  # the first proposal
        bounds = zip(state.begin.tolist(), end.tolist(), state.text.tolist(), strict=True)
        drafts = [self._forced(row[begin:end])[:count] for begin, end, row in bounds]
        tokens = [draft + [PAD_TOKEN] * (count - len(draft)) for draft in drafts]
        num_valid = torch.tensor([len(draft) for draft in drafts], device=end.device)
        return Draft(torch.tensor(tokens, device=end.device), None, num_valid)

    def _forced(self, tokens: list[int]) -> list[int]:
        matcher = self._start.deep_copy()
        if matcher.try_consume_tokens(tokens) < len(tokens) or matcher.is_stopped():
            return []  # the row has ended
        return matcher.compute_ff_tokens()
