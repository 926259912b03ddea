"""Published protocols run end to end on files in the published forms, go on after an interruption,
and say in what they differ from the source.
"""

import json
import random
from dataclasses import asdict, replace
from typing import get_args

import numpy as np
import pytest

from specdec import SpeculativeGenerator, Tree, zoo
from specdec.cli import main
from specdec.cli.reproduce import Protocol
from specdec.evaluation import reproduce, sweep
from specdec.evaluation.protocols import PROTOCOLS, Figures
from specdec.samplers import RejectionSampler

TARGET, TOKENIZER = zoo.load_target(), zoo.load_tokenizer()
CATEGORIES = [name.partition("/")[2] for name in PROTOCOLS["speed-bench"].sets]
ENTRIES = {
    "gsm8k": lambda i: {"question": f"{i} + 1?", "answer": f"#### {i + 1}"},
    "math500": lambda i: {"problem": f"{i} + 1?", "answer": "2", "unique_id": f"test/{i}.json"},
    "aime24": lambda i: {"id": i, "problem": f"{i} + 1?", "answer": "2", "year": "2024"},
    "aime25": lambda i: {"problem_idx": i, "problem": f"{i} + 1?", "answer": 2},
    "mbpp": lambda i: {"task_id": i, "prompt": f"Add {i}.", "code": "", "test_list": []},
    "humaneval": lambda i: {
        "task_id": f"HumanEval/{i}",
        "prompt": f"def f{i}(a, b):\n",
        "canonical_solution": "",
    },
    "livecodebench": lambda i: {
        "question_id": f"{i}_A",
        "question_content": f"Sort {i}.",
        "starter_code": "",
    },
    "swe-bench": lambda i: {"instance_id": f"a__b-{i}", "problem_statement": f"{i} fails."},
    "mt-bench": lambda i: {"prompt_id": i, "category": "math", "prompt": [f"{i}?", "Again."]},
    "alpaca": lambda i: {"instruction": f"Sing {i}.", "input": "", "output": "", "text": "..."},
    "sum": lambda i: {"question_id": 240 + i, "category": "summarization", "turns": [f"Sum {i}."]},
    "qa": lambda i: {"question_id": 320 + i, "category": "qa", "turns": [f"Who is {i}?"]},
    "spec-bench": lambda i: {"question_id": i, "category": "math", "turns": [f"{i}?", "Again."]},
    "qualitative": lambda i: {
        "question_id": f"q{i}",
        "category": CATEGORIES[i % len(CATEGORIES)],
        "turns": [f"Say {i}."],
    },
    "arena-hard-v2": lambda i: {"uid": f"u{i}", "category": "hard_prompt", "prompt": f"Write {i}."},
}


def write_sets(folder, count: int = 2):
    """Every set of every protocol, in its published form."""
    folder.mkdir(exist_ok=True)
    for name, entry in ENTRIES.items():
        whole = count * (len(CATEGORIES) if name == "qualitative" else 1)
        lines = [json.dumps(entry(i)) + "\n" for i in range(whole)]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def load(nodes, drafter="mask-token"):
    options = {"tree": Tree(nodes, 5, nodes)} if nodes else {"num_draft_tokens": 5}
    drafter = zoo.load_drafter(drafter, TARGET, **options)
    return SpeculativeGenerator(TARGET, drafter, RejectionSampler()), TOKENIZER


def small(name: str):
    """A protocol with fewer budgets, and drafts as `load` makes them."""
    return replace(PROTOCOLS[name], budgets=PROTOCOLS[name].budgets[:2], num_draft_tokens=5)


def texts(found) -> dict:
    """All that was generated, cell by cell."""
    return {cell: repr([asdict(row) for row in e.rows]) for cell, e in found.cells.items()}


