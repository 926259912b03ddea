"""How much each row drafts may be a function of how long its text is: the wrapper of
`docs/generate.md`, with other limits.
"""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from agreement import check_captured
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts

from specdec import (
    CouplingSampler,
    ModelDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    WrappedDrafter,
    certify,
)

PAGE = Path(__file__).parents[2] / "docs" / "generate.md"
LENGTHS = 3, 14, 22, 9
OPTIONS = {"max_new_tokens": 12, "eos_token_id": [], "pad_token_id": 0}


LIMITS = {8_192: 16, 32_768: 24}


def by_length():
    """The page's class with K = 3 to 16 tokens, then 1 to 24, then 0."""
    (block,) = (b for b in PAGE.read_text().split("```python\n") if "class DraftsByLength" in b)
    (made,) = (n for n in ast.parse(block.split("```")[0]).body if isinstance(n, ast.ClassDef))
    numbers = [n for n in ast.walk(made) if isinstance(n, ast.Constant) and n.value in LIMITS]
    assert {number.value for number in numbers} == {*LIMITS}
    for number in numbers:
        number.value = LIMITS[number.value]
    names = {"torch": torch, "replace": replace, "WrappedDrafter": WrappedDrafter}
    exec(compile(ast.Module([made], []), str(PAGE), "exec"), names)
    return names["DraftsByLength"]


def parts():
    target = build("llama")
    return target, by_length()(ModelDrafter(perturbed(target), 3))


@pytest.mark.parametrize(
    ("sampler", "options"),
    [(RejectionSampler, {}), (CouplingSampler, {"do_sample": True, "seed": [3, 4, 5, 6]})],
    ids=["greedy", "coupled"],
)
def test_rows_draft_by_their_own_length_alone_and_in_company(sampler, options):
    target, drafter = parts()
    generator = SpeculativeGenerator(target, drafter, sampler())
    ids, mask = ragged_prompts(VOCAB, *LENGTHS)
    plain = SpeculativeGenerator(target, None, sampler())
    together = generator.generate(ids, mask, **options, **OPTIONS)
    assert together.sequences.equal(plain.generate(ids, mask, **options, **OPTIONS).sequences)
    seen = set()
    for row, length in enumerate(LENGTHS):
        own = {**options, "seed": options["seed"][row]} if options else {}
        alone = generator.generate(ids[row : row + 1, -length:], **own, **OPTIONS)
        assert alone.new_tokens[0].equal(together.new_tokens[row])
        for step, other in zip(alone.steps[0], together.steps[row], strict=True):
            assert step.draft_tokens == other.draft_tokens
            most = 3 if length <= 16 else 1 if length <= 24 else 0
            left = OPTIONS["max_new_tokens"] - (length - LENGTHS[row]) - 1
            assert min(most, left) <= len(step.draft_tokens) <= most
            seen.add(len(step.draft_tokens))
            length += len(step.new_tokens)
    assert {0, 1, 3} <= seen


def test_they_are_captured():
    target, drafter = parts()
    check_captured(target, drafter, *ragged_prompts(VOCAB, *LENGTHS), **OPTIONS)


@pytest.mark.swept
def test_they_are_certified():
    target, drafter = parts()
    ids, mask = ragged_prompts(VOCAB, *LENGTHS)
    prompts = [row[seen.bool()] for row, seen in zip(ids, mask, strict=True)]
    report = certify(
        SpeculativeGenerator(target, drafter), prompts, num_samples=64, max_new_tokens=8
    )
    assert report.passed, report
