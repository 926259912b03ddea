"""`certify(sampler)` passes what is lossless and fails what is not: planted bugs from the field's
history, and lossy samplers.
"""

import pytest
import torch
from text_laws import TARGET, tiny

import specdec
from specdec import (
    BlockSampler,
    CouplingSampler,
    EnsembleSampler,
    RejectionSampler,
    Sampler,
    SpeculativeGenerator,
    TypicalSampler,
)
from specdec.kernels import draw
from specdec.kernels.verify.verdict import verify_points
from specdec.lab.certificates import ForeignSampler, certify, huggingface_rule
from specdec.samplers import LogitsFilter, ScriptedNoise, StepNoise, Stream
from specdec.types import PAD_TOKEN, Draft, Verdict

FEW = ((3, 2, 6),)  # K = 2 draft tokens out of V = 3, in 6 problems of each kind
TINY = ((3, 1, 6),)


def soft(batches):
    """Those with soft drafts alone, which are enough to see what is wrong with every one of these
    rules: plain ones and filtered ones.
    """
    return batches[:2]


def kinds_of(report):
    return {failure.kind for failure in report.failures}


@pytest.mark.parametrize(
    "sampler",
    [
        RejectionSampler(),
        pytest.param(BlockSampler(), marks=pytest.mark.swept),
        pytest.param(CouplingSampler(), marks=pytest.mark.swept),
    ],
)
def test_lossless_samplers_pass(sampler):
    report = certify(sampler, sizes=((3, 2, 3),))
    assert report.passed
    assert report.is_exact
    assert report.deviation < 1e-14
    assert report.num_problems == 3 * 6
    assert str(report).startswith(f"PASS  {type(sampler).__name__}")


def test_without_sizes_many_problems_are_tried():
    batches = []

    def first(problems):
        batches.extend(problems)
        return problems[:1]

    assert certify(BlockSampler(), progress=first).passed
    assert sum(map(len, batches)) >= 500


def test_float32_passes_within_its_rounding():
    report = certify(BlockSampler(), dtype=torch.float32, sizes=((3, 2, 3),), progress=soft)
    assert report.passed
    assert 1e-14 < report.deviation < 1e-6


@pytest.mark.parametrize("sampler", [TypicalSampler(), EnsembleSampler(0.9)])
def test_lossy_samplers_fail_and_their_deviation_is_told(sampler):
    report = certify(sampler, sizes=((3, 1, 12),), progress=soft)
    assert not report.passed
    assert "law" in kinds_of(report)
    assert f"{report.deviation:.1e}" in str(report)
    if isinstance(sampler, EnsembleSampler):
        assert report.total_variation == pytest.approx(0.1)  # 1 - w, where the laws are disjoint


class Mistaken(Sampler):
    """Token-wise speculative sampling of soft drafts, written out, with one mistake."""

    lossless = True  # as its author believes

    def __init__(self, mistake=None):
        super().__init__()
        self.mistake = mistake

    def accept(
        self, draft: Draft, target_logits, logits_filter: LogitsFilter, noise: StepNoise
    ) -> Verdict:
        p = logits_filter(target_logits)
        rows, width = draft.tokens.shape
        safe = draft.tokens.clamp(min=0)
        q = draft.probs
        if q is None:
            q = torch.nn.functional.one_hot(safe, p.shape[-1]).to(p)
        valid = torch.full((rows,), width) if draft.num_valid is None else draft.num_valid
        steps = torch.arange(width + 1)
        q = torch.where((steps[:width] < valid[:, None])[..., None], q, 0.0)
        q = torch.cat([q, torch.zeros_like(p[:, :1])], dim=1)
        of_target, of_draft = (x[:, :width].gather(2, safe[..., None])[..., 0] for x in (p, q))
        u = noise.uniform(Stream.ACCEPT)[:, :width]
        is_accepted = u * of_draft < of_target
        if self.mistake == "accepts too often":
            is_accepted = u * of_draft < 1.2 * of_target
        if self.mistake == "accepts by the proposal's noise":
            is_accepted = noise.uniform(Stream.PROPOSE)[:, :width] * of_draft < of_target
        if self.mistake == "the first uniform for all":
            is_accepted = u[:, :1] * of_draft < of_target
        if self.mistake == ">= for <":
            is_accepted = u * of_draft >= of_target
        if self.mistake == "<= for <":
            is_accepted = u * of_draft <= of_target
        if self.mistake == "ratio >= u":
            is_accepted = of_target / of_draft >= u
        is_accepted &= steps[:width] < valid[:, None]
        count = is_accepted.long().cumprod(1).sum(1)
        at = torch.arange(rows)
        p_row, q_row = p[at, count], q[at, count]
        if self.mistake == "residual of the unfiltered target":
            p_row = target_logits.softmax(-1)[at, count]
        weights = (p_row - q_row).clamp(min=0)
        if self.mistake == "recovers from the target":
            weights = p_row
        if self.mistake == "residual divided by the draft law":
            weights = torch.where(q_row > 0, weights / q_row, weights)
        is_bonus = (count == valid)[:, None]
        last = (valid - 1).clamp(min=0)
        if self.mistake == "bonus from the draft's last row":
            weights = torch.where(is_bonus & (valid > 0)[:, None], q[at, last], weights)
        if self.mistake == "bonus from the target's row of the last draft token":
            weights = torch.where(is_bonus, p[at, last], weights)
        weights = torch.where(weights.sum(1, keepdim=True) > 0, weights, p_row)
        u = noise.uniform(Stream.RESAMPLE)[:, 0]
        if self.mistake == "residual not renormalised":
            u = u / weights.sum(1)
            u = u.clamp(max=1 - 2.0**-52)
        if self.mistake == "resampled with the proposal's noise":
            u = noise.uniform(Stream.PROPOSE)[at, count]
        if self.mistake == "resampled with the accepting noise":
            u = noise.uniform(Stream.ACCEPT)[at, count.clamp(max=max(width - 1, 0))]
        tokens = torch.nn.functional.pad(draft.tokens, (0, 1)).masked_fill(
            steps >= count[:, None], PAD_TOKEN
        )
        tokens[at, count] = draw(weights, u)
        return Verdict(tokens, count, draft.num_valid)


