"""`write_answers`: the target's own text, each line once, whatever is killed on the way."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from diagonal import first

from specdec import SpeculativeGenerator, zoo
from specdec.lab.cli import main
from specdec.lab.evaluation import Prompt, write_answers
from specdec.lab.evaluation.answers import repeated_share
from specdec.lab.training.data import encode_texts, read_texts

ROOT = Path(__file__).parents[2]
TARGET, TOKENIZER = zoo.load_target(), zoo.load_tokenizer()
TEXTS = [text[: 20 + 7 * i] for i, text in enumerate(zoo.heldout_prompts(12))]
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def written(path, prompts=TEXTS, drafter="lookup", **options):
    options = {"tokenizer": TOKENIZER, "max_new_tokens": 12, "batch_size": 3, **options}
    return write_answers(SpeculativeGenerator(TARGET, drafter), prompts, path, **options)


def by_key(path):
    """Every line by prompt and sample; none comes twice."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    found = {(line["prompt"], line["sample"]): line for line in lines}
    assert len(found) == len(lines)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The lines of one run, sampled."""
    path = tmp_path_factory.mktemp("whole") / "texts.jsonl"
    written(path, temperature=1.0, seed=5)
    return by_key(path)


def test_greedy_answers_are_those_of_hf_and_training_reads_them(tmp_path):
    """Without a drafter of ours, without a batch: the target's own `generate`."""
    found = written(tmp_path / "texts.jsonl")
    lines = by_key(tmp_path / "texts.jsonl")
    for index, prompt in enumerate(TEXTS):
        ids = TOKENIZER(prompt, return_tensors="pt").input_ids
        own = TARGET.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
        is_ended = own[-1] == TOKENIZER.eos_token_id
        line = lines[str(index), 0]
        assert line["num_tokens"] == len(own)
        assert line["finish_reason"] == ("eos" if is_ended else "length")
        assert line["text"] == TOKENIZER.decode(ids[0].tolist() + own[: len(own) - is_ended])
        assert line["answer"] == TOKENIZER.decode(own, skip_special_tokens=True)
    texts = list(read_texts(tmp_path / "texts.jsonl", TOKENIZER))
    assert sorted(texts) == sorted(line["text"] for line in lines.values())
    assert all(ids[-1] == TOKENIZER.eos_token_id for ids in encode_texts(texts, TOKENIZER))
    cut = sum(line["finish_reason"] == "length" for line in lines.values()) / len(lines)
    assert found.share_cut == cut
    assert f"12 answers in {tmp_path}" in str(found)
    assert f"{cut:.1%} cut off" in str(found)


def test_repeated_tokens_are_counted():
    assert repeated_share([1, 2, 3]) == 0
    assert repeated_share([7] * 13) == pytest.approx(0.9)
    tokens = random.Random(0).choices(range(3), k=40)
    seen, repeated = [], 0
    for start in range(37):
        repeated += tokens[start : start + 4] in seen
        seen.append(tokens[start : start + 4])
    assert repeated_share(tokens) == pytest.approx(repeated / 37)


def test_a_chat_template_stands_in_the_text_with_all_turns(tmp_path):
    tokenizer = zoo.load_tokenizer()
    tokenizer.chat_template = TEMPLATE
    prompts = [Prompt("a", ("def f(x):", "class A:")), Prompt("b", ("import os",))]
    written(tmp_path / "texts.jsonl", prompts, tokenizer=tokenizer)
    lines = by_key(tmp_path / "texts.jsonl")
    assert lines["b", 0]["text"] == f"<user>import os\n<assistant>{lines['b', 0]['answer']}"
    text = lines["a", 0]["text"]
    assert text.startswith("<user>def f(x):\n<assistant>")
    assert text.endswith(f"<user>class A:\n<assistant>{lines['a', 0]['answer']}")


def test_special_tokens_inside_of_an_earlier_answer_stay_in_the_text(tmp_path):
    tokenizer = zoo.load_tokenizer()
    tokenizer.chat_template = TEMPLATE
    prompt = [Prompt("a", ("print", "class A:"))]
    written(tmp_path / "plain.jsonl", prompt, tokenizer=tokenizer)
    (plain,) = by_key(tmp_path / "plain.jsonl").values()
    said = plain["text"].split("<assistant>")[1].split("\n<user>")[0]
    special = tokenizer.tokenize(said)[2]
    tokenizer.add_special_tokens({"additional_special_tokens": [special]})
    written(tmp_path / "texts.jsonl", prompt, tokenizer=tokenizer)
    (line,) = by_key(tmp_path / "texts.jsonl").values()
    assert line["text"].split("<assistant>")[1].split("\n<user>")[0] == said
    assert tokenizer.decode(tokenizer(said).input_ids, skip_special_tokens=True) != said


