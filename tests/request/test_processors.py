"""Logits processors run only where they are functions of (ids, scores); others are refused by name,
before they are called.

In plain decoding a processor is called once per token, here for every position of a step, those of
rejected tokens included. So one that counts its calls, or carries a cache from one to the next,
cannot give what it gives in plain decoding.
"""

import numpy as np
import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkLogitsProcessor,
)

from specdec import ModelDrafter, SpeculativeGenerator

MODEL = build("llama")
GENERATOR = SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL), 3))
IDS, MASK = ragged_prompts(VOCAB, 5, 5)


def generate(*processors, **options):
    options = {"max_new_tokens": 10, "logits_processor": LogitsProcessorList(processors)} | options
    return GENERATOR.generate(IDS, MASK, **options)


CALLS = []


class Counter(LogitsProcessor):
    """Counts in a number; no attribute is a container."""

    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        CALLS.append(self.calls)
        return scores.roll(self.calls, dims=1)


class Penalty(RepetitionPenaltyLogitsProcessor):
    """State in a subclass of a class of HF's that has none."""

    calls = 0
    __call__ = Counter.__call__


def closure():
    calls = 0

    def count(input_ids, scores):
        nonlocal calls
        calls += 1
        CALLS.append(calls)
        return scores.roll(calls, dims=1)

    return count


def defaults(is_keyword=False):
    def count(input_ids, scores, calls=[0]):  # noqa: B006, the state that is to be found
        calls[0] += 1
        return scores + calls[0]

    if is_keyword:
        count.__defaults__, count.__kwdefaults__ = None, {"calls": [0]}
    return count


def of_a_global(input_ids, scores):
    CALLS.append(0)
    return scores.roll(len(CALLS), dims=1)


def in_an_inner_function(input_ids, scores):
    return (lambda: scores.roll(len(CALLS), dims=1))()


def with_attributes(input_ids, scores):
    return scores


with_attributes.calls = 0
STATEFUL = [
    Counter(),
    Penalty(1.5),
    closure(),
    defaults(),
    defaults(is_keyword=True),
    of_a_global,
    in_an_inner_function,
    with_attributes,
    PrefixConstrainedLogitsProcessor(closure(), 1),
]
OF_HF = [
    UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, MODEL),
    SynthIDTextWatermarkLogitsProcessor(3, [3, 1, 4, 1, 5], 2**16, 0, 1024, torch.device("cpu")),
]


@pytest.mark.parametrize(
    "processor", STATEFUL, ids=lambda p: getattr(p, "__name__", type(p).__name__)
)
def test_a_processor_that_may_keep_state_is_refused_by_name_and_not_called(processor):
    shown = getattr(processor, "__name__", type(processor).__name__)
    CALLS.clear()
    with pytest.raises(ValueError, match=rf"{shown} may keep state.*is_stateless = True"):
        generate(processor)
    assert not CALLS


@pytest.mark.parametrize("processor", OF_HF, ids=lambda p: type(p).__name__)
def test_nobody_is_asked_to_vouch_for_one_of_hfs_that_keeps_state(processor):
    words = f"{type(processor).__name__} is HF's and keeps state.*leave it out, or use HF generate"
    with pytest.raises(ValueError, match=words):
        generate(processor)


class Table(LogitsProcessor):
    """Depends on its arguments, and prepares a table when it first sees scores."""

    is_stateless, table = True, None

    def __call__(self, input_ids, scores):
        if self.table is None:
            self.table = torch.eye(scores.shape[-1]) * -1e9
        return scores + self.table[input_ids[:, -1]]


def vouched_closure():
    table = torch.eye(VOCAB) * -1e9

    def forbid(input_ids, scores):
        return scores + table[input_ids[:, -1]]

    forbid.is_stateless = True
    return forbid


STATELESS = [
    RepetitionPenaltyLogitsProcessor(1.3),
    SequenceBiasLogitsProcessor([[[3], 4.0], [[5, 6], -2.0]]),
    NoBadWordsLogitsProcessor([[3], [4, 5]]),
    WatermarkLogitsProcessor(VOCAB, "cpu", greenlist_ratio=0.5, bias=2.0),
    PrefixConstrainedLogitsProcessor(lambda row, ids: list(range(1, 40)), 1),
    Table(),
    vouched_closure(),
    lambda ids, scores: scores.roll(1, dims=1) + torch.zeros(1),
]


@pytest.mark.parametrize(
    "processor", STATELESS, ids=lambda p: getattr(p, "__name__", type(p).__name__)
)
def test_a_processor_that_depends_on_its_arguments_gives_hfs_text(processor):
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
    options["logits_processor"] = LogitsProcessorList([processor])
    expected = MODEL.generate(IDS, attention_mask=MASK, **options)
    assert torch.equal(generate(processor).sequences, expected)


class Returns(LogitsProcessor):
    """Something other than scores."""

    is_stateless = True

    def __init__(self, change):
        self.change = change

    def __call__(self, input_ids, scores):
        return self.change(scores)


NO_SCORES = [
    lambda scores: None,
    lambda scores: 5.0,
    lambda scores: scores[:, :1],
    lambda scores: scores.half(),
    lambda scores: scores.to("meta"),
]


@pytest.mark.parametrize("change", NO_SCORES)
def test_a_processor_that_returns_no_scores_is_refused_by_name(change):
    words = rf"logits processor Returns returned .*expected scores \[1, {VOCAB}\] of torch.fl"
    with pytest.raises((TypeError, ValueError), match=words):
        generate(Returns(change))


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 1}], ids=len)
def test_a_processor_that_returns_nan_is_refused_by_name(options):
    with pytest.raises(ValueError, match=r"logits processor Returns returned .*use -inf for"):
        generate(Returns(lambda scores: scores * torch.nan), **options)


def test_a_processor_that_writes_into_its_ids_changes_no_text():
    def zero(input_ids, scores):
        input_ids.zero_()
        return scores

    assert torch.equal(generate(zero).sequences, generate().sequences)


def ends_by(answer):
    def undecided(input_ids, scores):
        return answer

    return generate(stopping_criteria=[undecided])


@pytest.mark.parametrize("answer", [None, 5, [True], torch.tensor([0.5]), torch.ones(3).bool()])
def test_a_criterion_that_gives_no_answer_is_refused_by_name(answer):
    with pytest.raises(TypeError, match=r"criterion undecided returned .*; expected a"):
        ends_by(answer)


@pytest.mark.parametrize("answer", [True, np.bool_(True), torch.tensor([True]), torch.tensor(True)])
def test_a_criterion_may_answer_as_hf_and_numpy_do(answer):
    result = ends_by(answer)
    assert (result.finish_reasons, result.lengths) == (["stop", "stop"], [1, 1])
