"""How much of the library a call runs through stays small: `tests/count_calls.py` counts."""

import pytest
from architectures import VOCAB, build
from count_calls import count_calls, count_eagle
from transformers import RepetitionPenaltyLogitsProcessor

from specdec import SpeculativeGenerator

MOST_FILES, MOST_FILES_OF_A_STEP, MOST_CALLS_OF_A_STEP = 39, 26, 294
NOT_NEEDED = {f"loop/{name}.py" for name in ("replay", "processors", "tracer", "check")}


@pytest.mark.parametrize("sampler", ["auto", "rejection"])
def test_a_call_and_a_step_enter_few_files_and_make_few_calls(sampler):
    whole, step = count_eagle(sampler, do_sample=True, seed=0)
    assert not NOT_NEEDED & set(whole.files)
    assert 10 < len(whole.files) <= MOST_FILES, whole
    assert 10 < len(step.files) <= MOST_FILES_OF_A_STEP, step
    assert 100 < step.functions.total() <= MOST_CALLS_OF_A_STEP, step


@pytest.mark.parametrize(
    ("name", "graphs", "options"),
    [
        ("replay", True, {}),
        ("processors", False, {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.2)]}),
        ("tracer", False, {"trace": True}),
        ("check", True, {"check": True}),
    ],
)
def test_a_stepper_is_entered_by_the_calls_that_ask_for_it(name, graphs, options):
    generator = SpeculativeGenerator(build("llama"), "lookup", graphs=graphs)
    ids = generator.target.model.dummy_inputs["input_ids"][:1] % VOCAB
    found = count_calls(lambda: generator.generate(ids, max_new_tokens=6, **options))
    assert f"loop/{name}.py" in found.files
