"""Rules of other libraries are judged like samplers and can run in the loop; so can HF's own."""

import pytest
import torch
from diagonal import first
from hypothesis import given
from hypothesis import strategies as st
from text_laws import DRAFT, PROMPT, TARGET, tiny
from torch.nn.functional import pad

from specdec import EnsembleSampler, ModelDrafter, RejectionSampler, SpeculativeGenerator
from specdec.lab.certificates import (
    ForeignBatchSampler,
    ForeignSampler,
    RuleNoise,
    certify,
    huggingface_rule,
)
from specdec.samplers import LogitsFilter, Noise, Stream
from specdec.types import PAD_TOKEN, Draft


def accept_by_ratio(draft_tokens, draft_probs, target_probs, noise):
    """A foreign rule: speculative sampling in plain Python."""
    for i, token in enumerate(draft_tokens.tolist()):
        if not noise.accept[i] * draft_probs[i, token] < target_probs[i, token]:
            rest = (target_probs[i] - draft_probs[i]).clamp(min=0)
            rest = rest if rest.sum() > 0 else target_probs[i]
            return [*draft_tokens[:i].tolist(), int(noise.draw(rest))]
    return [*draft_tokens.tolist(), int(noise.draw(target_probs[-1]))]


def accept_batch(draft_tokens, draft_probs, target_probs, noise):
    """The same for a batch."""
    q = draft_probs.gather(2, draft_tokens[..., None])[..., 0]
    p = target_probs[:, :-1].gather(2, draft_tokens[..., None])[..., 0]
    count = (noise.accept * q < p).long().cumprod(dim=1).sum(dim=1)
    every, steps = torch.arange(len(count)), torch.arange(q.shape[1] + 1)
    rest = (target_probs - pad(draft_probs, (0, 0, 0, 1))).clamp(min=0)[every, count]
    rest = torch.where(rest.sum(dim=1, keepdim=True) > 0, rest, target_probs[every, count])
    tokens = torch.where(
        steps == count[:, None], noise.draw(rest)[:, None], pad(draft_tokens, (0, 1))
    )
    return tokens.masked_fill(steps > count[:, None], PAD_TOKEN)


def draw_and_compare(draft_tokens, draft_probs, target_probs, noise):
    """Lossless, but not by thresholds: the target's own draws, as long as the draft has them."""
    tokens = []
    for u, row, drafted in zip(noise.accept, target_probs, draft_tokens.tolist(), strict=False):
        tokens.append(int((row.cumsum(0) <= u).sum()))
        if tokens[-1] != drafted:
            return tokens
    return [*tokens, int(noise.draw(target_probs[-1]))]


def first_two(batches):
    """Soft drafts, plain and filtered."""
    return batches[:2]


def test_a_foreign_rule_without_thresholds_is_certified_by_draws():
    report = certify(ForeignSampler(draw_and_compare), sizes=((3, 1, 1),), progress=first_two)
    assert report.passed
    assert "inconclusive" in str(report)
    assert report.drawn.num_draws == 1024


def test_a_foreign_rule_is_asked_in_problems_that_are_all_greedy():
    """Not the greedy path of `Sampler`, which would be certified in its place."""
    asked = []

    def reject_always(draft_tokens, draft_probs, target_probs, noise):
        asked.append(target_probs)
        return [int(noise.draw(target_probs[0]))]

    sampler = ForeignSampler(reject_always)
    tokens, logits = torch.tensor([[1]]), torch.tensor([[[0.0, 9.0], [9.0, 0.0]]])
    noise = Noise([0]).at(torch.tensor([4]), width=2)
    verdict = sampler(Draft(tokens), logits, LogitsFilter(1, temperature=0), noise)
    assert verdict.num_accepted.tolist() == [0]
    assert verdict.tokens[0, 0] == 1
    (shown,) = asked
    assert shown.tolist() == [[0.0, 1.0], [1.0, 0.0]]


def accept_always(draft_tokens, draft_probs, target_probs, noise):
    """A foreign rule that is wrong."""
    return [*draft_tokens.tolist(), int(noise.draw(target_probs[-1]))]


def test_a_foreign_rule_is_judged_like_a_sampler():
    assert certify(ForeignSampler(accept_by_ratio), sizes=((2, 1, 1),)).passed
    report = certify(ForeignSampler(accept_always), sizes=((2, 1, 2),), progress=first_two)
    assert not report.passed
    assert str(report).startswith("FAIL  accept_always")


