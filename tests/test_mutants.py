"""Planted faults are caught: each of them makes the test fail that is named beside it.

Slow but for what shows that they still fit the code: `python -m pytest -m slow
tests/test_mutants.py`, with `-k "part of a name"` for some of the faults. See `tests/README.md`.
"""

import pytest
from mutants import FAULTS
from mutation import run_tests, workers

TESTS = sorted({fault.caught_by for fault in FAULTS})


@pytest.fixture(scope="module", name="runs")
def _runs(request):
    """By name, the test run of each fault that is selected."""
    parameters = [getattr(item, "callspec", None) for item in request.session.items]
    selected = [p.params["fault"] for p in parameters if p and "fault" in p.params]
    with workers(2) as pool:
        yield {
            fault.name: pool.submit(run_tests, FAULTS.index(fault), fault.caught_by)
            for fault in selected
        }


def test_every_fault_fits_the_code_and_names_a_test_that_exists():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    misfits = []
    for fault in FAULTS:
        try:
            fault.check()
        except (AttributeError, ImportError, OSError, ValueError) as error:
            misfits.append(f"{fault.name}: {error}")
    assert not misfits, "\n".join(misfits)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_makes_its_test_fail(fault, runs):
    status, output = runs[fault.name].result()
    assert status == 1, output  # tests failed; 2 is trouble in collecting them, 3 in planting
    assert f"FAILED tests/{fault.caught_by}" in output  # not an error in a fixture


@pytest.mark.slow
def test_without_a_fault_all_tests_pass():
    with workers(1) as pool:
        status, output = pool.submit(run_tests, None, *TESTS).result()
    assert status == 0, output