MISTAKES = {
    ">= for <": "draws",
    "<= for <": "zero",
    "ratio >= u": "zero",
    "residual divided by the draft law": "law",
    "residual not renormalised": "law",
    "residual of the unfiltered target": "law",
    "bonus from the draft's last row": "law",
    "resampled with the proposal's noise": "law",
    "resampled with the accepting noise": "draws",
}
SAID = {
    "accepts too often": (
        "token 0 1 target 0.4000 0.6000 draft 0.2000 0.8000 accepted if drafted 1.0000 0.9000 "
        "target after (0,) 0.8000 0.2000 draft token 1 is accepted with chance 0.9; a lossless "
        "rule accepts it with target / draft = 0.75 at most"
    ),
    "recovers from the target": (
        "accepted if drafted - 0.5000 target after (0,) 0.2000 0.8000 no token is accepted too "
        "often, so the recovered token is wrong: after a rejection it must be drawn from target - "
        "draft * chance to accept, normalised, which is max(0, target - draft) where the chance"
    ),
    "bonus from the target's row of the last draft token": (
        "the first token is right, so the bonus token is wrong"
    ),
    "accepts by the proposal's noise": (
        "no token is accepted, whatever the uniform of Stream.ACCEPT is: a rule that reads another "
        "stream"
    ),
    "the first uniform for all": (
        "usual causes: one uniform for two decisions (two draft tokens, or accepting and drawing)"
    ),
}
"""Mistakes of the field, with the kind of failure; and those of a first rule of one's own, with
what the report says of them."""


@pytest.mark.parametrize("mistake", SAID)
def test_the_report_of_a_wrong_rule_says_what_is_wrong_with_it(mistake):
    few = {"progress": lambda batches: batches[:1] + batches[6:7], "num_draws": 1024}
    report = certify(Mistaken(mistake), sizes=((2, 1, 4), (2, 2, 4)), **few)
    text = " ".join(str(report).split())
    assert text.startswith("FAIL Mistaken: ")
    assert max(map(len, str(report).splitlines())) <= 100
    assert SAID[mistake] in text
    assert "a problem is a small target and draft" in text


def test_the_textbook_passes():
    assert certify(Mistaken(), sizes=TINY, progress=soft).passed


@pytest.mark.smoke
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistaken_sampler_fails(mistake):
    report = certify(Mistaken(mistake), sizes=FEW, num_draws=2048, progress=soft)
    assert not report.passed
    assert MISTAKES[mistake] in kinds_of(report)
    assert str(report).startswith("FAIL  Mistaken")


class DrawAndCompare(Sampler):
    """Lossless without thresholds: draws the target's token after each row of the window from that
    row's own uniform, and goes on along the draft that has it.
    """

    lossless = takes_trees = True

    def __init__(self, weight: float = 0.0, is_late: bool = False):
        super().__init__()
        self.weight, self.is_late = weight, is_late

    def accept(
        self, draft: Draft, target_logits, logits_filter: LogitsFilter, noise: StepNoise
    ) -> Verdict:
        """A verdict of the right law, if `weight` is 0 and rows are not late."""
        p = logits_filter(target_logits.roll(1, dims=1) if self.is_late else target_logits)
        p = (1 - self.weight) * p + self.weight * p.square() / p.square().sum(-1, keepdim=True)
        width, last = draft.tokens.shape[1], noise.uniform(Stream.RESAMPLE)[:, :1]
        uniforms = torch.cat([last, noise.uniform(Stream.ACCEPT)[:, :width]], dim=1)
        return verify_points(draft, draw(p, uniforms))


