"""Logits processors that keep state between calls are refused by name; others are not called for
it.

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


class Counter(LogitsProcessor):
    """Prefers another token at every call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        """One more call."""
        self.calls += 1
        scores[:, self.calls % VOCAB] += 5
        return scores


class Nested(LogitsProcessor):
    """Its count lies deep inside."""

    def __init__(self):
        self.inner = {"list": [Counter()]}

    def __call__(self, input_ids, scores):
        """Of its counter."""
        return self.inner["list"][0](input_ids, scores)


class Remembers(LogitsProcessor):
    """Keeps the tokens of earlier calls in a tensor of a fixed size."""

    def __init__(self):
        self.seen = torch.zeros(VOCAB)

    def __call__(self, input_ids, scores):
        """Pushes down what it has seen."""
        self.seen[input_ids[:, -1]] += 1
        return scores - self.seen


def watermark():
    config = SynthIDTextWatermarkingConfig(keys=[3, 1, 4, 1, 5], ngram_len=3)
    sizes = {"ngram_len": config.ngram_len, "keys": config.keys, "device": torch.device("cpu")}
    rest = {n: getattr(config, n) for n in ("sampling_table_size", "sampling_table_seed")}
    return SynthIDTextWatermarkLogitsProcessor(
        **sizes, **rest, context_history_size=config.context_history_size
    )


STATEFUL = {
    "counter": Counter,
    "nested": Nested,
    "remembers": Remembers,
    "guidance": lambda: UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, MODEL),
    "SynthID": watermark,
}


@pytest.mark.parametrize("name", STATEFUL)
def test_a_processor_that_keeps_state_is_refused_by_name_and_not_called(name):
    processor = STATEFUL[name]()
    before = dict(vars(processor))
    with pytest.raises(ValueError, match=f"{type(processor).__name__} keeps state from call"):
        GENERATOR.generate(
            IDS, MASK, max_new_tokens=NUM_NEW, logits_processor=LogitsProcessorList([processor])
        )
    assert {name: value for name, value in vars(processor).items() if name != "seen"} == {
        name: value for name, value in before.items() if name != "seen"
    }
    if name == "remembers":
        assert not processor.seen.any()


def test_guidance_that_a_call_asks_for_is_refused_too():
    options = {"max_new_tokens": NUM_NEW, "guidance_scale": 1.5}
    with pytest.raises(ValueError, match=r"Guidance.* keeps state"):
        MODEL.generate(IDS, attention_mask=MASK, custom_generate=GENERATOR, **options)


class Grammar(LogitsProcessor):
    """Depends on its arguments, and prepares a table when it first sees scores."""

    def __init__(self):
        self.table = None

    def __call__(self, input_ids, scores):
        """Forbids the last token."""
        if self.table is None:
            self.table = torch.eye(scores.shape[-1]) * -1e9
        return scores + self.table[input_ids[:, -1]]


STATELESS = {
    "penalty": lambda: RepetitionPenaltyLogitsProcessor(1.3),
    "bias": lambda: SequenceBiasLogitsProcessor([[[3], 4.0], [[5, 6], -2.0]]),
    "bad words": lambda: NoBadWordsLogitsProcessor([[3], [4, 5]]),
    "green list": lambda: WatermarkLogitsProcessor(VOCAB, "cpu", greenlist_ratio=0.5, bias=2.0),
    "prefix": lambda: PrefixConstrainedLogitsProcessor(lambda row, ids: list(range(1, 40)), 1),
    "grammar": Grammar,
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
    found = GENERATOR.generate(
        IDS,
        MASK,
        max_new_tokens=NUM_NEW,
        logits_processor=LogitsProcessorList([STATELESS[name]()]),
    )
    assert torch.equal(found.sequences, expected)


class Returns(LogitsProcessor):
    """Something other than scores."""

    def __init__(self, change):
        self.change = change

    def __call__(self, input_ids, scores):
        """What it was told to."""
        return self.change(scores)


CHANGES = {
    "nothing": lambda scores: None,
    "a pair": lambda scores: (scores, scores),
    "a number": lambda scores: 5.0,
    "one column": lambda scores: scores[:, :1],
    "one row": lambda scores: scores[:1],
    "twice the rows": lambda scores: scores.repeat(2, 1),
    "half": lambda scores: scores.half(),
    "double": lambda scores: scores.double(),
    "integers": lambda scores: scores.long(),
    "elsewhere": lambda scores: scores.to("meta"),
    "NaN": lambda scores: scores * torch.nan,
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 1}], ids=["greedy", "sampled"])
def test_a_processor_that_returns_no_scores_is_refused_by_name(name, options):
    processors = LogitsProcessorList([Returns(CHANGES[name])])
    message = "the logits processor Returns returned .*"
    message += "use -inf for" if name == "NaN" else rf"expected scores \[2, {VOCAB}\] of torch.fl"
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


ANSWERS = [None, 5, "x", [True], torch.zeros(0), torch.tensor([0.5]), torch.ones(3).bool()]


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
