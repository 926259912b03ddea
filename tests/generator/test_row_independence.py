"""Law 5: a row's text depends on its own prompt, settings and seed, and on nothing else.

The oracle is the row generated alone. It must come out the same in any batch, in any order, under
left or right padding, and beside neighbours that are greedy, sampled, long or short; not only its
tokens but also what was drafted for it. No global generator is consumed on the way.
"""

import random

import numpy as np
import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts, to_right_padding

from specdec import ModelDrafter, PromptLookupDrafter, SpeculativeGenerator

MODEL = build("llama")
LENGTHS = [3, 9, 1, 6, 9]
IDS, MASK = ragged_prompts(VOCAB, *LENGTHS)
NUM_NEW = 24
SETTINGS = {
    "temperature": [0.7, 1.0, 0.0, 1.3, 0.9],
    "top_k": [0, 5, 3, 0, 40],
    "top_p": [1.0, 0.9, 0.5, 0.8, 1.0],
    "min_p": [0.0, 0.0, 0.1, 0.05, 0.02],
    "seed": [11, 2**64 - 1, 7, 0, 11],
}
GREEDY_ROW = 2
GENERATORS = {
    "none": SpeculativeGenerator(MODEL, None),
    "random": SpeculativeGenerator(MODEL, ModelDrafter(build("llama", seed=1), 3)),
    "perturbed": SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL), 4)),
    "lookup": SpeculativeGenerator(MODEL, PromptLookupDrafter(3, max_ngram=2)),
}


@pytest.fixture(params=GENERATORS, name="generator")
def _generator(request):
    return GENERATORS[request.param]


def settings(rows: list[int]) -> dict:
    return {name: [values[row] for row in rows] for name, values in SETTINGS.items()}


def generate(generator, rows: list[int], *, ids=IDS, mask=MASK) -> dict[int, list]:
    """What happened to each of the rows, generated together."""
    result = generator.generate(
        ids[rows], mask[rows], max_new_tokens=NUM_NEW, do_sample=True, trace=True, **settings(rows)
    )
    return {
        row: [vars(step) for step in steps] for row, steps in zip(rows, result.trace, strict=True)
    }


@pytest.fixture(name="alone")
def _alone(generator) -> dict[int, list]:
    """Each row by itself, without any padding."""
    alone = {}
    for row, length in enumerate(LENGTHS):
        ids, mask = IDS[row : row + 1, -length:], MASK[row : row + 1, -length:]
        result = generator.generate(
            ids, mask, max_new_tokens=NUM_NEW, do_sample=True, trace=True, **settings([row])
        )
        alone[row] = [vars(step) for step in result.trace[0]]
    return alone


def test_a_row_in_any_batch_and_any_order_is_the_row_alone(generator, alone):
    for rows in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3], [1, 2, 3], [3, 0], [4]):
        assert generate(generator, rows) == {row: alone[row] for row in rows}


def test_the_side_and_the_width_of_the_padding_do_not_matter(generator, alone):
    ids, mask = to_right_padding(IDS, MASK)
    assert generate(generator, [0, 1, 2, 3, 4], ids=ids, mask=mask) == alone
    more = torch.zeros(len(LENGTHS), 4, dtype=torch.long)
    wide = {"ids": torch.cat([more, IDS], 1), "mask": torch.cat([more, MASK], 1)}
    assert generate(generator, [0, 1, 2, 3, 4], **wide) == alone


def test_a_greedy_row_among_sampled_ones_is_hfs_greedy_text(generator, alone):
    expected = MODEL.generate(
        IDS[[GREEDY_ROW]],
        attention_mask=MASK[[GREEDY_ROW]],
        max_new_tokens=NUM_NEW,
        do_sample=False,
    )
    text = [token for step in alone[GREEDY_ROW] for token in step["new_tokens"]]
    assert text == expected[0, IDS.shape[1] :].tolist()


def sample(seed, rows: int = 1):
    return GENERATORS["perturbed"].generate(
        IDS[1:2].expand(rows, -1), max_new_tokens=NUM_NEW, do_sample=True, seed=seed
    )


def test_equal_seeds_give_equal_texts_and_other_seeds_other_texts():
    first, again = sample(5), sample(5)
    assert first.sequences.equal(again.sequences)
    texts = sample(list(range(20)), rows=20).sequences.tolist()
    assert len({tuple(text) for text in texts}) == 20
    assert texts[5] == first.sequences[0].tolist()


def test_one_seed_for_a_batch_is_that_seed_for_every_row():
    texts = sample(5, rows=3).sequences.tolist()
    assert texts == sample(5).sequences.tolist() * 3


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
        GENERATORS["perturbed"].generate(IDS, MASK, max_new_tokens=NUM_NEW, **options)
    SpeculativeGenerator(MODEL, GENERATORS["perturbed"].drafter)
    assert states() == before


def test_the_global_generators_have_no_influence():
    texts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        texts.append(sample(5).sequences)
    assert texts[0].equal(texts[1])