def test_the_command_names_all_protocols():
    assert tuple(PROTOCOLS) == get_args(Protocol)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_zoo_goes_through_every_protocol_and_on_after_an_interruption(name, tmp_path):
    """It is stopped in the midst of the last of three sets, or of the only one; what was finished
    stands in the files, and is not measured again.
    """
    protocol, data = small(name), write_sets(tmp_path / "data")
    options = {"sets": list(protocol.sets)[:3], "max_new_tokens": 2}
    whole = reproduce(protocol, load, data, **options)
    assert list(whole.cells) == [(s, b) for s in options["sets"] for b in protocol.budgets]
    assert list(whole.plain) == options["sets"]
    assert f"Published: {protocol.source}." in " ".join(str(whole).split())
    assert len(whole.to_frame()) == len(whole.cells)
    calls = []

    def counted(stop=None):
        def load_counted(nodes):
            generator, tokenizer = load(nodes)
            generate = generator.generate

            def counting(*args, **given):
                if len(calls) == stop:
                    raise KeyboardInterrupt
                calls.append(nodes)
                return generate(*args, **given)

            generator.generate = counting
            return generator, tokenizer

        return load_counted

    reproduce(protocol, counted(), data, output=tmp_path / "counted", **options)
    total, out = len(calls), tmp_path / "out"
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        reproduce(protocol, counted(total - 1), data, output=out, **options)
    sizes = {path: path.stat().st_size for path in out.rglob("*.jsonl")}
    assert len({path.parent for path in sizes}) == len(options["sets"])
    calls.clear()
    again = reproduce(protocol, counted(), data, output=out, **options)
    assert 0 < len(calls) < total
    assert all(path.stat().st_size >= size for path, size in sizes.items())
    assert texts(again) == texts(whole)
    plain = [[row.new_tokens for row in run.rows] for run in (again.plain[s] for s in whole.plain)]
    assert plain == [[row.new_tokens for row in run.rows] for run in whole.plain.values()]


def test_times_stand_beside_plain_decoding_of_the_same_prompts(tmp_path):
    """The speed is that of tokens per second of both files, and greedy texts are the same."""
    figures = (Figures("zoo", "A", 0, {"gsm8k": 2.0, "mbpp": 3.0}, {"gsm8k": 1.5}),)
    data = write_sets(tmp_path / "data", 7)
    protocol = replace(small("ddtree"), budgets=(0,), figures=figures, card="one RTX 3090")
    options = {"sets": ["gsm8k", "mbpp"], "max_new_tokens": 8}
    found = reproduce(protocol, load, data, **options)
    for name in options["sets"]:
        plain, cell = found.plain[name], found.cells[name, 0]
        assert [r.new_tokens for r in plain.rows] == [r.new_tokens for r in cell.rows]
        assert plain.num_draft_tokens == 0
        speed = found.speedup(name, 0)
        assert speed.value == pytest.approx(cell.tokens_per_second / plain.tokens_per_second)
        assert speed.has_interval
    first, second = found.records()
    assert first["speedup"] == found.speedup("gsm8k", 0).value
    assert (first["A x plain"], "A x plain" in second) == (1.5, False)
    shown = " ".join(str(found).split())
    assert "2.00 (1.00), 1.50 x" in shown
    assert "Published speeds: one RTX 3090; these: cpu" in shown
    bare = reproduce(protocol, load, data, plain=False, **options)
    assert bare.plain == {}
    assert bare.speedup("gsm8k", 0) is None
    assert "x plain" not in str(bare).splitlines()[0]
    assert "ms per token" in str(bare)


def test_a_protocol_measures_with_its_settings(tmp_path):
    data = write_sets(tmp_path / "data")
    for name, turns, temperature, seed in (
        ("dspark-table1", 1, 1.0, 980406),
        ("ddtree", 2, 0.0, 0),
        ("ddtree-sampled", 2, 1.0, 0),
    ):
        options = {"sets": ["mt-bench"], "budgets": [0], "max_new_tokens": 4}
        cell = reproduce(small(name), load, data, **options).cells["mt-bench", 0]
        plan = cell.about["run"]["plan"]
        assert (plan["temperature"], plan["seed"]) == (temperature, seed)
        assert {row.turn for row in cell.rows} == set(range(turns))
        assert cell.about["run"]["sampler"] == {"class": "RejectionSampler", "lossless": True}
        assert PROTOCOLS[name].max_new_tokens == 2048
    (row, _) = (
        reproduce(small("ddtree"), load, data, sets=["gsm8k"], budgets=[0], max_new_tokens=1)
        .cells["gsm8k", 0]
        .rows
    )
    worded = "0 + 1?\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert row.num_prompt_tokens == len(TOKENIZER(worded).input_ids)


