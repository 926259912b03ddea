"""The rules of samplers on trees: exact laws by enumeration, against the definition in fractions,
and chains as trees. Laws by the numbers of `tests/README.md`.
"""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from exact_law import assert_lossless, emitted, law_error
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec import (
    BlockSampler,
    CouplingSampler,
    EnsembleSampler,
    RejectionSampler,
    TypicalSampler,
)
from specdec.graphs.rows import map_tensors
from specdec.kernels.verify.tree import verify_tree
from specdec.lab.certificates.sampler.enumeration import find_flips
from specdec.lab.certificates.sampler.problems import FILTERS, Problems, random_problems
from specdec.lab.trace.saved_step import read_step
from specdec.loop.step import check_verdict
from specdec.row_step import RowStep
from specdec.samplers import LogitsFilter, Noise
from specdec.samplers.base import rule_uniforms
from specdec.types import PAD_TOKEN, Draft, Verdict

seeds = st.integers(0, 2**32 - 1)
RULES = [RejectionSampler(), BlockSampler()]
KINDS = ["soft", "point-mass", "mixed", "short point-mass"]


def random_parents(count, most_children, generator):
    """A random shape, siblings not more than there are ids."""
    parents = []
    while len(parents) < count:
        parent = int(torch.randint(-1, len(parents), (), generator=generator))
        if parents.count(parent) < most_children:
            parents.append(parent)
    return tuple(parents)


def depth_of(parents):
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return max(depths)


def random_trees(seed, kind, *, vocab=3, has_replacement=False, filters=({},)):
    generator = torch.Generator().manual_seed(seed)
    parents = random_parents(1 + seed % 4, vocab, generator)
    problems = random_problems(
        vocab, depth_of(parents), 4, generator, kind=kind, filters=filters, parents=parents
    )
    problems.has_replacement = has_replacement
    return problems


# Law 1.


@pytest.mark.smoke
@pytest.mark.parametrize("sampler", RULES, ids=lambda rule: type(rule).__name__)
@settings(max_examples=9)
@given(seeds, st.sampled_from(KINDS), st.booleans(), st.booleans())
def test_every_tree_leaves_the_targets_law(sampler, seed, kind, has_replacement, is_filtered):
    has_replacement = has_replacement and "point" not in kind
    filters = FILTERS if is_filtered else ({},)
    problems = random_trees(seed, kind, has_replacement=has_replacement, filters=filters)
    assert_lossless(sampler, problems, seed % 1000)


