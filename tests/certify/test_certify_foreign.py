"""Rules of other libraries are judged like samplers and can run in the loop; so can HF's own."""

import pytest
import torch
from text_laws import DRAFT, PROMPT, TARGET, tiny

from specdec import ModelDrafter, RejectionSampler, SpeculativeGenerator
from specdec.certify import ForeignSampler, RuleNoise, certify, huggingface_rule


def accept_by_ratio(draft_tokens, draft_probs, target_probs, noise):
    """A foreign rule: speculative sampling in plain Python."""
    for i, token in enumerate(draft_tokens.tolist()):
        if not noise.accept[i] * draft_probs[i, token] < target_probs[i, token]:
            rest = (target_probs[i] - draft_probs[i]).clamp(min=0)
            rest = rest if rest.sum() > 0 else target_probs[i]
            return [*draft_tokens[:i].tolist(), int(noise.draw(rest))]
    return [*draft_tokens.tolist(), int(noise.draw(target_probs[-1]))]


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


def accept_always(draft_tokens, draft_probs, target_probs, noise):
    """A foreign rule that is wrong."""
    return [*draft_tokens.tolist(), int(noise.draw(target_probs[-1]))]


def test_a_foreign_rule_is_judged_like_a_sampler():
    assert certify(ForeignSampler(accept_by_ratio), sizes=((2, 2, 1),)).passed
    report = certify(ForeignSampler(accept_always), sizes=((2, 1, 2),), progress=first_two)
    assert not report.passed
    assert str(report).startswith("FAIL  accept_always")


def test_a_foreign_rule_can_run_in_the_loop():
    texts = []
    for sampler in (ForeignSampler(accept_by_ratio), RejectionSampler()):
        generator = SpeculativeGenerator(tiny(TARGET), ModelDrafter(tiny(DRAFT), 2), sampler)
        ids = torch.tensor([PROMPT]).expand(8, -1)
        options = {"do_sample": True, "max_new_tokens": 12, "seed": list(range(8)), "top_k": 4}
        texts.append(generator.generate(ids, **options).sequences)
    assert torch.equal(*texts)


OUTPUTS = [[], [9, 0], [0, 1, 2, 0], [[0]], None, "x", {0}, [None], [True], [0.5], [-1], [3]]


@pytest.mark.parametrize("output", OUTPUTS, ids=str)
def test_a_foreign_rule_must_return_the_beginning_of_the_draft_and_one_more_id(output):
    rule = ForeignSampler(lambda *arguments: output if len(arguments[0]) else [0], "odd")
    with pytest.raises((TypeError, ValueError), match="odd"):
        certify(rule, sizes=((3, 2, 1),))


def test_the_law_of_huggingface_is_exact_and_a_uniform_of_zero_is_its_one_mistake():
    report = certify(ForeignSampler(huggingface_rule), sizes=((2, 2, 1),))
    assert report.deviation < 1e-14
    assert {failure.kind for failure in report.failures} == {"zero"}
    assert max(failure.size for failure in report.failures) == 2.0**-52  # one value of one uniform

    def without_zero(draft_tokens, draft_probs, target_probs, noise):
        noise = RuleNoise(noise.accept + 2.0**-52, noise.resample)  # uniforms in (0, 1]
        return huggingface_rule(draft_tokens, draft_probs, target_probs, noise)

    assert certify(ForeignSampler(without_zero), sizes=((2, 1, 2),), progress=first_two).passed
