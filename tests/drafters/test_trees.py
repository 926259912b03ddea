"""How trees grow: shapes against brute force, EAGLE-2's dynamic tree against the paper's algorithm
in plain Python, and real heads against their wiring recomputed without a cache.
"""

import heapq
from itertools import pairwise, product

import mask_heads
import mask_reference
import pytest
import torch
from architectures import build
from drafter_table import MODEL, TREE, drive, fresh_state, loop_of, make, propose
from drafting import perturbed, ragged_prompts
from eagle_heads import VOCAB, WIRINGS, random_head, stand_in, tables_of
from eagle_heads import head_for as eagle_head_for
from eagle_oracle import oracle_drafter, oracle_target
from eagle_reference import draft_outputs
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from specdec import (
    BlockSampler,
    EagleDrafter,
    MaskTokenDrafter,
    ModelDrafter,
    MTPDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculativeGenerator,
)
from specdec.drafters.mask_token.correction import SelectorConfig
from specdec.drafters.mask_token.lattice import LiLiCorrConfig
from specdec.drafters.proposal import Proposal
from specdec.drafters.tree import Tree, TreePlan
from specdec.drafters.vocabulary import CommonVocabulary
from specdec.kernels import draw
from specdec.samplers import LogitsFilter, Stream, draw_by_inversion
from specdec.samplers.noise import Drawing

seeds = st.integers(0, 2**32 - 1)


# Shapes.


@given(
    st.integers(1, 5),
    st.integers(0, 25),
    st.lists(st.floats(0.05, 0.9), min_size=2, max_size=4).map(lambda x: sorted(x, reverse=True)),
)
def test_a_fixed_shape_has_the_paths_whose_products_of_rates_are_largest(depth, more, rates):
    most = sum(len(rates) ** d for d in range(1, depth + 1))
    nodes = min(depth + more, most)
    tree = Tree(nodes=nodes, depth=depth, top_k=32, rates=tuple(rates))
    shape = tree.shape
    assert len(shape) == nodes
    assert all(-1 <= parent < node for node, parent in enumerate(shape))
    values, depths = [], []
    for node, parent in enumerate(shape):
        rank = shape[:node].count(parent)
        values.append(rates[rank] * (values[parent] if parent >= 0 else 1))
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    assert depths == sorted(depths)
    assert max(depths) <= depth
    level, everything = [1.0], []
    for _ in range(depth):
        level = [value * rate for value in level for rate in rates]
        everything += level
    expected = sorted(heapq.nlargest(nodes, everything))
    assert sorted(values) == pytest.approx(expected)
    # Runs: nodes that hang on different parents, all of them before the run.
    first = 0
    for width in (w for of_depth in tree.levels for w in of_depth.widths):
        parents = shape[first : first + width]
        assert len(set(parents)) == width
        assert max(parents) < first
        first += width
    assert first == nodes


def test_a_shape_may_be_given():
    tree = Tree(nodes=5, depth=3, parents=(-1, 0, -1, 1, 0))
    assert sorted(tree.shape) == sorted([-1, -1, 0, 0, 2])
    assert tree.levels[0].parents == (-1,)


WRONG_SHAPES = [
    ({"depth": 0}, "Tree.depth"),
    ({"nodes": 4, "depth": 5}, "Tree.nodes"),
    ({"top_k": 0}, "Tree.top_k"),
    ({"rates": (0.5, 1.0)}, "a rate of Tree.rates"),
    ({"rates": ()}, "0 children of each node (Tree.rates)"),
    ({"parents": ()}, "has 0 nodes"),
    ({"nodes": 200, "depth": 3, "top_k": 8}, "at most 136 candidates"),
    ({"nodes": 9, "depth": 2, "rates": (0.5, 0.4)}, "fewer than 9 nodes"),
    ({"nodes": 2, "depth": 1, "parents": (0, -1)}, "Tree.parents of node 0"),
    ({"nodes": 3, "depth": 1, "parents": (-1, -1)}, "has 2 nodes and depth 1"),
    *(({"rates": x}, "Tree.rates must be a tuple of numbers") for x in (0.5, None, "0.5")),
    *(({"parents": x}, "Tree.parents must be a tuple of numbers") for x in (5, 0)),
]
NO_TREES = [("model", 3), ("eagle3", (7, 3)), ("p-eagle", Tree), ("mtp", 3.5)]
NO_TREES += [("model", True), ("eagle3", False), ("mtp", {"nodes": 8})]


