"""A run is the same whatever its batches, shards and interruptions, and says where it is from."""

import json
from contextlib import suppress

import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from transformers import MaxLengthCriteria

from specdec import (
    EnsembleSampler,
    ModelDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    TypicalSampler,
    zoo,
)
from specdec.evaluation import Evaluation, Prompt, evaluate
from specdec.evaluation import evaluate as evaluate_function
from specdec.evaluation.run_file import RunFile
from specdec.settings import differences

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
    ("change", "difference"),
    [
        ({"temperature": 0.5}, r"plan.temperature \(0.9 there, 0.5 here\)"),
        ({"seed": 6}, r"plan.seed \(5 there, 6 here\)"),
        ({"max_new_tokens": 8}, r"plan.max_new_tokens \(9 there, 8 here\)"),
        ({"top_k": 5}, r"plan.options.top_k \(20 there, 5 here\)"),
        ({"batch_size": 2}, r"plan.batch_size \(1 there, 2 here\)"),
        ({"shard": (0, 2)}, r"shard \(\[0, 1\] there, \[0, 2\] here\)"),
        ({"stopping_criteria": [MaxLengthCriteria(99)]}, "plan.options.stopping_criteria"),
    ],
)
def test_a_file_of_another_run_is_not_gone_on_with(change, difference, tmp_path):
    path = tmp_path / "run.jsonl"
    evaluate(GENERATOR, PROMPTS, output=path, **OPTIONS)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"holds another run; they differ in {difference}"):
        evaluate(GENERATOR, PROMPTS, output=path, **{**OPTIONS, **change})
    with pytest.raises(ValueError, match=r"differ in prompts.count \(5 there, 4 here\), prompts"):
        evaluate(GENERATOR, PROMPTS[:4], output=path, **OPTIONS)
    assert path.read_bytes() == before


def other_weights(scale):
    model = build("llama")
    model.lm_head.weight.data *= scale
    return model


LOOKUP = PromptLookupDrafter(4)


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        (GENERATOR, (TARGET, LOOKUP), r"drafter.class \('ModelDrafter' there, 'PromptLook"),
        ((TARGET, LOOKUP), (TARGET, PromptLookupDrafter(3)), "drafter.num_draft_tokens"),
        ((TARGET, LOOKUP), (TARGET, PromptLookupDrafter(4, max_ngram=2)), "drafter.max_ngram"),
        ((TARGET, LOOKUP), (TARGET, PromptLookupDrafter(4, min_ngram=2)), "drafter.min_ngram"),
        ((TARGET, LOOKUP), (other_weights(-1), LOOKUP), "target.weights"),
        (
            GENERATOR,
            (TARGET, ModelDrafter(perturbed(TARGET), 3, draft_temperature=0.3)),
            "drafter.proposal.temperature",
        ),
        (
            GENERATOR,
            (TARGET, ModelDrafter(perturbed(TARGET), 3, proposal="argmax")),
            r"drafter.proposal.kind \('sample' there, 'argmax' here\)",
        ),
        (GENERATOR, (TARGET, ModelDrafter(other_weights(2), 3)), "drafter.weights"),
        (
            (TARGET, LOOKUP, TypicalSampler(0.9)),
            (TARGET, LOOKUP, TypicalSampler(0.1)),
            r"sampler.epsilon \(0.9 there, 0.1 here\)",
        ),
        (
            (TARGET, LOOKUP, EnsembleSampler(0.9)),
            (TARGET, LOOKUP, EnsembleSampler(0.1)),
            "sampler.target_weight",
        ),
        ((TARGET, LOOKUP, RejectionSampler()), (TARGET, LOOKUP), "sampler.class"),
        ((TARGET, LOOKUP), (build("llama").double(), LOOKUP), "dtype"),
    ],
)
def test_a_file_of_other_parts_is_not_gone_on_with(first, second, difference, tmp_path):
    """Each part says its settings; a run with others would mix two measurements."""
    path = tmp_path / "run.jsonl"
    first, second = (
        g if isinstance(g, SpeculativeGenerator) else SpeculativeGenerator(*g)
        for g in (first, second)
    )
    evaluate(first, PROMPTS[:2], output=path, **OPTIONS)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"differ in {difference}"):
        evaluate(second, PROMPTS[:2], output=path, **OPTIONS)
    shards = [evaluate(g, PROMPTS, shard=(i, 2), **OPTIONS) for i, g in enumerate((first, second))]
    with pytest.raises(ValueError, match=f"different runs; they differ in {difference}"):
        Evaluation.merged(shards)
    assert path.read_bytes() == before


