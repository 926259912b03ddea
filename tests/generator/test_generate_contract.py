"""`generate` keeps HF's contract at every border: HF `generate` with equal arguments is the oracle.

A row may end anywhere inside an accepted block, by end of sequence, length or stopping criterion.
What logits processors see is in `request/test_rows_alone.py`.
"""

import itertools

import pytest
import torch
from architectures import VOCAB, build
from drafting import ConstantDrafter, NumberedRows, perturbed, ragged_prompts
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from specdec import Draft, ModelDrafter, SpeculativeGenerator

MODEL = build("llama")
IDS, MASK = ragged_prompts(VOCAB, 2, 5, 8)
WIDTH = IDS.shape[1]
NUM_NEW = 20
ITSELF = SpeculativeGenerator(MODEL, ModelDrafter(MODEL, num_draft_tokens=4))
"""Accepts everything: blocks of five tokens."""
PERTURBED = SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL), num_draft_tokens=4))


def hf(ids=IDS, mask=MASK, *, max_new_tokens=NUM_NEW, **options) -> torch.Tensor:
    options = {"do_sample": False, "pad_token_id": 0} | options
    return MODEL.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, **options)


TEXT = hf()[:, WIDTH:].tolist()
UNUSED = min(set(range(1, VOCAB)) - {token for row in TEXT for token in row})


def first_token_at(index: int) -> tuple[int, int]:
    """A row whose text shows a token for the first time at `index`, and that token."""
    return next((r, t[index]) for r, t in enumerate(TEXT) if t[index] not in t[:index])


def ends_of(text: list[list[int]], eos: set[int]) -> list[tuple[int, str]]:
    """Length and finish reason of each row of HF's unbounded greedy text, cut at its first eos."""
    cuts = [next((i for i, token in enumerate(row) if token in eos), None) for row in text]
    return [(NUM_NEW, "length") if cut is None else (cut + 1, "eos") for cut in cuts]


@pytest.mark.parametrize("index", [0, 1, 3, 4, 5, 9])
def test_end_of_sequence_is_honoured_at_every_offset_of_an_accepted_block(index):
    row, token = first_token_at(index)
    result = ITSELF.generate(
        IDS, MASK, max_new_tokens=NUM_NEW, eos_token_id=token, pad_token_id=0, trace=True
    )
    assert result.sequences.tolist() == hf(eos_token_id=token).tolist()
    ends = ends_of(TEXT, {token})
    assert list(zip(result.lengths, result.finish_reasons, strict=True)) == ends
    assert ends[row] == (index + 1, "eos")
    assert result.texts == [text[:end] for text, (end, _) in zip(TEXT, ends, strict=True)]
    assert len(result.trace[row][-1].new_tokens) == index % 5 + 1
    assert result.trace[row][-1].num_accepted == 4  # the row was cut, not the acceptance


def test_several_ids_may_end_a_sequence():
    eos = next(
        pair
        for pair in map(list, itertools.combinations(range(VOCAB), 2))
        if ends_of(TEXT, set(pair)) not in [ends_of(TEXT, {token}) for token in pair]
    )  # each of the two ends a row that the other does not end
    result = PERTURBED.generate(IDS, MASK, max_new_tokens=NUM_NEW, eos_token_id=eos, pad_token_id=7)
    assert result.sequences.tolist() == hf(eos_token_id=eos, pad_token_id=7).tolist()
    ends = ends_of(TEXT, set(eos))
    assert list(zip(result.lengths, result.finish_reasons, strict=True)) == ends


def test_an_end_of_sequence_in_the_draft_ends_the_row_where_it_is_accepted_and_not_elsewhere():
    generator = SpeculativeGenerator(MODEL, ConstantDrafter(UNUSED))
    result = generator.generate(IDS, MASK, max_new_tokens=NUM_NEW, eos_token_id=UNUSED)
    assert result.new_tokens.tolist() == TEXT
    assert result.finish_reasons == ["length"] * 3
    assert sum(result.stats.drafted) > 0 == sum(result.stats.accepted)
    row, token = first_token_at(6)
    generator = SpeculativeGenerator(MODEL, ConstantDrafter(token))
    result = generator.generate(IDS, MASK, max_new_tokens=NUM_NEW, eos_token_id=token)
    assert result.new_tokens.tolist() == hf(eos_token_id=token)[:, WIDTH:].tolist()
    assert result.stats.accepted[row] >= 1


