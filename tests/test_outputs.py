"""Texts that a page shows are held against a run: what may differ between processors, what not."""

import pytest
from outputs import differences

SHOWN = "PASS  rule: 72 problems\n  2.42 [2.02, 2.94], deviation 1.7e-16, e-value 3.1e+04, T = 1"


@pytest.mark.parametrize(
    "change",
    [
        ("2.42", "2.43"),
        ("1.7e-16", "2.2e-16"),
        ("3.1e+04", "3.2e+04"),
        ("PASS  ", "PASS "),
        ("", ""),
    ],
)
def test_rounding_is_no_difference(change):
    assert differences(SHOWN, SHOWN.replace(*change)) == []


@pytest.mark.parametrize(
    "change",
    [
        ("2.42", "2.44"),
        ("72", "73"),
        ("1.7e-16", "1.7e-5"),
        ("3.1e+04", "3.3e+04"),
        ("PASS", "FAIL"),
        ("T = 1", "T = 2"),
        ("[2.02, 2.94]", ""),
        ("\n", "\nOne line more.\n"),
    ],
)
def test_everything_else_is_one(change):
    assert len(differences(SHOWN, SHOWN.replace(*change))) == 1


def test_times_are_compared_by_their_words():
    assert differences("0.13 s of 2 rows", "12.5 s of 2 rows", numbers=False) == []
    assert len(differences("0.13 s of 2 rows", "0.13 ms of 2 rows", numbers=False)) == 1
