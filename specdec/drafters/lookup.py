"""`PromptLookupDrafter`: the text so far drafts for itself."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.arguments import check_integer
from specdec.drafters.base import Drafter, check_num_draft_tokens
from specdec.samplers.drawing import Drawing
from specdec.types import PAD_TOKEN, Context, Draft, keep_rows


@dataclass(frozen=True, eq=False)
class PromptLookupState:
    """`[B, S]` committed tokens, position by position."""

    tokens: Tensor

    def keep(self, rows: list[int]) -> "PromptLookupState":
        """The given rows, in the storage of all."""
        return PromptLookupState(keep_rows(self.tokens, rows))

    def reset(self) -> None:
        """Forgets everything and keeps the storage."""
        self.tokens.fill_(PAD_TOKEN)


class PromptLookupDrafter(Drafter):
    """Finds the longest n-gram that ends the text and occurred before, and proposes what followed
    it then.

    Among the occurrences of the longest matching n-gram, one that has K tokens after it is
    preferred, and of those the latest. A row proposes fewer than K tokens when the text after its
    match is shorter, and none without a match. The proposal is deterministic: a point mass.

    Args:
        num_draft_tokens: K.
        max_ngram: longest n-gram to look for, in tokens.
        min_ngram: shortest match worth proposing from.

    Raises:
        TypeError: a number that is no integer.
        ValueError: K < 0, or not 1 <= min_ngram <= max_ngram.

    Example:
        >>> drafter = PromptLookupDrafter(num_draft_tokens=2)
        >>> state = drafter.init_state(1, 16, vocab_size=10, device=torch.device("cpu"))
        >>> text = torch.tensor([[5, 6, 7, 8, 5, 6]])
        >>> context = Context(text, None, torch.tensor([0]), torch.tensor([5]), num_attended=6)
        >>> drafter.propose(context, state, Drawing(2, None, None, None)).tokens
        tensor([[7, 8]])

    Reference: A. Saxena, "Prompt Lookup Decoding" (2023),
    github.com/apoorvumang/prompt-lookup-decoding.
    """

    def __init__(self, num_draft_tokens: int = 8, *, max_ngram: int = 3, min_ngram: int = 1):
        super().__init__()
        self.num_draft_tokens = check_num_draft_tokens(num_draft_tokens)
        check_integer("min_ngram", min_ngram)
        check_integer("max_ngram", max_ngram)
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                f"expected 1 <= min_ngram <= max_ngram, got min_ngram={min_ngram}, "
                f"max_ngram={max_ngram}"
            )
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def validate(self, *, vocab_size: int, device: torch.device) -> None:
        """Fits every target: it has no weights."""

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> PromptLookupState:
        """Room for `max_length` tokens per row and one to forget."""
        shape = batch_size, max_length + 1
        return PromptLookupState(torch.full(shape, PAD_TOKEN, dtype=torch.long, device=device))

    def prefill(self, context: Context, state: PromptLookupState) -> None:
        """Remembers the anchor and the new tokens."""
        offsets = torch.arange(context.tokens.shape[1], device=context.start.device)
        is_real = offsets <= context.num_new[:, None]
        trash = state.tokens.shape[1] - 1
        slots = torch.where(is_real, context.start[:, None] + offsets, trash)
        state.tokens.scatter_(1, slots, context.tokens)

    def propose(self, context: Context, state: PromptLookupState, drawing: Drawing) -> Draft:
        """Looks the end of the text up in the text."""
        self.prefill(context, state)
        length = context.num_committed[:, None]
        num_draft_tokens = drawing.num_draft_tokens
        text = state.tokens[:, : context.num_attended]  # [B, T]
        matched = self._matched(text, length)
        ends = torch.arange(text.shape[1], device=text.device)  # position of a match's last token
        follow = (length - 1 - ends).clamp(0, num_draft_tokens)  # tokens known after it
        # Longest match first, then the most tokens after it, then the latest.
        score = (matched * (num_draft_tokens + 1) + follow) * text.shape[1] + ends
        found, best = torch.where((matched >= self.min_ngram) & (follow > 0), score, -1).max(dim=1)
        num_valid = torch.where(found >= 0, follow.gather(1, best[:, None])[:, 0], 0)
        steps = torch.arange(num_draft_tokens, device=text.device)
        source = (best[:, None] + 1 + steps).clamp(max=text.shape[1] - 1)
        tokens = torch.where(steps < num_valid[:, None], text.gather(1, source), PAD_TOKEN)
        return Draft(tokens, None, num_valid)

    def _matched(self, text: Tensor, length: Tensor) -> Tensor:
        """`[B, T]`: how many tokens up to and including each position equal the end of the text."""
        matched = torch.zeros_like(text)
        for n in range(min(self.max_ngram, text.shape[1])):
            nth_last = (length - 1 - n).clamp(min=0)
            wanted = text.gather(1, nth_last)  # [B, 1]
            shifted = torch.nn.functional.pad(text, (n, 0), value=PAD_TOKEN)[:, : text.shape[1]]
            is_equal = (shifted == wanted) & (shifted != PAD_TOKEN) & (length > n)
            matched = matched + (is_equal & (matched == n))
        return matched
