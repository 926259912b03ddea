"""Models that remember: what was rejected is taken back.

The oracle is HF's own `generate`, and the plain forward where the two differ.
"""

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from architectures import RECURRENT, VOCAB, build
from drafting import ragged_prompts

from specdec import Drafter, ModelDrafter, PromptLookupDrafter, SpeculativeGenerator, Target
from specdec.samplers import BlockSampler
from specdec.types import Draft

NUM_NEW = 30
IDS, MASK = ragged_prompts(VOCAB, 9, 1, 6, 4)
LENGTHS = MASK.sum(dim=1).tolist()


@dataclass
class Rows:
    """Which row of the batch each row is."""

    rows: list[int]

    def keep(self, rows):
        return Rows([self.rows[row] for row in rows])

    def reset(self):
        pass


class Reciter(Drafter):
    """Proposes known texts: all right, all wrong, or with every third token wrong."""

    def __init__(self, texts, mistakes, num_draft_tokens=4):
        super().__init__()
        self.num_draft_tokens, self.mistakes = num_draft_tokens, mistakes
        self.texts = torch.stack([torch.cat([t, t.new_zeros(99 - len(t))]) for t in texts])

    def validate(self, **target):
        pass

    def prefill(self, context, state):
        pass

    def init_state(self, batch_size, max_length, *, vocab_size, device):
        return Rows(list(range(batch_size)))

    def propose(self, context, state, drawing):
        last = context.start + context.num_new
        index = last[:, None] + 1 + torch.arange(drawing.num_draft_tokens)
        tokens = self.texts[state.rows].gather(1, index.clamp(max=98))
        is_wrong = {"none": index < 0, "all": index >= 0, "some": index % 3 == 0}[self.mistakes]
        return Draft(torch.where(is_wrong, (tokens + 1) % VOCAB, tokens))


@cache
def model_of(name):
    return build(name)


@cache
def texts_of(name):
    """Each row's prompt and greedy continuation, by plain forwards over the whole text."""
    found = []
    for row, length in enumerate(LENGTHS):
        text = IDS[row : row + 1, -length:]
        for _ in range(NUM_NEW):
            logits = model_of(name)(input_ids=text, use_cache=False).logits
            text = torch.cat([text, logits[:, -1:].argmax(dim=-1)], dim=1)
        found.append(text[0])
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", RECURRENT)
def test_greedy_text_is_hfs_whatever_is_rejected(name):
    model, texts = model_of(name), texts_of(name)
    for row in (0, 1):
        alone = texts[row][None, : LENGTHS[row]]
        options = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
        assert model.generate(alone, **options)[0].tolist() == texts[row].tolist()
    target = Target(model)
    for mistakes in ("none", "some", "all"):
        generator = SpeculativeGenerator(target, Reciter(texts, mistakes), prefill_chunk_size=4)
        result = generator.generate(IDS, MASK, max_new_tokens=NUM_NEW)
        found = [r[-n - NUM_NEW :].tolist() for r, n in zip(result.sequences, LENGTHS, strict=True)]
        assert found == [text.tolist() for text in texts]
        rate = result.stats.acceptance_rate
        assert {"none": rate == 1, "some": 0 < rate < 1, "all": rate == 0}[mistakes]
        alone = generator.generate(texts[0][None, : LENGTHS[0]], max_new_tokens=NUM_NEW)
        assert alone.sequences[0].tolist() == texts[0].tolist()
