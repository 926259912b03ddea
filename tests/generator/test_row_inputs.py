"""Row inputs: values of each row that steps read, kept, loaded and captured with all else."""

import pytest
import torch
from architectures import VOCAB, build
from diagonal import diagonal
from drafter_table import MODEL, make
from drafting import ragged_prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from target_readers import LayerDrafter

from specdec import Draft, NoDrafter, SpeculativeGenerator, Target
from specdec.request.row_inputs import read_row_inputs

LENGTHS, NUM_NEW = (1, 4, 6, 9), 14
BATCH, MASK = ragged_prompts(VOCAB, *LENGTHS)


@torch.no_grad()
def text_at(model, ids, offset):
    """HF's greedy text of one prompt whose first token stands at a position, without a cache."""
    for _ in range(NUM_NEW):
        positions = offset + torch.arange(ids.shape[1])[None]
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(dim=-1)], dim=1)
    return ids[0].tolist()


@pytest.mark.parametrize(
    ("name", "graphs"), diagonal(["lookup", "model", "eagle3", "model, tree"], [False, True])
)
@settings(max_examples=2, deadline=None)
@given(offsets=st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_text_is_that_of_hf_at_the_rows_own_positions(name, graphs, offsets):
    generator = SpeculativeGenerator(MODEL, make(name), graphs=graphs)
    options = {"max_new_tokens": NUM_NEW, "eos_token_id": []}
    result = generator.generate(BATCH, MASK, row_inputs={"position_offset": offsets}, **options)
    for row, (length, offset) in enumerate(zip(LENGTHS, offsets, strict=True)):
        expected = text_at(MODEL, BATCH[row : row + 1, -length:], offset)
        assert result.sequences[row, -length - NUM_NEW :].tolist() == expected


@pytest.mark.parametrize("model", ["gpt2", "gemma3"])
def test_absolute_positions_and_sliding_windows_are_moved_too(model):
    model = build(model)
    target, offsets = Target(model), [5, 0, 3, 8]
    drafters = [make("lookup"), LayerDrafter(target, range(target.num_layers))]
    for drafter in drafters:
        generator = SpeculativeGenerator(target, drafter)
        options = {"max_new_tokens": NUM_NEW, "eos_token_id": []}
        result = generator.generate(BATCH, MASK, row_inputs={"position_offset": offsets}, **options)
        for row, (length, offset) in enumerate(zip(LENGTHS, offsets, strict=True)):
            expected = text_at(model, BATCH[row : row + 1, -length:], offset)
            assert result.sequences[row, -length - NUM_NEW :].tolist() == expected
    assert result.stats.acceptance_rate == 1  # the target behind the text has the same positions


def test_an_offset_changes_a_text_of_absolute_positions():
    """The negative control."""
    generator = SpeculativeGenerator(build("gpt2"), None)
    one, other = (
        generator.generate(BATCH, MASK, max_new_tokens=NUM_NEW, row_inputs=inputs).sequences
        for inputs in (None, {"position_offset": [7] * 4})
    )
    assert not torch.equal(one, other)


class Echo(NoDrafter):
    """Proposes the id that the call brought for each row."""

    num_draft_tokens, row_inputs = 2, ("favourite",)

    def propose(self, context, state, drawing):
        favourite = context.row_inputs["favourite"]
        return Draft(favourite[:, None].expand(-1, drawing.num_draft_tokens).clone())


@pytest.mark.parametrize("graphs", [False, True])
def test_a_drafter_reads_its_own_and_rows_keep_theirs_when_others_have_ended(graphs):
    generator = SpeculativeGenerator(build("llama"), Echo(), graphs=graphs)
    for favourites in ([3, 1, 4, 1], [5, 9, 2, 6]):  # loaded anew, into the same tensors
        result = generator.generate(
            BATCH,
            MASK,
            max_new_tokens=NUM_NEW,
            eos_token_id=list(range(0, VOCAB, 4)),  # rows end at different times
            row_inputs={"favourite": torch.tensor(favourites)},
        )
        for row, favourite in zip(result.steps, favourites, strict=True):
            assert all(token == favourite for step in row for token in step.draft_tokens)
    assert len({len(row) for row in result.steps}) > 1


@pytest.mark.parametrize("names", ["favourite", ["favourite"], (1,)])
def test_what_a_drafter_reads_is_a_tuple_of_names(names):
    drafter = Echo()
    drafter.row_inputs = names
    with pytest.raises(TypeError, match=r"Echo\.row_inputs must be a tuple of names"):
        SpeculativeGenerator(build("llama"), drafter)


def test_rows_of_one_prompt_share_its_values():
    values = {"adapter": [0, 2], "style": torch.rand(4, 3)}
    found = read_row_inputs(values, rows=4, copies=2)
    assert found["adapter"].tolist() == [0, 0, 2, 2]
    assert torch.equal(found["style"], values["style"])


REFUSED = [
    ([1, 2], "must be a dict"),
    ({"position_offset": "far"}, "must be a tensor or a sequence of numbers"),
    ({"position_offset": [1, 2]}, "shape \\[2\\] for a batch of 4 rows"),
    ({"position_offset": 3}, "shape \\[\\] for a batch of 4 rows"),
    ({"position_offset": [0, -1, 0, 0]}, "integer >= 0"),
    ({"position_offset": [0.5] * 4}, "integer >= 0"),
    ({"adapter": [0] * 4}, "nobody reads row_inputs\\['adapter'\\]; known are 'position_offset'"),
    ({"position_offset": [0, 0, 0, 10_000]}, "positions; shorten the prompt$"),
]


@pytest.mark.parametrize(("given_", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_no_row_can_have_is_refused(given_, message):
    generator = SpeculativeGenerator(build("llama"), make("lookup"))
    with pytest.raises((TypeError, ValueError), match=message):
        generator.generate(BATCH, MASK, max_new_tokens=4, row_inputs=given_)
