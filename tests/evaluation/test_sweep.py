"""A study is `evaluate` in every cell: cells of one rule once, resumed where it stopped, and what
its tables say follows from the evaluations.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from architectures import VOCAB, build
from drafting import perturbed

from specdec import (
    ModelDrafter,
    PromptLookupDrafter,
    Recent,
    RejectionSampler,
    Sinks,
    SpeculativeGenerator,
    Tree,
    evaluate,
    zoo,
)
from specdec.lab.evaluation import Evaluation, Study, difference, sweep
from specdec.lab.evaluation.cells import StudyFolder, axes_of, file_of, places_of
from specdec.lab.evaluation.study_table import _best_of_columns, ranked
from specdec.lab.evaluation.sweep import _short_names, read_study
from specdec.loading import load_drafter

ROOT = Path(__file__).parents[2]
TARGET = build("llama")
DRAFT = perturbed(TARGET, scale=0.15)
PROMPTS = [[(7 * i + j) % VOCAB for j in range(3 + i % 3)] for i in range(7)]
OPTIONS = {"max_new_tokens": 8, "seed": 3, "batch_size": 4, "top_k": 30}


def model(target, num_draft_tokens, **options):
    """A drafter of the user's own, with probabilities."""
    return ModelDrafter(DRAFT, num_draft_tokens, **options)


def lookup(target, num_draft_tokens):
    """One of point masses."""
    return PromptLookupDrafter(num_draft_tokens)


STUDY = {
    "drafters": [model, lookup, "none"],
    "drafts": [2, 3],
    "samplers": ["block", "rejection", "coupling"],
    "temperatures": [0, 0.9],
}
RUNS = 2 + 2 + 1 + 3 * 2 + 2 * 2 + 2
"""Greedy model, lookup and plain decoding; sampled ones by three rules, by two, and by two."""


@pytest.fixture(scope="module", name="study")
def _study() -> Study:
    return sweep(TARGET, PROMPTS, **STUDY, **OPTIONS)


def run_of(study: Study, **wanted) -> Evaluation:
    """The run of a cell."""
    (run,) = {id(study.runs[i]): study.runs[i] for i in places_of(study.cells, wanted)}.values()
    return run


def texts(run: Evaluation) -> list:
    return [(row.prompt, row.seed, [step.saved() for step in row.steps]) for row in run.rows]


def test_every_cell_is_what_evaluate_measures_of_it(study):
    assert len(study.cells) == 3 * 2 * 3 * 2
    made = {"model": model, "lookup": lookup, "none": lambda *_: None}
    for cell, run in [*zip(study.cells, study.runs, strict=True)][::7]:  # of each axis all values
        drafter = made[cell["drafter"]](TARGET, cell["draft"])
        generator = SpeculativeGenerator(TARGET, drafter, cell["sampler"])
        sampling = {"temperature": 0.9} if cell["temperature"] else {"top_k": None}
        alone = evaluate(generator, PROMPTS, **{**OPTIONS, **sampling, "batch_size": 7})
        assert texts(run) == texts(alone), cell


def test_cells_of_one_rule_run_once_and_share_a_line(study):
    once = {}
    for cell, run in zip(study.cells, study.runs, strict=True):
        once.setdefault(id(run), []).append(cell)
    shared = [{(c["drafter"], c["sampler"], c["temperature"]) for c in cs} for cs in once.values()]
    greedy = [{(d, s, 0.0) for s in STUDY["samplers"]} for d in ("model", "lookup", "none")]
    points = [{(d, s, 0.9) for s in ("block", "rejection")} for d in ("lookup", "none")]
    alone = [{("model", s, 0.9)} for s in STUDY["samplers"]]
    alone += [{(d, "coupling", 0.9)} for d in ("lookup", "none")]
    assert {frozenset(s) for s in shared} == {frozenset(s) for s in greedy + points + alone}
    (table,) = study.tables()
    labels = [row[:3] for row in table.rows]
    assert ["T = 0", "lookup", "all"] in labels
    assert ["T = 0.9", "lookup", "block, rejection"] in labels
    assert "cells are one rule with another cell" in table.notes[1]
    firsts = [r for r in study.records() if r["same_as"] is None]
    assert len(firsts) == len(once) == RUNS
    assert all(r["draft"] == 2 for r in firsts if r["drafter"] == "none")


