"""`SourceLookupDrafter` proposes what follows the end of the text in its source."""

import pytest
import torch
from encoder_decoders import kept_whole, sources
from transformers import GenerationMixin

from specdec import SourceLookupDrafter, SpeculativeGenerator, zoo
from specdec.samplers.noise import Drawing
from specdec.types import PAD_TOKEN, Context

DRAWING = Drawing(3, None, None, None)


def draft_of(source, text, **options):
    drafter = SourceLookupDrafter(3, **options)
    rows = len(text)
    state = drafter.init_state(rows, 32, vocab_size=99, device=torch.device("cpu"))
    width = max(map(len, text))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in text])
    num_new = torch.tensor([len(row) - 1 for row in text])
    inputs = {"source_ids": torch.tensor(source)}
    context = Context(tokens, None, torch.zeros(rows, dtype=torch.long), num_new, row_inputs=inputs)
    draft = drafter.propose(context, state, DRAWING)
    return draft


def test_what_follows_in_the_source_is_proposed_for_each_row():
    source = [[5, 6, 7, 8, 9], [10, 11, 12, -1, -1]]
    draft = draft_of(source, [[2, 5, 6], [2, 10]])
    assert draft.tokens[0].tolist() == [7, 8, 9]
    assert draft.tokens[1, :2].tolist() == [11, 12]
    assert bool((draft.tokens >= PAD_TOKEN).all())


def test_the_longest_match_wins_wherever_it_is():
    text = [[2, 40, 41, 42, 43, 30, 40, 41]]
    assert draft_of([[41, 50, 51, 52]], text).tokens.tolist() == [[42, 43, 30]]
    assert draft_of([[40, 41, 50, 51, 52]], [[2, 41, 60, 61, 40, 41]]).tokens.tolist() == [
        [50, 51, 52]
    ]


def test_nothing_matches_nothing_and_no_text_is_matched_across_its_end():
    assert draft_of([[5, 6, -1, -1]], [[2, 30]]).num_valid.tolist() == [0]
    draft = draft_of([[5, 2]], [[30, 5, 2, 30]], min_ngram=2)
    assert draft.num_valid.tolist() == [0]  # 2 ends the source, and 30 begins the text


def test_a_tree_of_continuations():
    drafter = SourceLookupDrafter(6, num_continuations=2)
    model = kept_whole("bart")
    batch, rows = sources(model, 19, 8)
    options = {"max_new_tokens": 12, "do_sample": False}
    result = SpeculativeGenerator(model, drafter).generate(**batch, **options, eos_token_id=[])
    for row, own in zip(result.sequences, rows, strict=True):
        assert row.equal(GenerationMixin.generate(model, **own, **options, eos_token_id=None)[0])


def test_a_target_without_a_source_of_ids_is_refused():
    drafter = SourceLookupDrafter(3)
    with pytest.raises(ValueError, match="expected a target with an encoder and a source of ids"):
        SpeculativeGenerator(zoo.load_target(), drafter).generate(torch.tensor([[5, 6]]))
    model = kept_whole("whisper")
    batch, _ = sources(model, 1)
    with pytest.raises(ValueError, match="use PromptLookupDrafter for sound"):
        SpeculativeGenerator(model, drafter).generate(**batch, max_new_tokens=4)
