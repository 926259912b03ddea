"""A run is the same whatever its batches, shards and interruptions, and says where it is from."""

import copy
import json
import re
from contextlib import nullcontext
from dataclasses import asdict

import pytest
import torch
from architectures import VOCAB, build
from drafting import perturbed, ragged_prompts
from transformers import GenerationConfig, MaxLengthCriteria

from specdec import (
    EnsembleSampler,
    ModelDrafter,
    PromptLookupDrafter,
    RejectionSampler,
    SpeculativeGenerator,
    TypicalSampler,
    zoo,
)
from specdec.lab.evaluation import Evaluation, Prompt, evaluate, markers
from specdec.lab.evaluation.plan import settings_of_run
from specdec.lab.evaluation.prompts import encode
from specdec.lab.evaluation.run_file import RunFile
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
    return [asdict(row) for row in evaluation.rows]


@pytest.mark.smoke
@pytest.mark.parametrize("batch_size", [2, None])
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
    length = evaluation.estimates["acceptance_length"]
    assert length.note == "no interval: 5 prompts"
    texts = [tuple(row.new_tokens) for row in evaluation.rows if row.prompt == "p0"]
    assert len(set(texts)) == 3
    once = {row.prompt: row.new_tokens for row in evaluate(GENERATOR, PROMPTS, **OPTIONS).rows}
    assert list(texts[0]) == once["p0"]


@pytest.mark.parametrize(("stop_after", "cut"), [(0, 0), (1, 40), (3, 0), (5, 1)])
def test_an_interrupted_run_goes_on_without_losing_or_repeating_a_prompt(
    stop_after, cut, tmp_path, monkeypatch
):
    path, asked = tmp_path / "run.jsonl", []
    generate = SpeculativeGenerator.generate

    def spy(self, ids, mask, **options):
        if len(asked) == stop_after:
            raise KeyboardInterrupt
        asked.append(ids[mask.bool()].tolist())
        return generate(self, ids, mask, **options)

    monkeypatch.setattr(SpeculativeGenerator, "generate", spy)
    with pytest.raises(KeyboardInterrupt) if stop_after < 5 else nullcontext():
        evaluate(GENERATOR, PROMPTS, output=path, **OPTIONS)
    monkeypatch.setattr(markers, "PATIENCE_S", 0.0)  # this process lives: it was not killed
    if cut:  # killed while it was writing
        part = next(file for file in RunFile(path).files if file.exists())
        part.write_bytes(part.read_bytes()[:-cut])
    kept, stop_after = stop_after - bool(cut), 99
    asked.clear()
    resumed = evaluate(GENERATOR, PROMPTS, output=path, **OPTIONS)
    assert len(asked) == 5 - kept
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
        ({"generator": SpeculativeGenerator(TARGET, "lookup")}, r"drafter\.class"),
        ({"temperature": 0.5}, r"plan.temperature \(0.9 there, 0.5 here\)"),
        ({"seed": 6}, "plan.seed"),
        ({"max_new_tokens": 8}, "plan.max_new_tokens"),
        ({"top_k": 5}, "plan.options.top_k"),
        ({"batch_size": 2}, "plan.batch_size"),
        ({"stopping_criteria": [MaxLengthCriteria(99)]}, "plan.options.stopping_criteria"),
        ({"prompts": PROMPTS[:4]}, r"prompts.count \(5 there, 4 here\), prompts.sha256"),
        ({"prompts": [Prompt("p0", ((9,),), "a"), *PROMPTS[1:]]}, "prompts.sha256"),
    ],
)
def test_a_file_of_another_run_is_not_gone_on_with(change, difference, tmp_path):
    path, options = tmp_path / "run.jsonl", {"generator": GENERATOR, "prompts": PROMPTS, **OPTIONS}
    evaluate(output=path, **options)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=f"holds another run; they differ in {difference}"):
        evaluate(output=path, **options | change)
    assert path.read_bytes() == before


def other_weights(scale):
    model = build("llama")
    model.lm_head.weight.data *= scale
    return model


def drafting(**options):
    return TARGET, ModelDrafter(perturbed(TARGET), 3, **options)


