"""A powered test of the law of what a generator writes, where that law is known exactly.

Under top-k with a small k, short texts are few, and the target's own forwards over all of their
prefixes give the probability of each. Many samples of the generator are compared with it.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from specdec.certify.chisquare import detectable_variation, goodness_of_fit
from specdec.generator import SpeculativeGenerator
from specdec.request import Sampling
from specdec.request.prompts import left_padded

TextLaw = dict[tuple[int, ...], float]
NUM_TOKENS = 3
"""Of a text whose distribution is tested."""
MOST_TEXTS = 2**14
"""Whose probabilities are computed; more of them would be too rare to be counted."""
_ROWS = 256
"""Texts that the target reads together."""


def check_enumerable(num_tokens: int, top_k: int, vocab_size: int) -> None:
    """Raises `ValueError` where `top_k` tokens can follow each beginning of texts of `num_tokens`,
    and these are too many; says which numbers work.
    """
    choices = min(top_k, vocab_size)
    if choices > 1 and num_tokens * math.log(choices) > math.log(MOST_TEXTS) + 1e-9:
        fewer = int(math.log(MOST_TEXTS) / math.log(choices) + 1e-9)
        smaller = max(k for k in range(1, MOST_TEXTS + 1) if k**num_tokens <= MOST_TEXTS)
        works = f"num_tokens={fewer} with top_k={top_k}, or " if fewer else ""
        raise ValueError(
            f"num_tokens={num_tokens} and top_k={top_k} make more than {MOST_TEXTS} texts, whose "
            f"probabilities are all needed; pass {works}top_k={smaller} with "
            f"num_tokens={num_tokens}"
        )


@dataclass(frozen=True)
class LawTest:
    """Chi-square of the texts of one length behind one prompt. Texts that expect few counts are
    taken together.
    """

    prompt: int  # its number
    length: int  # of the texts, in tokens
    num_cells: int  # texts of positive probability
    num_samples: int
    p_value: float
    threshold: float  # what the p-value must not fall below
    detectable: float  # total variation that is detected with 99 % power

    @property
    def passed(self) -> bool:
        """The counts are as likely as they should be."""
        return self.p_value >= self.threshold

    def __str__(self) -> str:
        return (
            f"{self.prompt:>6}  {self.length:>6}  {self.num_cells:>6}  {self.num_samples:>7}  "
            f"{self.p_value:>8.2g}  {self.detectable:.3f}"
        )


def run_law_tests(
    generator: SpeculativeGenerator,
    prompts: list[list[int]],
    *,
    num_samples: int,
    num_tokens: int,
    sampling: Sampling,
    false_alarm: float,
    batch_size: int,
    progress: Callable[[list], Iterable],
) -> list[LawTest]:
    """Draws texts behind each prompt and tests their beginnings of every length. The false alarm is
    shared equally among the tests.
    """
    # No seed comes twice, and none is one of the audits': a drafter with memory must not draft from
    # a text that the same noise has written.
    texts = [Counter() for _ in prompts]
    starts = range(0, num_samples, batch_size)
    for number, start in progress([(n, i) for n in range(len(prompts)) for i in starts]):
        first, count = ((number + 1) << 32) + start, min(batch_size, num_samples - start)
        seeds = range(first, first + count)
        inputs = left_padded([prompts[number]] * len(seeds), generator.target.device)
        options = {"max_new_tokens": num_tokens, "seed": list(seeds), **sampling.options()}
        result = generator.generate(*inputs, **options)
        texts[number].update(map(tuple, result.new_tokens.tolist()))
    threshold, tests = false_alarm / (len(prompts) * num_tokens), []
    for number, (prompt, counts) in enumerate(zip(prompts, texts, strict=True)):
        laws = text_laws(generator, prompt, num_tokens, sampling)
        for length, law in enumerate(laws, start=1):
            beginnings = Counter(text[:length] for text in counts.elements())
            p_value, df = goodness_of_fit(beginnings, law)
            detectable = detectable_variation(num_samples, df, threshold)
            cells = (number, length, len(law), num_samples)
            tests.append(LawTest(*cells, p_value, threshold, detectable))
    return tests


@torch.inference_mode()
def text_laws(
    generator: SpeculativeGenerator, prompt: list[int], num_tokens: int, sampling: Sampling
) -> list[TextLaw]:
    """Exact laws of the first 1, 2, ... tokens behind a prompt, from the target's own forwards and
    HF's own warpers.
    """
    model, device = generator.target.model, generator.target.device
    warpers = [TemperatureLogitsWarper(sampling.temperature), TopKLogitsWarper(sampling.top_k)]
    warpers = LogitsProcessorList(warpers)
    laws = [{(): 1.0}]
    for _ in range(num_tokens):
        texts = list(laws[-1])
        law = {}
        for start in range(0, len(texts), _ROWS):
            chunk = texts[start : start + _ROWS]
            ids = torch.tensor([prompt + list(text) for text in chunk], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[:, -1].double()
            rows = warpers(ids, logits).softmax(dim=-1).cpu()
            for text, row in zip(chunk, rows, strict=True):
                support = row.nonzero()[:, 0]
                for token, chance in zip(support.tolist(), row[support].tolist(), strict=True):
                    law[(*text, token)] = laws[-1][text] * chance
        laws.append(law)
    return laws[1:]