@given(st.integers(2, 5), st.integers(0, 3), st.integers(1, 6), st.integers(0, 2**31))
def test_a_rule_of_a_batch_a_rule_of_a_row_and_a_sampler_agree_on_ragged_drafts(v, k, rows, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(2, rows, k + 1, v, generator=generator, dtype=torch.float64) + 0.01
    target, draft = weights / weights.sum(dim=-1, keepdim=True)
    num_valid = torch.randint(k + 1, (rows,), generator=generator)
    tokens = torch.randint(v, (rows, k), generator=generator)
    tokens = tokens.masked_fill(torch.arange(k) >= num_valid[:, None], PAD_TOKEN)
    noise = Noise(list(range(rows))).at(torch.arange(rows), k + 1)
    inputs = Draft(tokens, draft[:, :k], num_valid), target.log(), LogitsFilter(rows), noise
    samplers = ForeignSampler(accept_by_ratio), ForeignBatchSampler(accept_batch)
    for sampler in samplers:
        verdict, expected = sampler(*inputs), RejectionSampler()(*inputs)
        assert verdict.tokens.tolist() == expected.tokens.tolist()
        assert verdict.num_accepted.tolist() == expected.num_accepted.tolist()


@pytest.mark.parametrize("races", first([False, True], [False]))
def test_a_rule_of_a_batch_is_enumerated_also_if_it_races(races):
    report = certify(ForeignBatchSampler(accept_batch, races=races), sizes=((3, 2, 4),))
    assert report.passed
    assert report.is_exact
    assert report.deviation < 1e-12

    def wrong(draft_tokens, draft_probs, target_probs, noise):  # token 0 wins 1 % more often
        law = torch.ones(target_probs.shape[-1]).index_fill(0, torch.tensor([0]), 0.99)
        extra = noise.exponentials * law if races else None
        noise = RuleNoise(noise.accept, noise.resample if races else noise.resample * 0.99, extra)
        return accept_batch(draft_tokens, draft_probs, target_probs, noise)

    report = certify(ForeignBatchSampler(wrong, races=races), sizes=((3, 2, 4),))
    assert "law" in {failure.kind for failure in report.failures}
    assert 1e-4 < report.deviation < 0.01


def test_the_draws_of_a_race_are_tested_where_it_cannot_be_enumerated():
    def rule(draft_tokens, draft_probs, target_probs, noise):  # lossless, but not by thresholds
        noise = RuleNoise((noise.accept * 7) % 1, noise.resample, noise.exponentials)
        return accept_batch(draft_tokens, draft_probs, target_probs, noise)

    sampler = ForeignBatchSampler(rule, races=True)
    report = certify(sampler, sizes=((3, 1, 6),), progress=lambda batches: batches[:1])
    assert report.passed
    assert not report.is_exact


def in_float32(draft_tokens, draft_probs, target_probs, noise):
    """As `accept_batch`, with the precision of most libraries."""
    noise = RuleNoise(noise.accept.float(), noise.resample)
    if (noise.accept == 1).any():
        raise OverflowError("a uniform was rounded to 1")
    return accept_batch(draft_tokens, draft_probs.float(), target_probs.float(), noise)


def test_rules_in_float32_state_their_uniforms_and_their_rounding():
    sizes = ((3, 1, 6),)
    report = certify(ForeignBatchSampler(in_float32, bits=24, tolerance=1e-6), sizes=sizes)
    assert report.passed
    assert report.tolerance == 1e-6
    assert 1e-10 < report.deviation < 1e-6
    assert not certify(ForeignBatchSampler(in_float32, bits=24), sizes=sizes).passed
    with pytest.raises(OverflowError):
        certify(ForeignBatchSampler(in_float32, tolerance=1e-6), sizes=sizes)
    assert certify(ForeignBatchSampler(accept_batch, tolerance=1e-15), sizes=sizes).passed


def test_a_rule_in_float32_is_told_from_a_wrong_one():
    few, rule = {"sizes": ((2, 1, 3),), "progress": first_two}, in_float32
    report = certify(ForeignBatchSampler(rule, bits=24), **few)
    told = [failure.text for failure in report.failures if failure.kind == "law"]
    assert any(f": {report.deviation:.1e} apart, " in text for text in told)
    assert all("rounding to float32; dtype=torch.float32 allows for it" in text for text in told)
    assert certify(ForeignBatchSampler(rule, bits=24), **few, dtype=torch.float32).passed
    for dtype in (torch.float64, torch.float32):
        wrong = certify(EnsembleSampler(0.9), **few, dtype=dtype)
        assert any("apart" in failure.text for failure in wrong.failures)
        assert "float32" not in str(wrong)


def test_uniforms_have_as_many_bits_as_a_rule_says():
    seen = []

    def rule(draft_tokens, draft_probs, target_probs, noise):
        seen.extend([noise.accept, noise.resample])
        return accept_batch(draft_tokens, draft_probs, target_probs, noise)

    rows, law = 64, torch.full((64, 2, 4), 0.25, dtype=torch.float64)
    noise = Noise(list(range(rows))).at(torch.zeros(rows, dtype=torch.long), 2)
    tokens = torch.zeros(rows, 1, dtype=torch.long)
    ForeignBatchSampler(rule, bits=3)(
        Draft(tokens, law[:, :1]), law.log(), LogitsFilter(rows), noise
    )
    for shown, stream in zip(seen, (Stream.ACCEPT, Stream.RESAMPLE), strict=True):
        assert (shown * 8 == (noise.uniform(stream)[:, 0].view_as(shown) * 8).floor()).all()
        assert len(shown.unique()) > 4


def test_a_foreign_rule_can_run_in_the_loop():
    texts = []
    samplers = (
        *(ForeignSampler(accept_by_ratio), ForeignBatchSampler(accept_batch), RejectionSampler()),
        *(
            kind(rule, races=True)
            for kind, rule in (
                (ForeignSampler, accept_by_ratio),
                (ForeignBatchSampler, accept_batch),
            )
        ),
    )
    for sampler in samplers:
        generator = SpeculativeGenerator(tiny(TARGET), ModelDrafter(tiny(DRAFT), 2), sampler)
        ids = torch.tensor([PROMPT]).expand(8, -1)
        options = {"do_sample": True, "max_new_tokens": 12, "seed": list(range(8)), "top_k": 4}
        texts.append(generator.generate(ids, **options).sequences.tolist())
    assert texts[0] == texts[1] == texts[2]
    assert texts[3] == texts[4] != texts[0]


OUTPUTS = [[], [9, 0], [0, 1, 2, 0], [[0]], None, "x", {0}, [None], [True], [0.5], [-1], [3]]
"""What is no beginning of the draft with one more id."""
BATCHES = [
    *(lambda ids: ids, lambda ids: pad(ids, (0, 1)).float(), lambda ids: pad(ids, (0, 1)) > 0),
    *(lambda ids: None, lambda ids: [[0], [0, 1]], lambda ids: pad(ids, (0, 1))[0]),
]
"""What has not the shape of a batch."""
IDS = [[0, 0, 3], [PAD_TOKEN] * 3, [0, PAD_TOKEN, 0], [-2, 0, 0]]
"""Ids that no sampler may emit."""
SHAPE = r"odd returned .*expected integers \[\d+, 3\], padded with"
WRONG = [(ForeignSampler, lambda *given, o=o: o, "odd") for o in OUTPUTS]
WRONG += [(ForeignBatchSampler, lambda ids, *_, make=make: make(ids), SHAPE) for make in BATCHES]
WRONG += [(ForeignBatchSampler, lambda ids, *_, row=row: [row] * len(ids), ".") for row in IDS]


@pytest.mark.parametrize(("kind", "rule", "words"), WRONG)
def test_what_a_foreign_rule_returns_is_looked_at(kind, rule, words):
    with pytest.raises((TypeError, ValueError), match=words):
        certify(kind(rule, "odd"), sizes=((3, 2, 1),))


def test_the_law_of_huggingface_is_exact_and_a_uniform_of_zero_is_its_one_mistake():
    report = certify(ForeignSampler(huggingface_rule), sizes=((2, 2, 1),))
    assert report.deviation < 1e-14
    assert {failure.kind for failure in report.failures} == {"zero"}
    assert max(failure.size for failure in report.failures) == 2.0**-52  # one value of one uniform

    def without_zero(draft_tokens, draft_probs, target_probs, noise):
        noise = RuleNoise(noise.accept + 2.0**-52, noise.resample)  # uniforms in (0, 1]
        return huggingface_rule(draft_tokens, draft_probs, target_probs, noise)

    assert certify(ForeignSampler(without_zero), sizes=((2, 1, 2),), progress=first_two).passed
