"""Which cases of a long table run by default. The others are `swept`, of the same law, and run in
CI as a stage of their own.
"""

import itertools
from collections.abc import Collection, Iterable

import pytest

PLACES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
"""Where a case runs that is of both."""


def diagonal(*axes: Iterable, is_quick: bool = True) -> list:
    """All combinations of values. By default run as many as the longest axis has values: the first
    values of all axes together, the second ones, and so on, shorter axes being begun again; or
    none.
    """
    axes = [list(axis) for axis in axes]
    steps = range(max(map(len, axes)) if is_quick else 0)
    quick = {tuple(i % len(axis) for axis in axes) for i in steps}
    places = itertools.product(*(range(len(axis)) for axis in axes))
    return [
        case([axis[i] for axis, i in zip(axes, place, strict=True)], place in quick)
        for place in places
    ]


def first(values: Iterable, quick: Collection) -> list:
    """The values, of which the quick ones run by default."""
    values = list(values)
    assert all(value in values for value in quick), "a quick case is none of the table"
    return [case([value], value in quick) for value in values]


def case(values: list, is_quick: bool):
    """One case of a table, as pytest takes it."""
    return pytest.param(*values, marks=[] if is_quick else [pytest.mark.swept])
