"""Finished texts, read once more: the target's distribution before each token, from HF's own model,
and what the drafter proposes there.

The distributions are those of forwards without a cache over each whole text alone, behind HF's own
warpers, so that nothing of ours, neither caches nor masks nor graphs, has a part in them. Drafts
come from a drafter that knows the text up to the token before, with random numbers of their own:
what they say of the token is fixed before it is drawn.

Legend: B rows, T tokens of a text, V vocabulary, D directions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, LogitsProcessorList, PreTrainedModel

from specdec.certify.generator.directions import Directions, Gains
from specdec.certify.generator.learned import Learned
from specdec.generator import SpeculativeGenerator
from specdec.hf import WARPS, cache_argument, device_of
from specdec.request import Request
from specdec.request.options import WARPERS
from specdec.request.prompts import left_padded
from specdec.samplers.given import ROW_BITS, GivenText
from specdec.types import Draft

_OTHER_SEEDS = 1 << 62
"""Seeds of rows that are read, beyond those of texts. Bits 32 to 61 number the first text."""
_PIECE = 8


@dataclass(frozen=True, eq=False)
class Reader:
    """Reads texts of a generator.

    Args:
        generator: that wrote them.
        reference: whose forwards count; `None` for the target's own model. A copy in float32 shows
            what rounding does.
        with_drafts: whether the drafter drafts at every token, which costs a step per token. It is
            not asked where it remembers earlier texts, of which these are some.
        piece: so many tokens are read at a time, through HF's cache; `None` for whole texts.
    """

    generator: SpeculativeGenerator
    reference: PreTrainedModel | None = None
    with_drafts: bool = True
    piece: int | None = None

    @torch.inference_mode()
    def read(
        self,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[Sequence[int]],
        options: dict[str, Any],
        scores: Sequence[Tensor] | None = None,
        learned: Learned | None = None,
        first: int = 0,
    ) -> Gains:
        """The gains of all directions along the texts, `[B, T, ...]` instead of `[B, ...]`; all
        zeros where a row has ended.

        Args:
            prompts: ids of each.
            texts: what follows them, at least one token each.
            options: of `generate`, with which they were drawn.
            scores: for each column of new tokens `[B, V]` what the generator drew from, where it is
                known: `GenerationResult.scores`.
            learned: where earlier texts of the same target leaned; `None` for nowhere.
            first: number of the first text. No number may come twice: drafts are drawn by it.

        Raises:
            ValueError: greedy texts, or values that differ between rows.
        """
        directions = Directions(prompts, texts, self.generator.target.device, learned)
        is_swapped, others, steps = scores is not None and self.is_rounded, repeat(None), []
        if is_swapped:
            others = (p for p, *_ in self._another.distributions(prompts, texts, options))
        columns = self.distributions(prompts, texts, options, scores, first)
        for (probs, draft, loop), other in zip(columns, others, strict=False):
            if is_swapped:
                probs, loop = loop, probs
            steps.append(directions.step(probs, draft, loop, other))
        return Gains(*(torch.stack(each, dim=1).cpu() for each in zip(*steps, strict=True)))

    def distributions(
        self,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[Sequence[int]],
        options: dict[str, Any],
        scores: Sequence[Tensor] | None = None,
        first: int = 0,
    ) -> Iterator[tuple[Tensor, Draft | None, Tensor | None]]:
        """For each column of new tokens `[B, V]` float64 the target's distribution, what is drafted
        there, and what the generator drew from; arguments as of `read`.
        """
        device = self.generator.target.device
        inputs = left_padded(prompts, device)
        # Some processors of HF look at the length that was allowed.
        options = {"max_new_tokens": max(map(len, texts)), **options}
        options |= {"seed": 0, "num_return_sequences": 1}
        request = Request.read(self.generator.target, *inputs, options)
        warp = {name: _common(name, value) for name, value in request.options.warp.items()}
        if warp["temperature"] == 0:
            raise ValueError(
                "greedy texts are not drawn, so there is nothing to bet on; pass a temperature > 0"
            )
        warpers = [w(warp[n]) for w, n in WARPERS.items() if warp.get(n, WARPS[n]) != WARPS[n]]
        processors = [LogitsProcessorList()] * len(prompts)
        for rows, own in request.processors:
            processors[rows] = [own] * len(processors[rows])
        whole = [[*p, *t] for p, t in zip(prompts, texts, strict=True)]
        rows = zip(whole, map(len, prompts), processors, strict=True)
        logits = pad_sequence([self._logits(*row) for row in rows], batch_first=True)  # [B, T, V]
        drafts = self._drafts(prompts, whole, warp, first) if self._asks else repeat(None)
        for index, draft in zip(range(logits.shape[1]), drafts, strict=False):
            own = logits[:, index].double()
            for warper in warpers:
                own = warper(None, own)
            probs, loop = own.softmax(dim=-1), None
            if scores is not None:
                loop = scores[index].double().softmax(dim=-1)
                loop = torch.where(loop.isnan(), probs, loop)  # of rows that have ended
            yield probs, draft, loop

    @property
    def is_rounded(self) -> bool:
        """The target computes in half precision. There its distributions differ visibly from those
        of any other computation, so where the loop's own are known, tokens are held against these,
        and these against the model's.
        """
        return torch.finfo(self.generator.target.dtype).bits < 32

    @property
    def _another(self) -> Reader:
        """A sound computation of the same, which tells how far rounding goes: the model's own where
        another one counts, or else the model in pieces, as small as those that the loop reads.
        """
        is_recurrent = self.generator.target.is_recurrent  # HF goes on with single tokens there
        piece = None if self.reference is not None else 1 if is_recurrent else _PIECE
        return replace(self, reference=None, with_drafts=False, piece=piece)

    @property
    def _asks(self) -> bool:
        drafter = self.generator.drafter
        return self.with_drafts and drafter.num_draft_tokens > 0 and not drafter.has_memory

    def _logits(self, ids: list[int], start: int, processors: LogitsProcessorList) -> Tensor:
        """`[T, V]` of a text that begins at `start`, behind the processors of its row."""
        model = self.generator.target.model if self.reference is None else self.reference
        whole = torch.tensor([ids], device=device_of(model.get_input_embeddings()))
        if self.piece is None:
            logits = model(input_ids=whole, use_cache=False).logits[0, start - 1 : -1]
        else:
            past = {cache_argument(model): DynamicCache(config=model.config), "use_cache": True}
            pieces = [whole[:, :start], *whole[:, start:-1].split(self.piece, dim=1)]
            pieces = [model(input_ids=piece, **past).logits[0] for piece in pieces if piece.numel()]
            logits = torch.cat([pieces[0][-1:], *pieces[1:]])
        # A copy, so that the logits of the prompt are not kept.
        logits = logits[:, : self.generator.target.vocab_size].clone()
        logits = logits.to(self.generator.target.device)
        if not processors:
            return logits
        whole = whole.to(logits.device)
        rows = [
            processors(whole[:, : start + t], row[None].float()) for t, row in enumerate(logits)
        ]
        return torch.cat(rows)

    def _drafts(
        self, prompts: Sequence, whole: list[list[int]], warp: dict, first: int
    ) -> Iterator[Draft]:
        """What is drafted after each token of the texts, from the last of the prompts on."""
        own = self.generator
        reader = SpeculativeGenerator(
            own.target,
            own.drafter,
            GivenText(whole, own.target.device),
            graphs=False,
            prefill_chunk_size=own.prefill_chunk_size,
            kept_bytes=0,
            steps_ahead=1,
        )
        longest = max(len(ids) - len(prompt) for ids, prompt in zip(whole, prompts, strict=True))
        generation = reader.start(
            *left_padded(prompts, own.target.device),
            max_new_tokens=longest,
            neutral=True,
            do_sample=True,
            eos_token_id=[],
            seed=[_OTHER_SEEDS + (first << ROW_BITS) + row for row in range(len(whole))],
            **warp,
        )
        if own.drafter.tree_depth is None:  # deeper drafts are not looked at
            generation.num_draft_tokens = min(2, own.drafter.num_draft_tokens)
        for _ in range(longest):
            yield reader.step(generation).draft


def _common(name: str, value: Any) -> Any:
    """The value of all rows."""
    values = set(value) if isinstance(value, list) else {value}
    if len(values) > 1:
        raise ValueError(
            f"{name} has different values for different rows; read texts of one value at a time"
        )
    return values.pop()
