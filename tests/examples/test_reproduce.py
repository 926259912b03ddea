"""A published table is measured on files in the published forms, and its figures stand beside."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from examples import reproduce
from examples.reproduce import Figures, main, read_protocols
from specdec import Tree
from specdec.lab.evaluation import Study
from specdec.loading import load_target

PROTOCOLS = read_protocols()
TARGET, TOKENIZER = load_target("zoo")


def write_set(folder, name: str, count: int, turns=1):
    """Prompts of a set, in a file of its name."""
    folder.mkdir(exist_ok=True)
    lines = [{"question_id": i, "turns": [f"def f{i}(a):"] * turns} for i in range(count)]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_measured_lengths_stand_beside_published_ones(tmp_path, capsys):
    data = write_set(tmp_path / "data", "math500", 7, turns=2)
    arguments = ["--drafter", "zoo:mask-token", "--data", str(data), "--sets", "math500"]
    arguments += [
        "--budgets",
        "0",
        "16",
        "--max-new-tokens",
        "6",
        "--output",
        str(tmp_path / "out"),
    ]
    main(["ddtree", *arguments])
    lines = capsys.readouterr().out.splitlines()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[:4]]
    assert table[0][5:] == ["DFlash", "DDTree", "best-DDTree"]
    shown = [row[:2] + row[5:] for row in table[2:]]
    best = "10.73 (9.73)"
    assert shown == [
        ["math500", "chain of 15", "7.79 (6.79)", "", best],
        ["math500", "16", "", "8.61 (7.61)", best],
    ]
    study = Study.load(tmp_path / "out/math500")
    assert [cell["drafter"] for cell in study.cells] == ["0", "16", "plain"]
    chain, tree, plain = study.runs
    for run, row in zip((chain, tree), table[2:], strict=True):
        means = [1 + np.mean([step.num_accepted for step in row.steps]) for row in run.rows]
        assert len(means) == 14
        value, interval = row[2].split(" [")
        assert value == f"{np.mean(means):.2f}"
        low, high = map(float, interval.split("]")[0].split(", "))
        assert low <= float(value) <= high
        assert [r.new_tokens for r in run.rows] == [r.new_tokens for r in plain.rows]
        speed = run.tokens_per_second / plain.tokens_per_second
        assert float(row[4].split()[0]) == pytest.approx(speed, abs=0.006)
    assert lines[5:-1] == [
        "Published for Qwen3-8B; the target here is 'zoo'.",
        "enable_thinking=False was not set: no chat template reads it.",
        "At most 6 new tokens; 2048 in the source.",
        "7 prompts of math500; 128 in the source.",
    ]


def test_the_published_figures_are_those_of_the_tables():
    by_row = {
        (name, row.target, row.label, row.nodes): row.lengths
        for name, protocol in PROTOCOLS.items()
        for row in protocol.figures
    }
    eagle = by_row["dspark-table1", "Qwen3-8B", "EAGLE-3", 0]
    assert (eagle["gsm8k"], eagle["humaneval"], eagle["mt-bench"]) == (5.30, 4.33, 2.66)
    dspark = by_row["dspark-table1", "Qwen3-8B", "DSpark", 0]
    assert (dspark["gsm8k"], dspark["humaneval"], dspark["mt-bench"]) == (6.17, 5.52, 3.72)
    best = by_row["ddtree", "Qwen3-8B", "best-DDTree", None]
    # Figure 3 and table 1 share the chain and the best budget of MATH-500.
    assert best["math500"] == by_row["ddtree", "Qwen3-8B", "DDTree", 512]["math500"] == 10.73
    assert by_row["ddtree", "Qwen3-8B", "DDTree", 16] == {"math500": 8.61}
    assert by_row["ddtree-sampled", "Qwen3-4B", "DFlash", 0]["alpaca"] == 2.96
    eagle3 = {row.target: row for row in PROTOCOLS["eagle3"].figures if row.label == "EAGLE-3"}
    llama, vicuna = eagle3["Llama-3.1-8B-Instruct"], eagle3["vicuna-13b-v1.3"]
    assert (llama.lengths["mt-bench"], llama.speedups["mt-bench"]) == (6.13, 4.40)
    assert (vicuna.lengths["humaneval"], vicuna.speedups["humaneval"]) == (7.54, 6.47)
    leader = next(f for f in PROTOCOLS["spec-bench"].figures if f.label == "EAGLE3")
    assert (leader.lengths, leader.speedups) == ({"spec-bench": 5.71}, {"spec-bench": 3.02})
    mtp = by_row["speed-bench", "Qwen3-Next-80B-A3B-Instruct", "MTP", 0]
    assert (mtp["qualitative/coding"], mtp["qualitative/writing"]) == (3.34, 2.46)
    assert by_row["dflash", "Qwen3-8B", "DFlash", 0]["livecodebench"] == 7.27
    assert by_row["speculators-mt-bench", "Qwen3-8B", "EAGLE-3", 0] == {"mt-bench": 2.26}
    for (name, *_, nodes), lengths in by_row.items():
        assert nodes or set(lengths) == set(PROTOCOLS[name].sets)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_every_protocol_makes_its_drafters(name):
    """Trees hold the best nodes of all where the source has no limit of children."""
    protocol = PROTOCOLS[name]
    for nodes in protocol.budgets:
        made = protocol.drafter("zoo:mask-token", TARGET, nodes, TOKENIZER)
        k = protocol.num_draft_tokens
        expected = (Tree(nodes, k, protocol.children or nodes), nodes) if nodes else (None, k)
        assert (made.tree, made.num_draft_tokens) == expected


@pytest.mark.parametrize("name", ["dspark-table1", "ddtree"])
def test_of_larger_sets_the_prompts_of_the_source_are_chosen(name, tmp_path):
    """DeepSpec shuffles the list with `random.Random(seed)`, Hugging Face datasets with a
    permutation of NumPy's `default_rng(seed)`.
    """
    data = write_set(write_set(tmp_path, "humaneval", 300, turns=2), "mt_bench", 80)
    chosen = PROTOCOLS[name].prompts("humaneval", data)
    ids = [str(i) for i in range(300)]
    if name == "dspark-table1":
        random.Random(980406).shuffle(ids)
    else:
        ids = [ids[i] for i in np.random.default_rng(0).permutation(300)]
    assert [prompt.id for prompt in chosen] == ids[:164]
    assert {len(prompt.turns) for prompt in chosen} == {1 + (name == "ddtree")}
    whole = PROTOCOLS[name].prompts("mt-bench", data)
    assert [prompt.id for prompt in whole] == [str(i) for i in range(80)]


def test_figures_are_those_of_the_runs_target():
    rows = Figures.of("other A 0 1.5", ["x"]), Figures.of("zoo B best 2.0@1.25 @3.0", ["x", "y"])
    protocol = replace(PROTOCOLS["ddtree"], figures=rows)
    run = reproduce.sweep(TARGET, [[7, 8]], drafters=["none"], max_new_tokens=1).runs[0]
    assert reproduce.published(protocol, run) == [rows[1]]
    assert reproduce.published(replace(protocol, figures=rows[:1]), run) == [rows[0]]
    assert [rows[1].shown(name, 16) for name in "xyz"] == ["2.00 (1.00) 1.25 x", " 3.00 x", ""]
    assert (rows[0].shown("x", 0), rows[0].shown("x", 16)) == ("1.50 (0.50)", "")


def test_what_a_protocol_has_not_is_told_before_anything_is_loaded(tmp_path, capsys):
    given = ["ddtree", "--drafter", "none", "--data", str(tmp_path)]
    for more, message in ((["--sets", "gsm9k"], "got gsm9k"), (["--budgets", "7"], "got {7}")):
        with pytest.raises(SystemExit):
            main([*given, *more])
        assert message in capsys.readouterr().err
    with pytest.raises(FileNotFoundError, match=r"does not hold the set math500: .*--sets"):
        main(given)
