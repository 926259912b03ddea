"""Law 1 for all samplers: lossless ones have the target's law, lossy ones are off by what they say.

One round over context-dependent integer-weight tables, completed to K + 1 tokens by the target, has
the target's joint law to 1e-12 in float64; `specdec.lab.certificates` has the method. What the law
should be comes from HF's own warpers and processors here, not from the package.
"""

from dataclasses import replace

import pytest
import torch
from exact_law import assert_lossless, emitted, filtered, random_problems
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from warpers import filters

from specdec.lab.certificates.sampler.enumeration import find_flips, joint_law
from specdec.lab.certificates.sampler.problems import FILTERS, Problems, filtered_law
from specdec.loop.processors import process_window
from specdec.samplers import (
    BlockSampler,
    CouplingSampler,
    EnsembleSampler,
    LogitsFilter,
    RejectionSampler,
    TypicalSampler,
    draw_by_race,
)
from specdec.types import PAD_TOKEN, Draft

LOSSLESS = [RejectionSampler(), BlockSampler(), CouplingSampler()]
KINDS = ["soft", "point-mass", "mixed"]
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
TRUNCATIONS = {
    "none": {},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.77},
    "min-p": {"min_p": 0.3},
    "all, cold": {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1},
}
sizes = st.tuples(st.integers(2, 5), st.integers(0, 3), st.integers(1, 2))  # V, K, W
small_sizes = st.tuples(st.integers(2, 4), st.integers(1, 3), st.integers(1, 2))
kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 2**32 - 1)
lossless = pytest.mark.parametrize("sampler", LOSSLESS, ids=lambda s: type(s).__name__)


ONE_BY_ONE = [
    *((name, "mixed", 2, 4) for name in TRUNCATIONS),
    *(("all, cold", kind, 2, 3) for kind in ("soft", "point-mass")),
    *(("none", "mixed", *size) for size in ((1, 5), (3, 3))),
]


@pytest.mark.smoke
@lossless
@pytest.mark.parametrize(("name", "kind", "width", "vocab"), ONE_BY_ONE)
def test_a_round_has_the_law_of_the_target_behind_each_filter(sampler, kind, name, width, vocab):
    problems = random_problems((vocab, width, 6), seed=width, kind=kind)
    if name != "none":
        problems = filtered(problems, [NEUTRAL | TRUNCATIONS[name]] * 6)
    assert_lossless(sampler, problems, seed=0)


@lossless
@given(sizes, kinds, seeds)
@settings(max_examples=8)
def test_a_round_has_the_law_of_the_target_for_tables_of_any_size(sampler, size, kind, seed):
    assert_lossless(sampler, random_problems(size, seed, kind), seed)


@lossless
@given(sizes, kinds, st.lists(filters, min_size=2, max_size=2), seeds)
@settings(max_examples=8)
def test_truncated_and_greedy_rows_mix_in_a_batch(sampler, size, kind, filters, seed):
    assert_lossless(sampler, filtered(random_problems((*size[:2], 2), seed, kind), filters), seed)


@given(st.lists(st.integers(0, 4), min_size=2, max_size=5).filter(any), st.sampled_from(FILTERS))
def test_the_laws_of_the_packages_own_problems_are_those_of_huggingface(weights, options):
    table = torch.tensor([weights], dtype=torch.float64)
    problems = filtered(Problems([table[None].log()], []), [NEUTRAL | options])
    expected = filtered_law(table[0], options)
    torch.testing.assert_close(problems.target[0][0, 0], expected, rtol=0, atol=1e-12)


PROMPT = [2, 0, 2]
PROCESSORS = {
    "repetition penalty": [RepetitionPenaltyLogitsProcessor(1.7)],
    "no repeated pairs": [NoRepeatNGramLogitsProcessor(2)],
    "bad words": [NoBadWordsLogitsProcessor([[1], [0, 2]])],
    "grammar": [PrefixConstrainedLogitsProcessor(lambda _, ids: [(ids[-1].item() + 1) % 3, 0], 1)],
}


