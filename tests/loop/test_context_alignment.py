"""What a drafter is shown of prompts, by the docstring of `Context`. That features belong to the
tokens beside them is in `drafters/test_parity.py` and `drafters/test_laws.py`.
"""

import copy

import torch
from architectures import VOCAB, build
from drafting import ConstantDrafter, ragged_prompts

from specdec import SpeculativeGenerator


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
    assert drafter.read[1].num_new.tolist() == [3, -1, -1, 0]  # its root is token 3 of 5
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
