"""How much of the library a call runs through stays small, and most of what it enters runs:
`tests/count_calls.py` and `tests/entered_lines.py` count.
"""

import pytest
from architectures import VOCAB, build
from count_calls import count_calls, count_eagle, eagle_generator
from entered_lines import count_lines
from transformers import RepetitionPenaltyLogitsProcessor

from specdec import SpeculativeGenerator

MOST_FILES_OF_A_STEP, MOST_CALLS_OF_A_STEP = 28, 284
MOST_LINES, LEAST_SHARE = 2_520, 0.52
"""Lines of code of the files that a call enters, and the share of them that runs."""
NOT_NEEDED = {f"loop/{name}.py" for name in ("replay", "processors", "tracer", "check")}


@pytest.mark.parametrize("sampler", ["auto", "rejection"])
def test_a_call_and_a_step_enter_few_files_and_make_few_calls(sampler):
    whole, step = count_eagle(sampler, do_sample=True, seed=0)
    assert not NOT_NEEDED & set(whole.files)
    assert 10 < len(step.files) <= MOST_FILES_OF_A_STEP, step
    assert 100 < step.functions.total() <= MOST_CALLS_OF_A_STEP, step


def test_a_call_enters_few_lines_and_runs_many_of_them():
    generator, ids = eagle_generator()
    options = {"max_new_tokens": 12, "do_sample": True, "seed": 0, "top_p": 0.9}
    generator.generate(ids, **options)
    found = count_lines(lambda: generator.generate(ids, **options))
    ran, of_all = map(sum, zip(*found.values(), strict=True))
    worst = sorted(found.items(), key=lambda entry: entry[1][0] - entry[1][1])[:10]
    assert 1000 < of_all <= MOST_LINES, worst
    assert ran / of_all >= LEAST_SHARE, worst


def test_lines_of_rare_branches_are_seen():
    """A call that asks for scores runs more lines of the files that it enters."""
    generator, ids = eagle_generator()
    generator.generate(ids, max_new_tokens=6)  # makes what is kept between calls
    plain = count_lines(lambda: generator.generate(ids, max_new_tokens=6))
    asked = count_lines(lambda: generator.generate(ids, max_new_tokens=6, output_scores=True))
    assert sum(ran for ran, _ in asked.values()) > sum(ran for ran, _ in plain.values())


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