@lossless
@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "mixed") for name in PROCESSORS), ("grammar", "soft")]
)
def test_logits_processors_that_read_the_text_belong_to_the_target(sampler, kind, name):
    processors = LogitsProcessorList(PROCESSORS[name])
    problems = random_problems((3, 2, 4), seed=len(name), kind=kind)
    problems.logits = [
        level.clamp(min=-2.0) for level in problems.logits
    ]  # something is always left
    target = []
    for length, level in enumerate(problems.logits):
        ids = [[*PROMPT, *digits(code, length)] for code in range(3**length)]
        ids = torch.tensor(ids).repeat(len(problems), 1)
        target.append(processors(ids, level.flatten(0, 1)).softmax(-1).view(level.shape))
    processed = {}

    def with_processors(draft, logits, logits_filter, noise):
        """As the loop does it; the same batch comes again and again."""
        key = draft.tokens.data_ptr()
        if key not in processed:
            prefixes = [PROMPT] * len(logits)
            window = process_window(processors, logits, prefixes, draft, pad=0)
            processed[key] = draft, window
        return sampler(draft, processed[key][1], logits_filter, noise)

    is_race = sampler.draw_draft is draw_by_race
    assert_lossless(with_processors, replace(problems, target=target), 0, is_race=is_race)
    assert any(
        not torch.allclose(a.softmax(-1), b) for a, b in zip(problems.logits, target, strict=True)
    )


