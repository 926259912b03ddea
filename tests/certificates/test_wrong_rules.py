"""`certify(rule)` finds each planted fault of a table; the page names what it does not see."""

import re
from pathlib import Path

import pytest
from wrong_rules import WRONG

from specdec import certify

PAGE = Path(__file__).parents[2] / "docs" / "certificates.md"
DEAR = [name for name in WRONG if WRONG[name].word is None]
"""A rule that passes takes all of the problems, one that fails some of them."""


def test_there_are_25_kinds_or_more():
    assert len(WRONG) - len(DEAR) >= 25


SEEN = [name for name in WRONG if name not in DEAR]
CASES = [
    pytest.param(name, marks=() if number % 4 == 0 else pytest.mark.swept)
    for number, name in enumerate(SEEN)
]


@pytest.mark.parametrize("name", CASES)
def test_a_planted_fault_is_found(name):
    report = certify(WRONG[name].rule(), sizes=((3, 1, 13),), trees=())
    assert not report.passed, report
    assert WRONG[name].word in {failure.kind for failure in report.failures}, report
    assert re.search(rf"\n +{WRONG[name].word} \(\d+ found\): ", str(report))
    if WRONG[name].word == "rows":
        assert "a row is not decided on by what it has alone" in str(report)


@pytest.mark.swept
@pytest.mark.parametrize("name", DEAR)
def test_another_one_is_not(name):
    assert certify(WRONG[name].rule(), sizes=((3, 1, 13),), trees=()).passed


def test_the_page_names_what_is_not_seen():
    section = PAGE.read_text().split("## What certify(rule) does not see")[1].split("\n## ")[0]
    listed = re.findall(r"^\| (.+?) \| (.+?) \|$", section, re.MULTILINE)[1:]
    listed = [row for row in listed if set(row[0]) != {"-"}]
    assert listed == [(name, WRONG[name].reason) for name in DEAR]
