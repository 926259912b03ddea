"""Generators with planted faults, for `certificates.py`: each is wrong in one way only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from specdec import Draft, ModelDrafter, RejectionSampler, Target, zoo
from specdec.samplers import LogitsFilter, Noise, Stream
from specdec.slots import attention

ROWS, PROMPT_TOKENS = 50, 12
SLOT = PROMPT_TOKENS
"""Of the first new token: it is stale, or hidden."""


class OtherDraws:
    """The numbers of a step, those that decide on draft tokens changed."""

    def __init__(self, noise, change: Callable[[Tensor], Tensor]):
        self._noise, self._change = noise, change

    def __getattr__(self, name: str):
        return getattr(self._noise, name)

    def uniform(self, stream: Stream) -> Tensor:
        """As of the step's noise."""
        uniform = self._noise.uniform(stream)
        return self._change(uniform) if stream == Stream.ACCEPT else uniform


class ScaledDraws(RejectionSampler):
    """Accept draws are multiplied by a factor."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def accept(self, draft, target_logits, logits_filter, noise):
        """As the rule, with other draws."""
        noise = OtherDraws(noise, lambda uniform: uniform * self.factor)
        return super().accept(draft, target_logits, logits_filter, noise)


class BonusFromDraft(RejectionSampler):
    """The last token of a step in which all before it were accepted is the draft's own."""

    def accept(self, draft, target_logits, logits_filter, noise):
        """As the rule, where the last draft token is always accepted."""
        is_last = torch.arange(noise.uniform(Stream.ACCEPT).shape[1]) == draft.tokens.shape[1] - 1
        noise = OtherDraws(noise, lambda u: u.masked_fill(is_last.to(u.device), 0.0))
        return super().accept(draft, target_logits, logits_filter, noise)


class NoClamp(RejectionSampler):
    """Negative parts of p - q stay in the residual, so that it sums to 0 and p takes its place."""

    def accept(self, draft, target_logits, logits_filter, noise):
        """As the rule, but for the extra token."""
        verdict = super().accept(draft, target_logits, logits_filter, noise)
        probs = logits_filter(target_logits).double()
        row = probs[torch.arange(len(probs)), verdict.num_accepted].cumsum(dim=-1)
        passed = row <= noise.uniform(Stream.RESAMPLE)[:, :1] * row[:, -1:]
        extra = passed.sum(dim=-1, keepdim=True).clamp(max=row.shape[1] - 1)
        tokens = verdict.tokens.scatter(1, verdict.num_accepted[:, None], extra)
        return replace(verdict, tokens=tokens)


class Sharpened(ModelDrafter):
    """Draws from q and reports q^1.25, normalised."""

    def propose(self, context, state, drawing):
        """Its tokens, and other probabilities."""
        draft = super().propose(context, state, drawing)
        probs = draft.probs**1.25
        return replace(draft, probs=probs / probs.sum(dim=-1, keepdim=True))


class TruncatedDraft(ModelDrafter):
    """Draws behind top-p 0.9 and reports the whole distribution."""

    def propose(self, context, state, drawing):
        """One token is drafted, so that both distributions are of the same text."""
        cut = replace(
            drawing, logits_filter=LogitsFilter(drawing.logits_filter.batch_size, top_p=0.9)
        )
        tokens = super().propose(context, state, cut).tokens
        return Draft(tokens, super().propose(context, state, drawing).probs)


class StaleSlot(Target):
    """In one row of 50 a slot holds what another one does."""

    def verify(self, cache, start, root, draft, **options):
        """Where the slot is committed, it is overwritten before each forward."""
        rows = torch.arange(0, len(start), ROWS)
        rows = rows[start[rows] > SLOT]
        for table in (*cache.keys.values(), *cache.values.values()):
            table[rows, SLOT] = table[rows, SLOT - 3]
        return super().verify(cache, start, root, draft, **options)


@contextmanager
def hidden_slot() -> Iterator[None]:
    """No later token sees one slot, in all rows and layers (of a CPU's masks)."""
    whole = attention.window_mask

    def cut(window, *args, **options):
        mask = whole(window, *args, **options)
        if mask.shape[-1] > SLOT:
            mask, slots = mask.clone(), window.slots[:, -mask.shape[-2] :]
            lost = mask[..., SLOT].masked_fill(slots[:, None] > SLOT, -torch.inf)
            mask[..., SLOT] = lost
        return mask

    attention.window_mask = cut
    try:
        yield
    finally:
        attention.window_mask = whole