def test_a_users_parts_are_told_apart_by_their_public_attributes():
    class Mine(PromptLookupDrafter):
        def __init__(self, depth):
            super().__init__(2)
            self.depth, self._counter, self.rule = depth, depth, lambda: depth

    assert differences(Mine(1).settings(), Mine(2).settings()) == ["depth (1 there, 2 here)"]
    assert Mine(1).settings() == Mine(1).settings()


def test_shards_of_other_runs_are_not_merged():
    first = evaluate(GENERATOR, PROMPTS, shard=(0, 2), **OPTIONS)
    second = evaluate(GENERATOR, PROMPTS, shard=(1, 2), **{**OPTIONS, "temperature": 1.0})
    with pytest.raises(ValueError, match=r"parts 0 and 1 .* plan.temperature \(0.9 there, 1.0"):
        Evaluation.merged([first, second])
    with pytest.raises(ValueError, match="nothing to merge"):
        Evaluation.merged([])
    with pytest.raises(TypeError, match="a part must be an Evaluation, got None"):
        Evaluation.merged([first, None])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line.pop("rows"), "line 3 is no batch of an evaluation .*rows"),
        (lambda line: line["rows"][0].pop("seed"), "line 3 is no batch .*seed"),
        (lambda line: line["rows"][0]["steps"][0].append(1), "line 3 .* a step must be 3 fields"),
        (lambda line: line["rows"][0]["steps"][0].__setitem__(1, 9), "num_accepted must be an int"),
        (lambda line: line["rows"][0]["steps"][0].__setitem__(2, ["x"]), "new_tokens must be a li"),
        (lambda line: line["rows"][0]["steps"][0].__setitem__(2, []), "new_tokens must be the"),
        (lambda line: line.update(batch=0), "line 3 repeats batch 0"),
        (lambda line: line.update(rows=[]), "line 3 .* expected rows"),
    ],
)
def test_a_damaged_line_of_a_run_is_named(change, message, tmp_path):
    path = tmp_path / "run.jsonl"
    evaluate(GENERATOR, PROMPTS[:2], output=path, **OPTIONS)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines[2])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for read in (Evaluation.load, lambda p: evaluate(GENERATOR, PROMPTS[:2], output=p, **OPTIONS)):
        with pytest.raises(ValueError, match=message):
            read(path)


def leaves(value, path=()):
    """Paths of all values inside nested lists and dictionaries, these included."""
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    inside = [leaf for key, inner in items for leaf in leaves(inner, (*path, key))]
    return [path, *inside] if path else inside


def is_legal(leaf, new) -> bool:
    """Whether some run could have the value there."""
    match [key for key in leaf if key not in ("rows", 0)]:
        case ["category" | "prompt"]:
            return isinstance(new, str)
        case ["seed"]:
            return new is None
        case ["was_cut"]:
            return isinstance(new, bool)
        case ["seconds"]:
            return len(leaf) == 2 and new == 7.5
        case ["steps", *_]:
            return new == []  # nothing drafted, or no step; what follows from it is checked
    return False


@pytest.mark.parametrize("new", [None, True, -1, 7.5, "x", [], {}, float("nan")], ids=repr)
def test_no_value_of_a_run_can_be_changed_into_one_that_no_run_has(new, tmp_path):
    path = tmp_path / "run.jsonl"
    evaluate(GENERATOR, PROMPTS[:1], output=path, **OPTIONS)
    header, text = path.read_text().splitlines()
    for leaf in leaves(json.loads(text)):
        line = json.loads(text)
        inner = line
        for key in leaf[:-1]:
            inner = inner[key]
        inner[leaf[-1]] = new
        path.write_text(f"{header}\n{json.dumps(line)}\n")
        refuses = pytest.raises(ValueError, match="line 2 is no batch of an evaluation")
        with suppress(ValueError) if is_legal(leaf, new) else refuses:
            Evaluation.load(path)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_file_that_cannot_be_written_is_refused_before_anything_is_generated(
    is_there, tmp_path, monkeypatch
):
    path, opened = tmp_path / "run.jsonl", type(tmp_path).open
    if is_there:
        evaluate(GENERATOR, PROMPTS[:1], output=path, **OPTIONS)

    def closed(self, mode="r", *args, **kwargs):
        if self == path and mode[0] != "r":
            raise PermissionError(f"Permission denied: {path}")
        return opened(self, mode, *args, **kwargs)

    monkeypatch.setattr(type(tmp_path), "open", closed)
    monkeypatch.setattr(SpeculativeGenerator, "generate", None)
    with pytest.raises(PermissionError, match=r"run\.jsonl"):
        evaluate(GENERATOR, PROMPTS[:2], output=path, **OPTIONS)
    assert path.exists() == is_there


