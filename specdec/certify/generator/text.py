"""Whether speculation gives the very text of plain decoding: greedy, or with coupled noise.

Two sound computations of the same logits differ by rounding. So the first difference between two
texts is judged: it is a tie if moving the logits by as much as two sound paths of plain decoding
differ (the loop's step by step, and the model's own forward over the whole text) leads from the
one token to the other. Nothing is asked of a text behind its first difference.
"""

from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import Tensor

from specdec.generator import SpeculativeGenerator
from specdec.request import Sampling
from specdec.request.prompts import left_padded
from specdec.samplers import Warp

Prompts = list[list[int]]
MAX_ROUNDING = 16
GREEDY = {"neutral": True, "do_sample": False}


@dataclass(frozen=True)
class Difference:
    """Where two texts part."""

    prompt: int  # its number
    place: int  # new tokens that agree
    plain: int | None  # the token of plain decoding, `None` if its text ends here
    speculative: int | None
    margin: float  # between the two largest logits there
    rounding: float  # by which two sound paths differ
    is_tie: bool  # rounding explains it; with coupled noise it moves perturbed logits

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt}, new token {self.place}: plain decoding has {self.plain}, "
            f"speculation {self.speculative}; top-2 margin of the logits {self.margin:.2g}, "
            f"rounding {self.rounding:.2g}: "
            + ("a tie within rounding" if self.is_tie else "not explained by rounding")
        )


@dataclass(frozen=True)
class TextAudit:
    """The texts of one way of decoding, compared with plain decoding."""

    name: str
    num_tokens: int  # that are equal, up to the first difference of each text
    differences: list[Difference]  # the first of each text

    @property
    def passed(self) -> bool:
        """Every difference is a tie within rounding."""
        return all(difference.is_tie for difference in self.differences)

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.num_tokens} tokens equal plain decoding"]
        return "\n          ".join([*lines, *map(str, self.differences)])


def audit_text(
    generator: SpeculativeGenerator, prompts: Prompts, num: int, sampling: Sampling | None = None
) -> TextAudit:
    """Text, `num` tokens per prompt, against plain decoding through the same target: greedy text,
    or that of coupled noise, from `sampling` and with the numbers of the prompts as seeds.
    """
    device = generator.target.device
    plain = SpeculativeGenerator(generator.target, None, generator.sampler if sampling else "auto")
    warp = Warp(1, device=device, **(sampling or Sampling(temperature=0.0)).warp)
    options = GREEDY
    if sampling:
        options = {"neutral": True, "seed": list(range(len(prompts))), **sampling.warp}
    inputs, texts = left_padded(prompts, device), []
    for one in (plain, generator):
        result = one.generate(*inputs, max_new_tokens=num, **options)
        rows = zip(result.new_tokens.tolist(), result.lengths, strict=True)
        texts.append([row[:length] for row, length in rows])
    differences, num_equal = [], 0
    for number, (prompt, expected, found) in enumerate(zip(prompts, *texts, strict=True)):
        pairs = enumerate(zip_longest(expected, found))
        place = next((i for i, pair in pairs if pair[0] != pair[1]), len(expected))
        num_equal += place
        if expected == found:
            continue
        token, other = (next(iter(text[place:]), None) for text in (expected, found))
        margin, rounding, is_tie = torch.inf, 0.0, False
        if None not in (token, other):  # else the same tokens, but one text ended earlier
            rounding, logits = _two_paths(plain, prompt, expected, place)
            logits, (best, second) = logits.clone(), logits.topk(2).values.tolist()
            logits[other] += rounding
            logits[token] -= rounding
            noise = plain.sampler.noise_type([number], device=device)
            step = noise.at(torch.tensor([len(prompt) + place - 1], device=device), width=1)
            margin = best - second
            is_tie = step.race(logits[None, None], warp, 0).item() == other
        differences.append(Difference(number, place, token, other, margin, rounding, is_tie))
    return TextAudit("coupled" if sampling else "greedy", num_equal, differences)


@torch.inference_mode()
def _two_paths(
    plain: SpeculativeGenerator, prompt: list[int], text: list[int], place: int
) -> tuple[float, Tensor]:
    """How far the logits of a text differ between the model's own forward and the loop, which is
    made to follow the text; and the former's logits `[V]` at a place.

    A loop that is wrong must not excuse its own texts, so no more than `MAX_ROUNDING` last bits of
    the largest logit are believed.
    """
    device = plain.target.device
    ids = torch.tensor([prompt + text], device=device)
    own = plain.target.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    steps = []
    for end in range(place + 1):
        read = ids[:, : len(prompt) + end]
        state = plain.start(read, torch.ones_like(read), max_new_tokens=1, **GREEDY)
        steps.append(plain.step(state).logits[0, 0])
    off = (torch.stack(steps).double() - own[: place + 1].double()).abs().max().item()
    last_bit = torch.finfo(own.dtype).eps * own[place].abs().max().item()
    return min(max(off, last_bit), MAX_ROUNDING * last_bit), own[place].double()
