"""Law 1 for `RejectionSampler`: it accepts as much as any rule that decides token by token, and the
check that says it is lossless fails eleven wrong versions of it.

That it is lossless is in `test_sampler_laws.py`, with the other samplers.
"""

import pytest
import torch
from exact_law import law_error, random_worlds
from hypothesis import given
from hypothesis import strategies as st

from specdec.certify.sampler.enumeration import find_flips
from specdec.samplers import RejectionSampler, Stream
from specdec.types import PAD_TOKEN, Draft, Verdict

seeds = st.integers(0, 2**32 - 1)


@given(st.tuples(st.integers(2, 5), st.integers(1, 3), st.integers(1, 2)), seeds)
def test_each_token_is_accepted_with_the_largest_probability_that_any_rule_can_reach(size, seed):
    worlds = random_worlds(size, seed)
    flips = find_flips(RejectionSampler(), worlds)
    paths = flips.paths
    for i, (p, q) in enumerate(zip(worlds.target, worlds.draft, strict=False)):
        prefix = (paths.world, paths.prefix[:, i])
        optimum = torch.minimum(p, q).sum(-1)[prefix]
        ratio = (p / q)[prefix].gather(1, paths.tokens[:, i : i + 1])[:, 0].clamp(max=1)
        is_reached = (flips.accept[:, :i] > 1e-9).all(-1)
        reached = flips.accept[is_reached, i]
        torch.testing.assert_close(reached, ratio[is_reached], rtol=0, atol=1e-12)
        by_path = torch.zeros_like(worlds.draft[i])
        by_path[(*prefix, paths.tokens[:, i])] = flips.accept[:, i]
        accepted = (q * by_path).sum(-1)[prefix]
        torch.testing.assert_close(accepted[is_reached], optimum[is_reached], rtol=0, atol=1e-12)


class Textbook:
    """Speculative sampling row by row in plain Python, with one mistake built in."""

    def __init__(self, mistake=None):
        self.mistake = mistake

    def __call__(self, draft, logits, warp, noise):
        p = warp(logits).tolist()
        q = None if draft.probs is None else draft.probs.tolist()
        accept = noise.uniform(Stream.ACCEPT).tolist()
        resample = noise.uniform(Stream.RESAMPLE)[:, 0].tolist()
        tokens = draft.tokens.tolist()
        rows = [
            self.accept(t, q and q[b], p[b], accept[b], resample[b]) for b, t in enumerate(tokens)
        ]
        width = draft.tokens.shape[1]
        padded = [row + [PAD_TOKEN] * (width + 1 - len(row)) for row in rows]
        num_accepted = torch.tensor([len(row) - 1 for row in rows])
        return Verdict(torch.tensor(padded), num_accepted, torch.full_like(num_accepted, width))

    def accept(self, tokens, q, p, accept, resample):
        for i, token in enumerate(tokens):
            q_row = q[max(i - 1, 0) if self.mistake == "draft law of the previous row" else i]
            p_row = p[i + 1 if self.mistake == "target law of the next row" else i]
            ratio = p_row[token] / q_row[token] if q_row[token] else 2.0
            if self.mistake == "squared ratio":
                ratio = ratio**2
            if self.mistake == "inverted ratio":
                ratio = 1 / ratio if ratio else 2.0
            if accept[i] >= ratio:
                u = accept[i] if self.mistake == "noise of the accept decision" else resample
                return [*tokens[:i], self.invert(self.residual(p[i], q[i]), u)]
        last = p[-1]
        if self.mistake == "bonus from the previous row":
            last = p[-2]
        if self.mistake == "bonus from the draft":
            last = q[-1]
        if self.mistake == "bonus from the residual":
            last = self.residual(p[-1], q[-1])
        return [*tokens, self.invert(last, resample)]

    def residual(self, p, q):
        if self.mistake == "residual is the target":
            return p
        if self.mistake == "residual is the absolute difference":
            return [abs(a - b) for a, b in zip(p, q, strict=True)]
        rest = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        return rest if sum(rest) > 0 else p

    def invert(self, weights, u):
        total = 1.0 if self.mistake == "residual is not normalised" else sum(weights)
        mass = 0.0
        for index, weight in enumerate(weights):
            mass += weight
            if mass > u * total:
                return index
        return len(weights) - 1


MISTAKES = [
    "squared ratio",
    "inverted ratio",
    "draft law of the previous row",
    "target law of the next row",
    "noise of the accept decision",
    "residual is the target",
    "residual is the absolute difference",
    "residual is not normalised",
    "bonus from the previous row",
    "bonus from the draft",
    "bonus from the residual",
]


def worst_error(sampler, kind="soft"):
    worlds = [random_worlds((3, 2, 1), seed, kind) for seed in range(3)]
    return max(law_error(sampler, w, w.target) for w in worlds)


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_the_check_passes_the_textbook_and_fails_each_mistake(mistake):
    error = worst_error(Textbook(mistake))
    assert error > 1e-3 if mistake else error < 1e-12


def test_the_check_fails_argmax_tokens_that_claim_a_soft_law():
    def claims_to_be_soft(draft, logits, warp, noise):
        probs = torch.full((*draft.tokens.shape, 3), 1 / 3, dtype=torch.float64)
        return RejectionSampler()(Draft(draft.tokens, probs), logits, warp, noise)

    assert worst_error(claims_to_be_soft, "point-mass") > 1e-3
    assert worst_error(RejectionSampler(), "point-mass") < 1e-12
