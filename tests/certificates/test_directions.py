"""Every direction of the bets has a planted fault that makes it lead, and so has every other
distribution, and every kind of place.
"""

import pytest
from diagonal import first
from planted import FAULTS, OTHER_LAWS, PLACES, Fault, watched

from specdec.lab.certificates.generator.alternatives import ALTERNATIVES
from specdec.lab.certificates.generator.directions import DIRECTIONS

QUICK = ["draft above target", "proposed second"]
QUICK_LAWS = "at temperature x 1.25", "weighted by (q / p)^-0.25", "without the least likely 5%"
QUICK_PLACES = ["at new tokens 8 to 11", "in row 3 modulo 8"]
ENOUGH = 13.8
"""Logarithm of 1 / `false_alarm` of certificates."""


def test_no_direction_is_without_a_fault():
    assert list(FAULTS) == list(DIRECTIONS)
    assert list(OTHER_LAWS) == [each.what for each in ALTERNATIVES]


@pytest.mark.parametrize("name", first(FAULTS, QUICK))
def test_its_fault_makes_a_direction_lead(name):
    found, _ = watched(FAULTS[name])
    first = max(found, key=lambda each: abs(found[each]))
    assert first == name
    assert abs(found[first]) > 4


@pytest.mark.parametrize("name", first(OTHER_LAWS, QUICK_LAWS))
def test_texts_speak_for_the_distribution_that_they_are_drawn_from(name):
    _, best = watched(OTHER_LAWS[name])
    assert best.alternative.what == name
    assert best.log_e > ENOUGH


@pytest.mark.parametrize("name", first(PLACES, QUICK_PLACES))
def test_places_in_text_and_batch_are_looked_at(name):
    _, best = watched(PLACES[name])
    assert str(best) == f"p at temperature x 0.5, {name}"
    assert best.log_e > ENOUGH


def test_sound_texts_lean_nowhere():
    found, best = watched(Fault())
    assert max(map(abs, found.values())) < 4
    assert best.log_e < 0
