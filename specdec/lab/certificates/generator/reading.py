"""Finished texts, read once more: the target's distribution before each token, from HF's own model,
and what the drafter proposes there.

The distributions are those of `Witness`, after HF's own processors and warpers, so that nothing of
ours, neither caches nor masks nor graphs, has a part in them. Drafts come from a drafter that knows
the text up to the token before, with random numbers of their own: what they say of the token is
fixed before it is drawn.

A token whose probability is 0 is impossible, and decides alone. It is 0 for the loop, which hands
over what it drew from, or it is 0 for HF's model. Two sound computations may cut a truncation at
two places, so the second counts only where it stays 0 when every logit is moved by as much as
rounding moves it, in favour of the token or against it.

Legend: B rows, T tokens of a text, V vocabulary, D directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessorList, PreTrainedModel

from specdec.generator import SpeculativeGenerator
from specdec.hf.generation import FILTERS
from specdec.lab.certificates.generator.directions import Directions, Gains
from specdec.lab.certificates.generator.learned import Learned
from specdec.lab.certificates.generator.witness import RowText, Witness, moved
from specdec.request.call import Request, read_request
from specdec.request.lists import left_padded
from specdec.request.row_inputs import offsets_among, refuse_unknown
from specdec.request.warpers import WARPERS
from specdec.samplers.given import ROW_BITS, GivenText
from specdec.types import Draft

_OTHER_SEEDS = 1 << 62
"""Seeds of rows that are read, beyond those of texts. Bits 32 to 61 number the first text."""


@dataclass(frozen=True)
class ZeroToken:
    """A token of a text whose probability is exactly 0.

    Args:
        text: number of the text, from 0.
        place: new tokens before it.
        token: its id.
        rounding: by how much logits were moved without making it possible; `None` where the loop's
            own distribution, which no rounding touches, gives it 0.
    """

    text: int
    place: int
    token: int
    rounding: float | None

    def __str__(self) -> str:
        where = f"new token {self.place} of text {self.text} is {self.token}"
        if self.rounding is None:
            return f"{where}, to which the loop's own distribution gives 0"
        return (
            f"{where}, and moving all logits by {self.rounding:.1e}, the rounding, leaves it at 0"
        )


class Reading(NamedTuple):
    """What was read.

    Args:
        gains: of all directions along the texts, `[B, T, ...]` instead of `[B, ...]`; all zeros
            where a row has ended.
        impossible: tokens of probability 0.
        num_at_cut: tokens to which HF's model gives 0 and a sound computation need not.
    """

    gains: Gains
    impossible: list[ZeroToken]
    num_at_cut: int


@dataclass(frozen=True, eq=False)
class Claim:
    """What texts of a call claim to be drawn from.

    Args:
        texts: of each row.
        processors: HF's, of each row, before the warpers.
        logits_filter: temperature and truncation of all rows.
        row_inputs: as the call brought them.
    """

    texts: list[RowText]
    processors: list[LogitsProcessorList]
    logits_filter: dict[str, Any]
    row_inputs: Any

    @classmethod
    def of(
        cls,
        generator: SpeculativeGenerator,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[Sequence[int]],
        options: dict[str, Any],
    ) -> Claim:
        """Reads the options of a call as `generate` does.

        Raises:
            TypeError, ValueError: as `generate`; for greedy texts, and values that differ between
                rows.
        """
        target = generator.target
        inputs = left_padded(prompts, target.device)
        # Some processors of HF look at the length that was allowed.
        options = {"max_new_tokens": max(map(len, texts)), **options}
        request = read_request(target, *inputs, options | {"seed": 0, "num_return_sequences": 1})
        refuse_unknown(request.row_inputs, (target, generator.drafter))
        logits_filter = {
            name: _common(name, value) for name, value in request.logits_filter.items()
        }
        if logits_filter["temperature"] == 0:
            raise ValueError(
                "greedy texts are not drawn, so there is nothing to bet on; pass a temperature > 0"
            )
        processors = [LogitsProcessorList()] * len(prompts)
        for rows, own in request.processors:
            processors[rows] = [own] * len(processors[rows])
        given = options.get("row_inputs")
        return cls(rows_of(prompts, texts, request, given), processors, logits_filter, given)

    def processed(self, row: int, logits: Tensor) -> Tensor:
        """`[T, V]` of a row, after its processors."""
        own, text = self.processors[row], self.texts[row]
        if not own:
            return logits
        whole = torch.tensor([list(text.ids)], device=logits.device)
        each = enumerate(logits.split(1))
        return torch.cat([own(whole[:, : text.start + t], one.float()) for t, one in each])

    def scores(self, logits: Tensor) -> Tensor:
        """`[B, V]` float64: processed logits after HF's warpers."""
        own = logits.double()
        for warper, name in WARPERS.items():
            if self.logits_filter.get(name, FILTERS[name]) != FILTERS[name]:
                own = warper(self.logits_filter[name])(None, own)
        return own

    def probs(self, logits: Tensor) -> Tensor:
        """Their softmax, what texts are drawn from."""
        return self.scores(logits).softmax(dim=-1)

    def may_be(self, row: int, place: int, logits: Tensor, by: float) -> bool:
        """Whether moving logits `[V]` by so much, either way, makes the token there possible."""
        text = self.texts[row]
        before = torch.tensor([text.ids[: text.start + place]], device=logits.device)
        token = text.ids[text.start + place]
        against = logits.double() + by  # some processors keep what is not too likely
        against[token] = logits[token] - by
        for own in (moved(logits, token, by)[None], against[None]):
            if self.processors[row]:
                own = self.processors[row](before, own.float())
            if self.probs(own)[0, token] > 0:
                return True
        return False


