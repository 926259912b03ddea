"""How much of the library a call runs through stays small: `tests/count_calls.py` counts."""

import pytest
from count_calls import count_eagle

MOST_FILES, MOST_FILES_OF_A_STEP, MOST_CALLS_OF_A_STEP = 38, 28, 300


@pytest.mark.parametrize("sampler", ["auto", "rejection"])
def test_a_call_and_a_step_enter_few_files_and_make_few_calls(sampler):
    whole, step = count_eagle(sampler, do_sample=True, seed=0)
    assert 10 < len(whole.files) <= MOST_FILES, whole
    assert 10 < len(step.files) <= MOST_FILES_OF_A_STEP, step
    assert 100 < step.functions.total() <= MOST_CALLS_OF_A_STEP, step
