"""The zoo's trained EAGLE-3 head: real acceptance, position by position, against a recomputation.

A head whose state goes stale still yields correct text; it shows only as acceptance that collapses
behind the first draft token. So every draft of a run is computed again, without any cache, by the
published wiring (`eagle_reference.py`) over HF's own hidden states, and the rates are compared.
"""

import pytest
import torch
from eagle_reference import draft_outputs

from specdec import SpeculativeGenerator, zoo
from specdec.results import RowStep, SpeculationStats

K, NEW_TOKENS = 4, 40
PROMPTS = zoo.heldout_prompts(8)
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False}


@pytest.fixture(scope="module")
def generator():
    target = zoo.load_target()
    return SpeculativeGenerator(target, zoo.load_drafter("eagle3", target, num_draft_tokens=K))


@pytest.fixture(scope="module")
def singles(generator):
    """Every prompt alone, with its steps."""
    tokenizer = zoo.load_tokenizer()
    ids = [tokenizer(prompt, return_tensors="pt").input_ids for prompt in PROMPTS]
    return [(row, generator.generate(row, trace=True, **GREEDY)) for row in ids]


@torch.no_grad()
def drafted_without_cache(generator, text: list[int]) -> list[int]:
    """K greedy draft tokens behind a text, from scratch."""
    target, head = generator.target.model, generator.drafter.head
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    features = torch.cat([states[b][0, :-1] for b in head.config.feature_layers], dim=-1)
    tables = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    drafted: list[int] = []
    for _ in range(K):
        logits, _ = draft_outputs(
            head.config, head.state_dict(), tables, text, features, [*drafted, 0]
        )
        drafted.append(logits[-1].argmax().item())
    return drafted


def test_every_draft_and_so_every_rate_is_that_of_the_wiring_without_a_cache(generator, singles):
    again = []
    for ids, result in singles[:2]:
        text, truth, steps = ids[0].tolist(), result.sequences[0].tolist(), []
        for step in result.trace[0]:
            drafted = drafted_without_cache(generator, text)
            assert step.draft_tokens == drafted
            pairs = zip(drafted, truth[len(text) :] + [None] * K, strict=False)
            wrong = [i for i, (ours, theirs) in enumerate(pairs) if ours != theirs]
            is_cut = len(text) + len(step.new_tokens) == len(truth)
            count = step.num_accepted if is_cut else min(wrong, default=K)
            steps.append(RowStep(drafted, count, step.new_tokens))
            text += step.new_tokens
        again.append(steps)
    measured = SpeculationStats([result.trace[0] for _, result in singles[:2]], K)
    recomputed = SpeculationStats(again, K)
    assert measured.conditional_rates == recomputed.conditional_rates


def test_acceptance_does_not_collapse_behind_the_first_token(singles):
    stats = SpeculationStats([result.trace[0] for _, result in singles], K)
    first, *later = stats.conditional_rates
    assert stats.acceptance_length >= 3
    assert all(rate >= 0.75 * first for rate in later)


def test_a_batch_of_eight_is_eight_single_runs_and_plain_decoding(generator, singles):
    tokenizer = zoo.load_tokenizer()
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, padding_side="left")
    batch = generator.generate(inputs.input_ids, inputs.attention_mask, **GREEDY)
    expected = generator.target.model.generate(**inputs, **GREEDY)
    assert torch.equal(batch.sequences, expected)
    for row, (_, single) in enumerate(singles):
        length = single.lengths[0]
        assert batch.new_tokens[row, :length].tolist() == single.new_tokens[0].tolist()
