"""Laws that drafters with heads are held to whatever their family: the tests of each family bring
heads of its own.
"""

from dataclasses import replace

import torch
from architectures import VOCAB
from drafting import ragged_prompts, to_right_padding

from specdec import SpeculativeGenerator

LENGTHS = 1, 4, 6, 9
NUM_NEW = 24
IDS, MASK = ragged_prompts(VOCAB, *LENGTHS)
SETTINGS = {
    "temperature": [0.7, 1.0, 0.0, 1.3],
    "top_k": [0, 5, 3, 40],
    "top_p": [1.0, 0.9, 0.5, 0.8],
    "min_p": [0.0, 0.0, 0.1, 0.02],
    "seed": [11, 2**64 - 1, 7, 0],
}


def greedy_text(model):
    """HF's own greedy text of the padded batch."""
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
    return model.generate(IDS, attention_mask=MASK, **options)


def steps_of(result):
    return [[vars(step) for step in row] for row in result.trace]


def num_accepted(result):
    return [[step.num_accepted for step in row] for row in result.trace]


def check_greedy_text(model, drafter, text):
    """Law 3: HF's text in a ragged batch, and the same steps alone. Returns the batch's result."""
    generator = SpeculativeGenerator(model, drafter)
    result = generator.generate(IDS, MASK, max_new_tokens=NUM_NEW, trace=True)
    assert result.sequences.tolist() == text.tolist()
    for row, length in ((0, LENGTHS[0]), (3, LENGTHS[3])):
        alone = generator.generate(IDS[row : row + 1, -length:], max_new_tokens=NUM_NEW, trace=True)
        assert alone.sequences[0].tolist() == text[row, -length - NUM_NEW :].tolist()
        assert steps_of(alone) == [steps_of(result)[row]]  # what was drafted, too
    return result


def check_is_exercised(result):
    """Both branches of the rule were taken, and rows accepted different counts."""
    assert 0 < sum(result.stats.accepted) < sum(result.stats.drafted)
    assert any(len(set(counts)) > 1 for counts in zip(*num_accepted(result), strict=False))


def check_company(model, drafter, sampler, *, chunk: int = 3):
    """Law 5: a row is the same alone and in any batch, order, padding and chunking."""

    def sampled(generator, rows=(0, 1, 2, 3), *, ids=IDS, mask=MASK):
        """Every step of the rows, generated together, each with settings of its own."""
        own = {name: [values[row] for row in rows] for name, values in SETTINGS.items()}
        own |= {"max_new_tokens": 16, "do_sample": True, "trace": True}
        result = generator.generate(ids[list(rows)], mask[list(rows)], **own)
        return dict(zip(rows, steps_of(result), strict=True))

    generator = SpeculativeGenerator(model, drafter, sampler)
    alone = {}
    for row, length in enumerate(LENGTHS):
        alone |= sampled(generator, (row,), ids=IDS[:, -length:], mask=MASK[:, -length:])
    assert sampled(generator) == alone
    assert sampled(generator, (3, 1, 0, 2)) == alone
    assert sampled(generator, (2, 1)) == {row: alone[row] for row in (2, 1)}
    ids, mask = to_right_padding(IDS, MASK)
    assert sampled(generator, ids=ids, mask=mask) == alone
    options = {"prefill_chunk_size": chunk}
    chunked = SpeculativeGenerator(model, drafter, sampler, **options)
    assert sampled(chunked) == alone
    assert sampled(chunked) == alone  # over the storage of the call before


def check_first_draft(model, drafter, first: int):
    """A row of one token has `first` draft tokens in its first step, all others all of theirs."""
    width = drafter.num_draft_tokens
    generator = SpeculativeGenerator(model, drafter)
    result = generator.generate(IDS, MASK, max_new_tokens=NUM_NEW, trace=True)
    drafted = [[len(step.draft_tokens) for step in row] for row in result.trace]
    assert drafted[0] == [first] + [width] * (len(drafted[0]) - 1)
    assert all(counts == [width] * len(counts) for counts in drafted[1:])


def with_features(change):
    return lambda c: replace(c, features=c.features if c.features is None else change(c.features))


TAMPERING = {
    "features one position late": with_features(lambda f: f.roll(1, dims=1)),
    "features one position early": with_features(lambda f: f.roll(-1, dims=1)),
    "no features": with_features(torch.zeros_like),
    "tokens one position late": lambda c: replace(c, tokens=c.tokens.roll(1, dims=1).clamp(min=0)),
    "a row of a rejected token": lambda c: replace(
        c, tokens=c.tokens.clamp(min=0), num_new=(c.num_new + 1).clamp(max=c.tokens.shape[1])
    ),
}
"""Contexts that are out of place."""


def misled(drafter, tampering: str):
    """The drafter, which from now on gets contexts that have been tampered with."""
    tamper, family = TAMPERING[tampering], type(drafter)

    class Misled(family):
        def prefill(self, context, state):
            super().prefill(tamper(context), state)

        def propose(self, context, state, drawing):
            return super().propose(tamper(context), state, drawing)

    drafter.__class__ = Misled
    return drafter