@pytest.mark.parametrize(("fields", "message"), WRONG_SHAPES)
def test_a_shape_that_cannot_be_is_refused(fields, message):
    with refused(message):
        Tree(**fields)


@pytest.mark.parametrize(("name", "tree"), NO_TREES)
def test_what_is_no_tree_is_refused_with_how_one_is_written(name, tree):
    with refused('tree must be Tree(nodes=32, .. , "32x6" for the same, or'):
        make(name, tree=tree)


@pytest.mark.parametrize("text", ["", "32", "x", "32x", "x6", "32x6x2", "-3x2", "3.5x2", "32 x 6"])
def test_a_text_that_is_no_tree_is_refused_in_words(text):
    with refused("is no shape; write nodes and depth with an x"):
        make("model", tree=text)
    with refused("Tree.nodes must be an integer >= 6"):
        Tree.of("3x6")


@pytest.mark.parametrize("name", ["model", "eagle3", "p-eagle"])
def test_a_tree_may_be_written_as_on_the_command_line(name):
    drafter = make(name, tree="6x3")
    assert drafter.tree == Tree(nodes=6, depth=3)
    assert (drafter.num_draft_tokens, drafter.tree_depth) == (6, 3)
    drafter.tree = "8x2"
    assert (drafter.num_draft_tokens, drafter.tree_depth) == (8, 2)
    assert Tree.of(None) is None


@pytest.mark.parametrize(
    ("name", "other", "graphs", "do_sample"),
    [
        ("model, tree", Tree(4, 2), True, True),
        ("model, tree", Tree(4, 2), False, False),
        ("eagle3, fewer ids, tree", Tree(9, 4), True, False),
        ("dflash, tree", TREE, False, True),
    ],
)
def test_another_tree_holds_from_the_next_call_on(name, other, graphs, do_sample):
    drafter, options = make(name), {"max_new_tokens": 12, "eos_token_id": None, "trace": True}
    drafter.tree = Tree(nodes=5, depth=3, top_k=2)
    options |= {"do_sample": True, "seed": [1, 2]} if do_sample else {"do_sample": False}
    generator = SpeculativeGenerator(MODEL, drafter, graphs=graphs)
    prompts = ragged_prompts(MODEL.config.vocab_size, 5, 3)
    generator.generate(*prompts, **options)
    drafter.tree = other
    expected = make(name.removesuffix(", tree"), tree=other)
    expected = SpeculativeGenerator(MODEL, expected).generate(*prompts, **options)
    found = generator.generate(*prompts, **options)
    assert drafter.num_draft_tokens == other.nodes
    assert found.sequences.equal(expected.sequences)
    assert repr(found.trace) == repr(expected.trace)
    for wrong, message in ((None, "between chains and trees"), (6, "tree must be")):
        with refused(message):
            drafter.tree = wrong
    assert drafter.tree is other


WIDE = Tree(nodes=9, depth=2, parents=(-1,) * 6 + (0, 0, 0))


FIVE_RATES = (0.5, 0.4, 0.3, 0.2, 0.1)
FITS = [Tree(), Tree(nodes=70, depth=3, rates=FIVE_RATES)]  # top_k=8
TOO_MANY = [
    (WIDE, "6 children of one node .. drawn from 5 ids"),
    (Tree(31, 2, rates=(0.5,) * 5 + (0.4,)), "6 children of one node .. from 5 ids"),
    (Tree(71, 3, rates=FIVE_RATES), "depth 3 over 5 ids has at most 70 candidates with top_k=8"),
]