def test_proposals_are_of_drafters_that_take_them_and_of_sampled_text():
    study = sweep(
        TARGET,
        PROMPTS[:2],
        drafters=[model, lookup],
        drafts=[2],
        vary={"proposal": ["sample", "argmax"], "draft_temperature": ["own", 0.5]},
        samplers=["block", "rejection"],
        temperatures=[0, 1],
        **OPTIONS,
    )
    kinds = {}
    for cell, run in zip(study.cells, study.runs, strict=True):
        key = cell["drafter"], cell["temperature"]
        kinds.setdefault(key, {}).setdefault(id(run), []).append(cell)
    # Greedy text: one rule; lookup: one; of the model block and rejection of samples at two
    # temperatures, and one rule of its point masses.
    counts = {key: len(found) for key, found in kinds.items()}
    assert counts == {("model", 0.0): 1, ("lookup", 0.0): 1, ("lookup", 1.0): 1, ("model", 1.0): 5}
    sampled = run_of(
        study,
        drafter="model",
        temperature=1.0,
        proposal="sample",
        draft_temperature=0.5,
        sampler="block",
    )
    assert sampled.about["run"]["drafter"]["proposal"] == {
        "class": "Proposal",
        "kind": "sample",
        "edit": None,
        "temperature": 0.5,
    }


def test_what_drafters_see_is_varied_for_those_that_have_keys_and_values():
    """In greedy cells, too; a lookup sees all of a text in any case."""
    study = sweep(
        "zoo",
        ["def main(argv):\n    return argv"] * 2,
        drafters=["zoo:model", "lookup"],
        drafts=[3],
        vary={"visible": ["all", "1+2", "3"]},
        **OPTIONS,
    )
    assert [line["same_as"] for line in study.records()] == [None] * 4 + [3, 3]
    drafters = [run.about["run"]["drafter"] for run in study.runs]
    seen = [drafter.get("visible") for drafter in drafters]
    assert [each and (each["sinks"], each["recent"]) for each in seen[:3]] == [None, (1, 2), (0, 3)]
    expected = load_drafter("zoo:model", zoo.load_target(), 3, visible=Sinks(1) + Recent(2))
    assert drafters[1].items() >= expected.settings().items()


def test_a_drafter_that_takes_no_proposal_has_one_rule_beside_one_that_does():
    study = sweep(
        TARGET,
        PROMPTS[:2],
        drafters=[model, lookup],
        drafts=[2],
        vary={"proposal": ["own", "argmax"]},
        temperatures=[1],
        **OPTIONS,
    )
    assert [cell["proposal"] for cell in study.cells] == [None, "argmax"] * 2
    assert [line["same_as"] for line in study.records()] == [None, None, None, 2]


def test_objects_trees_and_varied_options():
    drafter, trees = ModelDrafter(DRAFT, 3), ModelDrafter(DRAFT, tree=Tree(4, 2))
    study = sweep(
        TARGET,
        PROMPTS[:3],
        drafters={"chain": drafter, "tree": trees},
        samplers={"mine": RejectionSampler()},
        vary={"top_k": [5, 30]},
        temperatures=[1],
        max_new_tokens=6,
    )
    assert [(c["drafter"], c["draft"], c["top_k"]) for c in study.cells] == [
        *(("chain", 3, 5), ("chain", 3, 30), ("tree", "4x2", 5), ("tree", "4x2", 30)),
    ]
    assert study.runs[0].about["run"]["plan"]["options"]["top_k"] == 5
    shorter = sweep(TARGET, PROMPTS[:3], drafters=[drafter], drafts=[2], max_new_tokens=6)
    assert shorter.runs[0].num_draft_tokens == 2
    drawn = sweep(TARGET, PROMPTS[:2], drafters=[model], drafts=["4x2"], max_new_tokens=6)
    assert drawn.runs[0].about["run"]["drafter"]["tree"]["depth"] == 2