@pytest.mark.parametrize("name", ["dspark-table1", "ddtree"])
def test_of_larger_sets_the_prompts_of_the_source_are_chosen(name, tmp_path):
    """DeepSpec shuffles the list with `random.Random(seed)`, Hugging Face datasets with a
    permutation of NumPy's `default_rng(seed)`.
    """
    protocol, data = PROTOCOLS[name], write_sets(tmp_path / "data", 300)
    protocol = replace(protocol, sets={"humaneval": 164, "gsm8k": 300})
    chosen = [prompt.id for prompt in protocol.prompts("humaneval", data)]
    ids = [f"HumanEval/{i}" for i in range(300)]
    if name == "dspark-table1":
        random.Random(980406).shuffle(ids)
    else:
        ids = [ids[i] for i in np.random.default_rng(0).permutation(300)]
    assert chosen == ids[:164]
    whole = protocol.prompts("gsm8k", data)
    assert [prompt.id for prompt in whole] == [str(i + 1) for i in range(300)]
    assert {prompt.category for prompt in whole} == {"gsm8k"}


def test_a_part_of_a_file_is_a_set(tmp_path):
    data, protocol = write_sets(tmp_path / "data", 3), PROTOCOLS["speed-bench"]
    prompts = protocol.prompts("qualitative/math", data)
    assert [prompt.category for prompt in prompts] == ["math"] * 3
    assert len({prompt.id for prompt in prompts}) == 3
    with pytest.raises(ValueError, match="qualitative has no prompts of category cooking: coding"):
        protocol.prompts("qualitative/cooking", data)


def test_the_mean_is_that_of_the_source(tmp_path):
    data = write_sets(tmp_path / "data", 7)
    protocol = replace(small("ddtree"), budgets=(0,))
    options = {"sets": ["mt-bench"], "max_new_tokens": 8}
    found = reproduce(protocol, load, data, **options)
    rows = found.cells["mt-bench", 0].rows
    assert len(rows) == 14
    means = [1 + np.mean([step.num_accepted for step in row.steps]) for row in rows]
    steps = [1 + step.num_accepted for row in rows for step in row.steps]
    length = protocol.length(found.cells["mt-bench", 0])
    assert length.value == pytest.approx(np.mean(means))
    assert length.has_interval
    pooled = replace(protocol, mean_over="steps").length(found.cells["mt-bench", 0])
    assert pooled.value == pytest.approx(np.mean(steps))
    assert abs(pooled.value - length.value) > 1e-3
    assert found.records()[0]["value"] == length.value


def test_published_figures_stand_beside_their_own_budget_and_target(tmp_path):
    data = write_sets(tmp_path / "data")
    figures = (
        Figures("other", "A", 0, {"gsm8k": 1.0}),
        Figures("zoo", "A", 0, {"gsm8k": 2.0}),
        Figures("zoo", "A", 16, {"gsm8k": 3.0}),
        Figures("zoo", "B", None, {"gsm8k": 4.0}),
    )
    protocol = replace(small("ddtree"), figures=figures)
    options = {"sets": ["gsm8k", "mbpp"], "max_new_tokens": 4}
    lines = reproduce(protocol, load, data, **options).records()
    shown = {(line["set"], line["nodes"]): (line["A"], line["B"]) for line in lines}
    assert shown == {
        ("gsm8k", 0): (2.0, 4.0),
        ("gsm8k", 16): (3.0, 4.0),
        ("mbpp", 0): (None, None),
        ("mbpp", 16): (None, None),
    }
    of_another = reproduce(replace(protocol, figures=figures[:1]), load, data, **options)
    assert of_another.records()[0]["A"] == 1.0
    assert "Published for other; the target here is 'zoo'." in of_another.deviations()


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