def looking_up(*sampler, **options):
    return TARGET, PromptLookupDrafter(4, **options), *sampler


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        (drafting(), looking_up(), r"drafter.class \('ModelDrafter' there, 'PromptLook"),
        (looking_up(), (TARGET, PromptLookupDrafter(3)), "drafter.num_draft_tokens"),
        (looking_up(), looking_up(max_ngram=2), "drafter.max_ngram"),
        (looking_up(), (other_weights(-1), PromptLookupDrafter(4)), "target.weights"),
        (drafting(), drafting(draft_temperature=0.3), "drafter.proposal.temperature"),
        (drafting(), drafting(proposal="argmax"), "drafter.proposal.kind"),
        (drafting(), (TARGET, ModelDrafter(other_weights(2), 3)), "drafter.weights"),
        (looking_up(TypicalSampler(0.9)), looking_up(TypicalSampler(0.1)), "sampler.epsilon"),
        (looking_up(EnsembleSampler(0.9)), looking_up(EnsembleSampler(0.1)), "sampler.target_w"),
        (looking_up(RejectionSampler()), looking_up(), "sampler.class"),
        (looking_up(), (build("llama").double(), PromptLookupDrafter(4)), "dtype"),
    ],
)
def test_every_part_says_its_settings(first, second, difference):
    """A run with others would mix two measurements."""
    runs = (settings_of_run(SpeculativeGenerator(*parts), PROMPTS) for parts in (first, second))
    assert re.match(difference, ", ".join(differences(*runs)))


def test_a_users_parts_are_told_apart_by_their_public_attributes():
    class Mine(PromptLookupDrafter):
        def __init__(self, depth):
            super().__init__(2)
            self.depth, self._counter, self.rule = depth, depth, lambda: depth

    assert differences(Mine(1).settings(), Mine(2).settings()) == ["depth (1 there, 2 here)"]
    assert Mine(1).settings() == Mine(1).settings()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line.pop("rows"), "line 3 has no 'rows'"),
        (lambda line: line["rows"][0].pop("seed"), "line 3 is damaged: .*seed"),
        (lambda line: line["rows"][0]["steps"][0].append(1), "line 3 is damaged"),
        (lambda line: line["rows"][0]["steps"][0].__setitem__(1, 9), "num_accepted"),
        (lambda line: line["rows"][0]["steps"][0].__setitem__(2, []), "new_tokens"),
        (lambda line: line.update(batch=0), "line 3 is damaged: batch 0 comes twice"),
        (lambda line: line.update(rows=[]), "line 3 is damaged"),
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


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_generated(
    tmp_path, monkeypatch
):
    path, make = tmp_path / "run.jsonl", type(tmp_path).mkdir

    def closed(self, *args, **kwargs):
        if self.parent == tmp_path:
            raise PermissionError(f"Permission denied: {self}")
        return make(self, *args, **kwargs)

    monkeypatch.setattr(type(tmp_path), "mkdir", closed)
    monkeypatch.setattr(SpeculativeGenerator, "generate", None)
    with pytest.raises(PermissionError, match=r"run\.jsonl"):
        evaluate(GENERATOR, PROMPTS[:2], output=path, **OPTIONS)
    assert not list(tmp_path.iterdir())


def test_a_run_that_fails_leaves_nothing_behind(tmp_path):
    path = tmp_path / "run.jsonl"
    with pytest.raises(ValueError, match="positions"):
        evaluate(GENERATOR, PROMPTS[:1], output=path, max_new_tokens=10**6)
    assert not list(tmp_path.iterdir())
    evaluate(GENERATOR, PROMPTS[:1], output=path, **OPTIONS)
    with pytest.raises(ValueError, match=r"differ in plan\.seed"):
        evaluate(GENERATOR, PROMPTS[:1], output=path, **OPTIONS | {"seed": 6})
    evaluate(GENERATOR, PROMPTS[:1], output=path, **OPTIONS)
    assert list(tmp_path.iterdir()) == [path]