def of_trees(batches):
    """Two of each kind: the shape without replacement of the most nodes, and one with it."""
    return [problems for problems in batches if problems.parents in ((-1, 0, 0, -1), (-1, -1, 1))]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_rule_that_compares_draws_on_trees_is_tested_by_draws(is_late):
    few = {"num_draws": 1024, "progress": lambda batches: of_trees(batches)[:2]}
    report = certify(DrawAndCompare(is_late=is_late), **few)
    assert not report.is_exact
    assert report.passed is not is_late


def test_a_lossless_rule_without_thresholds_is_inconclusive_and_certified_by_draws():
    report = certify(DrawAndCompare(), sizes=FEW, trees=(), progress=soft)
    assert report.passed
    assert not report.is_exact
    assert report.drawn.p_value > report.drawn.threshold
    said = " ".join(str(report).split())
    named = "DrawAndCompare(weight=0.0, is_late=False)"
    assert said.startswith(f"PASS {named}: by draws, 16384 texts in each of 12 problems")
    assert "enumeration is inconclusive: decisions are no thresholds" in said
    assert f"detectable TV {report.drawn.detectable:.3f}" in said
    assert "detectable TV: the total variation" in said
    assert report.drawn.detectable < 0.06


def test_a_lossy_rule_without_thresholds_fails_by_draws():
    report = certify(DrawAndCompare(weight=0.3), sizes=TINY, num_draws=4096, progress=soft)
    assert not report.passed
    assert kinds_of(report) == {"draws"}
    assert "the target gives" in str(report)


def test_draws_of_the_rules_own_are_inconclusive_too():
    class OwnNumbers(RejectionSampler):
        def accept(self, draft, target_logits, logits_filter, noise):
            uniforms = torch.rand(len(target_logits), len(Stream), target_logits.shape[1]).double()
            return super().accept(draft, target_logits, logits_filter, ScriptedNoise(uniforms))

    torch.manual_seed(0)
    report = certify(OwnNumbers(), sizes=((2, 1, 6),), num_draws=4096, progress=soft)
    assert report.passed
    assert not report.is_exact


def test_the_function_has_a_module_of_another_name():
    assert specdec.lab.certificates.certify is certify
    assert specdec.lab.certificates.ForeignSampler is not None
    with pytest.raises(TypeError, match="expected a Sampler or a SpeculativeGenerator, got 3"):
        specdec.certify(3)


class MistakenRace(CouplingSampler):
    """Coupled sampling with one mistake."""

    def __init__(self, mistake=None):
        super().__init__()
        self.mistake = mistake

    def accept(self, draft: Draft, target_logits, logits_filter: LogitsFilter, noise) -> Verdict:
        logits = target_logits
        if not draft.is_chain and self.mistake != "noise by index":
            noise = noise.at_depths(draft.depths)
        if self.mistake == "races over the square of the law":
            logits = 2 * logits
        winners = noise.race(logits, logits_filter, index=0)
        if self.mistake == "the extra token is the likeliest":
            places = torch.arange(winners.shape[1]) == draft.tokens.shape[1]
            winners = torch.where(places, logits.argmax(-1), winners)
        if self.mistake == "each place looks at the noise of the one before":
            winners = noise.race(logits.roll(-1, dims=1), logits_filter, 0).roll(1, dims=1)
        if self.mistake == "rows of other nodes":
            winners = winners.roll(1, dims=1)
        if self.mistake == "drafts pass where they are possible":
            parents = draft.window_parents
            chance = logits_filter(logits)[torch.arange(len(winners))[:, None], parents]
            chance = chance.gather(2, draft.tokens.clamp(min=0)[..., None])[..., 0]
            passes = (chance > 0) & draft.is_valid
            tokens = torch.where(passes, draft.tokens, winners.gather(1, parents))
            winners = winners.scatter(1, parents, tokens)
        return verify_points(draft, winners)


ON_CHAINS = (
    *("races over the square of the law", "the extra token is the likeliest"),
    *("each place looks at the noise of the one before", "drafts pass where they are possible"),
)
ON_TREES = "noise by index", "rows of other nodes", "drafts pass where they are possible"


@pytest.mark.parametrize(
    ("mistake", "options"),
    [
        *((mistake, {"sizes": FEW, "trees": (), "progress": soft}) for mistake in ON_CHAINS),
        *((mistake, {"progress": lambda b: of_trees(b)[:1]}) for mistake in ON_TREES),
    ],
)
def test_a_mistaken_race_fails(mistake, options):
    found = kinds_of(certify(MistakenRace(mistake), **options))
    if "sizes" in options:
        assert ("decision" if mistake.startswith("each place") else "law") in found
    assert found & {"law", "decision"}