def of_five_ids(name):
    """A target and the drafter of a tree over five ids: all of a tiny vocabulary, those in common
    with the target, those of a head, and those that a selector leaves.
    """
    target, few = build("llama", vocab_size=5), 5
    if name == "model":
        return target, lambda tree: ModelDrafter(build("llama", vocab_size=5, seed=3), tree=tree)
    if name == "eagle3":
        head = eagle_head_for(target, draft_vocab_size=few)
        return target, lambda tree: EagleDrafter(head, target, tree=tree)
    if name in ("dflash2", "lilicorr"):
        kinds = {"dflash2": SelectorConfig(4, few), "lilicorr": LiLiCorrConfig(few, num_heads=2)}
        head = mask_heads.head_for(MODEL, name, correction=kinds[name])
        return MODEL, lambda tree: MaskTokenDrafter(head, MODEL, tree=tree)
    own = torch.arange(few)
    common = CommonVocabulary(own, own, torch.zeros(61, dtype=torch.long))
    return MODEL, lambda tree: ModelDrafter(build("llama", seed=3), tree=tree, vocabulary=common)


@pytest.mark.parametrize("name", ["model", "model, common", "eagle3", "dflash2", "lilicorr"])
def test_a_tree_fits_the_ids_of_its_drafter(name):
    (target, drafter_of), (ids, mask) = of_five_ids(name), ragged_prompts(5, 6, 3)
    for tree, message in TOO_MANY:
        with refused(message):
            SpeculativeGenerator(target, drafter_of(tree))
    text = target.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    options = {"max_new_tokens": 8, "eos_token_id": None}
    for tree in FITS:
        generator = SpeculativeGenerator(target, drafter_of(tree))
        assert generator.generate(ids, mask, do_sample=False, **options).sequences.equal(text)
        generator.generate(ids, mask, do_sample=True, seed=[3, 4], **options)  # checks them


class ForChains(RejectionSampler):
    takes_trees = False


def test_who_drafts_chains_refuses_trees_and_is_refused_with_them():
    with refused("chains"):
        MTPDrafter(make("mtp").head, MODEL, tree=TREE)
    with refused("multiple of num_continuations"):
        PromptLookupDrafter(5, num_continuations=2)
    with refused("ForChains verifies chains"):
        SpeculativeGenerator(MODEL, make("model, tree"), ForChains())
    with refused("cannot read the window of a tree"):
        SpeculativeGenerator(build("mpt"), PromptLookupDrafter(4, num_continuations=2))


# EAGLE-2's dynamic tree.


def dynamic_tree(logits_after, tree, vocab):
    """The nodes (path, parent) of the paper's tree, in the order of SafeAILab's code: candidates
    depth by depth, and of them the best, in that order. `logits_after` maps paths to logits.
    """

    def children(path, score):
        values, ids = logits_after(path).double().log_softmax(-1).topk(min(tree.top_k, vocab))
        return [((*path, i), score + v) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]

    candidates = beam = children((), 0.0)
    for _ in range(tree.depth - 1):
        found = [child for path, score in beam for child in children(path, score)]
        candidates = candidates + found
        beam = sorted(found, key=lambda child: -child[1])[: tree.top_k]
    order = sorted(range(len(candidates)), key=lambda i: -candidates[i][1])[: tree.nodes]
    paths = [candidates[i][0] for i in sorted(order)]
    return [(path[-1], paths.index(path[:-1]) if len(path) > 1 else -1) for path in paths]


@settings(max_examples=25)
@given(seeds, st.integers(1, 4), st.integers(1, 4), st.integers(0, 20), st.sampled_from([2, 9]))
def test_a_dynamic_tree_is_the_papers(seed, depth, top_k, more, vocab):
    widths = [min(top_k, vocab)]
    for _ in range(depth - 1):
        widths.append(min(top_k, widths[-1]) * min(top_k, vocab))
    nodes = min(depth + more, sum(widths))
    tree, rows = Tree(nodes=nodes, depth=depth, top_k=top_k, rates=(0.5,) * 4), 2

    def logits_after(path):
        generator = torch.Generator().manual_seed(hash((seed, *path)) % 2**32)
        return 2 * torch.randn(vocab, generator=generator)

    texts = [[()] * rows]  # of each node read so far, pass by pass

    def expand(step):
        above = step.above.expand(rows, -1).tolist()
        tokens = step.tokens.tolist()
        now = [
            [(*texts[-1][row][a], t) for a, t in zip(above[row], tokens[row], strict=True)]
            for row in range(rows)
        ]
        # What a node sees are its ancestors.
        seen = step.visible.expand(rows, -1, -1)
        for row in range(rows):
            read = [path for of_pass in (*texts[1:], now) for path in of_pass[row]]
            for node, path in enumerate(now[row]):
                visible = [p for p, is_seen in zip(read, seen[row, node], strict=True) if is_seen]
                assert visible == [path[: n + 1] for n in range(len(path))]
        texts.append(now)
        return torch.stack([torch.stack([logits_after(p) for p in paths]) for paths in now])

    texts[0] = [[()] for _ in range(rows)]
    plan = TreePlan(tree, torch.device("cpu"))
    drawing = Drawing(tree.nodes, LogitsFilter(rows, temperature=0), None, draw_by_inversion)
    first = logits_after(()).expand(rows, 1, -1)
    draft = plan.grow(Proposal(), drawing, first, expand)
    expected = dynamic_tree(logits_after, tree, vocab)
    for row in range(rows):
        found = zip(draft.tokens[row].tolist(), draft.parents[row].tolist(), strict=True)
        assert list(found) == expected


