"""A plan of how much to draft says first how long it takes, and takes about a minute by default."""

import re
import time

import pytest
from diagonal import first
from typer import BadParameter

from examples.plan import main

ESTIMATE = re.compile(
    r"^(\d+) ways to draft, (\d+) of 16 prompts, (\d+) tokens, (\d+) rounds: about (\d+) s "
)


@pytest.mark.parametrize("minutes", first(["0", "0.05"], ["0"]))
def test_the_estimate_comes_first_and_is_kept(small, capsys, minutes):
    sizes = ["--num-draft-tokens", "2", "--batch-sizes", "1,2", "--rounds", "1"]
    started_s = time.perf_counter()
    options = ["--target", small, "--drafter", small, *sizes, "--minutes", minutes]
    main(options)
    taken_s = time.perf_counter() - started_s
    shown = capsys.readouterr().out
    ways, prompts, tokens, rounds, seconds = map(int, ESTIMATE.match(shown).groups())
    assert (ways, rounds) == (3, 1)
    assert prompts == 2 if minutes == "0" else prompts >= 2
    assert tokens == 8 if minutes == "0" else 8 <= tokens <= 64
    assert "fastest with batches of 2" in shown
    assert taken_s < 60  # as a whole set of prompts would not be on a slow machine
    assert minutes == "0" or seconds <= 4


def test_more_time_measures_on_more_prompts(small, capsys):
    sizes = ["--num-draft-tokens", "1", "--batch-sizes", "1", "--rounds", "1"]
    few = ["--max-new-tokens", "2", "--target", small, "--drafter", "lookup", *sizes]
    main([*few, "--minutes", "10"])
    _, prompts, tokens, *_ = map(int, ESTIMATE.match(capsys.readouterr().out).groups())
    assert (prompts, tokens) == (16, 2)


def test_what_cannot_be_planned_is_told_before_anything_is_loaded():
    with pytest.raises(SystemExit, match="plan compares lengths of drafts; name a --drafter"):
        main(["--drafter", "none"])
    with pytest.raises(BadParameter, match="must be like 1,8, got 1,x"):
        main(["--batch-sizes", "1,x"])
