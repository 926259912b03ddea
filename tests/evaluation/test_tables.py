"""What is shown in tables has the same methods everywhere, and says why an interval is missing."""

import sys

import pytest

from specdec.lab.evaluation import Evaluation, Study
from specdec.lab.evaluation.costs import CostCurve
from specdec.lab.evaluation.run_file import EvaluatedBatch, EvaluatedRow
from specdec.row_step import RowStep
from specdec.statistics import SpeculationStats

STEPS = [RowStep([1, 2], 1, [1, 7]), RowStep([3, 4], 2, [3, 4, 8])]


def evaluation(prompts: int, *, k: int = 2, categories: int = 1) -> Evaluation:
    steps = STEPS if k else [RowStep([], 0, [7])]
    rows = [
        EvaluatedRow(str(i), f"c{i % categories}", 0, 0, 5, False, "length", None, steps)
        for i in range(prompts)
    ]
    return Evaluation([EvaluatedBatch(i, [0.5], [row]) for i, row in enumerate(rows)], k)


def study(prompts: int) -> Study:
    """A timed one of two cells."""
    cells = [{"drafter": name, "draft": 2, "temperature": 0.0} for name in "ab"]
    return Study(cells, [evaluation(prompts), evaluation(prompts)], timed=True)


CURVE = CostCurve([2.0, 4.0], {0: [2.0, 4.0], 4: [3.0, 9.0]})
SHOWN = {
    "evaluation": (evaluation(7), 2, 7),
    "plain evaluation": (evaluation(7, k=0), 1, 7),
    "study": (study(6), 1, 2),
    "costs": (CURVE, 1, 2 * 2),
}


@pytest.mark.parametrize("case", SHOWN)
def test_all_have_the_same_forms(case):
    pytest.importorskip("pandas")
    shown, num_tables, num_lines = SHOWN[case]
    tables = shown.tables()
    assert len(tables) == num_tables
    assert shown.to_markdown().count("\n|---|") == num_tables
    assert shown.to_latex().count(r"\toprule") == num_tables
    assert shown._repr_html_().count("<table") == num_tables
    for table in tables:
        for cell in (cell for row in table.rows for cell in row):
            for form in (shown.to_text(), shown.to_markdown(), shown.to_latex()):
                assert cell in form
    assert repr(shown) == str(shown)
    assert len(shown.to_frame()) == num_lines


def test_frames_hold_what_was_measured():
    pytest.importorskip("pandas")
    costs = CURVE.to_frame()
    assert costs.groupby("num_draft_tokens").step_ms.median().to_dict() == {0: 3.0, 4: 6.0}
    assert (costs.plain_ms == [2.0, 4.0] * 2).all()
    rows = [["0", "3.00", "0.33", "1.00"], ["4", "6.00", "0.50", "2.00"]]
    assert CURVE.tables()[0].rows == rows
    assert "Times vary too much to rank K = 0 and 4" in CURVE.tables()[0].notes[-1]


def test_without_pandas_a_page_shows_the_text(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)  # as Python notes what is not there
    assert CURVE._repr_html_() == f"<pre>{CURVE.to_text()}</pre>"
    assert "| 4 | 6.00 | 0.50 | 2.00 |" in CURVE.to_markdown()


@pytest.mark.parametrize("texts", [1, 5, 6])
def test_fewer_than_six_say_so_instead_of_an_interval(texts):
    few = texts < 6
    prompts = f"No interval: {texts} prompt{'s' * (texts > 1)}, fewer than 6."
    assert (prompts in str(evaluation(texts))) is few
    assert ("Brackets: 95 %" in str(evaluation(texts))) is not few
    assert ("no interval for" in str(study(texts))) is few


def test_categories_have_lines_of_their_own_and_those_without_an_interval_are_noted():
    assert "none for fewer than 6." in str(evaluation(10, categories=2))
    twelve = evaluation(12, categories=2)
    assert "none for fewer than 6" not in str(twelve)
    assert list(twelve.categories) == ["c0", "c1"]
    assert [row[:2] for row in twelve.table().rows] == [["c0", "6"], ["c1", "6"], ["all", "12"]]
    assert [row[:2] for row in twelve.positions().rows] == [["1", "24"], ["2", "24"]]


def test_a_position_has_what_reached_it_and_its_two_rates():
    steps = [RowStep([1, 2], 0, [7]), RowStep([1, 2], 2, [1, 2, 8])]
    row = EvaluatedRow("0", "", 0, 0, 5, False, "length", None, steps)
    table = Evaluation([EvaluatedBatch(0, [0.5], [row])], 2).tables()[1]
    assert table.header == ["position", "reached", "conditional rate", "joint rate"]
    assert table.rows == [["1", "2", "0.50", "0.50"], ["2", "1", "1.00", "0.50"]]


def test_statistics_fit_80_columns():
    steps = [RowStep(list(range(8)), 7, list(range(8)))] * 12345
    lines = str(SpeculationStats([steps] * 3, 8, wall_s=1234.5)).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "acceptance length 8.00   acceptance rate 0.88   block efficiency 8.00"
    assert lines[1] == "296280 tokens, 37035 steps, 1234.50 s, 240.0 tokens/s"