@pytest.mark.parametrize("torn", ["", "{", '{"a": "\xe9'])
def test_a_torn_settings_file_is_refused_in_words(torn, tmp_path):
    path = tmp_path / "texts.jsonl"
    written(path, TEXTS[:1])
    before, beside = path.read_bytes(), tmp_path / ".texts.jsonl.settings"
    beside.write_bytes(torn.encode("latin-1"))
    with pytest.raises(ValueError, match=r"settings of the answers in .* is cut off or damaged"):
        written(path, TEXTS[:1])
    assert path.read_bytes() == before
    path.write_bytes(b"")
    written(path, TEXTS[:1])  # nothing is lost
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "cut", first(["between lines", "in a line", "in the first line", "no lines"], ["in a line"])
)
def test_a_file_that_was_cut_off_is_completed(cut, whole, tmp_path, capsys):
    path, options = tmp_path / "texts.jsonl", {"temperature": 1.0, "seed": 5}
    written(path, **options)
    content = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == 10]
    keep = {"between lines": ends[4], "in a line": ends[4] + 9, "in the first line": 7}
    path.write_bytes(content[: keep.get(cut, 0)])
    written(path, batch_size=2, progress=True, **options)
    is_said = f"5 of {len(TEXTS)} answers are in {path}" in capsys.readouterr().err
    assert is_said == (keep.get(cut, 0) > 7)
    assert by_key(path) == whole
    before = path.stat().st_mtime_ns
    assert len(written(path, **options).lines) == len(TEXTS)
    assert path.stat().st_mtime_ns == before


def test_samples_are_texts_of_their_own(tmp_path):
    written(tmp_path / "texts.jsonl", TEXTS[:2], temperature=1.0, samples=3)
    lines = by_key(tmp_path / "texts.jsonl")
    assert len({line["text"] for line in lines.values()}) == 6


def test_files_that_would_be_lost_or_mixed_are_refused(tmp_path):
    path = tmp_path / "texts.jsonl"
    with pytest.raises(ValueError, match=r"\.jsonl file.*got .*texts\.txt"):
        written(tmp_path / "texts.txt")
    path.write_text('{"text": "mine"}\n')
    with pytest.raises(ValueError, match="was not begun by this function"):
        written(path)
    assert path.read_text() == '{"text": "mine"}\n'
    path.unlink()
    written(path, TEXTS[:2])
    content = path.read_bytes()
    with pytest.raises(ValueError, match=r"another run; they differ in .*plan\.seed"):
        written(path, TEXTS[:2], seed=1)
    path.write_bytes(content + content)
    with pytest.raises(ValueError, match=r"line 3 is damaged: .* comes twice"):
        written(path, TEXTS[:2])
    with pytest.raises(ValueError, match="prompt '0' must be a text"):
        written(tmp_path / "ids.jsonl", [[5, 6]])
    assert not (tmp_path / "ids.jsonl").exists()


def test_the_command_ends_with_a_line_on_quality(tmp_path, capsys):
    path = tmp_path / "texts.jsonl"
    words = ["--output", str(path), "--max-new-tokens", "6", "--drafter", "zoo:eagle3"]
    assert main(["answers", *words]) == 0
    line = capsys.readouterr().out
    assert line.startswith(f"16 answers in {path}: ")
    assert "4-grams repeated" in line
    assert main(["answers", "--output", str(tmp_path / "x.txt"), *words[2:]]) == 2


PROMPTS = [{"id": str(i), "text": text} for i, text in enumerate(zoo.heldout_prompts(24))]
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def command(folder, *launcher):
    """`specdec answers` of processes that a signal reaches as a group."""
    words = ["answers", "--prompts", str(folder / "prompts.jsonl"), "--temperature", "1"]
    words += ["--max-new-tokens", "40", "--batch-size", "2", "--seed", "3"]
    words += ["--output", str(folder / f"texts{len(launcher)}.jsonl")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    environment["PYTHONPATH"] = str(ROOT)
    options = {"env": environment, "start_new_session": True, "stderr": subprocess.DEVNULL}
    line = [sys.executable, *launcher, "-m", "specdec", *words]
    return subprocess.Popen(line, stdout=subprocess.PIPE, text=True, **options)


def lines_of(path):
    """How many answers are there, in all parts."""
    parts = path.with_name(f".{path.name}.parts").glob("*.jsonl")
    return sum(max(0, part.read_bytes().count(b"\n") - 1) for part in parts)


@pytest.mark.slow
@pytest.mark.parametrize("kills", [1, 10])
def test_two_processes_that_are_killed_at_random_write_what_one_does(kills, tmp_path):
    """Kills are spread over the file: each comes once some more lines are there, at a random time
    after that, in the middle of a batch or of a line.
    """
    lines = "".join(json.dumps(prompt) + "\n" for prompt in PROMPTS)
    (tmp_path / "prompts.jsonl").write_text(lines)
    one = command(tmp_path)
    assert one.communicate(timeout=600)[0].startswith(f"{len(PROMPTS)} answers")
    path, generator = tmp_path / f"texts{len(TWO)}.jsonl", random.Random(kills)
    for kill in range(kills):
        process = command(tmp_path, *TWO)
        wanted = kill * len(PROMPTS) // (kills + 1)
        while process.poll() is None and lines_of(path) <= wanted:
            time.sleep(0.02)
        time.sleep(generator.uniform(0, 0.5))
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    last = command(tmp_path, *TWO)
    assert last.communicate(timeout=600)[0].startswith(f"{len(PROMPTS)} answers")
    assert by_key(path) == by_key(tmp_path / "texts0.jsonl")
