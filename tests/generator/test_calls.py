"""How much of the library a call runs through stays small, and most of what it enters runs:
`tests/count_calls.py` counts.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from architectures import VOCAB, build
from count_calls import count_calls, count_eagle, eagle_generator
from transformers import RepetitionPenaltyLogitsProcessor

import specdec
from specdec import SpeculativeGenerator

PACKAGE = f"{Path(specdec.__file__).parent}/"
LEFT_OUT = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef


def statements(node: ast.AST) -> Iterator[range]:
    """Lines of each statement; of one with a body, those before the body."""
    for part in ast.iter_child_nodes(node):
        is_text = isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
        if isinstance(part, ast.stmt) and not isinstance(part, LEFT_OUT) and not is_text:
            end = part.body[0].lineno if hasattr(part, "body") else part.end_lineno + 1
            yield range(part.lineno, max(end, part.lineno + 1))
        if isinstance(part, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from statements(part)


def count_lines(function: Callable[[], Any]) -> dict[str, tuple[int, int]]:
    """Runs a function; by entered file, how many lines of code ran, and how many there are."""
    seen: dict[str, set[int]] = defaultdict(set)

    def note(frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            seen[frame.f_code.co_filename].add(frame.f_lineno)
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        function()
    finally:
        sys.settrace(before)
    found = {}
    for file, lines in seen.items():
        spans = [*statements(ast.parse(Path(file).read_text()))]
        ran = sum(len(span) for span in spans if lines & {*span})
        found[file.removeprefix(PACKAGE)] = ran, sum(map(len, spans))
    return found


MOST_FILES_OF_A_STEP, MOST_CALLS_OF_A_STEP = 28, 284
MOST_LINES, LEAST_SHARE = 2_600, 0.53
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
