"""A run is the same whatever its batches, shards and interruptions, and says where it is from."""

import json

import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts

from specdec import ModelDrafter, PromptLookupDrafter, SpeculativeGenerator, zoo
from specdec.evaluation import Evaluation, Prompt, evaluate
from specdec.evaluation import evaluate as evaluate_function
from specdec.evaluation.run_file import RunFile

TARGET = build("llama")
GENERATOR = SpeculativeGenerator(TARGET, ModelDrafter(perturbed(TARGET), 3))
IDS, MASK = ragged_prompts(VOCAB, 3, 7, 5, 4, 6)
PROMPTS = [
    Prompt(f"p{i}", (tuple(row[mask.bool()].tolist()),), "ab"[i // 3])
    for i, (row, mask) in enumerate(zip(IDS, MASK, strict=True))
]
OPTIONS = {"max_new_tokens": 9, "temperature": 0.9, "top_k": 20, "seed": 5}


def rows_of(evaluation: Evaluation) -> list[dict]:
    return [{**vars(row), "steps": [vars(step) for step in row.steps]} for row in evaluation.rows]


@pytest.mark.parametrize("batch_size", [2, 5, None])
def test_rows_do_not_depend_on_their_batch(batch_size):
    expected = rows_of(evaluate(GENERATOR, PROMPTS, **OPTIONS))
    assert rows_of(evaluate(GENERATOR, PROMPTS, batch_size=batch_size, **OPTIONS)) == expected
    seeds = [row["seed"] for row in expected]
    assert seeds == [5, 6, 7, 8, 9]


def test_a_batch_holds_prompts_of_one_category():
    evaluation = evaluate(GENERATOR, PROMPTS, batch_size=2, **OPTIONS)
    batches = [[row.prompt for row in batch.rows] for batch in evaluation.batches]
    assert batches == [["p0", "p1"], ["p2"], ["p3", "p4"]]
    parts = evaluation.categories
    assert sum(part.seconds for part in parts.values()) == pytest.approx(evaluation.seconds)
    assert [len(part.rows) for part in parts.values()] == [3, 2]


def test_samples_of_a_prompt_differ_and_are_one_cluster():
    evaluation = evaluate(GENERATOR, PROMPTS, samples=3, batch_size=4, **OPTIONS)
    assert len(evaluation.rows) == 15
    assert len({row.seed for row in evaluation.rows}) == 15
    texts = [tuple(row.new_tokens) for row in evaluation.rows if row.prompt == "p0"]
    assert len(set(texts)) == 3
    once = {row.prompt: row.new_tokens for row in evaluate(GENERATOR, PROMPTS, **OPTIONS).rows}
    assert list(texts[0]) == once["p0"]


@pytest.mark.parametrize("count", [2, 4])
def test_shards_together_are_the_run(count):
    whole = evaluate(GENERATOR, PROMPTS, batch_size=2, **OPTIONS)
    shards = [
        evaluate(GENERATOR, PROMPTS, batch_size=2, shard=(index, count), **OPTIONS)
        for index in range(count)
    ]
    merged = Evaluation.merged(shards[::-1])
    assert rows_of(merged) == rows_of(whole)
    with pytest.raises(ValueError, match="two parts hold the same batch"):
        Evaluation.merged([shards[0], shards[0]])


class InterruptedRunError(Exception):
    """Stands for a process that is killed."""


@pytest.mark.parametrize("stop_after", [0, 1, 3, 5])
@pytest.mark.parametrize("cut", [0, 1, 40])
def test_an_interrupted_run_goes_on_without_losing_or_repeating_a_prompt(
    stop_after, cut, tmp_path, monkeypatch
):
    path, asked = tmp_path / "run.jsonl", []
    generate = SpeculativeGenerator.generate

    def spy(self, ids, mask, **options):
        if len(asked) == stop_after:
            raise InterruptedRunError
        asked.append(ids[mask.bool()].tolist())
        return generate(self, ids, mask, **options)

    with monkeypatch.context() as patch:
        patch.setattr(SpeculativeGenerator, "generate", spy)
        if stop_after < 5:
            with pytest.raises(InterruptedRunError):
                evaluate(GENERATOR, PROMPTS, output=path, **OPTIONS)
        else:
            evaluate(GENERATOR, PROMPTS, output=path, **OPTIONS)
    kept = stop_after
    if path.exists() and cut:  # killed while it was writing
        path.write_bytes(path.read_bytes()[:-cut])
        kept -= 1
    asked.clear()
    stop_after = 99
    monkeypatch.setattr(SpeculativeGenerator, "generate", spy)
    resumed = evaluate(GENERATOR, PROMPTS, output=path, **OPTIONS)
    assert len(asked) == 5 - max(kept, 0)
    monkeypatch.undo()
    assert rows_of(resumed) == rows_of(evaluate(GENERATOR, PROMPTS, **OPTIONS))
    loaded = Evaluation.load(path)
    assert rows_of(loaded) == rows_of(resumed)
    assert loaded.seconds == resumed.seconds
    assert loaded.estimates == resumed.estimates
    lines = path.read_text().splitlines()
    assert [json.loads(line)["batch"] for line in lines[1:]] == list(range(5))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"temperature": 0.5}, "plan"),
        ({"seed": 6}, "plan"),
        ({"max_new_tokens": 8}, "plan"),
        ({"top_k": 5}, "plan"),
        ({"batch_size": 2}, "plan"),
        ({"shard": (0, 2)}, "shard"),
    ],
)
def test_a_file_of_another_run_is_not_gone_on_with(change, name, tmp_path):
    path = tmp_path / "run.jsonl"
    evaluate(GENERATOR, PROMPTS, output=path, **OPTIONS)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"holds another run: its {name} is"):
        evaluate(GENERATOR, PROMPTS, output=path, **{**OPTIONS, **change})
    with pytest.raises(ValueError, match="another run: its prompts"):
        evaluate(GENERATOR, PROMPTS[:4], output=path, **OPTIONS)
    other = SpeculativeGenerator(TARGET, PromptLookupDrafter(3))
    with pytest.raises(ValueError, match="another run: its drafter"):
        evaluate(other, PROMPTS, output=path, **OPTIONS)
    assert path.read_bytes() == before


