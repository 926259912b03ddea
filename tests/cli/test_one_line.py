"""What cannot be right ends every command in one line on standard error, before anything large is
loaded, and never in a traceback.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from training_runs import on_a_cpu
from transformers import AutoModelForCausalLM

from specdec import Proposal, SpeculativeGenerator, zoo
from specdec.cli import main

TARGET, HEAD = str(zoo.WEIGHTS_DIR / "target"), str(zoo.WEIGHTS_DIR / "eagle3")
PROMPT = ["--prompt", "def main():", "--max-new-tokens", "8"]
TRAINED = ["eagle3", "--target", "zoo", "--data", "zoo", "--output", "x"]


def without(error, *arguments):
    """The command in a process of its own, in which importing torch is an error."""
    code = f"""
import runpy, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise {error}
sys.meta_path.insert(0, Finder())
sys.argv[:] = {["specdec", *arguments]}
runpy.run_module("specdec", run_name="__main__")
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def refused(capsys, *arguments):
    """The one line that a command ends in."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert code == 2, captured
    assert captured.out == ""
    (line,) = [s for s in captured.err.splitlines() if s and "Loading weights" not in s]
    assert line.startswith(("specdec: ", "error: "))
    assert len(line) < 430
    return line


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    """Loading a model is an error."""

    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(zoo, "load_target", load)


def damaged(tmp_path, name):
    """Folders that are no models."""
    folder = tmp_path / name.replace(" ", "-")
    folder.mkdir()
    config = {
        "deep": "[" * 100_000 + "]" * 100_000,
        "no type": "{}",
        "a list": "[1]",
        "cut": '{"model_type": "lla',
        "odd": json.dumps({"model_type": "llama", "hidden_size": "x"}),
        "escapes": json.dumps({"model_type": "\x1b[2Jllama"}),
    }
    if name in config:
        (folder / "config.json").write_text(config[name])
    return folder


BAD = [
    (
        ["--sampler", "block", "--target-weight", "0.5"],
        "target_weight belongs to the sampler ensemble",
    ),
    (["--drafter", "none", "--num-draft-tokens", "4"], "belongs to a drafter; there is none"),
    (["--device", "cuda:99"], "device cuda:99 cannot be used here: .*try cpu"),
    (["--device", "gpu"], "device gpu cannot be used here: .*try cpu"),
    (["--device", "meta"], "device meta cannot be used here"),
    (["--dtype", "float8"], "argument --dtype: invalid choice: 'float8'"),
    (["--sampler", "best"], "argument --sampler: invalid choice: 'best'"),
    (["--sampler", "ensemble", "--target-weight", "2"], r"a number in 0\.\.1, got 2"),
    (["--drafter", ""], "cannot load ''"),
    (["--drafter", "eagle:"], "no drafter 'eagle:'; write eagle:PATH, or zoo:eagle3"),
    (["--drafter", "./no/such"], "cannot load './no/such': .*there is no such folder"),
    (["--drafter", "eagle:./no/such"], "cannot load './no/such'"),
    (["--drafter", __file__], "cannot load .*: it must be a folder with a config.json"),
    (["--drafter", "zoo:model"], "zoo:model drafts for --target zoo only"),
    (["--prompt", "a\udcff"], r"argument --prompt: expected text in UTF-8, got 'a\\udcff'"),
    (["--drafter", "none", "--temperature", "1", "--draft-temperature", "1"], "there is none"),
    (["--drafter", "lookup", "--temperature", "1", "--proposal", "argmax"], "not to lookup"),
    (["--top-p", "0.5"], "--top-p belongs to sampling; pass a --temperature above 0"),
    (["--seed", "1"], "--seed belongs to sampling"),
    (["--draft-temperature", "0.5"], "--draft-temperature belongs to sampling"),
]


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(("wrong", "message"), BAD, ids=lambda case: " ".join(case)[:40])
def test_a_setting_that_cannot_be_right_is_told_before_anything_is_loaded(wrong, message, capsys):
    line = refused(capsys, "generate", "--target", TARGET, *PROMPT, *wrong)
    assert re.search(message, line), line


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["certify", "--target", TARGET, "--device", "gpu"], "device gpu cannot be used"),
        (["evaluate", "--seed", "1"], "--seed belongs to sampling; pass a --temperature"),
        (["evaluate", "--limit", "0"], "--limit: must be an integer >= 1, got 0"),
        (["certify", "--samples", "x"], "--samples: must be an integer >= 1, got x"),
        (["certify", "--prompt", "a", "--prompts", "2"], "--prompts belongs to prompts of source"),
        (["certify", "--temperature=-1"], "--temperature must be"),
        (["inspect", HEAD, "--prompt", "a"], "--prompt belongs to the parity check; pass --target"),
        (["inspect", HEAD, "--num-draft-tokens", "8"], "--num-draft-tokens belongs to the parity"),
        (["train", *TRAINED, "--mlp-width", "-1"], "--mlp-width: must be an integer >= 1, got -1"),
        (["generate", "--target", TARGET, *PROMPT, "\x1b[2J"], r"arguments: \\x1b\[2J; see --help"),
    ],
)
def test_every_command_tells_its_own(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert re.search(message, refused(capsys, *arguments))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *(("generate", name) for name in ("empty", "deep", "no type", "a list", "cut", "odd")),
        *((name, "escapes") for name in ("generate", "certify", "inspect", "train")),
    ],
)
def test_a_folder_that_is_no_model_is_told_in_one_line(command, name, tmp_path, capsys):
    folder = damaged(tmp_path, name)
    arguments = {
        "generate": ["--target", folder, *PROMPT],
        "certify": ["--target", folder],
        "inspect": [HEAD, "--target", folder],
        "train": ["eagle3", "--target", folder, "--data", "zoo", "--output", tmp_path],
    }
    with on_a_cpu():
        line = refused(capsys, command, *arguments[command])
    assert str(folder)[:60] in line
    assert line.isprintable()


def test_a_target_that_lacks_weights_is_refused_instead_of_run_with_random_ones(tmp_path, capsys):
    """An EAGLE head's configuration is that of a Llama, and HF draws what its files lack."""
    line = refused(capsys, "generate", "--target", HEAD, *PROMPT)
    assert "tokenizer" in line
    zoo.load_tokenizer().save_pretrained(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((zoo.WEIGHTS_DIR / "eagle3" / name).read_bytes())
    line = refused(capsys, "generate", "--target", tmp_path, *PROMPT)
    assert "is no whole causal LM: its files lack" in line
    assert f"eagle:{tmp_path}"[:50] in line


def test_a_head_is_recognised_without_its_prefix(capsys):
    for drafter in (HEAD, f"eagle:{HEAD}"):
        arguments = ["--target", "zoo", "--drafter", drafter, "--dtype", "float32"]
        assert main(["generate", *arguments, *PROMPT]) == 0
        shown = capsys.readouterr().out
        assert "acceptance length" in shown
        figures = [line for line in shown.splitlines() if "acceptance length" in line]
        assert figures[0].split("acceptance length ")[1] > "1.5"  # random weights accept nothing


@pytest.mark.parametrize("sampler", ["coupling", "ensemble"])
def test_samplers_have_names_and_the_zoo_is_a_target(sampler, capsys):
    options = ["--sampler", sampler, "--temperature", "1", "--seed", "3"]
    assert main(["generate", "--target", "zoo", "--drafter", "zoo:model", *options, *PROMPT]) == 0
    assert "seed 3" in capsys.readouterr().out


def test_a_draft_model_of_another_tokenizer_drafts_what_is_common(tmp_path, capsys):
    """The zoo's target under two exchanged ids; where hardly any token is common, it is refused."""
    model, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    by_id = sorted(vocab, key=vocab.get)
    first, second = by_id[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(content))
    options = ["--target", "zoo", "--drafter", str(tmp_path), "--dtype", "float32", *PROMPT]
    assert main(["generate", *options]) == 0
    assert "acceptance length" in capsys.readouterr().out
    content["model"] |= {"vocab": {f"{t}!" if i > 300 else t: i for i, t in enumerate(by_id)}}
    content["model"]["merges"] = []
    path.write_text(json.dumps(content))
    line = refused(capsys, "generate", *options)
    assert "the tokenizers of target and draft model share" in line


def offline(*args, **kwargs):
    raise ConnectionError("no network")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--target", "somebody/model", *PROMPT],
        ["generate", "--target", TARGET, "--drafter", "eagle:somebody/model", *PROMPT],
        ["inspect", "somebody/model"],
        ["train", "eagle3", "--target", "somebody/model", "--data", "zoo", "--output", "x"],
    ],
)
@pytest.mark.usefixtures("nothing_is_loaded")
def test_offline_what_cannot_be_found_is_told_at_once(arguments, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specdec.checkpoints.hub.HfApi.model_info", offline)
    started = time.monotonic()
    line = refused(capsys, *arguments)
    assert time.monotonic() - started < 5
    assert "somebody/model is no folder here and is not in the local cache" in line
    assert not list(tmp_path.iterdir())


def test_the_train_command_has_its_own_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: specdec train ")
    assert "--checkpoint-minutes" in shown
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "train a head" in capsys.readouterr().out


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def load(*args, **kwargs):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(zoo, "load_target", load)
    # A shell that runs a command in the background tells it to ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    assert main(["generate", "--target", "zoo", *PROMPT]) == 130
    signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "specdec: interrupted\n"


@pytest.mark.parametrize("command", [["train", *TRAINED], ["demo"]])
def test_an_interrupt_while_libraries_are_imported_is_one_line(command):
    done = without("KeyboardInterrupt", *command)
    assert done.returncode == 130
    assert done.stderr == "specdec: interrupted\n"


def test_an_interrupted_training_says_where_it_goes_on(monkeypatch, capsys, tmp_path, small):
    text = "def f(x):\n    return x\n" * 2000
    (tmp_path / "text.txt").write_text(text)
    from specdec.training import PackedStream

    batches = PackedStream.batches

    def interrupted(self, shapes, *, skip=0):
        for index, rows in enumerate(batches(self, shapes, skip=skip)):
            if index == 4:
                signal.raise_signal(signal.SIGINT)
            yield rows

    arguments = ["train", "eagle3", "--target", small, "--data", tmp_path / "text.txt"]
    arguments += ["--output", tmp_path / "head", "--steps", "6", "--tokens-per-step", "64"]
    arguments += ["--length", "32", "--precision", "no", "--evaluation-prompts", "0"]
    arguments = [str(argument) for argument in arguments]
    with on_a_cpu():
        with monkeypatch.context() as patch:
            patch.setattr(PackedStream, "batches", interrupted)
            assert main(arguments) == 130
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("interrupted: step 5 is saved in ")
        assert last.endswith("the same command goes on from there")
        assert not (tmp_path / "head" / "config.json").exists()
    with on_a_cpu():
        assert main(arguments) == 0
    assert (tmp_path / "head" / "config.json").exists()


def test_prompts_that_begin_alike_are_not_certified_twice(monkeypatch, capsys, small):
    fast = ["--target", small, "--samples", "32", "--audit-tokens", "4"]
    same = ["--prompt", "import os", "--prompt", "import os", "--prompt", "def main():"]
    assert main(["certify", *fast, *same]) == 0
    assert "2 prompts" in capsys.readouterr().out
    monkeypatch.setattr(zoo, "heldout_prompts", lambda n: [f"import os  # {i}" for i in range(n)])
    line = refused(capsys, "certify", *fast, "--prompt-tokens", "1")
    assert "of 32 sources only 1 begin with different 1 tokens; pass --prompt-tokens" in line


def test_texts_that_cannot_be_enumerated_are_told_at_once(capsys, small):
    line = refused(capsys, "certify", "--target", small, "--top-k", "5000")
    assert "num_tokens=3 and top_k=5000 make more than 16384 texts" in line
    assert "top_k=25 with num_tokens=3" in line


def test_a_number_of_sources_beyond_all_libraries_is_told_at_once(capsys, small):
    line = refused(capsys, "certify", "--target", small, "--prompts", "99999999999")
    assert re.search("of 4096 sources only [0-9]+ begin with different 8 tokens", line), line


@pytest.mark.parametrize("command", ["", "generate", "certify", "inspect"])
def test_help_waits_for_no_library(command):
    done = without("ImportError", *command.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: specdec {command}")


@pytest.mark.parametrize("closed", [["stdout"], ["stderr"]])
def test_a_closed_stream_is_no_error(closed, monkeypatch, capsys):
    """As a shell closes it with `>&-`."""
    for name in closed:
        monkeypatch.setattr(sys, name, None)
    assert main(["generate", "--target", "zoo", "--drafter", "lookup", *PROMPT]) == 0
    assert main(["evaluate", "--drafter", "lookup", "--limit", "1", "--max-new-tokens", "2"]) == 0
    assert main(["generate", "--target", "zoo", "--drafter", "", *PROMPT]) == 2
    captured = capsys.readouterr()
    assert ("acceptance length" in captured.out) == ("stdout" not in closed)
    assert ("specdec: cannot load ''" in captured.err) == ("stderr" not in closed)
    assert "specdec: " not in captured.out


def test_a_reader_that_ends_first_is_no_error(monkeypatch, capsys):
    """Such as `head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["generate", "--target", "zoo", "--drafter", "lookup", *PROMPT]) == 141
        monkeypatch.undo()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("head", ["zoo:eagle3", str(zoo.WEIGHTS_DIR / "draft")])
def test_how_a_drafter_draws_is_an_option(head, monkeypatch, capsys):
    made = []
    start = SpeculativeGenerator.generate

    def generate(self, *args, **kwargs):
        made.append(self.drafter.proposal)
        return start(self, *args, **kwargs)

    monkeypatch.setattr(SpeculativeGenerator, "generate", generate)
    command = ["generate", "--target", "zoo", "--drafter", head, "--temperature", "1", *PROMPT]
    for options in ([], ["--proposal", "argmax"], ["--draft-temperature", "0.5"]):
        assert main([*command, *options]) == 0
    assert made == [Proposal(), Proposal("argmax"), Proposal("sample", 0.5)]
    capsys.readouterr()
    assert "draft_temperature must be" in refused(capsys, *command, "--draft-temperature", "0")
