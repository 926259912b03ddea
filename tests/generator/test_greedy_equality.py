"""Laws 3 and 7: greedy text is that of HF `generate`, token for token, and a target that drafts for
itself is never rejected.

For every architecture in float32 on a CPU: any drafter, any batch, any padding, any chunking of the
prompt. HF's own output is the oracle of the text. A lossless sampler hides a broken drafter, so the
number of accepted tokens is tested too: all of them where the target drafts, none where the drafter
is always wrong, and a mixture that differs between rows where a perturbed copy drafts.
"""

from dataclasses import dataclass

import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, build
from drafting import WrongDrafter, perturbed, ragged_prompts, to_right_padding
from torch import Tensor
from transformers import PreTrainedModel

from specdec import GenerationResult, ModelDrafter, SpeculativeGenerator, Target

LENGTHS = 1, 4, 6, 9
NUM_NEW = 24  # well beyond every sliding window of the configurations
DRAFTERS = {
    "none": lambda target, name: None,
    "perturbed": lambda target, name: ModelDrafter(perturbed(target), num_draft_tokens=4),
    "random": lambda target, name: ModelDrafter(build(name, seed=1), num_draft_tokens=3),
    "wrong": lambda target, name: WrongDrafter(target, num_draft_tokens=2),
}


@dataclass(frozen=True, eq=False)
class Case:
    """One architecture with HF's own greedy text for a padded batch."""

    name: str
    model: PreTrainedModel
    target: Target
    ids: Tensor
    mask: Tensor
    text: Tensor


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request) -> Case:
    model = build(request.param)
    ids, mask = ragged_prompts(VOCAB, *LENGTHS)
    text = hf_greedy(model, ids, mask)
    assert any(len(row.unique()) > 4 for row in text[:, ids.shape[1] :]), "the text says too little"
    return Case(request.param, model, Target(model), ids, mask, text)


def hf_greedy(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> Tensor:
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0
    )


def drafts(result: GenerationResult) -> list[list[list[int]]]:
    return [[step.draft_tokens for step in row] for row in result.trace]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_greedy_text_of_a_padded_batch_is_that_of_hf(case, kind):
    generator = SpeculativeGenerator(case.target, DRAFTERS[kind](case.model, case.name))
    result = generator.generate(case.ids, case.mask, max_new_tokens=NUM_NEW, trace=True)
    assert result.sequences.tolist() == case.text.tolist()
    assert result.lengths == [NUM_NEW] * len(LENGTHS)
    if kind == "wrong":
        assert result.stats.accepted == [0] * len(LENGTHS)
    if kind == "perturbed":
        assert 0 < sum(result.stats.accepted) < sum(result.stats.drafted)
        steps = zip(*([step.num_accepted for step in row] for row in result.trace), strict=False)
        assert any(len(set(accepted)) > 1 for accepted in steps), "rows advance in lockstep"


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("row", [0, 3], ids=["one-token", "longest"])
def test_greedy_text_of_one_unpadded_prompt_is_that_of_hf(case, kind, row):
    prompt = case.ids[row : row + 1, -LENGTHS[row] :]
    expected = hf_greedy(case.model, prompt, torch.ones_like(prompt))
    generator = SpeculativeGenerator(case.target, DRAFTERS[kind](case.model, case.name))
    result = generator.generate(prompt, max_new_tokens=NUM_NEW)
    assert result.sequences.tolist() == expected.tolist()


def test_right_padding_gives_the_text_of_left_padding(case):
    generator = SpeculativeGenerator(case.target, ModelDrafter(perturbed(case.model)))
    ids, mask = to_right_padding(case.ids, case.mask)
    result = generator.generate(ids, mask, max_new_tokens=NUM_NEW)
    assert result.new_tokens.tolist() == case.text[:, ids.shape[1] :].tolist()
    assert result.sequences[:, : ids.shape[1]].tolist() == ids.tolist()


def test_reading_the_prompt_in_chunks_changes_nothing(case):
    whole, chunked = (
        SpeculativeGenerator(case.target, ModelDrafter(perturbed(case.model)), **options)
        for options in ({}, {"prefill_chunk_size": 3})
    )
    expected = whole.generate(case.ids, case.mask, max_new_tokens=NUM_NEW, trace=True)
    result = chunked.generate(case.ids, case.mask, max_new_tokens=NUM_NEW, trace=True)
    assert result.sequences.tolist() == case.text.tolist()
    assert drafts(result) == drafts(expected)  # the drafter has read the prompt equally well


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "seed": [1, 2, 3, 4]}], ids=["greedy", "sampled"]
)
def test_a_target_that_drafts_for_itself_is_never_rejected(case, options):
    # Sampled, a draw is lost only where the two forwards round apart: odds of about 1e-6 per token.
    generator = SpeculativeGenerator(case.target, ModelDrafter(case.model, num_draft_tokens=4))
    result = generator.generate(case.ids, case.mask, max_new_tokens=NUM_NEW, trace=True, **options)
    accepted = [[step.num_accepted for step in row] for row in result.trace]
    assert accepted == [[4] * 5] * len(LENGTHS)  # 5 * (4 + 1) >= 24
