"""The rules for independent paths: exact laws by enumeration, their distributions from all tuples
of paths, and the most that any lossless rule accepts against formulas. Laws by the numbers of
`tests/README.md`.
"""

from dataclasses import replace
from itertools import combinations, product
from math import prod

import pytest
import torch
from drafter_table import MODEL, make
from exact_law import assert_lossless, law_error
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from specdec import CouplingSampler, Draft, SpeculativeGenerator, Tree, certify
from specdec.drafters import Paths as DraftPaths
from specdec.drafters.tree_drafter import shape_of
from specdec.kernels.verify import paths as kernel
from specdec.kernels.verify.paths import PathDraft
from specdec.lab.certificates.sampler.enumeration import find_flips, joint_law
from specdec.lab.certificates.sampler.optimum import most_accepted
from specdec.lab.certificates.sampler.paths import Paths
from specdec.lab.certificates.sampler.problems import FILTERS, Problems, random_problems
from specdec.samplers import (
    BlockSampler,
    GBVSampler,
    LogitsFilter,
    Noise,
    RejectionSampler,
    SpecTrSampler,
)

seeds = st.integers(0, 2**32 - 1)
RULES = [GBVSampler(), SpecTrSampler()]
each_rule = pytest.mark.parametrize("sampler", RULES, ids=lambda rule: type(rule).__name__)
SIZES = [(3, 1, 1), (3, 2, 1), (3, 3, 1), (3, 2, 2), (2, 2, 3), (2, 3, 2), (5, 2, 1)]  # V, P, D


def path_problems(seed, size, kind="soft", count=4, filters=({},)):
    vocab, paths, depth = size
    parents = tuple(max(node - paths, -1) for node in range(paths * depth))
    generator = torch.Generator().manual_seed(seed)
    problems = random_problems(
        vocab, depth, count, generator, kind=kind, filters=filters, parents=parents
    )
    problems.has_replacement = "point" not in kind
    return problems


# Law 1.


@each_rule
@settings(max_examples=4)
@given(seeds, st.sampled_from(SIZES), st.sampled_from(["soft", "mixed"]), st.booleans())
def test_paths_leave_the_targets_law(sampler, seed, size, kind, is_filtered):
    problems = path_problems(seed, size, kind, filters=FILTERS if is_filtered else ({},))
    assert_lossless(sampler, problems, seed % 1000)
    assert bool(
        (find_flips(sampler, problems).mean_accepted < most_accepted(Paths(problems)) + 1e-6).all()
    )


@each_rule
@settings(max_examples=4)
@given(seeds, st.sampled_from(["point-mass", "short point-mass"]))
def test_of_point_masses_the_targets_own_tokens_are_taken(sampler, seed, kind):
    problems = path_problems(seed, (3, 2, 2), kind)
    flips, expected = (find_flips(rule, problems) for rule in (sampler, BlockSampler()))
    assert flips.completed_law().equal(expected.completed_law())
    assert flips.mean_accepted.equal(expected.mean_accepted)


@each_rule
@settings(max_examples=2)
@given(seeds, st.sampled_from(["soft", "mixed"]))
def test_one_path_is_verified_as_a_block(sampler, seed, kind):
    problems = path_problems(seed, (3, 1, 3), kind)
    for of in (problems, replace(problems, parents=None)):
        flips, expected = (find_flips(rule, of) for rule in (sampler, BlockSampler()))
        torch.testing.assert_close(flips.completed_law(), joint_law(of.target), rtol=0, atol=1e-12)
        torch.testing.assert_close(flips.mean_accepted, expected.mean_accepted, rtol=0, atol=1e-8)


@each_rule
def test_certify_passes_them_and_prints_how_much_they_accept(sampler):
    """Also law 6: no impossible token, not at u = 0 either."""
    report = certify(sampler, sizes=((3, 1, 3),), trees=(), paths=((2, 2), (3, 1)))
    assert report.passed
    assert 0 < report.distance < 1
    assert "independent paths 0." in str(report)
    problems, mean, most = report.accepted[0]
    assert problems.family == "chains"
    torch.testing.assert_close(mean, most, rtol=0, atol=1e-7)


