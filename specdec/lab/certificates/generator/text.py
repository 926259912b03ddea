"""Whether greedy text is that of Hugging Face's own model, and text of coupled noise the one that
its logits draw.

The reference is HF's own forward of each finished text alone, without a cache and without any code
of specdec. So every token is judged after the very tokens before it: the expected one is the
largest logit, or the winner of the race. A token that is another one is a tie where it wins once
every logit is moved, by as much as rounding moves it, in its favour: both tokens are then within
rounding of the top. How much that is, two forwards of HF's say, over the whole text and in pieces
through HF's own cache (`Witness.rounding`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specdec.generator import SpeculativeGenerator
from specdec.lab.certificates.generator.reading import Claim, inputs_of, rows_of, witness_of
from specdec.lab.certificates.generator.witness import RowText, Witness, moved
from specdec.request import Sampling
from specdec.request.call import read_request
from specdec.request.lists import left_padded
from specdec.samplers import LogitsFilter

Prompts = list[list[int]]
GREEDY = {"neutral": True, "do_sample": False}


@dataclass(frozen=True)
class Difference:
    """A token of a text that is not the expected one."""

    prompt: int  # its number
    place: int  # new tokens before it
    expected: int | None  # HF's token; `None` where one of the texts ends before the other
    found: int | None  # `None` if the text ends here
    margin: float  # by how much the expected token is above the found one
    rounding: float  # by which logits were moved
    is_tie: bool  # rounding explains it
    is_beside: bool = False  # in a batch with a row that is sampled

    def __str__(self) -> str:
        where = f"prompt {self.prompt}{', beside a sampled row' * self.is_beside}, new token "
        if self.expected is None:
            ends = "ends there, and" if self.found is None else "goes on there, and"
            return (
                f"{where}{self.place}: speculation {ends} Hugging Face's "
                "own text does not, by the ids that end a text"
            )
        verdict = (
            "a tie within rounding: both tokens are within it of the top"
            if self.is_tie
            else "not explained by rounding"
        )
        return (
            f"{where}{self.place}: Hugging Face's own forward has "
            f"{self.expected}, speculation {self.found}; margin {self.margin:.2g}, "
            f"rounding {self.rounding:.2g}: {verdict}"
        )


@dataclass(frozen=True)
class TextAudit:
    """The texts of one way of decoding, held against HF's own forward of each text alone."""

    name: str
    num_tokens: int  # that are the expected ones
    num_ties: int  # that are not, which rounding explains
    differences: list[Difference]  # one of each text, a tie only where all are

    @property
    def passed(self) -> bool:
        """Every difference is a tie within rounding."""
        return all(difference.is_tie for difference in self.differences)

    def __str__(self) -> str:
        what = "the argmax" if self.name == "greedy" else "what the noise draws"
        ties = f", {self.num_ties} more within rounding of it" if self.num_ties else ""
        head = f"{self.name}: {self.num_tokens} tokens are {what} of Hugging Face's own forward of "
        return "\n          ".join([f"{head}each text alone{ties}", *map(str, self.differences)])


def audit_text(
    generator: SpeculativeGenerator,
    prompts: Prompts,
    num: int,
    sampling: Sampling | None = None,
    row_inputs: Mapping[str, Any] | None = None,
) -> TextAudit:
    """Text, `num` tokens per prompt, against HF's forward of it: greedy text, or that of coupled
    noise, from `sampling` and with the numbers of the prompts as seeds. Greedy text is written
    twice: by a greedy batch, and beside a row that is sampled.
    """
    inputs, options = left_padded(prompts, generator.target.device), dict(GREEDY)
    if sampling:
        options = {"neutral": True, "seed": list(range(len(prompts))), **sampling.logits_filter}
    options |= {"max_new_tokens": num, "row_inputs": row_inputs}
    result = generator.generate(*inputs, **options)
    request = read_request(generator.target, *inputs, options)
    texts = [(False, n, text) for n, text in enumerate(result.texts)]
    if not sampling:
        beside = enumerate(_beside_a_sampled_row(generator, prompts, num, row_inputs))
        texts += [(True, n, text) for n, text in beside if text != result.texts[n]]
    rows = rows_of(prompts, result.texts, request, row_inputs)
    kept, num_expected, num_ties = [], 0, 0
    for is_beside, number, new in texts:
        text = replace(rows[number], ids=[*prompts[number], *new])
        choose = _racer(generator, number, text, sampling) if sampling else _largest
        found = _differences(witness_of(generator), number, text, choose)
        num_expected += len(text.ids) - text.start - len(found)
        num_ties += sum(each.is_tie for each in found)
        found += _wrong_end(generator, number, text, num)
        first = sorted(found, key=lambda each: each.is_tie)[:1]
        kept += [replace(each, is_beside=is_beside) for each in first]
    return TextAudit("coupled" if sampling else "greedy", num_expected, num_ties, kept)


def _beside_a_sampled_row(
    generator: SpeculativeGenerator,
    prompts: Prompts,
    num: int,
    row_inputs: Mapping[str, Any] | None,
) -> list[list[int]]:
    """Greedy texts of the prompts, from a batch in which the first prompt is sampled as well."""
    rows = [*range(len(prompts)), 0]
    temperature = [0.0] * len(prompts) + [1.0]
    options = {"neutral": True, "temperature": temperature, "seed": list(range(len(rows)))}
    options |= {"max_new_tokens": num, "row_inputs": inputs_of(row_inputs, rows)}
    inputs = left_padded([prompts[row] for row in rows], generator.target.device)
    return generator.generate(*inputs, **options).texts[:-1]


Choose = Callable[[Tensor, int], int]
"""The token that logits `[V]` lead to, after so many new tokens."""


def _largest(logits: Tensor, place: int) -> int:
    return int(logits.argmax())


def _racer(
    generator: SpeculativeGenerator, number: int, text: RowText, sampling: Sampling
) -> Choose:
    """The winner of the race, whose numbers belong to the seed and the position."""
    device = generator.target.device
    noise = generator.sampler.noise_type([number], device=device)
    claim, neutral = Claim([text], [], sampling.logits_filter, None), LogitsFilter(1, device=device)

    def choose(logits: Tensor, place: int) -> int:
        step = noise.at(torch.tensor([text.start + place - 1], device=device), width=1)
        return int(step.race(claim.scores(logits[None])[:, None].to(device), neutral, 0))

    return choose


def _differences(witness: Witness, number: int, text: RowText, choose: Choose) -> list[Difference]:
    """All of a text."""
    logits, rounding, found = witness.logits(text), None, []
    for place, (token, own) in enumerate(zip(text.ids[text.start :], logits, strict=True)):
        expected = choose(own, place)
        if expected == token:
            continue
        if rounding is None:
            rounding = witness.rounding(text, logits)
        is_tie = choose(moved(own, token, rounding), place) == token
        margin = (own[expected].double() - own[token].double()).item()
        found.append(Difference(number, place, expected, token, margin, rounding, is_tie))
    return found


def _wrong_end(
    generator: SpeculativeGenerator, number: int, text: RowText, num: int
) -> list[Difference]:
    """A text that ends before HF's does, or goes on after it."""
    ends = generator.target.model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    new = text.ids[text.start :]
    first = next((place for place, token in enumerate(new, 1) if token in ends), num)
    if len(new) == first:
        return []
    place, goes_on = min(len(new), first), len(new) > first
    token = new[first] if goes_on else None
    return [Difference(number, place, None, token, torch.inf, 0.0, False)]
