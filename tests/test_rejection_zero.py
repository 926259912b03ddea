"""Law 6, zero: no token of target probability 0 is emitted; an empty residual is no accident.

Uniforms are set to the ends of their range, draft probabilities to the target's own, to NaN and to
infinity.
"""

import pytest
import torch
from exact_law import law_error
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.kernels import draw
from specdec.kernels.types import VerifyUniforms
from specdec.kernels.verify.reference import point_rule, token_rule
from specdec.lab.certificates.sampler.paths import Paths
from specdec.lab.certificates.sampler.problems import Problems, random_weights
from specdec.samplers import (
    BlockSampler,
    CouplingSampler,
    EnsembleSampler,
    LogitsFilter,
    Noise,
    RejectionSampler,
    ScriptedNoise,
    Stream,
    TypicalSampler,
)
from specdec.types import PAD_TOKEN, Draft, Verdict

LARGEST_UNIFORM = 1 - 2.0**-52
ENDS = st.sampled_from([0.0, 2.0**-52, LARGEST_UNIFORM])
seeds = st.integers(0, 2**32 - 1)


def uniform_drafts(vocab, width, seed):
    """Problems with zeros in the target, where every path is drafted."""
    generator = torch.Generator().manual_seed(seed)
    weights = [random_weights((2, vocab**i, vocab), generator) for i in range(width + 1)]
    draft = [torch.full_like(w, 1 / vocab) for w in weights[:width]]
    return Problems([w.log() for w in weights], draft)


def smallest_probability_emitted(sampler, problems, accept, resample):
    paths = Paths(problems)
    ones = torch.ones(paths.tokens.shape, dtype=torch.float64)
    run = paths.runner(sampler, torch.arange(len(paths)))
    verdict = run(accept * ones, torch.full((len(paths),), resample, dtype=torch.float64))
    law = paths.logits.softmax(-1)
    probability = law.gather(2, verdict.tokens.clamp(min=0)[..., None])[..., 0]
    return probability[verdict.tokens != PAD_TOKEN].min().item()


@given(st.integers(2, 5), st.integers(0, 3), ENDS, ENDS, seeds)
def test_no_token_of_probability_zero_is_emitted_at_the_ends_of_the_uniforms(
    vocab, width, accept, resample, seed
):
    problems = uniform_drafts(vocab, width, seed)
    assert smallest_probability_emitted(RejectionSampler(), problems, accept, resample) > 0


def accepts_ties(draft, logits, logits_filter, noise):
    """Like the rule, but `u * q <= p`, as in `u <= p / q`."""
    q = draft.probs.gather(2, draft.tokens[..., None])[..., 0]
    p = logits_filter(logits)[:, :-1].gather(2, draft.tokens[..., None])[..., 0]
    is_accepted = noise.uniform(Stream.ACCEPT)[:, :-1] * q <= p
    num_accepted = is_accepted.long().cumprod(-1).sum(-1)
    steps = torch.arange(draft.tokens.shape[1] + 1)
    padded = torch.nn.functional.pad(draft.tokens, (0, 1))
    tokens = torch.where(steps == num_accepted[:, None], logits.argmax(-1), padded)
    tokens = tokens.masked_fill(steps > num_accepted[:, None], PAD_TOKEN)
    return Verdict(tokens, num_accepted, None)


def test_the_check_fails_a_sampler_that_accepts_at_equality():
    problems = uniform_drafts(4, 2, seed=0)
    assert smallest_probability_emitted(accepts_ties, problems, 0.0, 0.0) == 0


@pytest.mark.smoke
def test_a_token_is_accepted_strictly_below_its_ratio():
    target = torch.tensor([[[0.25, 0.75], [1.0, 0.0]]]).double()
    draft = torch.tensor([[[0.5, 0.5]]]).double()
    for u, accepted in ((0.5 - 2.0**-52, 1), (0.5, 0)):
        uniforms = torch.tensor([[u]], dtype=torch.float64)
        half = torch.tensor([0.5], dtype=torch.float64)
        noise = VerifyUniforms(uniforms, half)
        _, num_accepted = token_rule(Draft(torch.tensor([[0]]), draft), target, noise)
        assert num_accepted.item() == accepted