def test_a_file_that_is_no_run_is_left_alone(tmp_path):
    path = tmp_path / "notes.jsonl"
    path.write_text('{"text": "mine"}\n')
    with pytest.raises(ValueError, match="is no evaluation"):
        evaluate(GENERATOR, PROMPTS, output=path, **OPTIONS)
    assert path.read_text() == '{"text": "mine"}\n'
    path.write_text('{"format": "specdec.evaluation/1", "run": {}}\nnot json\n')
    with pytest.raises(ValueError, match="line 2 is no JSON"):
        Evaluation.load(path)


def test_a_saved_run_says_where_it_comes_from(tmp_path):
    path = tmp_path / "run.jsonl"
    evaluate(GENERATOR, PROMPTS, output=path, **OPTIONS)
    about = Evaluation.load(path).about
    assert about["versions"]["torch"] == torch.__version__
    run = about["run"]
    assert run["dtype"] == "float32"
    assert run["attention"] == TARGET.config._attn_implementation
    assert run["device"].startswith("cpu")
    assert run["sampler"] == "BlockSampler"
    assert run["drafter"]["num_draft_tokens"] == 3
    assert run["plan"]["seed"] == 5
    assert len(run["prompts"]["sha256"]) == 64
    assert about["git_revision"] is None or len(about["git_revision"]) >= 40


def test_long_prompts_are_refused_by_name_or_shortened_and_marked():
    long = [Prompt("short", ((5, 6),)), Prompt("long", (tuple(range(1, 60)) * 3,))]
    with pytest.raises(ValueError, match=r"prompt 'long': .* max_prompt_tokens= shortens"):
        evaluate(GENERATOR, long, max_new_tokens=9)
    evaluation = evaluate(GENERATOR, long, max_new_tokens=9, max_prompt_tokens=16)
    assert [row.was_cut for row in evaluation.rows] == [False, True]
    assert [row.num_prompt_tokens for row in evaluation.rows] == [2, 16]
    assert "1 prompts were shortened" in str(evaluation.table())
    last = evaluate(GENERATOR, [long[1].turns[0][-16:]], max_new_tokens=9)
    assert last.rows[0].new_tokens == evaluation.rows[1].new_tokens


def test_turns_are_answered_one_after_the_other_with_the_replies_between_them():
    tokenizer, target = zoo.load_tokenizer(), zoo.load_target()
    generator = SpeculativeGenerator(target, PromptLookupDrafter(3))
    prompts = [Prompt("0", ("import os", "x = 1")), Prompt("1", ("def f():", "y"))]
    options = {"max_new_tokens": 6, "temperature": 1.0}
    rows = evaluate(generator, prompts, tokenizer=tokenizer, batch_size=2, **options).rows
    assert [(row.prompt, row.turn) for row in rows] == [("0", 0), ("1", 0), ("0", 1), ("1", 1)]
    assert len({row.seed for row in rows}) == 4
    reply = tokenizer.decode(rows[0].new_tokens, skip_special_tokens=True)
    text = f"import os{reply}\n\nx = 1"
    ids = tokenizer(text, return_tensors="pt").input_ids
    assert rows[2].num_prompt_tokens == ids.shape[1]
    expected = generator.generate(
        ids, max_new_tokens=6, do_sample=True, temperature=1.0, seed=rows[2].seed
    )
    assert rows[2].new_tokens == expected.new_tokens[0].tolist()


def test_warm_up_is_not_measured(monkeypatch):
    calls, generate = [], SpeculativeGenerator.generate

    def spy(self, *args, **options):
        calls.append(options)
        return generate(self, *args, **options)

    monkeypatch.setattr(SpeculativeGenerator, "generate", spy)
    evaluation = evaluate(GENERATOR, PROMPTS, warmup=2, **OPTIONS)
    assert len(calls) == 2 + 5
    assert [batch.index for batch in evaluation.batches] == list(range(5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be an integer >= 1"),
        ({"temperature": -1.0}, "temperature must be >= 0"),
        ({"samples": 2}, "samples > 1 are all the same at temperature 0"),
    ],
)
def test_plans_that_cannot_be_right_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        evaluate_function(GENERATOR, PROMPTS, **options)


@pytest.mark.parametrize("content", [b"my notes, without a newline", b"\x00\x01" * 99, b"{"])
def test_a_file_of_something_else_is_left_alone(content, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    run_file = RunFile(path, {"run": {}})
    if content == b"{":  # as a run begins that was interrupted at its first byte
        assert run_file.read() == []
        return
    with pytest.raises(ValueError, match="is no evaluation and would be lost"):
        run_file.read()
    assert path.read_bytes() == content
