"""`GrammarProcessor`: text in a grammar, whose matcher follows the draft and is rolled back."""

from collections.abc import Callable
from typing import Protocol, Self

import torch
from torch import Tensor
from transformers import LogitsProcessor


class Matcher(Protocol):
    """A grammar's position in one text; `xgrammar.GrammarMatcher` is one."""

    def accept_token(self, token_id: int, /) -> bool:
        """Advances by a token; returns `False`, and stays, where the grammar does not allow it."""

    def rollback(self, num_tokens: int, /) -> None:
        """Takes back the last tokens, any number of them."""

    def is_terminated(self) -> bool:
        """The text is complete, its end-of-sequence token included."""

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int, /) -> object:
        """Writes row `index` of `[B, ceil(V / 32)]` int32: bit v % 32 of word v // 32 is 1 if token
        v may come next.
        """


class GrammarProcessor(LogitsProcessor):
    """Keeps the new tokens of every row in a grammar; lossless, as the same mask in plain decoding.

    The scores depend on the row's tokens alone: a row's matcher is rolled back to what it has in
    common with the tokens of a call and then advanced along them. Scores after tokens that the
    grammar rejects, or after its end, are left as they are: nothing is sampled from them.

    One instance serves any number of calls; each begins with matchers of its own. The grammar
    libraries' own HF processors advance once per call and raise ValueError.

    Args:
        new_matcher: function of a row's number in the batch that returns a new `Matcher` for it.

    Example:
        >>> class Digits:  # a grammar of one rule: no token but 1 and 2
        ...     accept_token = staticmethod(lambda token: token in (1, 2))
        ...     rollback, is_terminated = lambda self, num_tokens: None, lambda self: False
        ...     def fill_next_token_bitmask(self, bitmask, index):
        ...         bitmask[index] = 0b110
        >>> processor = GrammarProcessor(lambda row: Digits()).start(torch.tensor([[7, 8]]))
        >>> processor(torch.tensor([[7, 8, 1]]), torch.zeros(1, 4))
        tensor([[-inf, 0., 0., -inf]])

    With xgrammar, `compiled` being its compiled grammar:

        GrammarProcessor(lambda row: xgrammar.GrammarMatcher(compiled))
    """

    is_stateless = True

    def __init__(self, new_matcher: Callable[[int], Matcher]):
        self.new_matcher = new_matcher
        self._width = 0
        self._rows: list[tuple[Matcher, list[int]]] = []

    def start(self, prompts: Tensor, first_row: int = 0) -> Self:
        """A processor for one call, whose grammar begins after its prompts.

        Args:
            prompts: `[B, T]` as the processor will see them.
            first_row: number of the first of them in the batch.
        """
        started = type(self)(self.new_matcher)
        started._width = prompts.shape[1]
        rows = range(first_row, first_row + len(prompts))
        started._rows = [(self.new_matcher(row), []) for row in rows]
        return started

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores `[B, V]` with -inf for what the grammar does not allow after ids `[B, t]`.

        Raises:
            ValueError: not started, since it was not called by a specdec generator.
        """
        if not self._rows:
            raise ValueError(
                "GrammarProcessor runs in a generator of specdec, which starts it after the "
                "prompts; in HF generate use the grammar library's own logits processor"
            )
        vocab_size = scores.shape[1]
        bitmask = torch.full(
            (len(scores), -(-vocab_size // 32)), -1, dtype=torch.int32, device="cpu"
        )
        texts = input_ids[:, self._width :].tolist()
        for index, ((matcher, accepted), text) in enumerate(zip(self._rows, texts, strict=True)):
            if _follow(matcher, accepted, text):
                matcher.fill_next_token_bitmask(bitmask, index)
        bits = torch.arange(32, dtype=torch.int32, device=scores.device)
        is_allowed = (bitmask.to(scores.device)[..., None] >> bits & 1).flatten(1) == 1
        return scores.masked_fill(~is_allowed[:, :vocab_size], -torch.inf)


def _follow(matcher: Matcher, accepted: list[int], text: list[int]) -> bool:
    """Moves a matcher from the accepted tokens to a text; whether it is there, and not at the end
    of the grammar.
    """
    pairs = enumerate(zip(accepted, text, strict=False))
    common = next((n for n, (a, b) in pairs if a != b), min(len(accepted), len(text)))
    if common < len(accepted):
        matcher.rollback(len(accepted) - common)
        del accepted[common:]
    for token in text[common:]:
        if matcher.is_terminated() or not matcher.accept_token(token):
            return False
        accepted.append(token)
    return not matcher.is_terminated()
