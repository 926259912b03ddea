"""`specdec-hf` without lm-eval, over a class that stands for its `HFLM`."""

from types import SimpleNamespace

import pytest
import torch
from diagonal import first
from transformers import StoppingCriteriaList

from specdec import PromptLookupDrafter, zoo
from specdec.lab.integrations.lm_eval import EachRowEnds, SpeculativeLM

INPUTS = zoo.load_tokenizer()(
    ["def f(x):", "import os"], return_tensors="pt", padding=True, padding_side="left"
)
END = 199
"""Id of a line's end."""


class Meets:
    """As `MultiTokenEOSCriteria`: notes the rows that have met a token among their new ones."""

    def __init__(self, token, width, rows):
        self.token, self.width, self.done_tracker = token, width, [False] * rows

    def __call__(self, input_ids, scores, **_):
        for row, ids in enumerate(input_ids[:, self.width :].tolist()):
            self.done_tracker[row] = self.done_tracker[row] or self.token in ids
        return False not in self.done_tracker


class Loads:
    """What `SpeculativeLM` uses of `HFLM`."""

    loaded = 0

    def __init__(self, pretrained, *, num_processes=1):
        type(self).loaded += 1
        self.model, self.tokenizer = pretrained, zoo.load_tokenizer()
        self._rank, self._world_size = 0, 1
        if num_processes > 1:
            self.accelerator = SimpleNamespace(process_index=1, num_processes=num_processes)

    def _model_generate(self, context, attention_mask, criteria, **options):
        inputs = {"input_ids": context, "attention_mask": attention_mask}
        stopping = StoppingCriteriaList(criteria)
        return self.model.generate(**inputs, stopping_criteria=stopping, **options)


class Evaluated(SpeculativeLM, Loads):
    """As `model_type()` joins them."""


def test_each_row_ends_where_it_meets_one_of_the_sequences():
    first, second = Meets(7, 2, 3), Meets(8, 2, 3)
    ends = StoppingCriteriaList([EachRowEnds(first), EachRowEnds(second)])
    ids = torch.tensor([[7, 7, 1], [8, 1, 7], [1, 1, 8]])
    assert ends(ids[:, :2], None).tolist() == [False, False, False]
    assert ends(ids, None).tolist() == [False, True, True]
    ids = torch.cat([ids, torch.tensor([[8], [1], [1]])], dim=1)
    assert ends(ids, None).tolist() == [True, True, True]
    assert first(ids, None) is False  # so a batch would go on in HF


@pytest.mark.parametrize(
    "drafter", first([None, "none", "lookup", "zoo:eagle3"], [None, "zoo:eagle3"])
)
def test_rows_of_a_batch_end_for_themselves_and_stay_what_they_were(drafter):
    model = zoo.load_target()
    ids, mask = INPUTS.input_ids, INPUTS.attention_mask
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    plain = Loads(model)._model_generate(ids, mask, [], **options)
    lm = Evaluated(model, drafter)
    criterion = Meets(END, ids.shape[1], 2)
    found = lm._model_generate(ids, mask, [criterion], **options)
    lengths = []
    for row, expected in zip(found.tolist(), plain.tolist(), strict=True):
        new = expected[ids.shape[1] :]
        end = ids.shape[1] + (new.index(END) + 1 if END in new else len(new))
        assert row[:end] == expected[:end]
        assert set(row[end:]) <= {0}
        lengths.append(end)
    assert len(set(lengths)) == 2  # one has ended before the other
    assert lm.generator.last_result is not None


def test_processes_on_cpus_share_the_requests():
    lm = Evaluated(zoo.load_target(), num_processes=3)
    assert (lm._rank, lm._world_size) == (1, 3)
    alone = Evaluated(zoo.load_target(), PromptLookupDrafter(2))
    assert (alone._rank, alone._world_size) == (0, 1)
    assert alone.generator.drafter.num_draft_tokens == 2
    assert Evaluated(zoo.load_target(), num_draft_tokens=5).generator.drafter.num_draft_tokens == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drafter": "eagel"}, "eagel"),
        ({"drafter": None, "num_draft_tokens": 4}, "belongs to a drafter; there is none"),
        ({"mixed_precision_dtype": "bfloat16"}, "under torch.autocast, which is not supported"),
    ],
)
def test_what_cannot_be_right_is_refused_before_a_model_is_loaded(options, message):
    before = Loads.loaded
    with pytest.raises(ValueError, match=message):
        Evaluated(zoo.load_target(), **options)
    assert Loads.loaded == before
