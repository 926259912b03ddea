"""Grammars of llguidance and outlines for `GrammarProcessor`. Matchers of xgrammar need nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec.request.grammar import GrammarProcessor

if TYPE_CHECKING:
    from outlines_core import Index


def llguidance_processor(
    grammar: str, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> GrammarProcessor:
    """Keeps new tokens in a grammar of llguidance (`pip install llguidance`).

    Args:
        grammar: as llguidance writes it down: `llguidance.LLMatcher.grammar_from_regex(...)`, or
            `grammar_from_json_schema`, `grammar_from_lark`.
        tokenizer: of the target.
        vocab_size: V of the target's logits, `target.vocab_size`.

    Example:
        >>> import llguidance  # doctest: +SKIP
        >>> grammar = llguidance.LLMatcher.grammar_from_regex("[a-z]+")  # doctest: +SKIP
        >>> processor = llguidance_processor(grammar, tokenizer, 2048)  # doctest: +SKIP

    Reference: https://github.com/guidance-ai/llguidance.
    """
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer
    from llguidance.torch import fill_next_token_bitmask

    vocabulary = from_tokenizer(tokenizer, vocab_size)

    class _Matcher(_NeverTerminated):
        def __init__(self):
            self.inner = LLMatcher(vocabulary, grammar)
            self.rollback = self.inner.rollback

        def accept_token(self, token: int) -> bool:
            return self.inner.try_consume_tokens([token]) == 1

        def fill_next_token_bitmask(self, bitmask: Tensor, index: int) -> None:
            fill_next_token_bitmask(self.inner, bitmask, index)

    return GrammarProcessor(lambda row: _Matcher())


def outlines_processor(index: Index, *, max_rollback: int = 32) -> GrammarProcessor:
    """Keeps new tokens in a regular expression of outlines (`pip install outlines`).

    Args:
        index: of outlines-core, `outlines_core.Index(regex, vocabulary)`; outlines' own logits
            processor has it as its `index`.
        max_rollback: tokens that a guide can take back: those of a draft at least.

    Reference: https://github.com/dottxt-ai/outlines.
    """
    from outlines_core import Guide
    from outlines_core.kernels.torch import fill_next_token_bitmask

    class _Matcher(_NeverTerminated):
        def __init__(self):
            self.guide = Guide(index, max_rollback=max_rollback)
            self.rollback = self.guide.rollback_state

        def accept_token(self, token: int) -> bool:
            if is_allowed := self.guide.accepts_tokens([token]):
                self.guide.advance(token, return_tokens=False)
            return is_allowed

        def fill_next_token_bitmask(self, bitmask: Tensor, index: int) -> None:
            fill_next_token_bitmask(self.guide, bitmask[index : index + 1])

    return GrammarProcessor(lambda row: _Matcher())


class _NeverTerminated:
    """Only the end of sequence may come after a complete text."""

    def is_terminated(self) -> bool:
        """As `specdec.request.grammar.Matcher`."""
        return False