@given(st.integers(2, 6), st.integers(1, 3), seeds)
def test_a_draft_from_the_targets_own_distribution_is_always_accepted(vocab, width, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = random_weights((3, width + 1, vocab), generator).log().float()
    logits_filter = LogitsFilter(3)
    probs = logits_filter(logits)[:, :width]
    tokens = probs.argmax(-1)
    uniforms = torch.full((3, len(Stream), width + 1), LARGEST_UNIFORM, dtype=torch.float64)
    verdict = RejectionSampler()(
        Draft(tokens, probs), logits, logits_filter, ScriptedNoise(uniforms)
    )
    assert verdict.num_accepted.tolist() == [width] * 3
    assert bool(verdict.is_bonus.all())


@given(st.integers(2, 6), st.sampled_from([0.0, 0.3, 0.7, LARGEST_UNIFORM]), seeds)
def test_a_rejection_that_leaves_nothing_draws_from_the_target(vocab, resample, seed):
    generator = torch.Generator().manual_seed(seed)
    weights = random_weights((4, 2, vocab), generator)
    target = weights / weights.sum(-1, keepdim=True)
    draft = target[:, :1] * (1 + 2.0**-40)  # agrees up to rounding, and nowhere below the target
    uniforms = torch.full((4,), resample, dtype=torch.float64)
    rejects = torch.full((4, 1), LARGEST_UNIFORM, dtype=torch.float64)
    tokens, num_accepted = token_rule(
        Draft(target[:, :1].argmax(-1), draft), target, VerifyUniforms(rejects, uniforms)
    )
    assert num_accepted.tolist() == [0] * 4
    assert tokens[:, 0].tolist() == draw(target[:, 0], uniforms).tolist()
    assert tokens[:, 1].tolist() == [PAD_TOKEN] * 4


@settings(max_examples=10)
@given(st.integers(2, 4), st.integers(1, 3), st.sampled_from([float("nan"), float("inf")]), seeds)
def test_draft_probs_that_are_not_finite_leave_the_law_of_the_target(vocab, width, value, seed):
    problems = uniform_drafts(vocab, width, seed)
    broken = torch.arange(width) % 2 == seed % 2

    def sampler(draft, logits, logits_filter, noise):
        probs = draft.probs.masked_fill(broken[:, None], value)
        return RejectionSampler()(Draft(draft.tokens, probs), logits, logits_filter, noise)

    assert law_error(sampler, problems, problems.target) < 1e-12


SAMPLERS = [
    *(RejectionSampler(), BlockSampler(), EnsembleSampler(0.0), EnsembleSampler(0.7)),
    *(TypicalSampler(), TypicalSampler(1.0, 1.0), TypicalSampler(0.0, 0.0)),
    CouplingSampler(),
]


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
@given(st.integers(2, 5), st.integers(1, 3), st.booleans(), st.booleans(), seeds)
def test_a_greedy_batch_is_decided_as_its_rows_are_beside_one_that_samples(
    sampler, vocab, width, is_ragged, is_soft, seed
):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-3, 3, (4, width + 1, vocab), generator=generator).float()
    tokens = torch.randint(0, vocab, (4, width), generator=generator)
    best = logits.argmax(-1)[:, :width]
    tokens = torch.where(torch.rand(4, width, generator=generator) < 0.7, best, tokens)
    probs = torch.rand(4, width, vocab, generator=generator) + 0.1
    probs = probs / probs.sum(-1, keepdim=True) if is_soft else None
    num_valid = torch.randint(0, width + 1, (4,), generator=generator) if is_ragged else None
    noise = sampler.noise_type([seed] * 4).at(torch.arange(4), width + 1)
    draft, greedy = Draft(tokens, probs, num_valid), LogitsFilter(4, temperature=0)
    mixed = LogitsFilter(4, temperature=[0.0, 0.0, 0.0, 1.0])
    assert greedy.is_greedy
    assert not mixed.is_greedy
    alone, beside = (
        sampler(draft, logits, logits_filter, noise) for logits_filter in (greedy, mixed)
    )
    assert torch.equal(alone.tokens[:3], beside.tokens[:3])
    assert torch.equal(alone.num_accepted[:3], beside.num_accepted[:3])


@pytest.mark.parametrize(
    ("probs", "shape"), [(None, (2, 3, 5)), (None, (1, 4, 5)), (torch.zeros(2, 3, 6), (2, 4, 5))]
)
def test_a_draft_that_does_not_fit_the_logits_is_refused(probs, shape):
    noise = ScriptedNoise(torch.zeros(2, len(Stream), 4, dtype=torch.float64))
    draft = Draft(torch.zeros(2, 3, dtype=torch.long), probs)
    with pytest.raises(ValueError, match=r"target logits|vocabulary 6"):
        RejectionSampler()(draft, torch.zeros(shape), LogitsFilter(2), noise)


def test_noise_with_too_few_draws_is_refused():
    noise = Noise([0]).at(torch.tensor([3]), width=1)
    draft = Draft(torch.zeros(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="1 draws per stream for 3 draft tokens"):
        RejectionSampler()(draft, torch.zeros(1, 4, 5), LogitsFilter(1), noise)


@given(
    rows=st.integers(1, 4),
    width=st.integers(0, 4),
    kind=st.sampled_from(["point", "soft", "one-hot"]),
    is_ragged=st.booleans(),
    uniform=ENDS,
    seed=seeds,
)
def test_point_masses_are_decided_as_the_general_rule_decides_them(
    rows, width, kind, is_ragged, uniform, seed
):
    generator, vocab = torch.Generator().manual_seed(seed), 3
    target = torch.randint(0, vocab, (rows, width + 1), generator=generator)
    tokens = torch.randint(0, vocab, (rows, width), generator=generator)
    probs = None
    if kind == "soft":  # every token possible, as a law that drew these tokens must have it
        probs = torch.rand(rows, width, vocab, generator=generator).add(0.1)
        probs = probs / probs.sum(-1, keepdim=True)
    elif kind == "one-hot":
        probs = torch.nn.functional.one_hot(tokens, vocab).float()
    num_valid = torch.randint(0, width + 1, (rows,), generator=generator) if is_ragged else None
    if is_ragged:
        tokens[torch.arange(width) >= num_valid[:, None]] = PAD_TOKEN
    one_hot = torch.nn.functional.one_hot(target, vocab).float()
    u = torch.full((rows, width + 1), uniform, dtype=torch.float64)
    draft = Draft(tokens, probs, num_valid)
    general = token_rule(draft, one_hot, VerifyUniforms(u[:, :width], u[:, 0]))
    for ours, theirs in zip(point_rule(draft, target), general, strict=True):
        assert torch.equal(ours, theirs)