def test_an_interrupted_study_goes_on_and_gives_the_same_tables(study, tmp_path, monkeypatch):
    generate, calls = SpeculativeGenerator.generate, []

    def counting(self, *args, **options):
        calls.append(1)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return generate(self, *args, **options)

    monkeypatch.setattr(SpeculativeGenerator, "generate", counting)
    with pytest.raises(KeyboardInterrupt):
        sweep(TARGET, PROMPTS, **STUDY, **OPTIONS, output=tmp_path)
    partly = Study.load(tmp_path)
    finished = [id(run) for run in study.runs[: len(partly.runs)]]
    assert len(set(finished)) == 4  # of four batches each, and nothing of the fifth
    whole = {path.name for path in tmp_path.glob("*.jsonl")}
    missing = sorted(set(StudyFolder(tmp_path).read()[1]) - whole)
    (tmp_path / missing[0]).touch()  # killed before its first line was whole
    (tmp_path / missing[1]).write_text('{"format": "specdec.ev')
    assert len(Study.load(tmp_path).runs) == len(partly.runs)
    left = len(study.cells) - len(finished)
    assert partly.tables()[0].notes[-1] == f"Not finished yet, and left out: {left} cells."
    again = sweep(TARGET, PROMPTS, **STUDY, **OPTIONS, output=tmp_path)
    assert len(calls) == 1 + 2 * RUNS  # of two batches each none was done twice
    loaded = Study.load(tmp_path)
    for found in (again, loaded):
        assert [str(t) for t in found.tables()] == [str(t) for t in study.tables()]
        assert list(map(texts, found.runs)) == list(map(texts, study.runs))
    with pytest.raises(ValueError, match="holds a study with timed=False, whose times do not"):
        sweep(TARGET, PROMPTS, **STUDY, **OPTIONS, output=tmp_path, timed=True)
    with pytest.raises(ValueError, match=r"differ in plan\.seed \(3 there, 4 here\)"):
        sweep(TARGET, PROMPTS, **STUDY, **{**OPTIONS, "seed": 4}, output=tmp_path)


@pytest.mark.swept
def test_a_study_of_the_form_before_is_read_and_goes_on(study, tmp_path, monkeypatch):
    """Its cells have `proposal` and `draft_temperature`, which are null where nothing varied."""
    sweep(TARGET, PROMPTS, **STUDY, **OPTIONS, output=tmp_path)
    path = tmp_path / "study.json"
    content = json.loads(path.read_text())
    for each in content["cells"]:
        old = {"proposal": None, "draft_temperature": None}
        cell = each["cell"]
        each["cell"] = {n: cell[n] for n in ("drafter", "draft")} | old | cell
    path.write_text(json.dumps(content))
    old = Study.load(tmp_path)
    assert old.cells == study.cells
    monkeypatch.setattr(SpeculativeGenerator, "generate", None)
    again = sweep(TARGET, PROMPTS, **STUDY, **OPTIONS, output=tmp_path)
    assert list(map(texts, again.runs)) == list(map(texts, study.runs))
    assert Study.load(tmp_path).cells == study.cells


def test_a_rule_of_a_drafter_keeps_its_file_wherever_its_axes_stand():
    old = {"drafter": "a", "draft": 2, "proposal": "argmax", "draft_temperature": 0.5}
    old |= {"sampler": "block", "temperature": 1.0, "top_p": 0.9}
    new = {name: old[name] for name in sorted(old, key=("drafter", "sampler").__contains__)}
    name = "a_2_proposal=argmax_draft_T=0.5_block_T=1_top_p=0.9.jsonl"
    assert file_of(old) == file_of(new) == name


def test_the_frame_has_a_line_of_every_cell_and_pivots_into_tables(study):
    pytest.importorskip("pandas")
    frame = study.to_frame()
    sampled = frame[frame.temperature == 0.9]
    table = sampled.pivot(index=["drafter", "sampler"], columns="draft", values="acceptance_length")
    for i, cell in enumerate(study.cells):
        length = study.runs[i].stats.acceptance_length
        assert frame.acceptance_length[i] == length
        found = study.runs[i].estimates["acceptance_length"]
        ends = frame.acceptance_length_low[i], frame.acceptance_length_high[i]
        assert ends == (found.low, found.high)
        if cell["temperature"]:
            assert table.loc[(cell["drafter"], cell["sampler"]), cell["draft"]] == length
    assert frame.same_as.isna().sum() == RUNS


