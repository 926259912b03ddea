"""Law 1, lossless: what `RejectionSampler` emits has the law of the target, whatever is drafted.

One round over context-dependent integer-weight tables, completed to K + 1 tokens by the target,
has the target's joint law to 1e-12 in float64; `exact_law.py` has the method. Wrong samplers fail
the same check.
"""

import pytest
import torch
from exact_law import (
    Worlds,
    check_certificate,
    completed_law,
    continued,
    find_flips,
    law_error,
    random_draft_weights,
    random_weights,
)
from hypothesis import given
from hypothesis import strategies as st
from warpers import by_row, gates, huggingface_law

from specdec.samplers import RejectionSampler, Stream
from specdec.types import PAD_TOKEN, Draft, Verdict

sizes = st.tuples(st.integers(2, 5), st.integers(0, 3), st.integers(1, 2))  # V, K, W
seeds = st.integers(0, 2**32 - 1)


def normalised(weights):
    return weights.log().softmax(-1)


def random_worlds(size, seed, *, is_point_mass=False, is_ragged=False):
    """Worlds with integer-weight tables, and the target's laws by division."""
    vocab, width, count = size
    generator = torch.Generator().manual_seed(seed)
    weights = [random_weights((count, vocab**i, vocab), generator) for i in range(width + 1)]
    draft = [random_draft_weights(w, generator) for w in weights[:width]]
    if is_point_mass:
        draft = [torch.zeros_like(q).scatter(-1, q.argmax(-1, keepdim=True), 1.0) for q in draft]
    num_valid = torch.randint(0, width + 1, (count,), generator=generator).tolist()
    laws = [normalised(q) for q in draft]
    num_valid = num_valid if is_ragged else None
    worlds = Worlds([w.log() for w in weights], laws, num_valid, is_point_mass)
    return worlds, [w / w.sum(-1, keepdim=True) for w in weights]


def assert_lossless(worlds, target, seed, tolerance=1e-12):
    flips = find_flips(RejectionSampler(), worlds)
    check_certificate(flips, torch.Generator().manual_seed(seed))
    joint = continued(torch.ones(len(target[0]), 1, dtype=torch.float64), target)
    torch.testing.assert_close(completed_law(flips, target), joint, rtol=0, atol=tolerance)
    return flips


@given(sizes, seeds)
def test_a_round_with_soft_drafts_has_the_law_of_the_target(size, seed):
    assert_lossless(*random_worlds(size, seed), seed)


@given(sizes, seeds)
def test_a_round_with_point_mass_drafts_has_the_law_of_the_target(size, seed):
    assert_lossless(*random_worlds(size, seed, is_point_mass=True), seed)


@given(sizes, seeds, st.booleans())
def test_rows_that_propose_fewer_tokens_have_the_law_of_the_target(size, seed, is_point_mass):
    worlds, target = random_worlds(size, seed, is_point_mass=is_point_mass, is_ragged=True)
    assert_lossless(worlds, target, seed)


@given(sizes, seeds)
def test_float32_tables_have_the_law_of_the_target_to_float32(size, seed):
    worlds, target = random_worlds(size, seed)
    worlds.logits = [x.float() for x in worlds.logits]
    worlds.draft = [q.float() for q in worlds.draft]
    assert_lossless(worlds, target, seed, tolerance=1e-6)


def warped(tables, gates):
    """Each world's tables through HF's warpers with that world's values."""
    laws = [[huggingface_law(x, gate) for x, gate in zip(t, gates, strict=True)] for t in tables]
    return [torch.stack(level) for level in laws]


@given(sizes, st.lists(gates, min_size=2, max_size=2), seeds)
def test_truncated_and_greedy_rows_have_the_law_of_the_warpers_of_huggingface(size, gates, seed):
    worlds, _ = random_worlds((*size[:2], 2), seed)
    worlds.warp = by_row(gates)
    worlds.draft = warped([q.log() for q in worlds.draft], gates)
    assert_lossless(worlds, warped(worlds.logits, gates), seed)


@given(st.tuples(st.integers(2, 5), st.integers(1, 3), st.integers(1, 2)), seeds)
def test_each_token_is_accepted_with_the_largest_probability_that_any_rule_can_reach(size, seed):
    worlds, target = random_worlds(size, seed)
    flips = find_flips(RejectionSampler(), worlds)
    rows = flips.rows
    for i, (p, q) in enumerate(zip(target, worlds.draft, strict=False)):
        prefix = (rows.world, rows.prefix[:, i])
        optimum = torch.minimum(p, q).sum(-1)[prefix]
        ratio = (p / q)[prefix].gather(1, rows.tokens[:, i : i + 1])[:, 0].clamp(max=1)
        is_reached = (flips.accept[:, :i] > 1e-9).all(-1)
        reached = flips.accept[is_reached, i]
        torch.testing.assert_close(reached, ratio[is_reached], rtol=0, atol=1e-12)
        by_path = torch.zeros_like(worlds.draft[i])
        by_path[(*prefix, rows.tokens[:, i])] = flips.accept[:, i]
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
            self.decide(t, q and q[b], p[b], accept[b], resample[b]) for b, t in enumerate(tokens)
        ]
        width = draft.tokens.shape[1]
        padded = [row + [PAD_TOKEN] * (width + 1 - len(row)) for row in rows]
        num_accepted = torch.tensor([len(row) - 1 for row in rows])
        return Verdict(torch.tensor(padded), num_accepted, torch.full_like(num_accepted, width))

    def decide(self, tokens, q, p, accept, resample):
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


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_the_check_passes_the_textbook_and_fails_each_mistake(mistake):
    errors = [law_error(Textbook(mistake), *random_worlds((3, 2, 1), seed)) for seed in range(3)]
    assert max(errors) > 1e-3 if mistake else max(errors) < 1e-12


def test_the_check_fails_argmax_tokens_that_claim_a_soft_law():
    def claims_to_be_soft(draft, logits, warp, noise):
        probs = torch.full((*draft.tokens.shape, 3), 1 / 3, dtype=torch.float64)
        return RejectionSampler()(Draft(draft.tokens, probs), logits, warp, noise)

    worlds = [random_worlds((3, 2, 1), seed, is_point_mass=True) for seed in range(3)]
    assert max(law_error(claims_to_be_soft, *world) for world in worlds) > 1e-3
    assert max(law_error(RejectionSampler(), *world) for world in worlds) < 1e-12
