"""A token of probability 0 under the declared distribution decides alone, unless rounding may have
moved the cut of a truncation to its other side.
"""

import math
from functools import cache

import pytest
import torch
from diagonal import diagonal
from text_laws import PROMPT
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList, TypicalLogitsWarper

from specdec import PromptLookupDrafter, RejectionSampler, SpeculativeGenerator
from specdec.lab.certificates import CertificateError, Sentinel
from specdec.lab.certificates.generator.reading import Claim
from specdec.lab.certificates.generator.witness import RowText
from specdec.samplers import LogitsFilter

ROWS = 48
ASKED = {"temperature": 1.0, "top_p": 0.9, "neutral": True}


@cache
def model(dtype=torch.float32):
    """Of many tokens that are nearly alike, so that cuts are close to some."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 300}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, **heads, initializer_range=0.2, bos_token_id=None)
    config.eos_token_id = None
    return LlamaForCausalLM(config).to(dtype).eval()


class TopP(RejectionSampler):
    """Truncates elsewhere."""

    def __init__(self, top_p):
        super().__init__()
        self.top_p = top_p

    def accept(self, draft, target_logits, logits_filter, noise):
        return super().accept(
            draft, target_logits, LogitsFilter(len(target_logits), top_p=self.top_p), noise
        )


def found_in(sampler, dtype=torch.float32, has_scores=True, num=32, **asked):
    """What a sentinel finds in texts of a sampler."""
    generator = SpeculativeGenerator(model(dtype), PromptLookupDrafter(2), sampler)
    options, ids = ASKED | asked, torch.tensor([PROMPT] * ROWS)
    result = generator.generate(
        ids, **options, max_new_tokens=num, seed=[*range(ROWS)], output_scores=True
    )
    sentinel = Sentinel(generator, raises=False)
    sentinel(result.prompts, result.texts, scores=result.scores if has_scores else None, **options)
    return sentinel.found, result.texts


@pytest.mark.parametrize("has_scores", [True, False])
def test_a_truncation_that_keeps_a_little_more_fails_by_its_tokens(has_scores):
    found, texts = found_in(TopP(0.91), has_scores=has_scores)
    assert found.log_peak < -math.log(found.false_alarm)  # no bet sees it
    assert not found.passed
    assert found.p_value == 0
    first = found.impossible[0]
    assert texts[first.text][first.place] == first.token
    assert (first.rounding is None) == has_scores
    said = str(found)
    assert f"impossible: {len(found.impossible)} tokens of probability 0 under the declared" in said
    assert f"new token {first.place} of text {first.text} is {first.token}" in said


def test_a_sentinel_stops_at_the_first_one():
    generator = SpeculativeGenerator(model(), None, TopP(0.95))
    result = generator.generate(
        torch.tensor([PROMPT] * 8), **ASKED, max_new_tokens=32, seed=[*range(8)]
    )
    with pytest.raises(CertificateError, match="impossible"):
        Sentinel(generator)(result.prompts, result.texts, **ASKED)


@pytest.mark.parametrize(
    ("has_scores", "dtype"), diagonal([True, False], [torch.float32, torch.bfloat16])
)
def test_sound_truncations_have_none(dtype, has_scores):
    for options in ({}, {"top_p": 1.0, "top_k": 7}, {"top_p": 1.0, "min_p": 0.05}):
        found, _ = found_in(RejectionSampler(), dtype, has_scores, **options)
        assert not found.impossible
        assert found.passed, found
        if dtype == torch.float32:
            assert found.num_at_cut == 0


@pytest.mark.slow
def test_in_half_precision_tokens_at_the_cut_are_excused_and_others_are_not():
    """0.904 for 0.9 is within what bfloat16 does to a cut, and not within what float32 does."""
    close, _ = found_in(TopP(0.904), torch.bfloat16, has_scores=False, num=64)
    assert close.num_at_cut > 0
    assert not close.impossible
    assert f"{close.num_at_cut} of the tokens stand at the cut of a truncation" in str(close)
    single, _ = found_in(TopP(0.904), torch.float32, has_scores=False, num=64)
    assert single.impossible
    for has_scores in (True, False):
        wrong, _ = found_in(TopP(0.97), torch.bfloat16, has_scores, num=64)
        assert not wrong.passed
        assert wrong.impossible


def claim(probs, **logits_filter):
    """Of one text whose first new token is the last id."""
    logits = torch.tensor(probs, dtype=torch.float64).log()
    return Claim(
        [RowText([0, len(probs) - 1], 1)], [LogitsProcessorList()], logits_filter, None
    ), logits


@pytest.mark.parametrize(
    ("probs", "logits_filter", "by", "may_be"),
    [
        ((0.5, 0.3, 0.2), {"top_p": 0.8}, 1e-6, True),  # 0.2 <= 1 - 0.8, by rounding
        ((0.5, 0.3, 0.2), {"top_p": 0.79}, 1e-6, False),
        ((0.5, 0.3, 0.2), {"top_p": 0.79}, 0.1, True),
        ((0.5, 0.3, 0.2), {"min_p": 0.41}, 1e-6, False),
        ((0.5, 0.3, 0.2), {"min_p": 0.4 + 1e-9}, 1e-6, True),
        ((0.4, 0.3, 0.3), {"top_k": 1}, 0.1, False),
        ((0.4, 0.3, 0.3), {"top_k": 1}, 0.2, True),
    ],
)
def test_a_token_is_impossible_if_moving_all_logits_by_the_rounding_leaves_it_at_zero(
    probs, logits_filter, by, may_be
):
    """The distance from the cut is counted in logits, of all tokens at once."""
    own, logits = claim(probs, **logits_filter)
    assert own.may_be(0, 0, logits, by) is may_be


def test_a_processor_that_keeps_the_middle_is_moved_both_ways():
    """Typical sampling drops the likeliest token here, which less of it keeps."""
    own, logits = claim((0.05, 0.2, 0.22, 0.53))
    own.processors[0] = LogitsProcessorList([TypicalLogitsWarper(0.4)])
    assert own.processed(0, logits[None])[0, 3] == -torch.inf
    assert not own.may_be(0, 0, logits, 1e-6)
    assert own.may_be(0, 0, logits, 0.6)


def test_what_a_processor_forbids_is_impossible_whatever_the_rounding():
    own, logits = claim((0.5, 0.5))
    own.processors[0] = LogitsProcessorList(
        [lambda ids, scores: scores - scores.new_tensor([0, math.inf])]
    )
    assert not own.may_be(0, 0, logits, 100.0)