def test_timed_cells_take_turns_on_every_batch(monkeypatch):
    asked, generate = [], SpeculativeGenerator.generate

    def spy(self, ids, mask, **options):
        asked.append((type(self.drafter).__name__, ids[0, -3:].tolist()))
        return generate(self, ids, mask, **options)

    monkeypatch.setattr(SpeculativeGenerator, "generate", spy)
    ways = [model, lookup, "none"]
    study = sweep(
        TARGET, PROMPTS, drafters=ways, drafts=[2], timed=True, rounds=2, max_new_tokens=4
    )
    names, kept = ["ModelDrafter", "PromptLookupDrafter", "NoDrafter"], asked[3:]
    assert [name for name, _ in asked[:3]] == names  # a batch to warm up
    for start in range(0, len(kept), 3):
        batch = kept[start : start + 3]
        assert sorted(n for n, _ in batch) == sorted(names)
        assert len({str(prompt) for _, prompt in batch}) == 1
    assert {kept[start][0] for start in range(0, len(kept), 3)} == set(names)  # who begins
    times = run_of(study, drafter="lookup").estimates["ms_per_token"]
    assert times.low <= times.value <= times.high
    (table,) = study.tables()
    ratio = study.ratio({"drafter": "model"}, {"drafter": "lookup"})
    assert table.rows[1][3] == format(ratio, ".2f")
    both = sweep(TARGET, PROMPTS[:2], drafters=ways, drafts=[1, 2], timed=True, max_new_tokens=4)
    titles = [table.notes[0].split(";")[0] for table in both.tables()]
    assert titles == ["Acceptance length", "Ms per token"]


def test_of_several_rounds_the_median_one_counts(monkeypatch):
    seconds = iter([9.0, 3.0, 1.0, 2.0])  # the first of the warm-up
    timed = "specdec.lab.evaluation.batches.timed"
    monkeypatch.setattr(timed, lambda run, device: (run(), next(seconds)))
    options = {"drafters": ["none"], "timed": True, "rounds": 3, "max_new_tokens": 1}
    assert sweep(TARGET, PROMPTS[:1], **options).runs[0].seconds == 2.0


def test_differences_and_the_best_are_those_of_the_pairs(study):
    a, b = ({"drafter": d, "draft": 3, "temperature": 0.0} for d in ("lookup", "model"))
    found = study.difference(a, b)
    assert found == difference(run_of(study, **a), run_of(study, **b))
    best = study.best(temperature=0.0)
    lengths = {i: run.stats.acceptance_length for i, run in enumerate(study.runs)}
    top = max((i for i, c in enumerate(study.cells) if c["temperature"] == 0), key=lengths.get)
    assert best.runs[0] is study.runs[top]
    for cell, run in zip(study.cells, study.runs, strict=True):
        if cell["temperature"] == 0 and id(run) not in map(id, best.runs):
            assert difference(run, best.runs[0]).low > 0
    (minus,) = study.tables("draft", minus={"drafter": "none"})
    rows = {tuple(row[:3]): row[3:] for row in minus.rows}
    plain = run_of(study, drafter="none", temperature=0.0)
    found = [
        difference(plain, run_of(study, drafter="model", draft=k, temperature=0.0)) for k in (2, 3)
    ]
    shown = [text.rstrip("*") for text in rows["T = 0", "model", "all"][1::2]]
    assert shown == [format(each, "+.2f") for each in found]
    assert rows["T = 0", "none", "all"][1::2] == ["", ""]


def test_bold_is_what_beats_every_other_cell_of_its_column_and_conditions():
    rng = np.random.default_rng(0)
    few, many, same = (made(rng, share) for share in (0.1, 0.9, 0.9))
    cells = [{"drafter": n, "draft": 2, "temperature": 0.0} for n in ("few", "many")]
    table = Study(cells, [few, many]).tables("draft")[0]
    assert table.bold == {(1, 1)}
    assert [r"\textbf" in line for line in table.latex().splitlines()[4:6]] == [False, True]
    assert "| **" in table.markdown().splitlines()[3]
    cells.append({"drafter": "same", "draft": 2, "temperature": 0.0})
    assert not Study(cells, [few, many, same]).tables("draft")[0].bold
    cells[1]["temperature"] = 1.0  # other conditions are no rivals
    assert not Study(cells[:2], [few, many]).tables("draft")[0].bold