def digits(code, length):
    """Tokens of a numbered prefix."""
    return [code // 3 ** (length - 1 - i) % 3 for i in range(length)]


@given(st.tuples(st.integers(2, 5), st.integers(1, 3), st.integers(1, 2)), seeds)
@settings(max_examples=8)
def test_each_token_is_accepted_with_the_largest_probability_that_any_rule_can_reach(size, seed):
    problems = random_problems(size, seed)
    flips = find_flips(RejectionSampler(), problems)
    paths = flips.paths
    for i, (p, q) in enumerate(zip(problems.target, problems.draft, strict=False)):
        prefix = (paths.problem, paths.prefix[:, i])
        optimum = torch.minimum(p, q).sum(-1)[prefix]
        ratio = (p / q)[prefix].gather(1, paths.tokens[:, i : i + 1])[:, 0].clamp(max=1)
        is_reached = (flips.accept[:, :i] > 1e-9).all(-1)
        reached = flips.accept[is_reached, i]
        torch.testing.assert_close(reached, ratio[is_reached], rtol=0, atol=1e-12)
        by_path = torch.zeros_like(problems.draft[i])
        by_path[(*prefix, paths.tokens[:, i])] = flips.accept[:, i]
        accepted = (q * by_path).sum(-1)[prefix]
        torch.testing.assert_close(accepted[is_reached], optimum[is_reached], rtol=0, atol=1e-12)


@given(st.tuples(st.integers(2, 4), st.integers(1, 3), st.integers(1, 3)), seeds)
@settings(max_examples=8)
def test_block_verification_accepts_the_most_that_a_lossless_rule_can(size, seed):
    """Prefix i stands with probability P_i: none more, or its text would come too often."""
    problems = random_problems(size, seed)
    flips = find_flips(BlockSampler(), problems)
    paths, (vocab, width, count) = flips.paths, size
    kept = torch.ones(len(paths), dtype=torch.float64)
    most = torch.zeros(count, dtype=torch.float64)
    for i in range(width):
        at = paths.problem, paths.prefix[:, i], paths.prefix[:, i + 1] % vocab
        kept = (kept * problems.target[i][at] / problems.draft[i][at]).clamp(max=1)
        most.index_add_(0, paths.problem, paths.weight * kept)
    torch.testing.assert_close(flips.mean_accepted, most, rtol=0, atol=1e-12)


def assert_emits(sampler, problems, law_of):
    """Each token that a round emits, given that the round came so far, has the law `law_of(p,
    q)`, and the target's at places without a draft token.
    """
    flips = find_flips(sampler, problems)
    valid = torch.tensor(problems.num_valid or [problems.num_draft_tokens] * len(problems))
    for i, p in enumerate(problems.target):
        found = emitted(flips, i + 1)
        reached = found.sum(-1, keepdim=True)
        expected = p
        if i < problems.num_draft_tokens:
            is_drafted = (i < valid)[:, None, None]
            expected = torch.where(is_drafted, law_of(p, problems.draft[i]), p)
        torch.testing.assert_close(found, reached * expected, rtol=0, atol=1e-12)
    return flips


@given(st.sampled_from([0.0, 0.25, 0.9, 1.0]), small_sizes, kinds, seeds)
@settings(max_examples=12)
def test_the_ensemble_samples_exactly_from_its_mixture(weight, size, kind, seed):
    problems = random_problems(size, seed, kind)
    sampler = EnsembleSampler(weight)
    flips = assert_emits(sampler, problems, lambda p, q: weight * p + (1 - weight) * q)
    valid = torch.tensor(problems.num_valid or [size[1]] * size[2])
    off, bound = joint_variation(flips), torch.zeros(size[2], dtype=torch.float64)
    for i, q in enumerate(problems.draft):
        largest = (1 - weight) * variation(q, problems.target[i]).amax(dim=1)  # over contexts
        bound += torch.where(i < valid, largest, 0.0)
    assert (off <= bound + 1e-12).all()
    if size[1] == 1:
        torch.testing.assert_close(off, bound, rtol=0, atol=1e-12)


TYPICAL = [(0.3, 0.09), (0.05, 1.0), (1.0, 1.0), (1.0, 2.0), (0.0, 0.0)]


@given(st.sampled_from(TYPICAL), small_sizes, kinds, seeds)
@settings(max_examples=12)
def test_typical_acceptance_is_off_by_what_its_docstring_says(thresholds, size, kind, seed):
    (epsilon, delta), problems = thresholds, random_problems(size, seed, kind)

    def law_of(p, q):
        entropy = -(p * p.clamp(min=1e-300).log()).sum(-1, keepdim=True)
        is_accepted = (p > (delta * (-entropy).exp()).clamp(max=epsilon)) | (p == 1)
        kept = torch.where(is_accepted, q, 0.0)  # A q'
        share = kept.sum(-1, keepdim=True)  # A
        law = kept + (1 - share) * p
        bound = share[..., 0] * variation(kept / share.clamp(min=1e-300), p)
        torch.testing.assert_close(variation(law, p), bound, rtol=0, atol=1e-12)
        return law

    assert_emits(TypicalSampler(epsilon, delta), problems, law_of)


def variation(law, other):
    """Total variation over the last dimension."""
    return (law - other).abs().sum(-1) / 2


def joint_variation(flips):
    """`[W]`: between the law of K + 1 tokens and the target's."""
    return variation(flips.completed_law(), joint_law(flips.paths.problems.target))


@pytest.mark.parametrize("is_told", [True, False], ids=["soft", "point-mass"])
@pytest.mark.parametrize(
    "sampler", [*LOSSLESS, TypicalSampler(), EnsembleSampler(0.5)], ids=lambda s: type(s).__name__
)
@given(st.integers(1, 4), seeds)
@settings(max_examples=8)
def test_a_short_row_is_decided_as_a_draft_of_so_many_tokens(sampler, is_told, width, seed):
    """What a draft holds behind a row's valid tokens is of no account, also where it looks sound.
    (Problems hold NaN there, which some mistakes take for a rejection.)
    """
    rows, vocab, generator = 6, 3, torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, width + 1, vocab, generator=generator)
    tokens = torch.randint(0, vocab, (rows, width), generator=generator)
    laws = torch.randn(rows, width, vocab, generator=generator).softmax(-1) if is_told else None
    num_valid = torch.randint(0, width + 1, (rows,), generator=generator)
    stale = torch.randint(-1, vocab, (rows, width), generator=generator)
    tokens = torch.where(torch.arange(width) < num_valid[:, None], tokens, stale)
    start = torch.arange(rows)
    noise = sampler.noise_type(list(range(seed, seed + rows)))
    verdict = sampler(
        Draft(tokens, laws, num_valid), logits, LogitsFilter(rows), noise.at(start, width + 1)
    )
    for b, n in enumerate(num_valid.tolist()):
        row = slice(b, b + 1)
        draft = Draft(tokens[row, :n], laws[row, :n] if is_told and n else None)
        noise = sampler.noise_type([seed + b]).at(start[row], n + 1)
        alone = sampler(draft, logits[row, : n + 1], LogitsFilter(1), noise)
        assert verdict.num_accepted[b] == alone.num_accepted
        assert verdict.tokens[b, : n + 1].tolist() == alone.tokens[0].tolist()
        assert verdict.tokens[b, n + 1 :].eq(PAD_TOKEN).all()


