"""What cannot be evaluated, compared, timed, replayed or plotted is refused by its name."""

import numpy as np
import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed

from specdec import ModelDrafter, PromptLookupDrafter, SpeculativeGenerator, zoo
from specdec.arguments import check_file, check_folder, check_number, make_folder
from specdec.evaluation import (
    Answer,
    CostCurve,
    Estimate,
    HFGenerate,
    Table,
    acceptance_by_context,
    as_spec_bench,
    as_vllm,
    bootstrap,
    compare,
    evaluate,
    every_anchor,
    measure_costs,
    plots,
    replay,
    with_draft_length,
)
from specdec.results import RowStep, SpeculationStats
from specdec.samplers import BlockSampler

TARGET = build("llama")
GENERATOR = SpeculativeGenerator(TARGET, ModelDrafter(perturbed(TARGET), 3))
LOOKUP = SpeculativeGenerator(TARGET, PromptLookupDrafter(3))
IDS = torch.tensor([[5, 6, 7, 5, 6]])
TRACE = GENERATOR.generate(IDS, max_new_tokens=9, do_sample=True, seed=0, trace=True).trace
WHOLE = every_anchor(GENERATOR, TRACE)
EVALUATION = evaluate(GENERATOR, [[1, 2], [3, 4]], max_new_tokens=4)
CURVE = CostCurve([10.0], {0: [10.0], 4: [14.0]})
STEP = RowStep([1, 2], 1, [1, 9])


def contest(other, **options):
    options = {"rounds": 1, "max_new_tokens": 4} | options
    return compare({"a": LOOKUP, "b": other}, [[1, 2]], **options)


def answering(rows, steps=None):
    return lambda: contest(lambda task: Answer(rows, steps))


def replayed(**options):
    return replay(WHOLE, num_draft_tokens=2, sampler=BlockSampler(), **options)


def share(sums):
    return sums[..., :1] / sums[..., 1:]


