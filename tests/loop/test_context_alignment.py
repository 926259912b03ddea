"""Law 7, the synthetic drafter: what a context says about features is true at every step.

A drafter that asks for the embeddings (boundary 0) can tell which token each feature belongs to,
and with GPT-2's learned positions at which position, by looking it up in the model's own tables.
"""

import pytest
from architectures import VOCAB, build
from drafting import NumberedState, perturbed, ragged_prompts

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