@pytest.mark.slow
def test_a_race_over_trees_passes():
    report = certify(CouplingSampler(), progress=lambda batches: of_trees(batches)[1::3])
    assert report.passed, report
    assert report.is_exact
    assert report.num_problems == 4 * 18
    assert report.deviation < 1e-14


class AtU(RejectionSampler):
    """Emits id 0, possible or not, where the drawing uniform is below a limit."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def accept(self, draft, target_logits, logits_filter, noise):
        verdict = super().accept(draft, target_logits, logits_filter, noise)
        is_off = noise.uniform(Stream.RESAMPLE)[:, :1] < self.limit
        at = verdict.num_accepted[:, None]
        extra = verdict.tokens.gather(1, at).masked_fill(is_off, 0)
        return Verdict(verdict.tokens.scatter(1, at, extra), verdict.num_accepted)


def test_what_happens_at_a_uniform_of_0_alone_is_said_so():
    few = {"sizes": TINY, "progress": soft}
    zeros = [f.text for f in certify(AtU(2.0**-52), **few).failures]
    assert zeros
    assert all("impossible, emitted at u = 0" in text for text in zeros)
    accepted = [f.text for f in certify(Mistaken("<= for <"), **few).failures]
    assert accepted
    assert all("emitted at u = 0" in text for text in accepted)
    often = [f.text for f in certify(AtU(0.01), **few).failures if f.kind == "zero"]
    assert often
    assert not any("at u = 0" in text for text in often)


class OfThree(RejectionSampler):
    """Looks at the three largest logits."""

    def accept(self, draft, target_logits, logits_filter, noise):
        assert target_logits.topk(3).values.isfinite().any()
        return super().accept(draft, target_logits, logits_filter, noise)


def test_a_sampler_that_fails_on_a_small_problem_is_told_which_and_what_to_pass():
    with pytest.raises(RuntimeError) as caught:
        certify(OfThree(), sizes=((3, 1, 1), (2, 3, 1)))
    text = str(caught.value)
    assert "OfThree fails on soft drafts (K = 3, V = 2)" in text
    assert "index k out of range" in text
    sizes = eval(text.split("sizes=")[-1])  # as the message says
    assert certify(OfThree(), sizes=sizes, progress=soft).passed


class Overdoing(RejectionSampler):
    """Changes a sound verdict."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def accept(self, draft, target_logits, logits_filter, noise):
        return self.change(super().accept(draft, target_logits, logits_filter, noise))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: None, "Overdoing must return a"),
        (
            lambda v: Verdict(v.tokens, v.num_accepted + 1, v.num_drafted),
            "Overdoing: the sampler accepted fewer than 0 tokens or more than were drafted",
        ),
        (lambda v: Verdict(v.tokens[:, 1:], v.num_accepted), "verdict.tokens of shape"),
        (lambda v: Verdict(v.tokens + 9, v.num_accepted), "emitted a token outside"),
        (lambda v: Verdict(1 - v.tokens.clamp(0, 1), v.num_accepted * 0 + 2), "are not the draft"),
    ],
)
def test_a_sampler_that_breaks_its_contract_gets_no_certificate(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        certify(Overdoing(change), sizes=((3, 2, 4),))


REFUSED = [
    (lambda: certify(RejectionSampler(), [[1]]), "without prompts"),
    (lambda: certify(SpeculativeGenerator(tiny(TARGET), None)), "pass prompts"),
    (lambda: certify(huggingface_rule), "wrap a rule"),
    (lambda: certify(RejectionSampler(), num_draws=0), "num_draws"),
    (lambda: certify(RejectionSampler(), sizes=()), "sizes"),
    (lambda: certify(RejectionSampler(), sizes=((30, 5, 9),)), "cells to enumerate"),
    (lambda: certify(RejectionSampler(), dtype=torch.bfloat16), "dtype"),  # too coarse
    (lambda: certify(RejectionSampler(), false_alarm=0.0), "false_alarm"),
    (lambda: certify(RejectionSampler(), trees=((-1, 1),)), "trees"),  # its own parent
    (lambda: certify(RejectionSampler(), trees=((-1,) * 12,)), "cells to enumerate"),
    (lambda: certify(Mistaken(), trees=((-1, -1),)), "Mistaken verifies chains"),
    (lambda: ForeignSampler(huggingface_rule, bits=0), "bits"),
    (lambda: ForeignSampler(huggingface_rule, bits=53), "bits"),
    (lambda: ForeignSampler(huggingface_rule, tolerance=-1.0), "tolerance"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_what_cannot_be_certified_is_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
