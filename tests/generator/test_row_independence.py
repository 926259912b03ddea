"""Law 5, seeds: a row's text depends on its own prompt, settings and seed, and on nothing else.

That it is the same in any batch is in `drafters/test_laws.py`. No global generator is consumed.
"""

import random

import numpy as np
import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts

from specdec import ModelDrafter, RejectionSampler, SpeculativeGenerator, evaluate
from specdec.kernels.verify.verdict import verify_points

MODEL = build("llama")
IDS, MASK = ragged_prompts(VOCAB, 3, 9, 1, 6, 9)
GENERATOR = SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL), 4))
NUM_NEW = 24


def sample(seed, rows: int = 1):
    return GENERATOR.generate(
        IDS[1:2].expand(rows, -1), max_new_tokens=NUM_NEW, do_sample=True, seed=seed
    )


@pytest.mark.smoke
def test_a_greedy_row_beside_sampled_ones_is_hfs_text():
    """The same rows in other batches are in `drafters/test_laws.py`."""
    options = {"max_new_tokens": NUM_NEW, "do_sample": True, "seed": 3}
    result = GENERATOR.generate(IDS, MASK, temperature=[0.7, 1.0, 0.0, 1.3, 0.9], **options)
    row = IDS[2:3], MASK[2:3]
    text = MODEL.generate(row[0], attention_mask=row[1], max_new_tokens=NUM_NEW, do_sample=False)
    assert result.sequences[2:3].equal(text)


class AcceptsAll(RejectionSampler):
    """Lossy: accepts the whole draft, of a tree its first path."""

    lossless = False

    def accept(self, draft, target_logits, logits_filter, noise):
        first, _ = draft.first_children
        return verify_points(draft, draft.tokens.gather(1, first))


def steps_of(result, row):
    return [(s.draft_tokens, s.num_accepted, s.new_tokens) for s in result.steps[row]]


@pytest.mark.parametrize("tree", [None, "6x3"])
@pytest.mark.parametrize("is_captured", [False, True])
def test_a_greedy_row_takes_its_own_steps_whatever_rule_its_neighbours_have(tree, is_captured):
    """The temperature of the row decides, not that of its batch."""
    drafter = ModelDrafter(perturbed(MODEL), 4, tree=tree, proposal="argmax")
    generator = SpeculativeGenerator(MODEL, drafter, AcceptsAll(), graphs=is_captured)
    call = {"max_new_tokens": NUM_NEW, "eos_token_id": []}
    alone = generator.generate(IDS[1:2], MASK[1:2], do_sample=False, **call)
    text = MODEL.generate(
        IDS[1:2], attention_mask=MASK[1:2], max_new_tokens=NUM_NEW, do_sample=False
    )
    assert alone.sequences.equal(text)
    rows, mixed = [1, 0, 1], {"temperature": [0.0, 1.0, 0.0], "do_sample": True, "seed": 3}
    beside = generator.generate(IDS[rows], MASK[rows], **mixed, **call)
    assert beside.sequences[:, -NUM_NEW:][[0, 2]].equal(text[:, -NUM_NEW:].expand(2, -1))
    if tree is None:  # the tree of sampled rows has a fixed shape
        assert steps_of(beside, 0) == steps_of(beside, 2) == steps_of(alone, 0)
    assert len(beside.steps[1]) < len(beside.steps[0])  # the rule is the sampled row's


def test_equal_seeds_give_equal_texts_and_other_seeds_other_texts():
    torch.manual_seed(1)
    first = sample(5)
    torch.manual_seed(2)
    texts = sample(5, rows=3).sequences.tolist()  # one seed is that of every row
    assert texts == first.sequences.tolist() * 3
    texts = sample(list(range(20)), rows=20).sequences.tolist()
    assert len({tuple(text) for text in texts}) == 20
    assert texts[5] == first.sequences[0].tolist()


def test_without_a_seed_texts_differ_and_the_reported_seeds_reproduce_them():
    first, second = sample(None, rows=2), sample(None, rows=2)
    assert len({*first.seeds, *second.seeds}) == 4
    assert len({tuple(t) for t in [*first.sequences.tolist(), *second.sequences.tolist()]}) == 4
    assert sample(first.seeds, rows=2).sequences.equal(first.sequences)
    alone = sample(first.seeds[1])
    assert alone.sequences[0].equal(first.sequences[1])


def test_no_global_generator_is_consumed():
    def states():
        _, keys, *rest = np.random.get_state()
        return torch.random.get_rng_state().tolist(), random.getstate(), keys.tolist(), rest

    before = states()
    for options in ({}, {"do_sample": True}, {"do_sample": True, "seed": 3}):
        GENERATOR.generate(IDS, MASK, max_new_tokens=NUM_NEW, **options)
    SpeculativeGenerator(MODEL, GENERATOR.drafter)
    evaluate(GENERATOR, IDS, MASK, max_new_tokens=4, temperature=1.0)
    assert states() == before
