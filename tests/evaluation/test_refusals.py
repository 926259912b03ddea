"""What would give wrong numbers, or fail late, is refused: the error's type and a word of it."""

import numpy as np
import pytest
import torch
from architectures import build
from drafting import perturbed

from specdec import (
    BlockSampler,
    ModelDrafter,
    PromptLookupDrafter,
    certify,
)
from specdec import SpeculativeGenerator as Generator
from specdec.lab.evaluation import (
    Estimate,
    Prompt,
    Study,
    evaluate,
    measure_costs,
    sweep,
)
from specdec.lab.evaluation.costs import CostCurve
from specdec.lab.evaluation.intervals import bootstrap
from specdec.lab.evaluation.sweep import with_draft_length
from specdec.lab.show.table import Table
from specdec.row_step import RowStep
from specdec.statistics import SpeculationStats

TARGET = build("llama")
GENERATOR = Generator(TARGET, ModelDrafter(perturbed(TARGET), 3))
LOOKUP = Generator(TARGET, PromptLookupDrafter(3))
IDS = torch.tensor([[5, 6, 7, 5, 6]])
CURVE = CostCurve([10.0], {0: [10.0], 4: [14.0]})


def evaluating(**options):
    return lambda: evaluate(GENERATOR, [[1, 2]], **options)


def stats(*step, k=1, **options):
    return lambda: SpeculationStats([[RowStep(*step)]], k, **options)


def prompt(*turns):
    return lambda: Prompt("a", turns)


REFUSED = [
    (evaluating(max_new_tokens=1.5), TypeError, "max_new_tokens"),
    (evaluating(temperature=[0.5]), TypeError, "temperature"),
    (evaluating(samples=2), ValueError, "samples > 1"),
    (evaluating(seed=-1), ValueError, "seed"),
    (evaluating(do_sample=True), ValueError, "a temperature above 0 samples"),
    (evaluating(do_sample=False, temperature=0.8), ValueError, "do_sample=False does not go with"),
    (lambda: sweep(TARGET, [[1]], do_sample=True), ValueError, "does not go with temperature 0"),
    (evaluating(output="nowhere/run"), FileNotFoundError, "nowhere"),
    (evaluating(output="."), IsADirectoryError, "."),
    (evaluating(attention_mask=torch.ones(1, 2)), TypeError, "attention_mask"),
    (lambda: evaluate(TARGET, [[1]]), TypeError, r"SpeculativeGenerator\(model, None\) decodes"),
    (lambda: sweep(TARGET, "nowhere"), FileNotFoundError, "no file of prompts nowhere; texts go"),
    (lambda: sweep(TARGET, [[1]], limit=-1), ValueError, "limit must be an integer >= 1"),
    (lambda: sweep(TARGET, [[1]], limit="2"), TypeError, "limit must be an integer >= 1"),
    (lambda: sweep(TARGET, [[1]], timed="yes"), ValueError, "timed must be True or False"),
    (
        lambda: sweep(TARGET, [[1]], vary={"proposal": ["x"]}),
        ValueError,
        "a value of proposal must be",
    ),
    (lambda: sweep(TARGET, [[1]], output=__file__), ValueError, "output must be a folder, and"),
    (lambda: certify(BlockSampler), TypeError, "got the class BlockSampler"),
    (lambda: evaluate(GENERATOR, ["text"]), ValueError, "pass tokenizer="),
    (lambda: evaluate(GENERATOR, "text"), TypeError, "put it into a list"),
    (lambda: evaluate(GENERATOR, []), ValueError, "no prompts"),
    (lambda: evaluate(GENERATOR, [3]), TypeError, "prompt 0"),
    (lambda: evaluate(GENERATOR, [[1], []]), ValueError, "turns of prompt '1'"),
    (lambda: evaluate(GENERATOR, [Prompt("p", ((1,),))] * 2), ValueError, "the id 'p'"),
    (prompt(""), ValueError, "prompt 'a'"),
    (lambda: Prompt("a", "text"), ValueError, "prompt 'a'"),
    (lambda: measure_costs(GENERATOR, IDS, draft_lengths=[]), ValueError, "draft_lengths is empty"),
    (lambda: CostCurve([1.0], {0: [1.0, 2.0]}), ValueError, "the same rounds"),
    (lambda: CostCurve([], {0: []}), ValueError, "the same rounds"),
    (lambda: CURVE.medians(5), ValueError, "measure it there"),
    (lambda: CostCurve([1.0], {2: [1.0]}).medians(1), ValueError, "begins at K = 2"),
    (lambda: with_draft_length(GENERATOR.drafter, 9), ValueError, "num_draft_tokens"),
    (lambda: bootstrap(np.zeros((0, 2)), None), ValueError, "at least one cluster"),
    (lambda: bootstrap(np.ones((9, 2)), None, level=95), ValueError, "level"),
    (lambda: Estimate(1.0, 2.0, 0.0), ValueError, "low must be at most high"),
    (lambda: Table(["a", "b"], [["x"]]), ValueError, "1 cells under a header of 2"),
    (stats([1], 5, [1]), ValueError, "accepted 5"),
    (stats([1, 2], 1, [1, 9]), ValueError, "at most K = 1"),
    (stats([1], 0, [1, 2]), ValueError, "at most one more"),
]


@pytest.mark.parametrize(("call", "error", "word"), REFUSED)
def test_what_cannot_be_right_is_refused(call, error, word):
    with pytest.raises(error, match=word):
        call()


@pytest.mark.parametrize("content", ["[]", "{}", '{"cells": []}', "{", "5"])
def test_a_file_that_is_no_study_is_refused(content, tmp_path):
    (tmp_path / "study.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="is no folder of a study"):
        Study.load(tmp_path)