@settings(max_examples=25)
@given(seeds, st.integers(1, 3), st.integers(0, 9))
def test_where_depths_are_independent_the_tree_has_the_best_nodes_of_all(seed, depth, more):
    """DDTree's (arXiv:2604.12989): the best nodes by the product along their path, of all paths."""
    vocab, nodes = 12, depth + more
    table = 2 * torch.randn(depth, vocab, generator=torch.Generator().manual_seed(seed))
    plan = TreePlan(Tree(nodes, depth, nodes, (0.5,) * vocab), torch.device("cpu"), is_read=False)
    drawing = Drawing(nodes, LogitsFilter(1, temperature=0), None, draw_by_inversion)
    draft = plan.grow(
        Proposal(), drawing, table[:1, None], lambda step: table[None, None, step.depth]
    )
    paths = []
    for token, parent in zip(draft.tokens[0].tolist(), draft.parents[0].tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    scores = table.double().log_softmax(-1).tolist()
    every = [path for d in range(depth) for path in product(range(vocab), repeat=d + 1)]
    best = heapq.nlargest(nodes, every, lambda path: sum(scores[d][t] for d, t in enumerate(path)))
    assert sorted(paths) == sorted(best)


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
@settings(max_examples=3)
@given(seeds)
@torch.no_grad()
def test_the_tree_of_a_head_is_that_of_its_wiring_recomputed_without_cache(name, seed):
    config, tree = WIRINGS[name], Tree(12, 3, 3, (0.5, 0.3, 0.2))
    head, target = random_head(config), stand_in(config)
    drafter = EagleDrafter(head, target, tree=tree)
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(0, VOCAB, (6,), generator=generator).tolist()]
    sizes = {"hidden_size": config.target_hidden_size, "dtype": torch.float64}
    loop, state = loop_of(drafter, prompts, seed, **sizes), fresh_state(drafter, 1, VOCAB)
    loop.prefill(drafter, state, 8)
    case = config, head.state_dict(), tables_of(target), prompts[0], loop.table[0, :5]

    def logits_after(path):
        outputs = draft_outputs(*case, [*path, 0])
        return head.over_target_ids(outputs[0][None, -1:])[0, 0]

    draft, _ = propose(drafter, loop, state, {"temperature": 0})
    found = zip(draft.tokens[0].tolist(), draft.parents[0].tolist(), strict=True)
    assert list(found) == dynamic_tree(logits_after, tree, VOCAB)
    draft, noise = propose(drafter, loop, state, {"temperature": 0.8})
    check_drawn(draft, noise, logits_after, LogitsFilter(1, temperature=0.8))


def check_drawn(draft, noise, logits_after, logits_filter):
    """Law 8: each node was drawn by its uniform from what its earlier siblings left."""
    parents, tokens = draft.parents[0].tolist(), draft.tokens[0].tolist()
    paths = []
    for node, parent in enumerate(parents):
        above = paths[parent] if parent >= 0 else ()
        logits = logits_after(above).clone()
        logits[[tokens[j] for j in range(node) if parents[j] == parent]] = -torch.inf
        expected = logits_filter(logits[None])[0]
        torch.testing.assert_close(draft.probs[0, node].double(), expected, rtol=0, atol=1e-6)
        paths.append((*above, tokens[node]))
    drawn = draw(draft.probs, noise.uniform(Stream.PROPOSE)[:, : len(tokens)])
    assert drawn.tolist() == [tokens]
    for one, other in pairwise(sorted(zip(parents, tokens, strict=True))):
        assert one != other  # siblings are different