REFUSED = {
    "no contenders": (lambda: compare(None, [[1]]), "contenders must be a Mapping, got None"),
    "a list": (lambda: compare([LOOKUP, LOOKUP], [[1]]), "contenders must be a Mapping"),
    "a number's name": (lambda: compare({5: LOOKUP, 6: LOOKUP}, [[1]]), "name of a contender must"),
    "a number": (lambda: contest(5), "contender 'b' must be a SpeculativeGenerator, HFGenerate or"),
    "a model": (lambda: contest(TARGET), r"contender 'b' is a LlamaForCausalLM; pass HFGenerate\("),
    "answers None": (
        lambda: contest(lambda task: None),
        "the answer of contender 'b' must be an An",
    ),
    "answers text": (answering("x"), "new_tokens in the answer of contender 'b' must be a list"),
    "answers words": (answering([[1.5, "x"]]), "new_tokens in the answer of contender 'b' must be"),
    "too few rows": (answering([]), "must have 1 rows of at most 4 new tokens, got 0"),
    "too many rows": (answering([[1]] * 9), "must have 1 rows of at most 4 new tokens, got 9"),
    "too long": (
        answering([list(range(99))]),
        "must have 1 rows of at most 4 .* got 1 of up to 99",
    ),
    "steps": (answering([[1]], []), "must have 1 rows"),
    "negative seed": (lambda: contest(GENERATOR, seed=-1), "seed must be an integer in 0"),
    "length": (lambda: contest(GENERATOR, max_new_tokens=-1), "max_new_tokens must be an integer"),
    "temperature": (lambda: contest(GENERATOR, temperature="x"), "temperature must be a number"),
    "unknown": (
        lambda: contest(GENERATOR).ratio("z"),
        "no contender 'z'; expected one of 'a', 'b'",
    ),
    "HF of None": (lambda: HFGenerate(None), "model must be a PreTrainedModel, got None"),
    "HF's assistant": (
        lambda: HFGenerate(TARGET, "x"),
        "assistant_model must be a PreTrainedModel",
    ),
    "HF's K": (lambda: HFGenerate(TARGET, TARGET, num_assistant_tokens=0), "num_assistant_tokens"),
    "HF's ids": (
        lambda: HFGenerate(TARGET, zoo.load_target()),
        f"assistant_model has a vocabulary of 2048 and model one of {VOCAB}",
    ),
    "rounds": (lambda: measure_costs(GENERATOR, IDS, rounds=0), "rounds must be an integer >= 1"),
    "steps of costs": (lambda: measure_costs(GENERATOR, IDS, num_steps=0), "num_steps must be an"),
    "no lengths": (
        lambda: measure_costs(GENERATOR, IDS, draft_lengths=[]),
        "draft_lengths is empty",
    ),
    "a length": (
        lambda: measure_costs(GENERATOR, IDS, draft_lengths=["x"]),
        "num_draft_tokens must",
    ),
    "lengths": (
        lambda: measure_costs(GENERATOR, IDS, draft_lengths=5),
        "draft_lengths must be an It",
    ),
    "costs of None": (lambda: measure_costs(None, IDS), "generator must be a SpeculativeGenerator"),
    "curve's words": (lambda: CostCurve([1.0], {0: ["x"]}), r"step_ms\[0\] must be a list"),
    "curve's rounds": (lambda: CostCurve([1.0], {0: [1.0, 2.0]}), "times of the same rounds"),
    "empty curve": (lambda: CostCurve([], {0: []}), "times of the same rounds"),
    "curve below": (lambda: CURVE.medians(-1), "num_draft_tokens must be an integer >= 0, got -1"),
    "curve's word": (lambda: CURVE.medians("x"), "num_draft_tokens must be an integer >= 0"),
    "no plain end": (
        lambda: CostCurve([1.0], {2: [1.0]}).medians(1),
        "measured at 2 to 2, not at 0",
    ),
    "drafter's K": (
        lambda: with_draft_length(GENERATOR.drafter, 9),
        r"an integer in 0\.\.3, got 9",
    ),
    "contexts": (lambda: acceptance_by_context(LOOKUP, IDS[0], 4), "contexts must be an Iterable"),
    "a context": (
        lambda: acceptance_by_context(LOOKUP, IDS[0], ("x",)),
        "a context must be an int",
    ),
    "text": (lambda: acceptance_by_context(LOOKUP, None, (4,)), "text must be a tensor, got None"),
    "prompts": (
        lambda: acceptance_by_context(LOOKUP, IDS[0], (4,), num_prompts=0),
        "num_prompts must be an integer >= 1, got 0",
    ),
    "statistic": (
        lambda: bootstrap(np.ones((3, 2)), None),
        "statistic must be a function, got None",
    ),
    "one number": (lambda: bootstrap(np.ones((9, 2)), lambda s: 5), "statistic must map totals"),
    "level": (lambda: bootstrap(np.ones((3, 2)), share, level="x"), "level must be a number"),
    "seed": (lambda: bootstrap(np.ones((9, 2)), share, seed=-1), "seed must be an integer >= 0"),
    "words": (lambda: bootstrap(np.array([["a", "b"]]), share), "totals must be numbers"),
    "estimate": (lambda: Estimate("x"), "value must be a number, got 'x'"),
    "turned interval": (
        lambda: Estimate(1.0, 2.0, 0.0),
        "low must be at most high, got 2.0 and 0.0",
    ),
    "anchors of None": (lambda: every_anchor(None, TRACE), "generator must be a SpeculativeGen"),
    "anchors of 5": (
        lambda: every_anchor(GENERATOR, 5),
        "trace must be a Trace, got 5; pass generate",
    ),
    "anchors of a run without a trace": (
        lambda: every_anchor(GENERATOR, GENERATOR.generate(IDS, max_new_tokens=2).trace),
        r"trace must be a Trace, got None; pass generate\(\.\.\., trace=True\)\.trace",
    ),
    "replay of 5": (
        lambda: replay(5, num_draft_tokens=2, sampler=BlockSampler()),
        "traces must be a Trace or an Iterable, got 5",
    ),
    "resamples": (lambda: replayed().run_interval(num_resamples=0), "num_resamples must be an int"),
    "speed-up": (lambda: replayed().speedup(None), "costs must be a CostCurve, got None"),
    "cells": (lambda: Table(["a"], [[5]]), "rows must be a list whose items are each a list"),
    "header": (lambda: Table("a", []), "header must be a list whose items are each a string"),
    "accepted": (lambda: SpeculationStats([[RowStep([1], 5, [1])]], 1), "drafted 1, accepted 5"),
    "drafted": (lambda: SpeculationStats([[STEP]], 1), "row 0, step 0 drafted 2, .* at most K = 1"),
    "emitted": (lambda: SpeculationStats([[RowStep([1], 0, [1, 2])]], 1), "at most one more"),
    "K": (lambda: SpeculationStats([[STEP]], -2), "num_draft_tokens must be an integer >= 0"),
    "clock": (lambda: SpeculationStats([[STEP]], 2, wall_s=-1), "wall_s must be a number >= 0"),
    "no steps": (lambda: SpeculationStats(None, 2), "steps must be a list of rows of RowStep"),
    "no step": (lambda: SpeculationStats(["x"], 2), "got a str in row 0"),
    "vLLM": (lambda: as_vllm(None, 2), "steps must be a Sequence, got None; pass result.steps"),
    "vLLM's K": (lambda: as_vllm([[STEP]], 1), "at most K = 1 drafted"),
    "Spec-Bench": (lambda: as_spec_bench([[STEP]], [0.0]), r"seconds\[0\] must be a number > 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(case):
    call, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


PLOTS = {
    "one evaluation": (lambda: plots.acceptance_by_position(EVALUATION), "must be a Mapping"),
    "a list": (lambda: plots.acceptance_by_position([EVALUATION]), "pass lines by their names"),
    "nothing": (lambda: plots.acceptance_by_position({}), "nothing to plot: evaluations is empty"),
    "None": (
        lambda: plots.acceptance_by_position({"a": None}),
        r"evaluations\['a'\] must be an Ev",
    ),
    "axes": (lambda: plots.acceptance_by_position({"a": EVALUATION}, ax=5), "ax must be an Axes"),
    "no lines": (lambda: plots.acceptance_by_temperature({}), "nothing to plot: lines is empty"),
    "an empty line": (lambda: plots.acceptance_by_temperature({"a": {}}), r"lines\['a'\] is empty"),
    "a flat line": (
        lambda: plots.acceptance_by_temperature({"a": EVALUATION}),
        "must be a Mapping",
    ),
    "a word": (
        lambda: plots.acceptance_by_temperature({"a": {"x": EVALUATION}}),
        "a temperature of lines.* must be a number",
    ),
    "no times": (lambda: plots.time_per_token({}), "nothing to plot: lines is empty"),
    "a number": (lambda: plots.time_per_token({"a": 5}), r"lines\['a'\] must be a tuple"),
    "no replays": (lambda: plots.cost_roof([], CURVE), "nothing to plot: replays is empty"),
    "no curve": (lambda: plots.cost_roof([], None), "costs must be a CostCurve, got None"),
    "no trace": (lambda: plots.timeline(EVALUATION), "trace must be a Trace, got a"),
    "row": (lambda: plots.timeline(TRACE, row=9), r"row must be an integer in 0\.\.0, got 9"),
    "negative row": (lambda: plots.timeline(TRACE, row=-5), r"row must be an integer in 0\.\.0"),
    "no tokenizer": (lambda: TRACE.html(5), "tokenizer must be the target's, got 5"),
    "as little": (lambda: TRACE.with_tokenizer(5), "tokenizer must be the target's, got 5"),
}


@pytest.mark.parametrize("case", PLOTS)
def test_what_cannot_be_shown_is_refused_by_name(case):
    pytest.importorskip("matplotlib")
    call, message = PLOTS[case]
    with pytest.raises((ValueError, TypeError), match=message):
        call()


def test_a_text_of_another_target_is_not_replayed():
    other = build("llama", seed=3)
    options = {"max_new_tokens": 9, "do_sample": True, "seed": 0, "top_k": 2, "trace": True}
    trace = SpeculativeGenerator(other, None).generate(IDS, **options).trace
    read = every_anchor(GENERATOR, trace)
    with pytest.raises(ValueError, match="probability 0, so it cannot have written it"):
        replay(read, num_draft_tokens=1, sampler=BlockSampler())


def test_prompts_of_a_short_text_are_not_counted_twice():
    lengths = acceptance_by_context(LOOKUP, torch.arange(1, 9), (6,), num_prompts=99)
    whole = [[*range(i, i + 6)] for i in (1, 2, 3)]
    expected = evaluate(LOOKUP, whole, max_new_tokens=64).stats
    assert lengths == {6: pytest.approx(expected.acceptance_length)}


def test_paths_are_checked_before_anything_is_done(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    for check, path, message in (
        (check_folder, file, "must be the path of a folder, but .*file is a file"),
        (check_folder, file / "below", "but .*file is a file"),
        (check_folder, "a\0b", "must be the path of a folder"),
        (make_folder, "/proc/no/such", "folder /proc/no/such cannot be made: "),
        (check_file, tmp_path, "must be the path of a file, but .* is a folder"),
        (check_file, "x" * 5000, "must be the path of a file, got 'xxx"),
    ):
        with pytest.raises(ValueError, match=message):
            check("folder", path)
    assert make_folder("folder", tmp_path / "a" / "b").is_dir()
    assert check_number("share", 0.5, above=0, below=1) == 0.5
