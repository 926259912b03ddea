"""Planted bugs are caught: each of the mutants makes the test fail that is named beside it.

The ordinary run checks that the list still fits the code and the tests; the run marked `slow`
plants every mutant in a copy of the project and runs its test there, in a process of its own.
"""

import ast
import shutil

import pytest
from mutants import MUTANTS
from mutation import ROOT, collect_tests, copy_project, run_planted, run_tests, workers

TESTS = sorted({mutant.caught_by for mutant in MUTANTS})


def test_there_are_at_least_forty_mutants_and_no_two_of_one_name():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40


def test_every_mutant_fits_the_code_compiles_and_changes_something():
    for mutant in MUTANTS:
        sound = (ROOT / "specdec" / mutant.file).read_text()
        planted = mutant.apply(sound)
        compile(planted, mutant.name, "exec")
        assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(sound)), mutant.name


def test_no_two_mutants_are_the_same():
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


def test_every_test_that_is_to_catch_a_mutant_exists_and_is_an_ordinary_one():
    files = sorted({test.split("::")[0] for test in TESTS})
    with workers(1) as pool:
        found = pool.submit(collect_tests, ROOT, *files).result()
    functions = {test.split("[")[0] for test in found}  # may be named without parameters
    assert [test for test in TESTS if test not in functions.union(found)] == []


@pytest.fixture(scope="module", name="runs")
def _runs(request, tmp_path_factory):
    """By name of the mutant, the test run of each that is selected; "" is the sound project."""
    project = copy_project(tmp_path_factory.mktemp("sound"))
    parameters = [getattr(item, "callspec", None) for item in request.session.items]
    selected = [p.params["mutant"] for p in parameters if p and "mutant" in p.params]
    with workers(2) as pool:
        runs = {"": pool.submit(run_tests, project, *TESTS)}
        for mutant in selected:
            runs[mutant.name] = pool.submit(run_planted, project, mutant)
        yield runs


@pytest.mark.slow
def test_without_a_mutant_all_tests_pass(runs):
    status, output = runs[""].result()
    assert status == 0, output


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_planted_bug_makes_its_test_fail(mutant, runs):
    status, output = runs[mutant.name].result()
    assert status == 1, output  # tests failed; 2 and 4 would be trouble in collecting them
    assert f"FAILED tests/{mutant.caught_by}" in output  # not an error in a fixture


@pytest.mark.slow
def test_a_run_that_finds_another_package_than_the_copy_is_no_test_failure(tmp_path):
    project = copy_project(tmp_path)
    shutil.rmtree(project / "specdec")
    with workers(1) as pool:
        status, output = pool.submit(run_tests, project, TESTS[0]).result()
    assert status == 4, output
    assert "is tested instead of the copy" in output
