"""Stopping criteria that keep state end texts through the hook where they do in HF's own generate:
they are shown the padded batch, column by column, once each.
"""

import pytest
import torch
from architectures import VOCAB
from drafter_table import MODEL, make
from drafting import ragged_prompts
from letters import letter_tokenizer
from transformers import StoppingCriteria, StoppingCriteriaList

from specdec import SpeculativeGenerator

TOKENIZER = letter_tokenizer()
IDS, MASK = ragged_prompts(VOCAB, 3, 5, 8, 8, seed=4)
GREEDY = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}
TEXTS = MODEL.generate(IDS, attention_mask=MASK, eos_token_id=None, **GREEDY)
TEXTS = TEXTS[:, IDS.shape[1] :].tolist()
LATE = [
    next(token for token in text[after:] if token not in text[:after])
    for text, after in zip(TEXTS, (4, 9, 2, 13), strict=True)
]
"""A token for each row that it first writes after a different number of others."""
COMMON = max(set.intersection(*map(set, TEXTS)), key=lambda t: max(x.index(t) for x in TEXTS))


class UntilAllHave(StoppingCriteria):
    """The algorithm of lm-eval's `MultiTokenEOSCriteria`: notes for each row of the batch whether
    its new tokens hold a text, and ends the batch when all do.
    """

    def __init__(self):
        self.text, self.done = TOKENIZER.decode([COMMON]), [False] * len(IDS)

    def __call__(self, input_ids, scores, **kwargs):
        new = TOKENIZER.batch_decode(input_ids[:, IDS.shape[1] :][:, -len(self.text) - 2 :])
        self.done = [done or self.text in text for done, text in zip(self.done, new, strict=True)]
        return all(self.done)


class EveryThird(StoppingCriteria):
    """Ends the rows whose last token is in a set, at every third call only."""

    calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return torch.isin(input_ids[:, -1], torch.tensor(LATE)) & (self.calls % 3 == 0)


class Recorder(StoppingCriteria):
    """Ends nothing, and keeps what it is shown."""

    def __init__(self):
        self.shown = []

    def __call__(self, input_ids, scores, **kwargs):
        self.shown.append(input_ids.tolist())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def run(kind, eos: int | None, **options):
    """Sequences, and what a second criterion was shown."""
    recorder = Recorder()
    ends = {"eos_token_id": eos, "stopping_criteria": StoppingCriteriaList([kind(), recorder])}
    out = MODEL.generate(IDS, attention_mask=MASK, **GREEDY, **ends, **options)
    return out.tolist(), recorder.shown


AHEAD = {"steps_ahead": 1, "graphs": True}
CASES = [
    *(("none", EveryThird, {}), ("lookup", UntilAllHave, {}), ("eagle3", EveryThird, AHEAD)),
    *(("model", UntilAllHave, AHEAD), ("model", EveryThird, {}), ("model, tree", EveryThird, {})),
]


@pytest.mark.parametrize(("drafter", "kind", "how"), CASES)
def test_criteria_with_state_see_and_end_the_batch_as_in_hf(drafter, kind, how):
    part = None if drafter == "none" else make(drafter)
    generator = SpeculativeGenerator(MODEL, part, **how)
    written = {token for text in TEXTS for token in text}
    # The end of a text ends a row before the criterion does, or none.
    eos = TEXTS[1][11] if kind is EveryThird else min({*range(1, VOCAB)} - written)
    expected = run(kind, eos)
    assert len(expected[1]) < 24  # the criterion ends the batch before its limit
    assert run(kind, eos, custom_generate=generator) == expected


def test_the_record_of_a_call_ends_where_its_texts_do():
    generator = SpeculativeGenerator(MODEL, make("model"))
    options = {"output_scores": True, "return_dict_in_generate": True, "eos_token_id": VOCAB - 1}
    options["stopping_criteria"] = StoppingCriteriaList([EveryThird()])
    out = MODEL.generate(IDS, attention_mask=MASK, custom_generate=generator, **GREEDY, **options)
    result = generator.last_result
    assert "stop" in result.finish_reasons
    assert len(set(result.lengths)) > 1
    for text, steps, length in zip(TEXTS, result.steps, result.lengths, strict=True):
        assert [token for step in steps for token in step.new_tokens] == text[:length]
        assert all(step.new_tokens for step in steps)
    is_scored = ~torch.stack(out.scores).isnan().any(dim=2)  # [columns, B]
    assert is_scored.sum(dim=0).tolist() == result.lengths


def test_natively_a_criterion_sees_each_row_alone_token_by_token():
    generator, recorder = SpeculativeGenerator(MODEL, make("model")), Recorder()
    options = GREEDY | {"eos_token_id": []}
    result = generator.generate(IDS, MASK, stopping_criteria=[recorder], **options)
    for ids, mask, text in zip(IDS, MASK, result.new_tokens.tolist(), strict=True):
        prompt = ids[mask.bool()].tolist()
        expected = [[[*prompt, *text[: n + 1]]] for n in range(24)]
        assert [shown for shown in recorder.shown if shown in expected] == expected