@pytest.mark.parametrize("limit", [1, 3, 4, 5, 6, 7])
def test_the_length_limit_is_honoured_inside_a_block_and_before_an_end_behind_it(limit):
    row, token = first_token_at(limit)  # an end of sequence in the block that the limit cuts
    for eos in (None, token):
        options = {"max_new_tokens": limit, "eos_token_id": eos, "pad_token_id": 0}
        result = ITSELF.generate(IDS, MASK, **options)
        assert result.sequences.tolist() == hf(**options).tolist()
        assert (result.lengths[row], result.finish_reasons[row]) == (limit, "length")


def stop_at(token: int):
    """A criterion that is met in rows whose last token is the given one."""
    return [lambda input_ids, scores, **_: input_ids[:, -1] == token]


@pytest.mark.parametrize("index", [2, 7])
@pytest.mark.parametrize("generator", [ITSELF, PERTURBED])
def test_a_stopping_criterion_ends_its_row_at_the_token_that_meets_it(generator, index):
    row, token = first_token_at(index)  # the third token of a block, where the target drafts
    # HF pads rows that have stopped only if there is an eos; without one it lets them run on.
    options = {"stopping_criteria": stop_at(token), "eos_token_id": UNUSED, "pad_token_id": 0}
    result = generator.generate(IDS, MASK, max_new_tokens=NUM_NEW, **options)
    assert result.sequences.tolist() == hf(**options).tolist()
    assert result.lengths[row] == index + 1
    assert result.finish_reasons == ["stop" if token in text else "length" for text in TEXT]


def test_the_hook_samples_what_generate_samples():
    options = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": [3, 4, 5]}
    direct = PERTURBED.generate(IDS, MASK, max_new_tokens=NUM_NEW, **options)
    hooked = hf(custom_generate=PERTURBED, **options)
    assert hooked.tolist() == direct.sequences.tolist()
    assert direct.new_tokens.tolist() != TEXT


@pytest.mark.parametrize("column", [1, -1])
def test_a_padding_id_after_a_prompts_first_token_is_a_token(column):
    """HF would mask it, and read on from a token that nobody sees."""
    ids = torch.tensor([[5, 9, 2, 7], [0, 8, 3, 6]])
    ids[0, column] = 0
    single = ids[:1]
    expected = hf(single, torch.ones_like(single))
    assert ITSELF.generate(single, max_new_tokens=NUM_NEW, pad_token_id=0).sequences.equal(expected)
    if column == 1:  # padding in front of another row's first token stays padding
        mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
        both = ITSELF.generate(ids, max_new_tokens=NUM_NEW, pad_token_id=0)
        assert both.sequences.equal(hf(ids, mask))


class Watcher(NumberedRows):
    """Adds up the tokens that the loop says it has committed, row by row."""

    num_draft_tokens = 1  # a drafter of none is not called

    def init_state(self, batch_size, *args, **target):
        self.committed = -torch.ones(batch_size, dtype=torch.long)  # the first is of the prompt
        return super().init_state(batch_size, *args, **target)

    def propose(self, context, rows, *args):
        self.committed[rows - 1] += context.num_new
        return Draft(context.tokens[:, :1], None, torch.zeros_like(context.start))


@pytest.mark.parametrize("rows_stay", [False, True])
@pytest.mark.parametrize("ends_by", ["eos_token_id", "stopping_criteria"])
def test_a_row_that_has_ended_commits_nothing_more(ends_by, rows_stay):
    row, token = first_token_at(4)
    options = {ends_by: token if ends_by == "eos_token_id" else stop_at(token)}
    if rows_stay:  # as they do beside any logits processor; this one leaves the text alone
        options["logits_processor"] = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.0)])
    generator = SpeculativeGenerator(MODEL, Watcher())
    result = generator.generate(IDS, MASK, max_new_tokens=NUM_NEW, **options)
    assert result.lengths[row] == 5 < max(result.lengths) == NUM_NEW
    # The watcher is not told what the last step of a row did, unless the row stays.
    seen = [min(n, NUM_NEW - 1) if rows_stay else n - 1 for n in result.lengths]
    assert generator.drafter.committed.tolist() == seen
