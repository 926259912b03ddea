"""`Proposal(edit=)` and `Drawing.edit` change logits before anything is drawn from them, in every
drafter that has logits: chains and trees, sampled, most likely and greedy.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from architectures import VOCAB
from diagonal import diagonal
from drafter_table import (
    MODEL,
    ONE_OF_EACH,
    PATHS,
    TREES,
    WITH_LOGITS,
    fresh_state,
    is_valid,
    loop_of,
    make,
    propose,
)
from drafting import perturbed, ragged_prompts

from specdec import (
    Draft,
    ModelDrafter,
    Proposal,
    SpeculativeGenerator,
    Tree,
    WrappedDrafter,
)
from specdec.settings import settings_of

NAMES = [*WITH_LOGITS, *(name for name in TREES if "lookup" not in name), *PATHS]
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5]]
FILTERS = {"sampled": {"temperature": [0.7, 0.0, 1.3]}, "greedy": {"temperature": 0}}
WAYS = list(product(FILTERS, ["sample", "argmax"]))
QUICK = [*ONE_OF_EACH, "model, tree", "eagle3, fewer ids, tree", "dspark, rnn, paths"]


def without(tokens):
    """An edit after which these ids are impossible."""
    return lambda logits: logits.index_fill(-1, torch.as_tensor(tokens), -torch.inf)


class Wrapped(WrappedDrafter):
    """Another drafter, with an edit in each step."""

    def __init__(self, inner, edit):
        super().__init__(inner)
        self.edit = edit

    def propose(self, context, state, drawing) -> Draft:
        return super().propose(context, state, drawing.with_edit(self.edit))


class Doubles:
    """A function; all of its kind are printed alike, as two at one address after each other are."""

    def __repr__(self):
        return "Doubles()"

    def __call__(self, logits):
        return logits * 2


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_step_that_was_captured_with_one_edit_is_not_replayed_for_another(is_wrapped):
    drafter = Wrapped(make("model"), None) if is_wrapped else make("model")
    generator = SpeculativeGenerator(MODEL, drafter, graphs=True)
    for count in (1, 2):
        if is_wrapped:
            drafter.edit = Doubles()
        else:
            drafter.proposal = Proposal(edit=Doubles())
        for _ in range(2):
            generator.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=4)
            assert len(list(generator._storages)) == count


@torch.no_grad()
def draft_of(drafter, logits_filter):
    loop, state = loop_of(drafter, PROMPTS), fresh_state(drafter, 3)
    loop.prefill(drafter, state, 4)
    return propose(drafter, loop, state, logits_filter)[0]


@pytest.mark.parametrize(
    ("name", "way"),
    diagonal([n for n in NAMES if n in QUICK], WAYS)
    + diagonal([n for n in NAMES if n not in QUICK], WAYS, is_quick=False),
    ids=str,
)
def test_what_an_edit_rules_out_is_never_drafted(name, way):
    logits_filter, kind = FILTERS[way[0]], way[1]
    plain = draft_of(make(name, proposal=kind), logits_filter)
    found = plain.tokens[is_valid(plain)].unique()
    ruled_out = found[: max(len(found) // 2, 1)]
    edit = without(ruled_out)
    drafter = make(name, proposal=kind)
    wrapped = draft_of(Wrapped(drafter, edit), logits_filter)
    drafter.proposal = replace(drafter.proposal, edit=edit)
    draft = draft_of(drafter, logits_filter)
    is_there = is_valid(draft)
    assert not torch.isin(draft.tokens[is_there], ruled_out).any()
    assert draft.tokens.equal(wrapped.tokens)
    if draft.probs is not None:
        assert draft.probs[is_there][:, ruled_out].eq(0).all()
        assert draft.probs[is_there].equal(wrapped.probs[is_there])


@pytest.mark.parametrize("kind", ["sample", "argmax"])
@pytest.mark.parametrize("tree", [None, Tree(6, 3, top_k=3, rates=(0.6, 0.3, 0.2))])
@pytest.mark.parametrize("logits_filter", FILTERS.values(), ids=FILTERS)
def test_a_bias_by_an_edit_is_the_bias_of_a_model(logits_filter, tree, kind):
    """The oracle is a model whose head has that bias."""
    bias = 3 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    biased, options = perturbed(MODEL), {"tree": tree, "proposal": kind}
    head = biased.get_output_embeddings()
    head.weight, head.bias = torch.nn.Parameter(head.weight.detach()), torch.nn.Parameter(bias)
    drafter = ModelDrafter(perturbed(MODEL), 3, **options)
    unedited = draft_of(drafter, logits_filter)
    drafter.proposal = Proposal(kind, edit=lambda logits: logits + bias)
    draft = draft_of(drafter, logits_filter)
    expected = draft_of(ModelDrafter(biased, 3, **options), logits_filter)
    assert draft.tokens.equal(expected.tokens)
    assert not draft.tokens.equal(unedited.tokens)
    assert draft.window_parents.equal(expected.window_parents)
    if draft.probs is not None:
        torch.testing.assert_close(draft.probs, expected.probs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_left", [1, 2])
def test_where_an_edit_leaves_fewer_ids_than_siblings_the_last_ones_repeat(num_left, dtype):
    """As of a grammar that forces a token. Samplers leave the target's law with replacement, too:
    `test_tree_laws`.
    """
    drafter = ModelDrafter(MODEL, tree=Tree(6, 3, top_k=3, rates=(0.6, 0.3, 0.2)))
    drafter.proposal = Proposal(edit=lambda x: without(range(num_left, VOCAB))(x).to(dtype))
    draft = draft_of(drafter, {"temperature": [0.1, 1.0, 2.0]})
    assert draft.tokens.max() < num_left
    torch.testing.assert_close(draft.probs[..., :num_left].sum(dim=-1), torch.ones(3, 6))
    first, second = draft.tokens[:, draft.parents[0] == -1][:, :2].T
    assert num_left == 1 or (first != second).all()
    options = {"max_new_tokens": 12, "do_sample": True, "eos_token_id": None}
    SpeculativeGenerator(MODEL, drafter).generate(torch.tensor(PROMPTS[:1]), **options)


@pytest.mark.parametrize("name", ["eagle3", "eagle3, fewer ids, tree"])
def test_a_text_is_the_targets_whatever_is_edited_and_a_captured_one_is_the_eager_one(name):
    ids, mask = ragged_prompts(VOCAB, 5, 9)
    options = {"max_new_tokens": 12, "eos_token_id": None}
    plain = SpeculativeGenerator(MODEL, None).generate(ids, mask, **options).sequences
    drafter, steps = make(name), []
    drafter.proposal = Proposal(edit=lambda logits: logits * 0.1)
    for graphs in (False, True):
        generator = SpeculativeGenerator(MODEL, drafter, graphs=graphs)
        assert generator.generate(ids, mask, **options).sequences.equal(plain)
        own = options | {"do_sample": True, "seed": [1, 2]}
        result = generator.generate(ids, mask, check=graphs, **own)
        steps.append([[vars(step) for step in row] for row in result.steps])
    assert steps[0] == steps[1]


def test_an_edit_that_returns_no_logits_of_the_shape_is_refused():
    with pytest.raises(TypeError, match=r"Proposal.edit must be a function of logits \[B, n, V\]"):
        Proposal(edit=3)
    for tree in (None, "6x3"):
        drafter = ModelDrafter(MODEL, 2, tree=tree)
        for edit in (lambda logits: logits[..., 1:], lambda logits: None):
            drafter.proposal = Proposal(edit=edit)
            with pytest.raises(TypeError, match=r"must return logits \[3, 1, .*changes values"):
                draft_of(drafter, {})


def test_runs_with_other_edits_have_other_settings():
    """So a saved run does not go on with another edit."""
    made = [settings_of(Proposal(edit=scaled(n))) for n in (2, 3, 3)]
    assert made[0] != made[1] == made[2]
    assert settings_of(Proposal())["edit"] is None


def scaled(factor):
    return lambda logits: logits * factor