def test_nothing_is_lost_under_a_name_that_two_have():
    rng = np.random.default_rng(0)
    first, second = made(rng, 0.5), made(rng, 0.5)
    near = [{"drafter": "a", "draft": 2, "temperature": t} for t in (0.1234567, 0.1234568)]
    study = Study(near, [first, second])
    assert len(ranked(study.cells, study.runs, "acceptance_length")) == 2
    assert len({file_of(cell) for cell in near}) == 2
    with pytest.raises(ValueError, match="2 cells, 1 of them different"):
        Study([near[0], dict(near[0])], [first, second])
    with pytest.raises(ValueError, match="and 1 runs"):
        Study(near, [first])


def test_of_equal_cells_none_is_called_worse_however_many_there_are():
    """60 studies of 12 equal cells on eight prompts; at most 5 % may leave one out: more than 8 of
    60 would come once in 200 repetitions. Pairwise intervals leave some out in most studies.
    """
    rng, left_out, bold = np.random.default_rng(0), 0, 0
    for _ in range(60):
        ease = rng.beta(4, 3, 8)
        runs = [made(rng, np.clip(ease + rng.normal(0, 0.1, 8), 0, 1)) for _ in range(12)]
        cells = [
            {"drafter": str(i % 4), "draft": 2 + i // 4, "temperature": 0.0} for i in range(12)
        ]
        study = Study(cells, runs)
        left_out += len(study.best().cells) < 12
        bold += any(_best_of_columns(cells, runs, "draft", "acceptance_length"))
    assert left_out <= 8
    assert bold <= 8
    # The negative control: cells that are worse are left out, and the best one is bold.
    ease = rng.uniform(0.2, 0.4, 16)
    runs = [made(rng, ease + 0.5 * (i == 5)) for i in range(12)]
    study = Study(cells, runs)
    assert [run is runs[5] for run in study.best().runs] == [True]
    assert len(study.tables("draft")[0].bold) == 1


def made(rng, share) -> Evaluation:
    """A run of made-up steps of two draft tokens, of which such a share is accepted; 40 prompts, or
    one for each share.
    """
    from specdec.lab.evaluation.run_file import EvaluatedBatch, EvaluatedRow
    from specdec.row_step import RowStep

    batches = []
    for i, own in enumerate(np.broadcast_to(share, np.shape(share) or 40)):
        accepted = (rng.random((20, 2)) < own).cumprod(axis=1).sum(axis=1).tolist()
        steps = [RowStep([1, 1], n, [1] * n + [2]) for n in accepted]
        row = EvaluatedRow(f"p{i}", "", 0, 0, 3, False, "length", None, steps)
        batches.append(EvaluatedBatch(i, [1.0], [row]))
    return Evaluation(batches, 2)


def test_the_figure_has_a_panel_for_each_condition_and_a_line_for_each_choice(study):
    pytest.importorskip("matplotlib").use("agg")
    figure = study.plot()
    assert [ax.get_title() for ax in figure.axes] == ["T = 0", "T = 0.9"]
    greedy, sampled = figure.axes
    assert [line.get_label() for line in greedy.get_lines()] == ["model", "lookup", "none"]
    named = {line.get_label(): line for line in sampled.get_lines()}
    run = [
        run_of(study, drafter="model", draft=k, temperature=0.9, sampler="block") for k in (2, 3)
    ]
    assert named["model, block"].get_ydata().tolist() == [r.stats.acceptance_length for r in run]
    colours = {line.get_color() for line in greedy.get_lines() + sampled.get_lines()}
    assert len(colours) == 3  # a drafter's is the same in all panels
    ranking = study.plot("drafter").axes[1]
    widths = [bar.get_width() for bar in ranking.patches]
    assert widths == sorted(widths, reverse=True)
    assert len(widths) == 3 * 2 + 2 * 2 + 2


class Chains(RejectionSampler):
    """A rule of the user's own."""

    takes_trees = False


def test_lossy_rules_are_called_so_where_they_sample():
    cells = {"drafters": [model], "drafts": [2], "temperatures": [0, 1], "max_new_tokens": 4}
    study = sweep(TARGET, PROMPTS[:2], samplers=["block", "typical"], **cells)
    rows = [row[:2] for row in study.tables("draft")[0].rows]
    assert rows == [["T = 0", "block, typical"], ["T = 1", "block"], ["T = 1", "typical (lossy)"]]
    assert "Lossy rules: their texts are not the target's." in study.tables()[0].notes
    lossy = run_of(study, temperature=1.0, sampler="typical")
    named = "TypicalSampler(epsilon=0.3, delta=0.09)"
    assert f"{named} is lossy: these are not the target's texts." in lossy.table().notes


def test_a_drafter_whose_file_was_edited_is_another_one(tmp_path):
    file, options = tmp_path / "own.py", {"output": tmp_path / "study", "max_new_tokens": 4}
    text = "from specdec import PromptLookupDrafter\nclass Own(PromptLookupDrafter):\n    {}\n"
    text += "def make(target, num_draft_tokens):\n    return Own(num_draft_tokens)\n"
    file.write_text(text.format("pass"))
    study = {"drafters": [f"{file}:make"], "drafts": [2], **options}
    sweep(TARGET, PROMPTS[:2], **study)
    sweep(TARGET, PROMPTS[:2], **study)  # goes on
    file.write_text(text.format("min_ngram = 2"))
    os.utime(file, ns=(1, 1))
    with pytest.raises(ValueError, match=r"holds another run; they differ in drafter\.source"):
        sweep(TARGET, PROMPTS[:2], **study)


REFUSED = [
    ({"drafters": "lookup"}, "drafters must be a list or a mapping of names"),
    ({"drafters": [model, model]}, "two drafters are called 'model'"),
    ({"drafters": ["ngram"]}, "write lookup"),
    ({"drafters": [ModelDrafter(DRAFT, 2)], "drafts": [3]}, "object that drafts 2.*asks it for 3"),
    ({"drafts": ["4x2"], "drafters": [model], "samplers": [Chains()]}, "verifies chains"),
    ({"drafts": []}, "the values of draft are an empty list"),
    ({"temperatures": 1.0}, "the values of temperature must be a list"),
    ({"vary": {"eos_token_id": [[1, 2]]}}, "a value of eos_token_id must be a number"),
    ({"vary": {"top_kk": [1]}}, "no argument 'top_kk': did you mean 'top_k'"),
    ({"vary": {"draft": [1]}}, r"draft is varied by drafts=\[...\], not in vary"),
    ({"proposals": ["argmax"]}, "proposals goes into vary: vary={'proposal': "),
    ({"draft_temperature": 0.5}, "draft_temperature goes into vary"),
    ({"vary": {"visible": ["4-508"]}}, "visible must be like .4.508., the first 4"),
    ({"visible": "4+508"}, "visible goes into vary"),
    ({"samplers": ["blok"]}, "sampler must be"),
    ({"rounds": 0}, "rounds"),
    (
        {"drafters": {"a/b": lookup, "a-b": lookup}, "drafts": [2]},
        "another cell would have one file, a-b_",
    ),
]


@pytest.mark.parametrize(("change", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_what_cannot_be_right_is_refused_before_anything_is_generated(change, why, monkeypatch):
    monkeypatch.setattr(SpeculativeGenerator, "generate", None)
    with pytest.raises((TypeError, ValueError), match=why):
        sweep(TARGET, PROMPTS, **{"drafters": ["lookup"], **change})


ASKED = [
    (lambda s: s.ratio({"drafter": "model"}, {}), "say as well: "),
    (lambda s: s.difference({"drafter": "m"}, {}), "a value of drafter must be"),
    (lambda s: s.best(colour="red"), "an axis must be"),
    (lambda s: s.test({"temperature": 0.0}, {"temperature": 0.0}), "no cell has a partner"),
    (lambda s: s.best(), "several conditions.*temperature"),
    (lambda s: s.tables(of="speed"), "of must be"),
    (lambda s: s.test({}, of="speed"), "of must be"),
    (lambda s: Study.load("nowhere"), "no folder of a study"),
]


@pytest.mark.parametrize(("ask", "why"), ASKED, ids=[why for _, why in ASKED])
def test_what_a_study_does_not_have_is_said(ask, why, study):
    with pytest.raises(ValueError, match=why):
        ask(study)


def test_a_file_that_is_no_toml_is_named(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text("drafters = lookup")
    with pytest.raises(ValueError, match=r"study\.toml is no TOML file: Invalid value"):
        read_study(path)


NODE = """
import sys
from specdec.lab.evaluation import sweep
study = sweep(drafters=["lookup", "zoo:model"], drafts=[2], temperatures=[0, 1], limit=5,
              max_new_tokens=8, share=True, output=sys.argv[1])
print(study.to_markdown())
"""


@pytest.mark.slow
def test_two_processes_of_one_machine_and_of_two_give_the_tables_of_one(tmp_path):
    """Two machines are two launches that meet over loopback."""
    (tmp_path / "node.py").write_text(NODE)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    environment["PYTHONPATH"] = str(ROOT)

    def started(*launcher: str, output: str) -> subprocess.Popen:
        command = [sys.executable, *launcher, str(tmp_path / "node.py"), str(tmp_path / output)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=environment, **pipes)

    def printed(process: subprocess.Popen) -> str:
        out, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors[-3000:]
        return out

    launch = ("-m", "accelerate.commands.launch", "--multi_gpu")
    whole = printed(started(output="one"))
    pair = printed(started(*launch, "--num_processes", "2", output="two"))
    nodes = ("--num_processes", "2", "--num_machines", "2", "--main_process_ip", "127.0.0.1")
    nodes += ("--main_process_port", "29571", "--machine_rank")
    machines = [started(*launch, *nodes, str(rank), output="nodes") for rank in (0, 1)]
    assert pair == whole * 2  # every process has the same study
    assert [printed(machine) for machine in machines] == [whole, whole]

    def saved(folder: str) -> list:
        files = sorted((tmp_path / folder).glob("*.jsonl"))
        lines = [json.loads(line) for f in files for line in f.read_text().splitlines()[1:]]
        return sorted(
            ([line["batch"], line["rows"]] for line in lines), key=lambda line: json.dumps(line)
        )

    assert saved("one") == saved("two") == saved("nodes")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two drafts of one name in different folders, and one whose name begins with a dash."""
    root, draft = tmp_path_factory.mktemp("models"), zoo.load_drafter("model").model
    paths = [root / "long" / "first" / "draft", root / "long" / "second" / "draft", root / "-x"]
    for path in paths:
        draft.save_pretrained(path)
    return list(map(str, paths))


def test_local_models_are_called_by_the_shortest_ends_that_differ(folders, tmp_path):
    few = {"drafts": [2], "limit": 1, "max_new_tokens": 4, "output": tmp_path / "study"}
    study = sweep(drafters=[*folders, "lookup"], **few)
    assert axes_of(study.cells)["drafter"] == ["first/draft", "second/draft", "-x", "lookup"]
    assert folders[0].rsplit("/", 3)[0] not in str(study)
    names = [path.name for path in (tmp_path / "study").glob("*.jsonl")]
    assert len(names) == 4
    assert not [name for name in names if name.startswith(("-", "."))]
    again = sweep(drafters=[*folders, "lookup"], **few)  # goes on, and has nothing left to do
    assert [run.stats.to_dict() for run in again.runs] == [r.stats.to_dict() for r in study.runs]


def test_a_study_names_its_parts_itself(folders, tmp_path):
    path = tmp_path / "study.toml"
    path.write_text(
        f"drafts = [2]\nlimit = 1\nmax_new_tokens = 4\n"
        f'[drafters]\nsmall = "{folders[0]}"\ntext = "lookup"\n[samplers]\nours = "rejection"\n'
    )
    study = sweep(**read_study(path))
    assert axes_of(study.cells)["drafter"] == ["small", "text"]
    assert axes_of(study.cells)["sampler"] == ["ours"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["eagle:/a/head", "mtp:/a/head"], ["eagle:head", "mtp:head"]),
        (["/a/b.py:make", "/c/b.py:make"], ["a/b.py:make", "c/b.py:make"]),
        (["/a/head/", "/b/a/head"], ["/a/head", "b/a/head"]),
        (["org/name", "zoo:eagle3", "pkg.mod:make"], ["org/name", "zoo:eagle3", "pkg.mod:make"]),
        (["/deep/lookup", "lookup"], ["deep/lookup", "lookup"]),
    ],
)
def test_names_are_short_and_distinct(given, expected):
    assert [*_short_names(given).values()] == expected