class OtherLogits(RejectionSampler):
    """The rule over logits `[B, N, V]` that are changed, and the filter with them."""

    def __init__(self, change: Callable[[Tensor, LogitsFilter], tuple[Tensor, LogitsFilter]]):
        super().__init__()
        self.change = change

    def accept(self, draft, target_logits, logits_filter, noise):
        """As the rule."""
        return super().accept(draft, *self.change(target_logits, logits_filter), noise)


class CoolPlaces(RejectionSampler):
    """The rule at a lower temperature in some rows, or at some new tokens."""

    def __init__(self, where: Callable[[Tensor, Tensor], Tensor], temperature: float = 0.8):
        super().__init__()
        self.where, self.temperature = where, temperature

    def law(self, probs, rows, place):
        """`[B, V]` what tokens are drawn from, of p in rows `[B, 1]` before a new token."""
        cool = probs ** (1 / self.temperature)
        is_cool = self.where(rows, torch.full_like(rows, place))
        return torch.where(is_cool, cool / cool.sum(dim=-1, keepdim=True), probs)

    def accept(self, draft, target_logits, logits_filter, noise):
        """As the rule."""
        rows = torch.arange(len(target_logits), device=target_logits.device)[:, None]
        columns = torch.arange(target_logits.shape[1], device=rows.device)
        places = noise._start[:, None] + 1 + columns - PROMPT_TOKENS
        is_cool = self.where(rows, places).expand(places.shape)[..., None]
        return super().accept(
            draft,
            torch.where(is_cool, target_logits / self.temperature, target_logits),
            logits_filter,
            noise,
        )


class OtherTruncation(RejectionSampler):
    """The rule after a truncation that keeps a little more, or less."""

    def __init__(self, **truncation: float):
        super().__init__()
        self.truncation = truncation

    def law(self, probs, rows, place):
        """`[B, V]` what tokens are drawn from, of p before truncation."""
        return LogitsFilter(len(probs), **self.truncation, device=probs.device)(probs.log())

    def accept(self, draft, target_logits, logits_filter, noise):
        """As the rule."""
        other = LogitsFilter(
            logits_filter.batch_size, **self.truncation, device=target_logits.device
        )
        return super().accept(draft, target_logits, other, noise)


def tempered_twice(logits: Tensor, logits_filter: LogitsFilter) -> tuple[Tensor, LogitsFilter]:
    """The temperature of `COOL`, once more."""
    return logits / COOL["temperature"], logits_filter


def one_token_less(logits: Tensor, logits_filter: LogitsFilter) -> tuple[Tensor, LogitsFilter]:
    """Without the least likely token that truncation keeps."""
    probs = logits_filter(logits)
    least = probs.where(probs > 0, 2.0).argmin(dim=-1, keepdim=True)
    is_other = probs.scatter(-1, least, 0.0).sum(dim=-1, keepdim=True) > 0  # not the only one
    kept = probs.scatter(-1, least, probs.gather(-1, least).where(~is_other, 0.0))
    return kept.log(), LogitsFilter(logits_filter.batch_size)


def row_of_before(logits: Tensor, logits_filter: LogitsFilter) -> tuple[Tensor, LogitsFilter]:
    """The last draft token is verified by the row before its own."""
    rows = torch.arange(logits.shape[1], device=logits.device)
    rows[-2] = max(len(rows) - 3, 0)
    return logits[:, rows], logits_filter


def in_8_bits(logits: Tensor, logits_filter: LogitsFilter) -> tuple[Tensor, LogitsFilter]:
    """256 levels from the least to the largest logit of a row."""
    least, most = logits.amin(dim=-1, keepdim=True), logits.amax(dim=-1, keepdim=True)
    step = (most - least) / 255
    return ((logits - least) / step).round() * step + least, logits_filter


