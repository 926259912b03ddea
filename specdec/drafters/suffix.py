"""`SuffixDrafter`: the text so far and earlier texts draft together.

Legend: B rows, T tokens of a text, K draft tokens, n tokens of the longest match, C tokens
remembered, m occurrences that are counted.

A remembered text may belong to a prompt. Its n-grams then have the prompt's key added to their own,
and so have those that rows of the prompt look for: one search finds what is of both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from specdec.arguments import check_integer, check_placement, check_tensor, shown
from specdec.atomic import replacing
from specdec.drafters.lookup import PromptLookupDrafter, following, last_tokens
from specdec.drafters.lookup_tree import are_alike
from specdec.paths import check_path
from specdec.samplers.noise import Drawing
from specdec.settings import plain
from specdec.slots.room import memory_bytes
from specdec.types import PAD_TOKEN, Context, Draft

_CELL_BYTES = 48
"""Of a token and a length of a match: 16 are kept, the others are used while texts are sorted."""
NUM_COUNTED = 16
"""Occurrences that are counted of each of the two, the text so far and the memory."""

_NO_KEY = 2**63 - 1
_FACTOR = 0x9E3779B97F4A7C15 - 2**64  # odd, with bits all over: the golden ratio's
_PROMPT_FACTOR = 0xBF58476D1CE4E5B9 - 2**64  # another one: keys of n-grams and prompts are added


class SuffixDrafter(PromptLookupDrafter):
    """Finds where the longest n-gram that ends the text occurred before, in the text itself and in
    the texts that were remembered, and proposes what followed most often.

    Up to 16 occurrences in the text are counted, the latest with K tokens after them first, and up
    to 16 in the memory, evenly spaced among all. Of their continuations the one with the most
    expected accepted tokens by these counts is proposed: the sum over i of how many occurrences
    have its first i tokens; of equal ones the text's own, then the latest. The proposal is
    deterministic: a point mass.

    `remember` extends the memory, and nothing else does: what a call drafts does not depend on the
    calls beside it. All n-grams of the memory are sorted by then, so that a step costs the same
    whatever is remembered. A captured step finds what was remembered since.

    Texts that were remembered with their prompts are for the rows that begin with one: such a row
    looks up those of the longest prompt that it begins with, every other row those without any.

    Args:
        num_draft_tokens: K.
        max_ngram: longest match to look for, in tokens.
        min_ngram: shortest match worth proposing from.
        max_tokens: C, tokens that are remembered, a separator after each text included; the
            oldest are dropped first. The tables take 16 bytes per token and length of a match.

    Attributes:
        memory: `[C]` remembered tokens, the latest last.
        prompts: `[C]` keys of the prompts that they belong to, 0 for none.

    Raises:
        TypeError, ValueError: a number out of range; see `PromptLookupDrafter`. Too large tables.

    Example:
        >>> drafter = SuffixDrafter(num_draft_tokens=2)
        >>> drafter.remember([[5, 6, 7, 8], [9, 6, 7, 1], [6, 7, 1, 2]])
        >>> state = drafter.init_state(1, 16, vocab_size=10, device=torch.device("cpu"))
        >>> text = torch.tensor([[3, 6, 7]])
        >>> context = Context(text, None, torch.tensor([0]), torch.tensor([2]))
        >>> drafter.propose(context, state, Drawing(2, None, None, None)).tokens
        tensor([[1, 2]])

    Reference: Oliaro et al., arXiv:2411.04975 (SuffixDecoding).
    """

    _vocab_size: int | None = None  # of the target that the memory was last checked for

    def __init__(
        self,
        num_draft_tokens: int = 8,
        *,
        max_ngram: int = 16,
        min_ngram: int = 1,
        max_tokens: int = 65536,
    ):
        super().__init__(num_draft_tokens, max_ngram=max_ngram, min_ngram=min_ngram)
        self.max_tokens = check_integer("max_tokens", max_tokens, 1)
        needed, there = max_ngram * max_tokens * _CELL_BYTES, memory_bytes(torch.device("cpu"))
        if there is not None and needed > there:
            raise ValueError(
                f"max_ngram={max_ngram} times max_tokens={max_tokens} take {needed / 2**30:.1f} "
                f"GiB, and cpu has {there / 2**30:.1f} GiB in all; make one of them smaller"
            )
        shape, host = (max_ngram, max_tokens), {"dtype": torch.long, "device": "cpu"}
        tables = {
            "memory": torch.full((max_tokens,), PAD_TOKEN, **host),  # a separator after each text
            "prompts": torch.zeros(max_tokens, **host),
            "_sorted_prompts": torch.zeros(max_tokens, **host),
            "_keys": torch.full(shape, _NO_KEY, **host),  # of the n-grams in row n - 1, ascending
            "_ends": torch.zeros(shape, **host),  # where each of them ends
        }
        for name, table in tables.items():  # `save` writes them
            self.register_buffer(name, table, persistent=False)
        self._has_prompts = False  # steps are captured anew where it changes

    def settings(self) -> dict[str, Any]:
        """See `Drafter.settings`; with a fingerprint of the memory."""
        return {**super().settings(), **{name: plain(x) for name, x in self._saved().items()}}

    def _saved(self) -> dict[str, Tensor]:
        """What a file of the memory holds."""
        prompts = {"prompts": self.prompts} if self._has_prompts else {}
        return {"memory": self.memory, **prompts}

    def remember(
        self,
        texts: Iterable[Sequence[int] | Tensor],
        prompts: Iterable[Sequence[int] | Tensor] | None = None,
    ) -> None:
        """Adds texts to the memory, for the calls that begin after it.

        A call stays lossless as long as its seeds have written no text of the memory: its draws
        must not depend on what is drafted. Give every call seeds of its own.

        Args:
            texts: token ids of each, prompt and answer for instance, without padding.
            prompts: token ids that each text followed. It is remembered for rows that begin with
                them; of a prompt itself the last tokens are, as many as a match has at most.
                `None`: for all rows that begin with no remembered prompt.

        Raises:
            TypeError, ValueError: a text or a prompt that is no list or tensor `[T]` of token ids,
                or one of ids that the target of the latest generator with this drafter does not
                have; another number of prompts than of texts.
        """
        texts, none = list(texts), self.memory[:0]
        starts = [none] * len(texts) if prompts is None else list(prompts)
        if len(starts) != len(texts):
            raise ValueError(
                f"prompts must be one for each text, got {len(starts)} for {len(texts)} texts; "
                "leave them out for texts of no prompt"
            )
        memory, keys, end = [self.memory], [self.prompts], self.memory.new_full((1,), PAD_TOKEN)
        for i, (text, start) in enumerate(zip(texts, starts, strict=True)):
            start = self._read(f"prompts[{i}]", start)
            memory += start[-self.max_ngram :], self._read(f"texts[{i}]", text), end
            keys += [_keys_of_starts(start)[-1:].expand(sum(map(len, memory[-3:])))]
        self._fill(torch.cat(memory), torch.cat(keys))

    def _read(self, what: str, text: Any) -> Tensor:
        """Token ids on the device of the memory, or an error."""
        try:
            tokens = check_tensor("", torch.as_tensor(text, device="cpu"), (None,), (torch.long,))
        except (TypeError, ValueError, RuntimeError) as error:  # strings, too large integers
            raise TypeError(
                f"{what} must be a list or an int64 tensor [T] of token ids, got {shown(text)}; "
                "tokenize texts, and pass a list of them"
            ) from error
        if bool((tokens < 0).any()):
            raise ValueError(f"{what} has the token id {int(tokens.min())}; ids are >= 0")
        self._check_ids(what, tokens, self._vocab_size)
        return tokens.to(self.memory.device)

    def save(self, path: str | Path) -> None:
        """Writes the memory to a safetensors file."""
        with replacing(check_path("path", path, what="a file")) as file:
            file.write(save({name: x.cpu().contiguous() for name, x in self._saved().items()}))

    def load(self, path: str | Path) -> None:
        """Replaces the memory by the latest tokens of one that was saved.

        Raises:
            ValueError: no file of `save`, or of texts of another tokenizer, see `remember`.
        """
        try:
            tables = load_file(check_path("path", path, what="a file"))
            memory = check_tensor("memory", tables["memory"], (None,), (torch.long,))
            prompts = tables.get("prompts", torch.zeros_like(memory))
            check_tensor("prompts", prompts, tuple(memory.shape), (torch.long,))
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} holds no memory of SuffixDrafter.save ({type(error).__name__}: {error})"
            ) from error
        self._check_ids(str(path), memory, self._vocab_size)
        self._fill(memory.to(self.memory.device), prompts.to(self.memory.device))

    def forget(self) -> None:
        """Empties the memory."""
        self._fill(self.memory[:0], self.prompts[:0])

    def _fill(self, memory: Tensor, prompts: Tensor) -> None:
        """Remembers the last C tokens and sorts their n-grams, in storage that captured steps read.
        Those that no token follows have no key; those with a separator in them match no text.
        """
        size, longest = self.max_tokens, self.max_ngram
        self.memory.copy_(F.pad(memory, (size, 0), value=PAD_TOKEN)[-size:])
        self.prompts.copy_(F.pad(prompts, (size, 0))[-size:])
        self._sorted_prompts.copy_(self.prompts.sort().values)
        self._has_prompts = bool(self.prompts.any())
        windows = F.pad(self.memory, (longest - 1, 0), value=PAD_TOKEN).unfold(0, longest, 1)
        is_followed = F.pad(self.memory[1:], (0, 1), value=PAD_TOKEN) >= 0
        keys = _keys(windows.flip(-1), _FACTOR) + self.prompts[:, None]
        keys = keys.masked_fill(~is_followed[:, None], _NO_KEY)
        torch.sort(keys.T, dim=1, stable=True, out=(self._keys, self._ends))

    def validate(self, *, vocab_size: int, device: torch.device) -> None:
        """Raises ValueError for a memory on another device, or with ids beyond the vocabulary."""
        check_placement("the memory", self.memory.device, device)
        self._check_ids("the memory", self.memory, vocab_size)
        self._vocab_size = vocab_size

    def _check_ids(self, what: str, ids: Tensor, vocab_size: int | None) -> None:
        if vocab_size is not None and len(ids) and (largest := int(ids.max())) >= vocab_size:
            raise ValueError(
                f"{what} has the token id {largest} and the target a vocabulary of {vocab_size}; "
                "its texts were made with another tokenizer. Tokenize with the target's; load() "
                "replaces a memory, and a new SuffixDrafter has none"
            )

    def propose(self, context: Context, state: Any, drawing: Drawing) -> Draft:
        """Looks the end of the text up in the text and in the memory."""
        self.prefill(context, state)
        length, count = context.num_committed[:, None], drawing.num_draft_tokens
        text = state.text
        found = self._in_text(text, length, count), self._in_memory(text, length, count)
        tokens, matched = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        longest = matched.amax(dim=1, keepdim=True)  # [B, 1]
        is_counted = (matched == longest) & (longest >= self.min_ngram)
        tokens = tokens.masked_fill(~is_counted[..., None], PAD_TOKEN)  # [B, 2 m, K]
        votes = (are_alike(tokens) & (tokens >= 0)[:, :, None]).sum(dim=(2, 3))
        best = votes.argmax(dim=1)[:, None, None]
        tokens = tokens.gather(1, best.expand(-1, -1, count))[:, 0]
        return Draft(tokens, None, (tokens >= 0).sum(dim=1))

    def _in_text(self, text: Tensor, length: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Tokens `[B, m, K]` after the best matches in the text, `PAD_TOKEN` after its end, and
        `[B, m]` the lengths of these matches.
        """
        found, ends = self._scores(text, length, count)[0].topk(min(NUM_COUNTED, text.shape[1]))
        matched = found.clamp(min=0) // ((count + 1) * text.shape[1])
        return following(text, length, ends, count, fill=PAD_TOKEN), matched

    def _in_memory(self, text: Tensor, length: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The same of the memory. An n-gram that is there has all its ends there, so the lengths
        that are found are 1, 2, ..., n.
        """
        keys = _keys(last_tokens(text, length, self.max_ngram).flip(-1), _FACTOR)
        if self._has_prompts:
            keys = keys + self._prompts_of(text, length)
        keys = keys.T.contiguous()  # [n, B]
        first = torch.searchsorted(self._keys, keys)
        after = torch.searchsorted(self._keys, keys, right=True)
        matched = (after > first).sum(dim=0)  # [B]; a start that a text lacks matches nothing
        row = (matched - 1).clamp(min=0)[None]
        first, after = first.gather(0, row).T, after.gather(0, row).T  # [B, 1]
        size, index = after - first, torch.arange(NUM_COUNTED, device=text.device)
        place = (after - 1 - index * size.clamp(min=NUM_COUNTED) // NUM_COUNTED).clamp(min=0)
        ends = self._ends[row.T, place]  # [B, m]
        source = ends[..., None] + 1 + torch.arange(count, device=text.device)
        tokens = self.memory[source.clamp(max=self.max_tokens - 1)]  # the last is a separator
        is_of_text = (tokens >= 0).cumprod(dim=2).bool()
        return tokens.where(is_of_text, PAD_TOKEN), matched[:, None] * (index < size)

    def _prompts_of(self, text: Tensor, length: Tensor) -> Tensor:
        """`[B, 1]`: key of the longest remembered prompt that a text begins with, 0 for none."""
        keys = _keys_of_starts(self._as_passed(text))
        place = torch.searchsorted(self._sorted_prompts, keys).clamp(max=self.max_tokens - 1)
        size = torch.arange(keys.shape[1], device=text.device)
        is_known = (self._sorted_prompts[place] == keys) & (size <= length)
        return keys.gather(1, (size * is_known).amax(dim=1, keepdim=True))


def _keys_of_starts(text: Tensor) -> Tensor:
    """`[..., T + 1]`: keys of the first 0, 1, ..., T tokens of texts `[..., T]`; 0 is of none."""
    return F.pad(_keys(text + 1, _PROMPT_FACTOR), (1, 0))


def _keys(tokens: Tensor, factor: int) -> Tensor:
    """Keys of the first 1, 2, ... of tokens `[..., T]`, of the same shape. Two beginnings of one
    key, a chance of about 1e-19, make a wrong guess, no wrong text.
    """
    powers = tokens.new_full(tokens.shape[-1:], factor).cumprod(0)
    return (tokens * powers).cumsum(-1)