def rows_of(
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    request: Request,
    row_inputs: Any,
) -> list[RowText]:
    """The texts of a call's rows, each with its offset, its adapter and its inputs."""
    adapters, inputs = ((row_inputs or {}).get(n) or repeat(None) for n in ("adapter", "prompt"))
    offsets, activated = offsets_among(request.row_inputs), request.row_inputs.get("alora_offsets")
    activated = repeat(0) if activated is None else activated.tolist()
    each = zip(prompts, texts, offsets, adapters, activated, inputs, strict=False)
    rows = [RowText([*p, *t], len(p), *own) for p, t, *own in each]
    return [*map(_with_source, rows)] if hasattr(request.row_inputs, "source") else rows


def _with_source(row: RowText) -> RowText:
    """The text of a decoder, whose prompt HF reads beside the source.

    Raises:
        ValueError: nobody says what the source is.
    """
    if row.prompt is None:
        raise ValueError(
            "expected the source of each prompt, since the target has an encoder; pass prompts as "
            "dicts of decoder_input_ids [1, T] beside input_ids or input_features"
        )
    ids = torch.tensor([row.ids[: row.start]], device="cpu")
    return replace(row, prompt={**row.prompt, "decoder_input_ids": ids})


def inputs_of(row_inputs: Mapping[str, Any] | None, numbers: Sequence[int]) -> dict | None:
    """Row inputs of some rows, by their numbers."""
    return row_inputs and {
        name: values[list(numbers)] if isinstance(values, Tensor) else [values[n] for n in numbers]
        for name, values in row_inputs.items()
    }