FAULTS = {
    "best path judged as if it were any": ("best_of", lambda *given: given[3]),
    "order of a smaller number of paths": (
        "best_of",
        lambda count, *given, best_of=kernel.best_of: best_of(count - 1, *given),
    ),
    "order by the draft alone": (
        "best_of",
        lambda *given, best_of=kernel.best_of: best_of(*given[:-1], torch.ones_like(given[-1])),
    ),
    "every path is the only one": (
        "k_sequential",
        lambda count, *given, select=kernel.k_sequential: select(torch.ones_like(count), *given),
    ),
    "a rest that was not rejected": (
        "k_sequential",
        lambda *given, select=kernel.k_sequential: (select(*given)[0], given[1]),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_mistake_is_found(monkeypatch, fault):
    name, wrong = FAULTS[fault]
    sampler, problems = RULES[name == "k_sequential"], path_problems(3, (3, 2, 2), count=8)
    assert law_error(sampler, problems, problems.target) < 1e-12
    monkeypatch.setattr(kernel, name, wrong)
    assert law_error(sampler, problems, problems.target) > 0.01


@each_rule
def test_paths_drawn_without_replacement_are_no_independent_ones(sampler):
    class Believed(type(sampler)):
        def accept(self, draft, *others):
            given = draft.tokens, draft.probs, draft.num_valid, draft.parents, draft.depth
            return super().accept(PathDraft(*given, num_paths=2), *others)

    problems = path_problems(5, (3, 2, 1), count=8)
    assert law_error(Believed(), problems, problems.target) < 1e-12
    assert law_error(Believed(), replace(problems, has_replacement=False), problems.target) > 0.01


# The distributions that they judge by.


def law_of_best(target, probs, count):
    """`[V**D]`: how often each path is the best of `count`, summed over all tuples of paths; D
    levels `[V**i, V]` of one problem.
    """
    depth, vocab = len(probs), target[0].shape[-1]
    chance, rank = {}, {}
    for path in product(range(vocab), repeat=depth):
        chance[path], keys, code = 1.0, [], 0
        for d, token in enumerate(path):
            p, q = float(target[d][code, token]), float(probs[d][code, token])
            chance[path] *= q
            keys.append((p / q if q else 0.0, token))
            code = code * vocab + token
        rank[path] = keys
    law = dict.fromkeys(chance, 0.0)
    for paths in product([path for path in chance if chance[path]], repeat=count):
        law[max(paths, key=rank.get)] += prod(chance[path] for path in paths)
    return torch.tensor(list(law.values()), dtype=torch.float64)


def next_tokens(law, vocab, depth):
    """Levels `[V**i, V]` of a law of paths `[V**D]`: that of the next token after each prefix; NaN
    after one that is impossible.
    """
    levels = [law.view(vocab**d, vocab, -1).sum(dim=-1) for d in range(depth)]
    return [level / level.sum(dim=-1, keepdim=True) for level in levels]


@settings(max_examples=8)
@given(seeds, st.integers(1, 3), st.integers(1, 2))
def test_the_best_path_is_drawn_from_what_all_tuples_of_paths_say(seed, count, depth):
    vocab = 3
    problems = path_problems(seed, (vocab, 1, depth), count=1)
    target, probs = ([level[0] for level in x] for x in (problems.target, problems.draft))
    law = law_of_best(target, probs, count)
    levels = next_tokens(law, vocab, depth)
    for number in law.nonzero()[:, 0].tolist():
        codes = [number // vocab ** (depth - d) for d in range(depth + 1)]  # of its prefixes
        path = torch.tensor([[code % vocab for code in codes[1:]]])
        rows = (torch.stack([x[d][codes[d]] for d in range(depth)])[None] for x in (probs, target))
        found = kernel.best_of(torch.tensor([count]), count, path, *rows)[0]
        expected = torch.stack([levels[d][codes[d]] for d in range(depth)])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@settings(max_examples=20)
@given(seeds, st.integers(1, 6))
def test_the_divisor_is_the_least_that_leaves_no_negative_weight(seed, count):
    problems = path_problems(seed, (5, 1, 1), count=6)
    p, q, many = problems.target[0][:, 0], problems.draft[0][:, 0], torch.full((6,), count)
    divisor, rest = kernel.k_sequential(many, p, q)
    assert bool(((divisor >= 1) & (divisor <= count)).all())

    def left(by):
        selected = torch.minimum(q, p / by[:, None])
        overlap = selected.sum(dim=1, keepdim=True)
        tries = sum((1 - overlap) ** i for i in range(count))
        return p - selected * tries

    torch.testing.assert_close(rest, left(divisor), rtol=0, atol=1e-8)
    # Where nearly everything is accepted the weights that remain are roundings.
    smaller, is_some = divisor * 0.999, rest.sum(dim=1) > 1e-9
    binds = ((q * smaller[:, None] >= p) & (p > 0)).any(dim=1) & (smaller >= 1) & is_some
    assert bool((left(smaller)[binds].amin(dim=1) < 0).all())


def test_a_small_interval_of_paths_loses_no_digits():
    """After a prefix so unlikely that powers of its ends agree, the next token is any path's."""
    q = torch.tensor([1e-9, 0.5, 0.5 - 1e-9], dtype=torch.float64).expand(1, 4, 3)
    p = torch.tensor([0.1, 0.5, 0.4], dtype=torch.float64).expand(1, 4, 3)
    tokens = torch.tensor([[2, 0, 0, 1]])
    found = kernel.best_of(torch.tensor([4]), 4, tokens, q, p)
    torch.testing.assert_close(found.sum(dim=-1), torch.ones(1, 4).double(), rtol=0, atol=1e-12)
    torch.testing.assert_close(found[:, 3], q[:, 3], rtol=1e-6, atol=0)


# How much is accepted.


@settings(max_examples=12)
@given(seeds, st.integers(1, 3), st.integers(2, 4))
def test_of_one_token_the_optimum_is_that_of_optimal_transport(seed, count, vocab):
    """Accepted tokens in a set S are at most p(S), and at most the chance that one is drafted."""
    problems = path_problems(seed, (vocab, count, 1), count=3)
    expected = []
    for p, q in zip(problems.target[0][:, 0], problems.draft[0][:, 0], strict=True):
        sets = [list(s) for n in range(vocab + 1) for s in combinations(range(vocab), n)]
        expected.append(min(1 - p[s].sum() + 1 - (1 - q[s].sum()) ** count for s in sets))
    found = most_accepted(Paths(problems))
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-7)


@settings(max_examples=6)
@given(seeds, st.sampled_from(["soft", "mixed"]))
def test_of_a_chain_no_rule_accepts_more_than_the_block_rule(seed, kind):
    generator = torch.Generator().manual_seed(seed)
    problems = random_problems(3, 3, 4, generator, kind=kind)
    found = most_accepted(Paths(problems))
    block, token = (
        find_flips(rule, problems).mean_accepted for rule in (BlockSampler(), RejectionSampler())
    )
    torch.testing.assert_close(found, block, rtol=0, atol=1e-7)
    assert bool((token <= found + 1e-7).all())


@settings(max_examples=6)
@given(seeds, st.sampled_from(SIZES), st.sampled_from(["soft", "mixed"]), st.booleans())
def test_of_the_chosen_path_no_rule_accepts_more_than_gbv(seed, size, kind, is_filtered):
    """A rule that sees the best path alone sees a chain, drawn from the law of the best path."""
    vocab, num_paths, depth = size
    # Rows at temperature 0 are verified as points, where the first of equal siblings is taken.
    sampled = [each for each in FILTERS if each.get("temperature") != 0]
    problems = path_problems(seed, size, kind, count=6, filters=sampled if is_filtered else ({},))
    found = find_flips(GBVSampler(), problems).mean_accepted
    for problem in range(len(problems)):
        valid = problems.num_valid[problem] if problems.num_valid else num_paths * depth
        count = max(1, min(valid, num_paths))  # paths, which are cut where the shortest one ends
        length = valid // count
        logits_filter = LogitsFilter(
            1, **{name: values[problem] for name, values in problems.logits_filter.items()}
        )
        # As the rule computes it, so that rounding breaks ties in the same way.
        target = [logits_filter(level[problem][None])[0] for level in problems.logits[: length + 1]]
        law = law_of_best(target, [level[problem] for level in problems.draft[:length]], count)
        # I(uy) <= law(uy), and I(uy) <= I(u) p(y | u): see `optimum`.
        reach, expected = torch.ones(1, dtype=torch.float64), 0.0
        for d in range(length):
            drawn = law.view(vocab ** (d + 1), -1).sum(dim=1)
            reach = torch.minimum(drawn, (reach[:, None] * target[d]).flatten())
            expected += reach.sum().item()
        assert found[problem].item() == pytest.approx(expected, abs=1e-9)
        chain = [level.nan_to_num(nan=1 / vocab)[None] for level in next_tokens(law, vocab, length)]
        chain = Problems([p.log()[None] for p in target], chain)
        assert most_accepted(Paths(chain)).item() == pytest.approx(expected, abs=1e-7)


def test_where_nothing_is_drafted_nothing_is_accepted():
    report = certify(BlockSampler(), sizes=((3, 0, 2),))
    assert report.passed
    assert "chains 0.0000 of 0.0000" in str(report)


def test_a_rule_that_accepts_too_little_is_seen():
    class Reluctant(BlockSampler):
        def accept(self, draft, logits, logits_filter, noise):
            probs = None if draft.probs is None else draft.probs[:, :0]
            none = Draft(draft.tokens[:, :0], probs)
            verdict = super().accept(none, logits[:, :1], logits_filter, noise)
            tokens = torch.nn.functional.pad(verdict.tokens, (0, draft.tokens.shape[1]), value=-1)
            return replace(verdict, tokens=tokens)

    report = certify(Reluctant(), sizes=((3, 1, 6),), trees=())
    assert report.passed
    assert report.distance == pytest.approx(1)
    assert "at most 1.000 less, in soft drafts" in " ".join(str(report).split())


# Drafts.


def drafts_of(rule, rows, **options):
    """What it is shown in a few steps with three paths of two tokens."""
    drafts = []

    class Kept(type(rule)):
        def accept(self, draft, *others):
            drafts.append(draft)
            return super().accept(draft, *others)

    generator = SpeculativeGenerator(MODEL, make("model", tree=DraftPaths(3, 2)), Kept())
    options |= {"max_new_tokens": 10, "do_sample": True, "seed": list(range(rows))}
    result = generator.generate(torch.tensor([[5, 3]] * rows), eos_token_id=None, **options)
    assert result.new_tokens.shape == (rows, 10)
    return drafts


def test_paths_are_drawn_independently_and_say_so():
    equal = 0
    for draft in drafts_of(GBVSampler(), 60):
        assert (draft.num_paths, draft.depth, draft.runs) == (3, 2, (1, 1, 1, 3))
        assert draft.parents[0].tolist() == [-1, -1, -1, 0, 1, 2]
        assert draft.probs[:, 0].equal(draft.probs[:, 1])
        equal += int((draft.tokens[:, 0] == draft.tokens[:, 1]).sum())
    assert equal > 0  # without replacement there is none


@each_rule
@pytest.mark.parametrize("width", [1, 2, 4, 5, 6])
def test_fewer_draft_tokens_are_fewer_or_shorter_paths(sampler, width):
    drafts = drafts_of(sampler, 2, num_draft_tokens=width)
    assert {(d.num_paths, d.depth) for d in drafts} == {(min(width, 3), 1 if width <= 3 else 2)}


def test_shapes_of_paths():
    assert shape_of("4x5 paths") == DraftPaths(4, 5)
    assert DraftPaths(2, 3).shape == (-1, -1, 0, 1, 2, 3)
    assert make("model", tree="2x3 paths").num_draft_tokens == 6
    assert DraftPaths(12, 1).nodes == 12
    with refused("num_paths must be an integer >= 1"):
        DraftPaths(0, 3)
    for text in ("4x5paths", "4 paths", "4x paths"):
        with refused("is no shape"):
            shape_of(text)
    with refused("draft.num_paths must be an integer"):
        PathDraft(torch.zeros(1, 2).long(), parents=torch.tensor([[-1, -1]]), depth=1, num_paths=3)


@each_rule
def test_other_trees_are_refused(sampler):
    draft = Draft(torch.zeros(1, 2).long(), torch.eye(3)[:1].expand(1, 2, 3))
    draft = replace(draft, parents=torch.tensor([[-1, -1]]), depth=1)
    noise = Noise([0]).at(torch.tensor([3]), 3)
    with refused(f"{type(sampler).__name__} verifies paths that were drawn independently"):
        sampler(draft, torch.zeros(1, 3, 3), LogitsFilter(1), noise)
    with refused("verifies independent paths; pass paths="):
        certify(sampler, trees=((-1, -1),))


def test_a_race_would_draw_one_path_many_times():
    generator = SpeculativeGenerator(MODEL, make("model", tree="2x3 paths"), CouplingSampler())
    with refused("paths that are drawn by one race (CouplingSampler) are all the same"):
        generator.generate(torch.tensor([[5, 3]]), max_new_tokens=4, do_sample=True, seed=1)


@pytest.mark.parametrize("favoured", [0, 1])
@pytest.mark.parametrize("better", [0, 1])
def test_paths_are_compared_by_the_tokens_in_which_they_differ_and_not_by_rounding(
    better, favoured
):
    """Two paths begin with the same two tokens. What follows these was computed twice, in rows of
    its own for each path, which differ by rounding.
    """
    tokens = torch.tensor([[1, 1, 2, 2, 3, 3]])
    tokens[0, 4 + better] = 0  # the target likes 0 four times as much as 3, the draft does not
    probs = torch.full((1, 6, 4), 0.25)
    target = torch.full((1, 7, 4), 0.25)
    target[:, 3:5] = torch.tensor([0.6, 0.125, 0.125, 0.15])
    target[:, [1 + favoured, 3 + favoured]] *= 1 + 1e-6
    parents = torch.tensor([[-1, -1, 0, 1, 2, 3]])
    draft = PathDraft(tokens, probs, parents=parents, depth=3, num_paths=2)
    uniforms = kernel.VerifyUniforms(torch.full((1, 6), 1e-3), torch.full((1,), 0.5))
    verdict = kernel.verify_greedy_path(draft, target, uniforms)
    assert verdict.path.tolist() == [[0, 1 + better, 3 + better, 5 + better]]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_tree_that_is_no_set_of_paths_is_refused_when_it_is_joined(rule):
    for tree in (Tree(6, 3), Tree(4, 2, parents=(-1, -1, 0, 1))):
        with pytest.raises(ValueError, match=r"drawn independently.*samples a tree of"):
            SpeculativeGenerator(MODEL, make("model", tree=tree), rule)
    for drafter in (
        make("model", tree="2x3 paths"),
        make("model", tree=Tree(6, 3), proposal="argmax"),  # point masses
        make("lookup, tree"),
        make("model"),
    ):
        SpeculativeGenerator(MODEL, drafter, rule)