def test_a_refused_run_leaves_no_file(tmp_path):
    path = tmp_path / "run.jsonl"
    with pytest.raises(ValueError, match="positions"):
        evaluate(GENERATOR, PROMPTS, output=path, max_new_tokens=10**6)
    assert not path.exists()


def test_a_file_that_is_no_run_is_left_alone(tmp_path):
    path = tmp_path / "notes.jsonl"
    path.write_text('{"text": "mine"}\n')
    with pytest.raises(ValueError, match="is no evaluation"):
        evaluate(GENERATOR, PROMPTS, output=path, **OPTIONS)
    assert path.read_text() == '{"text": "mine"}\n'
    path.write_text('{"format": "specdec.evaluation/1", "run": {}}\nnot json\n')
    with pytest.raises(ValueError, match="line 2 is no JSON"):
        Evaluation.load(path)
    path.write_text('{"format": "specdec.evaluation/1"}\n{}\n')
    with pytest.raises(ValueError, match="is no evaluation: its first line"):
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
    assert run["sampler"] == {"class": "BlockSampler"}
    assert run["drafter"]["proposal"] == {
        "class": "Proposal",
        "kind": "sample",
        "temperature": None,
    }
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
        ids, max_new_tokens=6, do_sample=True, seed=rows[2].seed, neutral=True
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
        ({"temperature": -1.0}, "temperature must be a number >= 0"),
        ({"temperature": "x"}, "temperature must be a number >= 0, got 'x'"),
        ({"temperature": [0.5]}, "temperature must be a number >= 0"),
        ({"samples": 2}, "samples > 1 are all the same at temperature 0"),
        ({"seed": -1}, "seed must be an integer in 0..18446744073709551615, got -1"),
        ({"seed": "x"}, "seed must be an integer in"),
        ({"warmup": -1}, "warmup must be an integer >= 0, got -1"),
        ({"shard": (1, 1)}, r"the index of shard must be an integer in 0..0, got 1"),
        ({"shard": (-1, 2)}, "the index of shard must be an integer in 0..1, got -1"),
        ({"shard": (0, 0)}, "the count of shard must be an integer >= 1, got 0"),
        ({"shard": 5}, r"shard must be a pair \(index, count\), got 5"),
        ({"do_sample": True}, "evaluate has no option do_sample: a temperature above 0 samples"),
        ({"streamer": None}, "evaluate has no option streamer"),
        ({"num_return_sequences": 2}, "evaluate has no option num_return_sequences: samples=n"),
        ({"progress": "x"}, "progress must be True or False, got 'x'"),
        ({"output": ""}, "output must be the path of a file, got ''"),
        ({"output": "."}, "output must be the path of a file, but . is a folder"),
        (
            {"output": "nowhere/run"},
            "but there is no folder nowhere",
        ),
        ({"output": 5}, "output must be a string or a Path, got 5"),
        ({"attention_mask": torch.ones(1, 2)}, "attention_mask belongs to prompts in one tensor"),
    ],
)
def test_plans_that_cannot_be_right_are_refused(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        evaluate_function(GENERATOR, PROMPTS, **options)


@pytest.mark.parametrize(
    ("generator", "prompts", "message"),
    [
        (None, PROMPTS, "generator must be a SpeculativeGenerator, got None"),
        (TARGET, PROMPTS, "generator must be a SpeculativeGenerator, got a LlamaForCausalLM"),
        (GENERATOR, 5, "prompts must be an Iterable, got 5"),
        (GENERATOR, [PROMPTS[0], PROMPTS[0]], "prompts 0 and 1 have the id 'p0'"),
        (GENERATOR, ["text"], "prompt '0' is a text; pass tokenizer="),
    ],
)
def test_what_cannot_be_evaluated_is_refused(generator, prompts, message):
    with pytest.raises((ValueError, TypeError), match=message):
        evaluate_function(generator, prompts)


def test_prompts_of_another_form_are_refused():
    for options, message in (
        ({"id": 5, "turns": ("x",)}, "the id of a prompt must be a string, got 5"),
        ({"id": "a", "turns": ()}, "turns of prompt 'a' must be a tuple of texts"),
        ({"id": "a", "turns": ("",)}, "turns of prompt 'a'"),
        ({"id": "a", "turns": ((1,), (2,))}, "turns of prompt 'a'"),
        ({"id": "a", "turns": "text"}, "turns of prompt 'a'"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            Prompt(**options)


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