def stopped(sampler, stop):
    """The sampler, of drafts that end before the first token at which `stop` is true."""

    def decide(draft, logits, logits_filter, noise):
        width = draft.tokens.shape[1]
        ends = torch.stack([stop(draft, i) for i in range(width)], dim=1)
        num_valid = (~ends).long().cumprod(dim=1).sum(dim=1)
        is_beyond = torch.arange(width) >= num_valid[:, None]
        probs = draft.probs
        if probs is not None:
            probs = probs.masked_fill(is_beyond[..., None], torch.nan)
        tokens = draft.tokens.masked_fill(is_beyond, PAD_TOKEN)
        return sampler(Draft(tokens, probs, num_valid), logits, logits_filter, noise)

    decide.draw_draft = sampler.draw_draft
    return decide


STOPS = {  # of draft token i, by the draft
    "token before": lambda draft, i: (draft.tokens[:, i - 1] == 0) & (i > 0),
    "two before": lambda draft, i: (draft.tokens[:, :i].sum(dim=1) % 3 == 2) & (i > 0),
    "own distribution": lambda draft, i: draft.probs[:, i].amax(dim=-1) < 0.6,
    "own draw": lambda draft, i: of_token(draft, i) < 0.4,
    "next draw": lambda draft, i: draft.tokens[:, min(i + 1, 2)] == 0,
}
CASES = [(s, name) for s in LOSSLESS for name in ("token before", "two before")]
CASES += [(s, "own distribution") for s in LOSSLESS[:2]]  # drafts of races have none


def of_token(draft, index):
    """The draft probability of a drafted token."""
    return draft.probs[:, index].gather(1, draft.tokens[:, index : index + 1])[:, 0]


@pytest.mark.parametrize(("sampler", "name"), CASES)
def test_a_draft_may_end_by_what_was_drawn_before_the_token_that_is_left_out(sampler, name):
    assert_lossless(stopped(sampler, STOPS[name]), random_problems((3, 3, 6), 0), 0)


@pytest.mark.parametrize("sampler", LOSSLESS[:2], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("name", ["own draw", "next draw"])
def test_a_draft_must_not_end_by_the_draw_of_the_token_that_is_left_out(sampler, name):
    flips = find_flips(stopped(sampler, STOPS[name]), random_problems((3, 3, 4), 0))
    assert (joint_variation(flips) > 0.01).sum() >= 3  # of 4 problems
    assert (joint_variation(find_flips(sampler, flips.paths.problems)) < 1e-12).all()


@lossless
def test_where_point_masses_and_drafts_of_races_end_is_of_no_account(sampler):
    """A point mass has no draw to end by, and a race emits the target's own tokens."""
    problems = random_problems((3, 3, 4), 0, "soft" if sampler is LOSSLESS[2] else "point-mass")
    assert_lossless(stopped(sampler, STOPS["next draw"]), problems, 0)
