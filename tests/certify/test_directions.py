"""Every direction of the bets has a planted fault that makes it lead."""

import pytest
from planted import FAULTS, OTHERS, Fault, leanings

from specdec.certify.generator.directions import DIRECTIONS

QUICK = {"draft above target", "proposed second", "position", "row"}
SLOW = pytest.mark.slow


def lead(fault):
    """The direction that leans most, and by how much."""
    found = leanings(fault)
    name = max(found, key=lambda each: abs(found[each]))
    return name, abs(found[name])


def test_no_direction_is_without_a_fault():
    assert list(FAULTS) == list(DIRECTIONS)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=SLOW) for name in FAULTS]
)
def test_its_fault_makes_a_direction_lead(name):
    first, sigmas = lead(FAULTS[name])
    assert first == name
    assert sigmas > 4


@pytest.mark.parametrize("name", OTHERS)
def test_places_in_text_and_batch_are_looked_at(name):
    expected, fault = OTHERS[name]
    first, sigmas = lead(fault)
    assert (first, sigmas > 5) == (expected, True)


def test_sound_texts_lean_nowhere():
    assert max(map(abs, leanings(Fault()).values())) < 4