def test_a_measurement_says_in_what_it_differs_from_its_source(tmp_path):
    data, protocol = write_sets(tmp_path / "data"), small("dspark-table1")
    options = {"sets": ["gsm8k", "aime25"], "max_new_tokens": 4}
    found = reproduce(protocol, load, data, **options)
    assert found.deviations() == [
        "Published for Qwen3-8B; the target here is 'zoo'.",
        "enable_thinking=False was not set: the template is missing.",
        "At most 4 new tokens; 2048 in the source.",
        "Fewer prompts than in the source: gsm8k 2 of 500, aime25 2 of 30.",
    ]
    shorter = reproduce(protocol, load, data, max_prompt_tokens=3, **options).deviations()
    assert "4 prompts were shortened from the left." in shorter
    same = replace(
        protocol,
        sets={"gsm8k": 2, "aime25": 2},
        max_new_tokens=4,
        figures=(Figures("zoo", "A", 0, {}),),
    )

    def chatting(template):
        def load_chatting(nodes):
            tokenizer = zoo.load_tokenizer()
            tokenizer.chat_template = template
            return load(nodes)[0], tokenizer

        return load_chatting

    template = "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}"
    out = tmp_path / "out"
    found = reproduce(same, chatting(template), data, output=out)
    assert found.deviations() == []
    run = found.cells["gsm8k", 0].about["run"]
    assert run["plan"]["chat_template_kwargs"] == {"enable_thinking": False}
    with pytest.raises(ValueError, match=r"plan\.chat_template_kwargs\.enable_thinking \(False"):
        reproduce(replace(same, thinking=True), chatting(template), data, output=out)
    found = reproduce(same, chatting("{{ messages[0].content }}"), data)
    assert found.deviations() == [
        "enable_thinking=False was not set: the template does not read it."
    ]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"sets": ["gsm9k"]},
            ValueError,
            r"sets= \(--sets\) must be .*math500.*got 'gsm9k'",
        ),
        ({"budgets": [7]}, ValueError, r"budgets= \(--budgets\) must be .*0.*16.*got 7"),
        ({"limit": 0}, ValueError, "limit must be an integer >= 1, got 0"),
        (
            {"data": "nowhere"},
            FileNotFoundError,
            r"hold the set math500: .*sets= \(--sets\)",
        ),
    ],
)
def test_what_a_protocol_has_not_is_refused_before_anything_is_loaded(
    options, error, message, tmp_path
):
    options = {"data": write_sets(tmp_path / "data"), "output": tmp_path / "out"} | options
    with pytest.raises(error, match=message):
        reproduce(small("ddtree"), None, **options)
    assert not (tmp_path / "out").exists()


def test_trees_of_a_protocol_hold_the_best_nodes_of_all(tmp_path, monkeypatch):
    """The command's trees have as many children per node as nodes, so that none is left out."""
    seen = []

    def swept(target, prompts, *, drafters, **options):
        drafted = [way.drafter for name, way in drafters.items() if name != "plain"]
        seen.extend((drafter.tree, drafter.num_draft_tokens) for drafter in drafted)
        return sweep(target, prompts, drafters=drafters, **options)

    monkeypatch.setattr("specdec.evaluation.protocols.sweep", swept)
    data = write_sets(tmp_path / "data")
    arguments = ["--drafter", "zoo:mask-token", "--data", str(data), "--sets", "gsm8k"]
    arguments += ["--limit", "1", "--max-new-tokens", "2", "--budgets", "0,16,32"]
    assert main(["reproduce", "ddtree", *arguments]) == 0
    assert seen == [(None, 15), (Tree(16, 15, 16), 16), (Tree(32, 15, 32), 32)]