FAULTS = {
    "children that are point masses are judged by the ratio": lambda draft, probs: (
        replace(draft, probs=draft.probs.roll(1, dims=-1)),
        probs,
    ),
    "a residual forgets the earlier sibling": lambda draft, probs: (
        replace(draft, probs=draft.probs[:, :1].expand_as(draft.probs)),
        probs,
    ),
    "logits of another node": lambda draft, probs: (draft, probs.roll(1, dims=1)),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("by_block", [True, False])
def test_a_planted_mistake_is_found(fault, by_block):
    def biased(draft, logits, logits_filter, noise):
        wrong, probs = FAULTS[fault](draft, logits_filter(logits))
        uniforms = rule_uniforms(draft, noise)
        return verify_tree(wrong, probs, uniforms, by_block=by_block)

    generator = torch.Generator().manual_seed(3)
    problems = random_problems(3, 2, 8, generator, parents=(-1, -1, 1))
    assert law_error(biased, problems, problems.target) > 0.01


# How much is accepted.


@settings(max_examples=8)
@given(seeds, st.booleans())
def test_traversal_accepts_at_least_what_recursive_rejection_does(seed, has_replacement):
    problems = random_trees(seed, "soft", has_replacement=has_replacement)
    by_node, by_path = (find_flips(rule, problems).mean_accepted for rule in RULES)
    assert bool((by_path >= by_node - 1e-12).all())


@pytest.mark.parametrize("sampler", RULES, ids=lambda rule: type(rule).__name__)
@settings(max_examples=8)
@given(seeds)
def test_of_point_masses_as_much_is_accepted_as_any_lossless_rule_can(sampler, seed):
    """The sum over all nodes of the target's probability of their path."""
    problems = random_trees(seed, "point-mass")
    flips, bound = find_flips(sampler, problems), torch.zeros(len(problems), dtype=torch.float64)
    paths = flips.paths
    assert len(paths) == len(problems)  # one tree in each problem
    chance = {0: torch.ones(len(problems), dtype=torch.float64)}
    for node, parent in enumerate(problems.window_parents):
        law = problems.target[paths.depths[parent]][paths.problem, paths.prefix[:, parent]]
        token = paths.tokens[:, node : node + 1]
        chance[node + 1] = chance[parent] * law.gather(1, token)[:, 0]
        bound += chance[node + 1]
    torch.testing.assert_close(flips.mean_accepted, bound, rtol=0, atol=1e-12)


def test_two_ids_by_hand():
    """p = (1/3, 2/3) and q = (2/3, 1/3) everywhere, as in the example of the block rule; a child,
    its child, and a second child of the root, which is the other id.

    Token by token: the first child is 0 with 2/3, and accepted with 1/2. After it, or after 1, the
    next is accepted with 2/3; the second child of the root always is. 2/3 (1/2 * 5/3 + 1/2) + 1/3
    * 5/3 = 13/9. By paths: after 0, which carries P = 1/2, its child is accepted with 2/3 * 1/4 +
    1/3 = 1/2, two tokens, and else nothing is left of it: then the second child of the root is.
    After 1 (P = 1): 5/3. 2/3 * 3/2 + 1/3 * 5/3 = 14/9.
    """
    p = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    tables = [p.expand(1, 2**i, 2) for i in range(3)]
    problems = Problems(
        logits=[table.log() for table in tables],
        draft=[table.flip(-1) for table in tables[:2]],
        parents=(-1, 0, -1),
    )
    for rule, expected in zip(RULES, (Fraction(13, 9), Fraction(14, 9)), strict=True):
        found = find_flips(rule, problems).mean_accepted.item()
        assert abs(found - expected) < 1e-12


# Chains as trees.


@pytest.mark.parametrize(
    "sampler",
    [*RULES, CouplingSampler(), EnsembleSampler(0.7), TypicalSampler()],
    ids=lambda rule: type(rule).__name__,
)
@settings(max_examples=8)
@given(seeds, st.integers(1, 4), st.booleans(), st.booleans())
def test_a_chain_is_a_tree_whose_nodes_have_one_child(sampler, seed, width, is_told, is_short):
    rows, vocab, generator = 64, 7, torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, width + 1, vocab, generator=generator, dtype=torch.float64)
    probs = torch.randn(rows, width, vocab, generator=generator, dtype=torch.float64).softmax(-1)
    tokens = probs.flatten(0, 1).multinomial(1, generator=generator).view(rows, width)
    valid = torch.randint(0, width + 1, (rows,), generator=generator) if is_short else None
    draft = Draft(tokens, probs if is_told else None, valid)
    parents = (torch.arange(width) - 1).expand(rows, -1)
    tree = replace(draft, parents=parents, depth=width)
    logits_filter, start = (
        LogitsFilter(rows, temperature=[0.0, 0.8] * (rows // 2)),
        torch.arange(rows),
    )
    noise = Noise([seed % 1000 + row for row in range(rows)]).at(start, width + 1)
    one, other = (
        sampler(draft, logits, logits_filter, noise),
        sampler(tree, logits, logits_filter, noise),
    )
    assert one.tokens.equal(other.tokens)
    assert one.num_accepted.equal(other.num_accepted)
    accepted = torch.arange(width + 1) <= other.num_accepted[:, None]
    assert other.path[accepted].equal(torch.arange(width + 1).expand(rows, -1)[accepted])
    assert (draft.is_chain, tree.is_chain) == (True, False)
    assert one.rows[accepted].equal(other.rows[accepted])


def test_a_shape_that_was_left_out_is_that_of_a_chain_whatever_is_replaced_beside_it():
    chain, seen = Draft(torch.tensor([[5, 6, 7]])), []
    assert chain.window_parents.tolist() == [[0, 1, 2]]
    assert (chain.depth, chain.depths.tolist()) == (3, [[0, 1, 2, 3]])
    shorter = replace(chain, tokens=chain.tokens[:, :2])
    assert (shorter.is_chain, shorter.depth) == (True, 2)
    assert shorter.window_parents.tolist() == [[0, 1]]
    rows = map_tensors(lambda table: (seen.append(table), table[:0])[1], chain)
    assert (rows.is_chain, rows.window_parents.shape, len(seen)) == (True, (0, 3), 1)
    tree = replace(chain, parents=torch.tensor([[-1, -1, 0]]), depth=2)
    assert (tree.is_chain, tree.depth, tree.parents.tolist()) == (False, 2, [[-1, -1, 0]])
    assert not replace(tree, num_valid=torch.tensor([2])).is_chain

    verdict = Verdict(torch.tensor([[5, 9, PAD_TOKEN]]), torch.tensor([1]))
    assert verdict.rows.tolist() == [[0, 1, 2]]
    assert replace(verdict, path=torch.tensor([[0, 2, 1]])).rows.tolist() == [[0, 2, 1]]

    step = RowStep([5, 6, 7], 1, [5, 9])
    assert (step.is_chain, step.parents, step.path) == (True, [-1, 0, 1], [0])
    assert replace(step, num_accepted=2, path=None).path == [0, 1]
    shorter = replace(step, draft_tokens=[5, 6], parents=None)
    assert shorter.saved() == [[5, 6], 1, [5, 9]]
    assert read_step(step.saved()).is_chain
    branches = replace(step, parents=[-1, -1, 0], path=[0])
    assert read_step(branches.saved()).parents == [-1, -1, 0]


def test_the_path_through_a_tree_is_named_and_that_of_a_chain_may_be():
    tokens = torch.tensor([[5, 6]])
    tree = Draft(tokens, parents=torch.tensor([[-1, -1]]), depth=1)
    silent = Verdict(torch.tensor([[5, 9]]), torch.tensor([1]))
    with pytest.raises(ValueError, match="returned path=None for a tree"):
        check_verdict(RejectionSampler(), silent, tree)
    named = replace(silent, path=torch.tensor([[0, 1]]))
    assert check_verdict(RejectionSampler(), named, tree) is named
    for path in ({}, {"path": torch.tensor([[0, 1, 2]])}):
        verdict = Verdict(torch.tensor([[5, 6, 9]]), torch.tensor([2]), **path)
        assert check_verdict(RejectionSampler(), verdict, Draft(tokens)) is verdict


# Other rules.


def test_typical_acceptance_keeps_the_longest_path():
    parents = torch.tensor([[-1, -1, 1, 2, 0]])
    logits = torch.zeros(1, 6, 9, dtype=torch.float64)
    draft = Draft(torch.tensor([[1, 2, 3, 4, 5]]), None, None, parents, depth=3)
    noise = Noise([0]).at(torch.tensor([3]), 6)
    verdict = TypicalSampler(0.1, 1.0)(draft, logits, LogitsFilter(1), noise)
    assert verdict.path.tolist() == [[0, 2, 3, 4]]
    assert verdict.tokens[0, :3].tolist() == [2, 3, 4]
    logits[0, 3, 4] = -20.0  # after the third node its child is not plausible
    verdict = TypicalSampler(0.1, 1.0)(draft, logits, LogitsFilter(1), noise)
    assert verdict.path[0, :3].tolist() == [0, 2, 3]  # of two that are as long
    assert verdict.num_accepted.tolist() == [2]


@settings(max_examples=5)
@given(seeds)
def test_a_mixture_is_drawn_exactly_where_the_first_child_is_its_other_half(seed):
    problems, w = random_trees(seed, "soft"), 0.6
    first = {}
    for node, parent in enumerate(problems.window_parents):
        first.setdefault(parent, node)
    flips = find_flips(EnsembleSampler(w), problems)
    expected = w * problems.target[0][:, 0] + (1 - w) * problems.draft[0][:, 0]
    torch.testing.assert_close(emitted(flips, 1)[:, 0], expected, rtol=0, atol=1e-12)


@settings(max_examples=6)
@given(seeds)
def test_coupling_takes_the_nodes_that_the_target_would_draw(seed):
    """Law 4, of one step: the emitted tokens are those of the races at their positions."""
    generator = torch.Generator().manual_seed(seed)
    rows, vocab = 200, 4
    shape = random_parents(6, 3, generator)
    depths = torch.tensor([0] + [0] * 6)
    for node, parent in enumerate(shape):
        depths[node + 1] = depths[parent + 1] + 1
    depth = int(depths.max())
    # Logits by position alone: then the text that the target draws is one for all paths.
    by_depth = torch.randn(rows, depth + 1, vocab, generator=generator)
    tokens = torch.randint(0, vocab, (rows, 6), generator=generator)
    draft = Draft(tokens, None, None, torch.tensor(shape).expand(rows, -1), depth)
    noise = Noise(list(range(rows))).at(torch.arange(rows), 7)
    verdict = CouplingSampler()(draft, by_depth[:, depths], LogitsFilter(rows), noise)
    drawn = noise.race(by_depth, LogitsFilter(rows), 0)
    for row in range(rows):
        count = int(verdict.num_accepted[row])
        assert verdict.tokens[row, : count + 1].equal(drawn[row, : count + 1])
        end = int(verdict.path[row, count])
        children = [n for n, parent in enumerate(shape) if parent == end - 1]
        assert int(drawn[row, count]) not in tokens[row, children].tolist()