# Whole texts.


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "deepseek_v3", "gpt2", "mixtral"])
def test_greedy_text_is_that_of_hf_and_a_target_that_drafts_for_itself_is_never_rejected(name):
    model = build(name)
    ids, mask = ragged_prompts(model.config.get_text_config().vocab_size, 9, 1, 12)
    options = {"attention_mask": mask, "max_new_tokens": 14, "do_sample": False}
    text = model.generate(ids, **options, pad_token_id=0)
    worse = ModelDrafter(perturbed(model), tree=TREE)
    result = SpeculativeGenerator(model, worse).generate(ids, **options, eos_token_id=None)
    assert result.sequences.tolist() == text.tolist()
    assert sum(result.stats.accepted) > 0
    itself = SpeculativeGenerator(model, ModelDrafter(model, tree=TREE), BlockSampler())
    sampled = {**options, "do_sample": True, "seed": 5, "eos_token_id": None, "top_k": 0}
    stats = itself.generate(ids, **sampled).stats
    assert stats.acceptance_length == 1 + TREE.depth


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True, "seed": [3, 4, 5]}])
def test_a_head_that_knows_the_target_is_given_the_features_of_the_accepted_path(kind, options):
    """Law 7: what a lossless rule hides; the accepted rows are not the first ones."""
    target = oracle_target()
    drafter = EagleDrafter(oracle_drafter(target, kind, 3).head, target, tree=TREE)
    ids, mask = ragged_prompts(26, 9, 4, 5)  # the first feature comes with a second token
    options = {"max_new_tokens": 24, "eos_token_id": None, "trace": True, **options}
    result = SpeculativeGenerator(target, drafter, BlockSampler()).generate(ids, mask, **options)
    assert result.stats.acceptance_length == 1 + TREE.depth
    parents = [step.parents for row in result.trace for step in row]
    assert all(max(of_step[:3]) < 1 for of_step in parents)  # nor the first three nodes a path


# Corrections inside a block.


CORRECTED = ["dspark, markov", "dspark, rnn", "domino", "xpress", "dflash2", "lilicorr"]


@pytest.mark.parametrize("name", CORRECTED)
@torch.no_grad()
def test_corrected_nodes_follow_their_own_paths(name):
    """Every node's distribution is that of the wiring recomputed for the path above it, without the
    tokens of its earlier siblings.
    """
    config = mask_heads.WIRINGS[name]
    head, target = mask_heads.random_head(config), stand_in(config)
    tree = Tree(nodes=9, depth=3, top_k=3, rates=(0.6, 0.4, 0.3))
    drafter, checked = MaskTokenDrafter(head, target, tree=tree), 0
    sizes = {"dtype": torch.float64, "hidden_size": config.target_hidden_size}
    for loop, draft, _ in drive(drafter, 5, vocab_size=mask_heads.VOCAB, num_steps=2, **sizes):
        for b, (text, count) in enumerate(zip(loop.rows, loop.num_new, strict=True)):
            features = loop.table[b, : len(text) - 1]
            case = config, head.state_dict(), tables_of(target), list(text), features, 3
            parents, tokens = draft.parents[b].tolist(), draft.tokens[b].tolist()
            paths = []
            for node, parent in enumerate(parents if count else ()):
                path = paths[parent] if parent >= 0 else []
                paths.append([*path, tokens[node]])
                padded = path + [0] * (3 - len(path))
                logits = mask_reference.draft_logits(*case, padded)[len(path)]
                logits[[tokens[n] for n in range(node) if parents[n] == parent]] = -torch.inf
                found = draft.probs[b, node].double()
                torch.testing.assert_close(found, logits.softmax(-1), rtol=0, atol=1e-6)
                checked += 1
    assert checked >= 18