def test_stop_strings_end_texts_with_the_tokenizer_that_the_run_has(tmp_path):
    tokenizer = zoo.load_tokenizer()
    target = zoo.load_target()
    own = copy.copy(target)  # over the same weights
    own.generation_config = GenerationConfig(eos_token_id=1, stop_strings=["\n"])
    texts, size = ["def main(argv):", "import os"], {"tokenizer": tokenizer, "max_new_tokens": 16}
    stopped = [
        evaluate(SpeculativeGenerator(model, "lookup"), texts, output=path, **size, **options)
        for model, options, path in (
            (target, {"stop_strings": ["\n"]}, tmp_path / "run.jsonl"),
            (target, {"generation_config": GenerationConfig(stop_strings=["\n"])}, None),
            (own, {"neutral": False}, None),
        )
    ]
    full = evaluate(SpeculativeGenerator(target, "lookup"), texts, **size)
    assert Evaluation.load(tmp_path / "run.jsonl").rows
    for evaluation in stopped:
        for row, longer in zip(evaluation.rows, full.rows, strict=True):
            assert row.finish_reason == "stop"
            assert row.new_tokens == longer.new_tokens[: len(row.new_tokens)]
            assert "\n" in tokenizer.decode(row.new_tokens)


def test_a_saved_run_says_where_it_comes_from(tmp_path):
    path = tmp_path / "run.jsonl"
    evaluate(GENERATOR, PROMPTS[:1], output=path, **OPTIONS)
    about = Evaluation.load(path).about
    assert about["versions"]["torch"] == torch.__version__
    run = about["run"]
    assert run["dtype"] == "float32"
    assert run["attention"] == TARGET.config._attn_implementation
    assert run["device"].startswith("cpu")
    assert run["sampler"] == {"class": "BlockSampler", "lossless": True}
    assert run["drafter"]["proposal"] == {
        "class": "Proposal",
        "kind": "sample",
        "edit": None,
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


def test_turns_read_special_tokens_inside_of_earlier_answers_and_no_end_of_them():
    tokenizer, target = zoo.load_tokenizer(), zoo.load_target()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    generator = SpeculativeGenerator(target, PromptLookupDrafter(3))
    prompts, options = [Prompt("0", ("import os", "x = 1"))], {"max_new_tokens": 6, "warmup": 0}
    first = evaluate(generator, prompts, tokenizer=tokenizer, **options).rows[0].new_tokens
    special = tokenizer.convert_ids_to_tokens(first[2])
    tokenizer.add_special_tokens({"additional_special_tokens": [special]})
    end = first[-1]
    for ends in ([], [end]):
        kept = first[: first.index(end)] if ends else first
        _, row = evaluate(
            generator, prompts, tokenizer=tokenizer, eos_token_id=ends, **options
        ).rows
        reply = tokenizer.decode(kept)
        assert special.replace("Ġ", " ").replace("Ċ", "\n") in reply
        assert row.num_prompt_tokens == len(encode(prompts[0], [reply], tokenizer))
        assert row.num_prompt_tokens != len(encode(prompts[0], [reply + "x ="], tokenizer))


def test_warm_up_is_not_measured(monkeypatch):
    calls, generate = [], SpeculativeGenerator.generate

    def spy(self, *args, **options):
        calls.append(options)
        return generate(self, *args, **options)

    monkeypatch.setattr(SpeculativeGenerator, "generate", spy)
    evaluation = evaluate(GENERATOR, PROMPTS, warmup=2, **OPTIONS)
    assert len(calls) == 2 + 5
    assert [batch.index for batch in evaluation.batches] == list(range(5))


HEADER = b'{"format": "specdec.evaluation/1", "run": {}}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"my notes, without a newline", "is no evaluation and would be lost"),
        (b"\x00\x01" * 99, "is no evaluation and would be lost"),
        (b'{"text": "mine"}\n', "is no evaluation: its first line"),
        (b'{"format": "specdec.evaluation/1"}\n{}\n', "is no evaluation: its first line"),
        (HEADER + b"not json\n", "line 2 is no JSON"),
    ],
)
def test_a_file_of_something_else_is_left_alone(content, message, tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        evaluate(GENERATOR, PROMPTS, output=path, **OPTIONS)
    with pytest.raises(ValueError, match="line"):
        Evaluation.load(path)
    assert path.read_bytes() == content


def test_a_run_without_a_finished_batch_is_begun_anew_and_cannot_be_loaded(tmp_path):
    path = tmp_path / "run.jsonl"
    for beginning in (b"{", HEADER[:30]):  # interrupted while its first line was written
        path.write_bytes(beginning)
        assert RunFile(path, {"run": {}}).refresh() == {}
    path.write_bytes(HEADER)
    with pytest.raises(ValueError, match="no finished batch"):
        Evaluation.load(path)
