"""Laws 3 and 7: greedy text is that of HF `generate`, token for token, and a target that drafts for
itself is never rejected.

In float32 on a CPU: every architecture with a drafter that is sometimes right (every drafter with
one architecture: `drafters/test_laws.py`); any padding, any chunking of the prompt. HF's own output
is the oracle of the text. A lossless sampler hides a broken drafter, so the number of accepted
tokens is tested too: all of them where the target drafts, and a mixture that differs between rows
where a perturbed copy drafts.
"""

from dataclasses import dataclass

import pytest
from architectures import ARCHITECTURES, VOCAB, build
from diagonal import first
from drafting import perturbed, ragged_prompts, to_right_padding
from torch import Tensor
from transformers import PreTrainedModel

from specdec import ModelDrafter, SpeculativeGenerator, Target
from specdec.hf.positions import position_limit

LENGTHS = 1, 4, 6, 9
NUM_NEW = 24  # well beyond every sliding window of the configurations


@dataclass(frozen=True, eq=False)
class Case:
    """One architecture with HF's own greedy text for a padded batch."""

    name: str
    model: PreTrainedModel
    target: Target
    ids: Tensor
    mask: Tensor
    text: Tensor

    def generate(self, drafter, ids=None, mask=None, *, chunk_size=2048, **options):
        """What ours writes, with its trace; for the batch where no other prompts are given."""
        generator = SpeculativeGenerator(self.target, drafter, prefill_chunk_size=chunk_size)
        ids, mask = (self.ids, self.mask) if ids is None else (ids, mask)
        return generator.generate(ids, mask, max_new_tokens=NUM_NEW, trace=True, **options)


MOST = ["gpt2", "llama", "opt", "mpt", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "llama4"]
MOST += ["qwen3_moe", "falcon_rotary", "cohere2"]
"""A way of each kind to place, to mask and to mix."""


@pytest.fixture(scope="module", params=first(ARCHITECTURES, MOST))
def case(request) -> Case:
    model = build(request.param)
    ids, mask = ragged_prompts(VOCAB, *LENGTHS)
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
    text = model.generate(ids, attention_mask=mask, **options)
    assert any(len(row.unique()) > 4 for row in text[:, ids.shape[1] :]), "the text says too little"
    return Case(request.param, model, Target(model), ids, mask, text)


def drafts(result) -> list[list[list[int]]]:
    return [[step.draft_tokens for step in row] for row in result.trace]


def accepted(result) -> list[list[int]]:
    return [[step.num_accepted for step in row] for row in result.trace]


def test_greedy_text_is_that_of_hf_under_any_padding_and_in_any_chunks(case):
    drafter = ModelDrafter(perturbed(case.model), num_draft_tokens=4)
    result = case.generate(drafter)
    assert result.sequences.tolist() == case.text.tolist()
    assert result.lengths == [NUM_NEW] * len(LENGTHS)
    assert 0 < sum(result.stats.accepted) < sum(result.stats.drafted)
    steps = zip(*accepted(result), strict=False)
    assert any(len(set(counts)) > 1 for counts in steps), "rows advance in lockstep"
    chunked = case.generate(drafter, *to_right_padding(case.ids, case.mask), chunk_size=3)
    assert chunked.new_tokens.tolist() == result.new_tokens.tolist()
    assert drafts(chunked) == drafts(result)  # the drafter has read the prompt equally well


def test_a_target_that_drafts_for_itself_is_never_rejected(case):
    """In greedy rows, and in sampled ones, where a draw is lost only if the two forwards round
    apart: odds of about 1e-6 per token.
    """
    options = {"do_sample": True, "temperature": [0.0, 1.0, 0.0, 1.0], "seed": [1, 2, 3, 4]}
    result = case.generate(ModelDrafter(case.model, num_draft_tokens=4), **options)
    assert accepted(result) == [[4] * 5] * len(LENGTHS)  # 5 * (4 + 1) >= 24


CAPTURED = "llama", "gpt2", "opt", "mpt", "gptj"
"""Also in steps over all of the storage: positions that are turned, added, and biases."""


AT_THE_END = ["llama", "gpt2", "opt", "mpt", "gemma3", "deepseek_v3"]


@pytest.mark.parametrize("case", first(ARCHITECTURES, AT_THE_END), indirect=True)
def test_a_text_may_fill_all_positions_of_the_model(case):
    """The last windows reach beyond them. (MPT takes no positions, so it has no trees.)"""
    ids, mask = ragged_prompts(VOCAB, *LENGTHS, position_limit(case.model.config) - NUM_NEW)
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "pad_token_id": 0}
    expected = case.model.generate(ids, attention_mask=mask, **options)
    for tree in (None,) if case.name == "mpt" else (None, "8x4"):
        drafter = ModelDrafter(perturbed(case.model), num_draft_tokens=4, tree=tree)
        for graphs in (False, True) if case.name in CAPTURED else (False,):
            generator = SpeculativeGenerator(case.target, drafter, graphs=graphs)
            found = generator.generate(ids, mask, max_new_tokens=NUM_NEW)
            assert found.sequences.equal(expected), (tree, graphs)
