"""Law 7, the synthetic drafter: what a context says about features is true at every step.

A drafter that asks for the embeddings (boundary 0) can tell which token each feature belongs to,
and with GPT-2's learned positions at which position, by looking it up in the model's own tables.
"""

import copy

import pytest
import torch
from architectures import VOCAB, build
from drafting import ConstantDrafter, NumberedState, perturbed, ragged_prompts

from specdec import Drafter, ModelDrafter, SpeculativeGenerator


class FeatureReader(Drafter):
    """Drafts like a `ModelDrafter` and decodes every feature that it is given."""

    feature_layers = (0,)

    def __init__(self, model, drafts):
        super().__init__()
        self.num_draft_tokens = drafts.num_draft_tokens
        self._drafts, self._model = drafts, model
        self.read: list[dict[int, int]] = []

    def validate(self, **target) -> None:
        self._drafts.validate(**target)

    def init_state(self, *sizes, **target):
        self.read = [{} for _ in range(sizes[0])]
        return NumberedState(self._drafts.init_state(*sizes, **target), list(range(sizes[0])))

    def prefill(self, context, state) -> None:
        self._decode(context, state.rows)
        self._drafts.prefill(context, state.own)

    def propose(self, context, state, drawing):
        self._decode(context, state.rows)
        return self._drafts.propose(context, state.own, drawing)

    def _decode(self, context, rows: list[int]) -> None:
        for row, num_new in enumerate(context.num_new.tolist()):
            for j in range(num_new):
                position, token = self._nearest(context.features[row, j])
                assert position == int(context.start[row]) + j
                assert token == int(context.tokens[row, j])
                self.read[rows[row]][position + 1] = int(context.tokens[row, j + 1])

    def _nearest(self, feature) -> tuple[int, int]:
        """The position and token whose embeddings add up to a feature."""
        transformer = self._model.transformer
        sums = transformer.wpe.weight[:64, None] + transformer.wte.weight  # [P, V, H]
        place = int((sums - feature).square().sum(-1).argmin())
        return divmod(place, VOCAB)


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": [1, 2, 3]}], ids=str)
def test_features_belong_to_the_tokens_and_positions_that_the_context_names(chunk, options):
    model = build("gpt2")
    ids, mask = ragged_prompts(VOCAB, 8, 1, 5)
    reader = FeatureReader(model, ModelDrafter(perturbed(model), num_draft_tokens=3))
    generator = SpeculativeGenerator(model, reader, prefill_chunk_size=chunk)
    result = generator.generate(ids, mask, max_new_tokens=20, trace=True, **options)
    accepted = {step.num_accepted for row in result.trace for step in row}
    assert len(accepted) > 1  # rows advanced by different counts
    for row, length in enumerate(mask.sum(1).tolist()):
        text = [*ids[row, -length:].tolist(), *result.new_tokens[row].tolist()]
        last_step = len(result.trace[row][-1].new_tokens)
        known = range(1, len(text) - last_step)  # what the last proposal of the row knew
        read = {position: reader.read[row][position] for position in known}
        assert read == {position: text[position] for position in known}


def test_the_reader_would_notice_a_shifted_context(monkeypatch):
    model = build("gpt2")
    ids, mask = ragged_prompts(VOCAB, 8, 1, 5)
    reader = FeatureReader(model, ModelDrafter(model, num_draft_tokens=3))
    generator = SpeculativeGenerator(model, reader)
    verify = generator.target.verify

    def shifted(*args, **kwargs):
        output = verify(*args, **kwargs)
        output.features.copy_(output.features.roll(1, dims=1))
        return output

    monkeypatch.setattr(generator.target, "verify", shifted)
    with pytest.raises(AssertionError):
        generator.generate(ids, mask, max_new_tokens=20)


class Contexts(ConstantDrafter):
    """Writes down every context."""

    def __init__(self):
        super().__init__(token=0, num_draft_tokens=1)
        self.read, self.proposals = [], []

    def prefill(self, context, state):
        """A chunk."""
        self.read.append(context)

    def propose(self, context, state, drawing):
        """A step."""
        self.proposals.append(copy.deepcopy(context))
        return super().propose(context, state, drawing)


def test_prompts_arrive_as_the_docstring_of_context_says():
    ids, mask = ragged_prompts(VOCAB, 8, 1, 2, 5)
    drafter = Contexts()
    generator = SpeculativeGenerator(build("gpt2"), drafter, prefill_chunk_size=3)
    generator.generate(ids, mask, max_new_tokens=1)
    lengths = mask.sum(1).tolist()
    known = [[] for _ in lengths]  # positions that were new tokens in `prefill`
    for context in drafter.read:
        for row, num_new in enumerate(context.num_new.tolist()):
            start = int(context.start[row])
            known[row] += range(start + 1, start + 1 + num_new)
    assert known == [list(range(1, length - 1)) for length in lengths]
    assert drafter.read[0].start.tolist() == [0] * 4
    assert drafter.read[0].num_new.tolist() == [3, -1, 0, 3]
    assert drafter.read[1].num_new.tolist() == [3, -1, -1, 0]  # its anchor is token 3 of 5
    first = drafter.proposals[0]
    assert first.num_new.tolist() == [1, 0, 1, 1]
    assert first.start.tolist() == [max(0, length - 2) for length in lengths]
    last = first.tokens.gather(1, first.num_new[:, None])[:, 0]
    assert last.tolist() == ids[:, -1].tolist()


def test_prompts_of_one_token_are_not_prefilled():
    drafter = Contexts()
    generator = SpeculativeGenerator(build("gpt2"), drafter)
    generator.generate(torch.tensor([[5], [7]]), max_new_tokens=1)
    assert drafter.read == []
    assert drafter.proposals[0].num_new.tolist() == [0, 0]
