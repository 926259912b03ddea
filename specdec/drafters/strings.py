"""`StringDrafter`: a draft model with any tokenizer drafts text for the target.

Legend: B rows, S tokens of a text, C slots of the draft model, K draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256
from math import ceil
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.arguments import check_number, check_placement
from specdec.drafters.base import Drafter, check_num_draft_tokens
from specdec.drafters.lookup import remember
from specdec.drafters.settable import OF_LOGITS
from specdec.samplers.noise import Drawing
from specdec.slots.cache import SlotCache, narrowed
from specdec.targets.slot_model import SlotModel
from specdec.types import PAD_TOKEN, Context, Draft

CHUNK_SIZE = 2048
"""Tokens of a text that the draft model reads in one forward, at most."""
LOOKBEHIND = 16
"""Last tokens of a text that are decoded or encoded together with what follows it."""
UNKNOWN = "\ufffd"
"""What decoders write for bytes that are no character; a text that ends in one is cut there."""


@dataclass(frozen=True, eq=False)
class StringState:
    """The text, and what the draft model has read of it.

    Args:
        text: `[B, S + 1]` the target's tokens.
        own: `[B, C]` the draft model's tokens whose keys and values are in the cache.
        num_own: `[B]` how many of them.
        cache: of C slots.
    """

    text: Tensor
    own: Tensor
    num_own: Tensor
    cache: SlotCache


class StringDrafter(Drafter):
    """Drafts text with a model of any tokenizer: the text is decoded, the draft model continues it
    greedily by K tokens of its own, and the target's tokenizer encodes what it wrote.

    No vocabulary has to be shared. The draft is the most likely text and a point mass, whatever the
    temperature: near temperature 0 it accepts as much as `CommonVocabulary` or more; at 1 a
    vocabulary that is mostly shared, whose tokens are drawn, accepts far more. A row drafts fewer
    than K tokens where the target's are longer.

    The draft model's keys and values are kept as far as the text, encoded anew in each step, begins
    with the tokens that they are of. Special tokens are no text and are left out. Tokenizers run on
    the host, so steps are not captured.

    Args:
        model: an HF causal LM in eval mode, on the target's device, without recurrent layers.
        target_tokenizer: of the target.
        draft_tokenizer: of the draft model.
        num_draft_tokens: K.
        expansion: tokens of the draft model for each of the target's that storage is allocated
            for. A text that takes more is not drafted for.

    Raises:
        TypeError, ValueError: the model cannot be decoded in slots (see `SlotModel`), is recurrent
            or an encoder-decoder; a tokenizer with more ids than its model; a number out of range.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
        >>> model = zoo.load_drafter("model").model  # its tokenizer may be another one
        >>> drafter = StringDrafter(model, tokenizer, tokenizer, num_draft_tokens=3)
        >>> SpeculativeGenerator(target, drafter).drafter.num_draft_tokens
        3

    Reference: Timor et al., arXiv:2502.05202, string-level exact match (SLEM).
    """

    _not_set = OF_LOGITS
    _set_once = ("model",)

    def __init__(
        self,
        model: PreTrainedModel,
        target_tokenizer: PreTrainedTokenizerBase,
        draft_tokenizer: PreTrainedTokenizerBase,
        num_draft_tokens: int = 4,
        *,
        expansion: float = 2.0,
    ):
        super().__init__()
        self.num_draft_tokens = check_num_draft_tokens(num_draft_tokens)
        check_number("expansion", expansion, above=0)
        self.expansion = expansion
        self._slot_model = SlotModel(model)
        self.model = self._slot_model.model
        if self._slot_model.is_recurrent or self._slot_model.reads_source:
            raise ValueError(
                "StringDrafter expected a decoder-only draft model without recurrent layers, whose "
                f"cache can go back to an earlier token, got {type(model).__name__}; use "
                "ModelDrafter(vocabulary=CommonVocabulary.of(...))"
            )
        self._target, self._own = _Strings(target_tokenizer), _Strings(draft_tokenizer)
        self._own.check_fits("draft", self._slot_model.vocab_size)

    def settings(self) -> dict[str, Any]:
        """See `Drafter.settings`; with fingerprints of both vocabularies."""
        both = self._target.fingerprint, self._own.fingerprint
        return {**super().settings(), "vocabularies": list(both)}

    def validate(self, *, vocab_size: int, device: torch.device) -> None:
        """Raises ValueError for a tokenizer that is not the target's, another device, and a model
        that was edited, cast or put into training mode since it was wrapped.
        """
        self._target.check_fits("target", vocab_size)
        check_placement("the draft model", self._slot_model.device, device)
        advice = "call generator.refresh(), or make the StringDrafter and its generator again"
        self._slot_model.check_unchanged(advice)

    def init_state(
        self, batch_size: int, max_length: int, *, vocab_size: int, device: torch.device
    ) -> StringState:
        """Room for `max_length` tokens of the target per row, and the draft model's of them."""
        text = torch.zeros(batch_size, max_length + 1, dtype=torch.long, device=device)
        size = ceil(self.expansion * max_length) + self.num_draft_tokens
        cache = self._slot_model.init_cache(batch_size, size, extra_slots=0)
        own = text.new_zeros(batch_size, cache.num_slots)
        return StringState(text, own, text.new_zeros(batch_size), cache)

    def prefill(self, context: Context, state: StringState) -> None:
        """Remembers the root and the new tokens; the draft model reads them in a proposal."""
        remember(context, context.tokens, state.text)

    def propose(self, context: Context, state: StringState, drawing: Drawing) -> Draft:
        """K forwards of the draft model; the first reads what is new to it."""
        self.prefill(context, state)
        count, lengths = drawing.num_draft_tokens, context.num_committed.tolist()
        texts = [row[:n] for row, n in zip(state.text.tolist(), lengths, strict=True)]
        wholes = [self._target.whole(ids) for ids in texts]
        rows = [self._own.encode(self._target.decode(ids)) for ids in wholes]
        limit = self._slot_model.max_positions or state.cache.num_slots
        room = min(limit, state.cache.num_slots) - count + 1
        written = self._continued(
            [row if len(row) <= room else row[:1] for row in rows], state, count
        )
        drafts = []
        for ids, whole, row, new in zip(texts, wholes, rows, written, strict=True):
            draft = self._in_target(whole, row, new) if len(row) <= room else []
            rest = ids[len(whole) :]  # tokens of a character that is not whole yet
            drafts.append(draft[len(rest) :][:count] if draft[: len(rest)] == rest else [])
        num_valid = torch.tensor([len(draft) for draft in drafts], device=state.text.device)
        tokens = [draft + [PAD_TOKEN] * (count - len(draft)) for draft in drafts]
        return Draft(torch.tensor(tokens, device=num_valid.device), None, num_valid)

    def _continued(self, rows: list[list[int]], state: StringState, count: int) -> list[list[int]]:
        """The most likely tokens after those of each row. The first forward reads as many last
        tokens of all rows as are new to one of them.
        """
        cache, known = state.cache, zip(state.own.tolist(), state.num_own.tolist(), strict=True)
        pairs = zip(rows, (own[:size] for own, size in known), strict=True)
        width = max(len(row) - min(_num_common(row, own), len(row) - 1) for row, own in pairs)
        tokens = [[0] * (width - len(row)) + row[-width:] for row in rows]
        tokens = torch.tensor(tokens, device=state.own.device)
        end = torch.tensor([[len(row)] for row in rows], device=state.own.device)
        slots = end + torch.arange(-width, 0, device=end.device)
        slots = slots.where(slots >= 0, cache.padding_slot)
        parts = zip(tokens.split(CHUNK_SIZE, dim=1), slots.split(CHUNK_SIZE, dim=1), strict=True)
        *chunks, (tokens, slots) = parts
        forward, drawn = self._slot_model.forward, []
        with narrowed([cache], max(map(len, rows)) + count):
            for part, at in chunks:
                forward(part, cache, at, logits_to_keep=None, is_chunk=True)
            for i in range(count):
                logits, _ = forward(tokens, cache, slots, logits_to_keep=1)
                tokens, slots = logits[..., : self._own.size].argmax(dim=-1), end + i
                drawn.append(tokens)
        written = torch.cat(drawn, dim=1).tolist()
        for i, (row, new) in enumerate(zip(rows, written, strict=True)):
            read = row + new[:-1]
            state.own[i, : len(read)] = torch.tensor(read, device=end.device)
        state.num_own.copy_(end[:, 0] + count - 1)
        return written

    def _in_target(self, ids: list[int], row: list[int], new: list[int]) -> list[int]:
        """What the draft model wrote after its tokens of a text, as the target's tokens after those
        of the text, which stay as they are.
        """
        own, target, is_end = self._own.tokenizer, self._target.tokenizer, False
        if own.eos_token_id in new:
            new, is_end = new[: new.index(own.eos_token_id)], target.eos_token_id is not None
        tail = self._own.tail(row)
        before, after = self._own.decode(tail), self._own.decode(self._own.whole(tail + new))
        if not after.startswith(before):
            return []
        text = after[len(before) :].rstrip(UNKNOWN)
        before = self._target.decode(self._target.tail(ids))
        draft = self._target.encode_after(before, text) if text else []
        return draft + [target.eos_token_id] * is_end