@dataclass(frozen=True, eq=False)
class Reader:
    """Reads texts of a generator.

    Args:
        generator: that wrote them.
        reference: whose forwards count; `None` for the target's own model. A copy in float32 shows
            what rounding does.
        with_drafts: whether the drafter drafts at every token, which costs a step per token. It is
            not asked where it remembers earlier texts, of which these are some.
    """

    generator: SpeculativeGenerator
    reference: PreTrainedModel | None = None
    with_drafts: bool = True

    @torch.inference_mode()
    def read(
        self,
        prompts: Sequence[Sequence[int]],
        texts: Sequence[Sequence[int]],
        options: dict[str, Any],
        scores: Sequence[Tensor] | None = None,
        learned: Learned | None = None,
        first: int = 0,
    ) -> Reading:
        """Reads texts that were drawn side by side.

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
        claim = Claim.of(self.generator, prompts, texts, options)
        directions = Directions(prompts, texts, self.generator.target.device, learned)
        is_swapped, others, steps = scores is not None and self.is_rounded, repeat(None), []
        if is_swapped:
            others = self._columns(claim, self._other_logits)
        zeros = []
        columns = zip(self._read(claim, scores, first), others, strict=False)
        for place, ((probs, draft, loop), other) in enumerate(columns):
            zeros += _zeros(claim, place, probs, loop)
            if is_swapped:
                probs, loop = loop, probs
            steps.append(directions.step(probs, draft, loop, other))
        gains = Gains(*(torch.stack(each, dim=1).cpu() for each in zip(*steps, strict=True)))
        return Reading(gains, *self._decisive(claim, zeros, first))

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
        return self._read(Claim.of(self.generator, prompts, texts, options), scores, first)

    @property
    def is_rounded(self) -> bool:
        """The target computes in half precision. There its distributions differ visibly from those
        of any other computation, so where the loop's own are known, tokens are held against these,
        and these against the model's.
        """
        return torch.finfo(self.generator.target.dtype).bits < 32

    @property
    def witness(self) -> Witness:
        """The model whose forwards count."""
        own = witness_of(self.generator)
        return own if self.reference is None else replace(own, model=self.reference)

    def _other_logits(self, text: RowText) -> Tensor:
        """Those of a sound computation of the same, which tells how far rounding goes: the model's
        own where another one counts, or else the model in pieces.
        """
        own = witness_of(self.generator)
        return own.in_pieces(text) if self.reference is None else own.logits(text)

    def _read(
        self, claim: Claim, scores: Sequence[Tensor] | None, first: int
    ) -> Iterator[tuple[Tensor, Draft | None, Tensor | None]]:
        drafter = self.generator.drafter
        asks = self.with_drafts and drafter.num_draft_tokens > 0 and not drafter.has_memory
        drafts = self._drafts(claim, first) if asks else repeat(None)
        columns = zip(self._columns(claim, self.witness.logits), drafts, strict=False)
        for index, (probs, draft) in enumerate(columns):
            loop = None
            if scores is not None:
                loop = scores[index].to(probs.device).double().softmax(dim=-1)
                loop = torch.where(loop.isnan(), probs, loop)  # of rows that have ended
            yield probs, draft, loop

    def _columns(self, claim: Claim, read: Callable[[RowText], Tensor]) -> Iterator[Tensor]:
        """`[B, V]` float64 for each column."""
        device = self.generator.target.device
        rows = [claim.processed(row, read(text)) for row, text in enumerate(claim.texts)]
        logits = pad_sequence([row.to(device) for row in rows], batch_first=True)  # [B, T, V]
        for index in range(logits.shape[1]):
            yield claim.probs(logits[:, index])

    def _decisive(
        self, claim: Claim, zeros: list[tuple[int, int, bool]], first: int
    ) -> tuple[list[ZeroToken], int]:
        """Which tokens of probability 0 are impossible, and how many need not be."""
        found, num_at_cut, known = [], 0, {}
        for row, place, is_of_loop in zeros:
            text, rounding = claim.texts[row], None
            if not is_of_loop:
                if row not in known:  # read once more, since few texts have such a token
                    logits = self.witness.logits(text)
                    other = self._other_logits(text)
                    known[row] = logits, self.witness.rounding(text, logits, other)
                logits, rounding = known[row]
                if claim.may_be(row, place, logits[place], rounding):
                    num_at_cut += 1
                    continue
            token = text.ids[text.start + place]
            found.append(ZeroToken(first + row, place, token, rounding))
        return found, num_at_cut

    def _drafts(self, claim: Claim, first: int) -> Iterator[Draft]:
        """What is drafted after each token of the texts, from the last of the prompts on."""
        own, texts = self.generator, claim.texts
        reader = SpeculativeGenerator(
            own.target,
            own.drafter,
            GivenText([text.ids for text in texts], own.target.device),
            graphs=False,
            prefill_chunk_size=own.prefill_chunk_size,
            kept_bytes=0,
            steps_ahead=1,
        )
        longest = max(len(text.ids) - text.start for text in texts)
        generation = reader.start(
            *left_padded([text.ids[: text.start] for text in texts], own.target.device),
            max_new_tokens=longest,
            neutral=True,
            do_sample=True,
            eos_token_id=[],
            seed=[_OTHER_SEEDS + (first << ROW_BITS) + row for row in range(len(texts))],
            row_inputs=claim.row_inputs,
            **claim.logits_filter,
        )
        if own.drafter.tree_depth is None:  # deeper drafts are not looked at
            generation.num_draft_tokens = min(2, own.drafter.num_draft_tokens)
        for _ in range(longest):
            yield reader.step(generation).draft


def witness_of(generator: SpeculativeGenerator) -> Witness:
    """The target's own model."""
    target = generator.target
    if target.edits:
        raise ValueError(
            "certify reads texts by Hugging Face's own forwards of the model, which has none of "
            "its target's edits; certify the generator without edits, and compare edited text with "
            "that of SpeculativeGenerator(target, None)"
        )
    own = Witness(getattr(target.model, "whole", target.model), target.vocab_size)
    return replace(own, piece=1) if target.is_recurrent else own  # as HF goes on with such models


def _zeros(
    claim: Claim, place: int, probs: Tensor, loop: Tensor | None
) -> list[tuple[int, int, bool]]:
    """(row, place, whether the loop gives it 0) of the tokens of a column whose probability is 0,
    for the loop or for the model.
    """
    rows = [row for row, text in enumerate(claim.texts) if text.start + place < len(text.ids)]
    ids = [claim.texts[row].ids[claim.texts[row].start + place] for row in rows]
    here = torch.tensor(rows, device="cpu"), torch.tensor(ids, device="cpu")
    own = (probs.cpu()[here] == 0).tolist()
    of_loop = own if loop is None else (loop.cpu()[here] == 0).tolist()
    is_of_loop = [loop is not None and each for each in of_loop]
    return [
        (row, place, drawn)
        for row, is_zero, drawn in zip(rows, own, is_of_loop, strict=True)
        if is_zero or drawn
    ]


def _common(name: str, value: Any) -> Any:
    """The value of all rows."""
    values = set(value) if isinstance(value, list) else {value}
    if len(values) > 1:
        raise ValueError(
            f"{name} has different values for different rows; read texts of one value at a time"
        )
    return values.pop()
