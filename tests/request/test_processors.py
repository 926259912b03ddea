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
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkLogitsProcessor,
)

from specdec import ModelDrafter, SpeculativeGenerator

MODEL = build("llama")
GENERATOR = SpeculativeGenerator(MODEL, ModelDrafter(perturbed(MODEL), 3))
IDS, MASK = ragged_prompts(VOCAB, 5, 5)
NUM_NEW = 10


def generate(processor):
    processors = LogitsProcessorList([processor])
    return GENERATOR.generate(IDS, MASK, max_new_tokens=NUM_NEW, logits_processor=processors)


CALLS = []


def raised(scores, number):
    CALLS.append(number)
    return scores.roll(int(number), dims=1)


class Counter(LogitsProcessor):
    """Counts in a number; no attribute is a container."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return raised(scores, self.calls)


class Penalty(RepetitionPenaltyLogitsProcessor):
    """State in a subclass of a class of HF's that has none."""

    calls = 0
    __call__ = Counter.__call__


def closure():
    calls = 0

    def count(input_ids, scores):
        nonlocal calls
        calls += 1
        return raised(scores, calls)

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


def with_attributes():
    def count(input_ids, scores):
        return scores

    count.calls = 0
    return count


def watermark():
    config = SynthIDTextWatermarkingConfig(keys=[3, 1, 4, 1, 5], ngram_len=3)
    sizes = {"ngram_len": config.ngram_len, "keys": config.keys, "device": torch.device("cpu")}
    rest = {n: getattr(config, n) for n in ("sampling_table_size", "sampling_table_seed")}
    return SynthIDTextWatermarkLogitsProcessor(
        **sizes, **rest, context_history_size=config.context_history_size
    )


STATEFUL = {
    "counter": Counter,
    "subclass": lambda: Penalty(1.5),
    "closure": closure,
    "defaults": defaults,
    "keyword defaults": lambda: defaults(is_keyword=True),
    "global": lambda: of_a_global,
    "inner function": lambda: in_an_inner_function,
    "attributes": with_attributes,
    "constraint": lambda: PrefixConstrainedLogitsProcessor(closure(), 1),
    "guidance": lambda: UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, MODEL),
    "SynthID": watermark,
}


@pytest.mark.parametrize("name", STATEFUL)
def test_a_processor_that_may_keep_state_is_refused_by_name_and_not_called(name):
    processor = STATEFUL[name]()
    shown = getattr(processor, "__name__", type(processor).__name__)
    CALLS.clear()
    with pytest.raises(ValueError, match=rf"{shown} may keep state.*is_stateless = True"):
        generate(processor)
    assert not CALLS


def test_guidance_that_a_call_asks_for_is_refused_too():
    options = {"max_new_tokens": NUM_NEW, "guidance_scale": 1.5}
    with pytest.raises(ValueError, match=r"Guidance.* may keep state"):
        MODEL.generate(IDS, attention_mask=MASK, custom_generate=GENERATOR, **options)


class Table(LogitsProcessor):
    """Depends on its arguments, and prepares a table when it first sees scores."""

    is_stateless = True

    def __init__(self):
        self.table = None

    def __call__(self, input_ids, scores):
        """Forbids the last token."""
        if self.table is None:
            self.table = torch.eye(scores.shape[-1]) * -1e9
        return scores + self.table[input_ids[:, -1]]


def vouched_closure():
    table = torch.eye(VOCAB) * -1e9

    def forbid(input_ids, scores):
        return scores + table[input_ids[:, -1]]

    forbid.is_stateless = True
    return forbid


STATELESS = {
    "penalty": lambda: RepetitionPenaltyLogitsProcessor(1.3),
    "bias": lambda: SequenceBiasLogitsProcessor([[[3], 4.0], [[5, 6], -2.0]]),
    "bad words": lambda: NoBadWordsLogitsProcessor([[3], [4, 5]]),
    "green list": lambda: WatermarkLogitsProcessor(VOCAB, "cpu", greenlist_ratio=0.5, bias=2.0),
    "prefix": lambda: PrefixConstrainedLogitsProcessor(lambda row, ids: list(range(1, 40)), 1),
    "class": Table,
    "closure": vouched_closure,
    "function": lambda: lambda ids, scores: scores.roll(1, dims=1) + torch.zeros(1),
}


@pytest.mark.parametrize("name", STATELESS)
def test_a_processor_that_depends_on_its_arguments_gives_hfs_text(name):
    expected = MODEL.generate(
        IDS,
        attention_mask=MASK,
        max_new_tokens=NUM_NEW,
        do_sample=False,
        pad_token_id=0,
        logits_processor=LogitsProcessorList([STATELESS[name]()]),
    )
    assert torch.equal(generate(STATELESS[name]()).sequences, expected)


class Returns(LogitsProcessor):
    """Something other than scores."""

    is_stateless = True

    def __init__(self, change):
        self.change = change

    def __call__(self, input_ids, scores):
        """What it was told to."""
        return self.change(scores)


CHANGES = {
    "nothing": lambda scores: None,
    "a number": lambda scores: 5.0,
    "one column": lambda scores: scores[:, :1],
    "half": lambda scores: scores.half(),
    "elsewhere": lambda scores: scores.to("meta"),
    "NaN": lambda scores: scores * torch.nan,
}


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in CHANGES), ("NaN", {"do_sample": True, "seed": 1})],
    ids=str,
)
def test_a_processor_that_returns_no_scores_is_refused_by_name(name, options):
    processors = LogitsProcessorList([Returns(CHANGES[name])])
    message = "the logits processor Returns returned .*"
    message += "use -inf for" if name == "NaN" else rf"expected scores \[1, {VOCAB}\] of torch.fl"
    with pytest.raises((TypeError, ValueError), match=message):
        GENERATOR.generate(IDS, MASK, max_new_tokens=3, logits_processor=processors, **options)


def test_a_processor_that_writes_into_its_ids_changes_no_text():
    def zero(input_ids, scores):
        input_ids.zero_()
        return scores

    plain = GENERATOR.generate(IDS, MASK, max_new_tokens=NUM_NEW).sequences
    processors = LogitsProcessorList([zero])
    found = GENERATOR.generate(IDS, MASK, max_new_tokens=NUM_NEW, logits_processor=processors)
    assert torch.equal(found.sequences, plain)


ANSWERS = [None, 5, [True], torch.tensor([0.5]), torch.ones(3).bool()]


@pytest.mark.parametrize("answer", ANSWERS, ids=str)
def test_a_criterion_that_gives_no_answer_is_refused_by_name(answer):
    class Undecided(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return answer

    with pytest.raises(TypeError, match=r"criterion Undecided returned .*; expected a"):
        GENERATOR.generate(IDS, MASK, max_new_tokens=3, stopping_criteria=[Undecided()])


@pytest.mark.parametrize("answer", [True, np.bool_(True), torch.tensor([True]), torch.tensor(True)])
def test_a_criterion_may_answer_as_hf_and_numpy_do(answer):
    criteria = [lambda input_ids, scores: answer]
    result = GENERATOR.generate(IDS, MASK, max_new_tokens=3, stopping_criteria=criteria)
    assert result.finish_reasons == ["stop", "stop"]
    assert result.lengths == [1, 1]