class _Strings:
    """A tokenizer between texts and ids, without special tokens but those that begin a text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        vocab = sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
        self.size = vocab[-1][1] + 1
        self.fingerprint = sha256(repr(vocab).encode()).hexdigest()[:16]
        marked, plain = tokenizer("o").input_ids, self._encode("o")
        starts = (i for i in range(len(marked)) if marked[i : i + len(plain)] == plain)
        self._start = marked[: next(starts, 0)]  # what ends a text would be read as its end
        ids = tokenizer.bos_token_id, tokenizer.eos_token_id, 0
        self._first = next(i for i in ids if i is not None)

    def check_fits(self, whose: str, vocab_size: int) -> None:
        """Raises `ValueError` for ids that the model has not."""
        if self.size > vocab_size:
            raise ValueError(
                f"expected a {whose}_tokenizer of at most the {vocab_size} ids of the {whose} "
                f"model, got one of {self.size}; pass StringDrafter(model, target_tokenizer, "
                "draft_tokenizer)"
            )

    def _encode(self, text: str) -> list[int]:
        options = {"add_special_tokens": False, "split_special_tokens": True}
        return self.tokenizer(text, **options).input_ids

    def encode(self, text: str) -> list[int]:
        """At least one id."""
        return self._start + self._encode(text) or [self._first]

    def decode(self, ids: list[int]) -> str:
        """As it is: no space is cleaned up."""
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return self.tokenizer.decode(ids, **options)

    def tail(self, ids: list[int]) -> list[int]:
        """The last ids, from the beginning of a character on: where bytes stand in for characters,
        decoders replace all bytes beside a character that was cut.
        """
        ends = (ids[-LOOKBEHIND - n :] for n in range(4))
        return next((e for e in ends if not self.decode(e).startswith(UNKNOWN)), ids[-LOOKBEHIND:])

    def whole(self, ids: list[int]) -> list[int]:
        """Ids without the last ones, three at most, that are a part of a character."""
        starts = (ids[: len(ids) - n] for n in range(min(4, len(ids))))
        return next((s for s in starts if not self.decode(self.tail(s)).endswith(UNKNOWN)), ids)

    def encode_after(self, tail: str, text: str) -> list[int]:
        """Ids of a text as they stand behind a tail: many tokenizers write a space before what they
        encode alone. Where a token would stand on both sides, those behind a new line.
        """
        for before in (tail, "\n"):
            ids, begin = self._encode(before + text), self.decode(self._encode(before))
            found = next((n for n in range(len(ids)) if self.decode(ids[:n]) == begin), None)
            if found is not None:
                return ids[found:]
        return self._encode(text)


def _num_common(some: list[int], others: list[int]) -> int:
    """How many of the first ids are the same."""
    pairs = enumerate(zip(some, others, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(some), len(others)))