class NoiseOfPairs(Noise):
    """Two positions have the same numbers."""

    def at(self, start, width):
        """Those of the even one."""
        return super().at(start // 2, width)


class NoiseOfRows(Noise):
    """Two rows side by side have the same numbers."""

    def __init__(self, seeds, **place):
        super().__init__([seed // 2 for seed in seeds], **place)


def with_noise(kind: type[Noise]) -> RejectionSampler:
    """A sound rule over such numbers."""
    sampler = RejectionSampler()
    sampler.noise_type = kind
    return sampler


class StaleProbabilities(ModelDrafter):
    """The last draft token comes with the probabilities of the one before."""

    def propose(self, context, state, drawing):
        """Its tokens, and other probabilities."""
        draft = super().propose(context, state, drawing)
        if draft.probs.shape[1] < 2:
            return draft
        return replace(draft, probs=torch.cat([draft.probs[:, :-1], draft.probs[:, -2:-1]], dim=1))


class OffByOne(Target):
    """New tokens stand one position further on."""

    def verify(self, cache, start, root, draft):
        """Prompts stand where they should."""
        own = cache.row_inputs
        offset = torch.ones_like(start) + own.get("position_offset", 0)
        cache.row_inputs = {**own, "position_offset": offset}
        try:
            return super().verify(cache, start, root, draft)
        finally:
            cache.row_inputs = own


class OtherRow(Target):
    """One row of 50 is verified by the logits of the row beside it."""

    def verify(self, cache, start, root, draft, **options):
        """All else is as it should be."""
        output = super().verify(cache, start, root, draft, **options)
        rows = torch.arange(len(start), device=start.device)
        rows[::ROWS] = rows.roll(-1)[::ROWS]
        return replace(output, logits=output.logits[rows])


COOL, CUT, FIFTY = {"temperature": 0.9}, {"top_p": 0.9}, {"top_k": 50}


@dataclass(frozen=True)
class Case:
    """A generator, by the functions that make it and its options, and what it runs in."""

    drafter: Callable
    sampler: Callable = RejectionSampler
    target: Callable = Target
    around: Callable = nullcontext
    options: dict = field(default_factory=dict)


def drafts(kind: type = ModelDrafter, count: int = 4) -> Callable:
    """Of the zoo's draft model."""
    return lambda target: kind(zoo.load_drafter("model", target).model, count)


FAULTS = {
    "accept draws x 0.98": Case(drafts(), lambda: ScaledDraws(0.98)),
    "accept draws x 0.95": Case(drafts(), lambda: ScaledDraws(0.95)),
    "accept draws x 1.05": Case(drafts(), lambda: ScaledDraws(1.05)),
    "residual without clamp": Case(drafts(), NoClamp),
    "sharpened q": Case(drafts(Sharpened)),
    "bonus from the draft": Case(drafts(), BonusFromDraft),
    "stale slot in one row of 50": Case(drafts(), target=StaleSlot),
    "mask hides one slot": Case(drafts(), around=hidden_slot),
    "truncation of the draft alone": Case(drafts(TruncatedDraft, 1)),
    "two positions share noise": Case(drafts(), lambda: with_noise(NoiseOfPairs)),
    "two rows share noise": Case(drafts(), lambda: with_noise(NoiseOfRows)),
}
"""The directions were made with these in mind."""
OTHER_FAULTS = {
    "temperature applied twice": Case(drafts(), lambda: OtherLogits(tempered_twice), options=COOL),
    "top-p keeps a token less": Case(drafts(), lambda: OtherLogits(one_token_less), options=CUT),
    "last row of the window before its own": Case(drafts(), lambda: OtherLogits(row_of_before)),
    "logits in 8 bits": Case(drafts(), lambda: OtherLogits(in_8_bits)),
    "stale probabilities of the draft": Case(drafts(StaleProbabilities)),
    "position off by one": Case(drafts(), target=OffByOne),
    "logits of another row in one of 50": Case(drafts(), target=OtherRow),
    "first token at 0.8": Case(drafts(), lambda: CoolPlaces(lambda row, at: at == 0)),
    "first token at 0.5": Case(drafts(), lambda: CoolPlaces(lambda row, at: at == 0, 0.5)),
    "tokens from the 48th on at 0.8": Case(drafts(), lambda: CoolPlaces(lambda row, at: at >= 48)),
    "one row of 50 at 0.8": Case(drafts(), lambda: CoolPlaces(lambda row, at: row == 7)),
    "every eighth row at 0.8": Case(drafts(), lambda: CoolPlaces(lambda row, at: row % 8 == 3)),
    "top-p 0.905 for 0.9": Case(drafts(), lambda: OtherTruncation(top_p=0.905), options=CUT),
    "top-p 0.89 for 0.9": Case(drafts(), lambda: OtherTruncation(top_p=0.89), options=CUT),
    "top-k 49 for 50": Case(drafts(), lambda: OtherTruncation(top_k=49), options=FIFTY),
    "top-p 0.99 where none was asked": Case(drafts(), lambda: OtherTruncation(top_p=0.99)),
}
"""And not with these, which were written after the directions."""
