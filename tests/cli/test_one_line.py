"""What cannot be right ends every command in one line on standard error, before anything large is
loaded, and never in a traceback.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from diagonal import first
from training_runs import on_a_cpu
from transformers import AutoModelForCausalLM

from specdec import Proposal, SpeculativeGenerator, zoo
from specdec.checkpoints.families import FAMILIES
from specdec.drafters import Visible
from specdec.lab.cli import main

TARGET, HEAD = str(zoo.WEIGHTS_DIR / "target"), str(zoo.WEIGHTS_DIR / "eagle3")
PROMPT = ["--prompt", "def main():", "--max-new-tokens", "8"]


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
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert code == 2, captured
    assert captured.out == ""
    (line,) = [s for s in captured.err.splitlines() if s and "Loading weights" not in s]
    assert line.startswith("specdec: ")
    assert len(line) < 430
    return line


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    """Loading a model is an error, and there is no network and no pyarrow."""

    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    monkeypatch.setattr(zoo, "load_target", load)
    monkeypatch.setattr("specdec.checkpoints.hub.HfApi.model_info", offline)
    monkeypatch.setitem(sys.modules, "pyarrow", None)


def offline(*args, **kwargs):
    raise ConnectionError("no network")


DAMAGED = {
    "empty": None,
    "deep": "[" * 100_000 + "]" * 100_000,
    "no type": "{}",
    "a list": "[1]",
    "cut": '{"model_type": "lla',
    "odd": json.dumps({"model_type": "llama", "hidden_size": "x"}),
    "escapes": json.dumps({"model_type": "\x1b[2Jllama"}),
}
"""Configurations of folders that are no models."""
PLACE = "{folder}"
GENERATE = f"generate --target {TARGET} --prompt x "
TRAIN = "train eagle3 --target zoo --data zoo --output x "
NOWHERE = "somebody/model is no folder here and is not in the local cache"
SAMPLED = GENERATE + "--temperature 1 "
REFUSED = {
    "nothing": "No such command 'nothing'; see specdec --help",
    "generate --prompt x": "Missing option '--target'; see specdec generate --help",
    GENERATE + "--prompts x": "No such option.* .?--prompts.*; see specdec generate --help",
    GENERATE + "\x1b[2J": r"unexpected extra argument.* \(\\x1b\[2J\); see specdec gen",
    GENERATE + "--dtype float8": "'--dtype': .*'float8' is not one of 'auto', 'float32'",
    GENERATE + "--prompt a\udcff": r"'--prompt': expected text in UTF-8, got 'a\\udcff'",
    GENERATE + "--tree 32": "'--tree': must be nodes and depth like 32x6, got 32",
    GENERATE + "--tree 2x3": "Tree.nodes must be an integer >= 3, got 2",
    GENERATE + "--tree 6x3 --num-draft-tokens 3": "num_draft_tokens belongs to chains",
    GENERATE + "--tree 7x3 --drafter lookup": "a multiple of 3 nodes, 6x3 for instance",
    GENERATE + "--tree 6x3 --drafter none": "tree belongs to a drafter; there is none",
    GENERATE + "--num-draft-tokens 4 --drafter none": "num_draft_tokens belongs to a drafter",
    GENERATE + "--sampler best": "sampler must be 'auto', .*got 'best'; or your own as mine.py",
    GENERATE + "--sampler block --target-weight 0.5": "belongs to the sampler ensemble",
    GENERATE + "--sampler ensemble --target-weight 2": r"a number in 0\.\.1, got 2",
    GENERATE + "--device cuda:99": "device cuda:99 cannot be used here: .*try cpu",
    GENERATE + "--device gpu": "device gpu cannot be used here: .*try cpu",
    GENERATE + "--device meta": "device meta cannot be used here",
    GENERATE + "--drafter eagle:": "no drafter 'eagle:'; write eagle:PATH, or zoo:eagle3",
    GENERATE + "--drafter ngram": "no drafter 'ngram'; write lookup",
    GENERATE + "--drafter ./no/such": "cannot load './no/such': .*there is no such folder",
    GENERATE + "--drafter eagle:./no/such": "cannot load './no/such'",
    GENERATE + f"--drafter {__file__}": "cannot load .*: it must be a folder with a config.json",
    GENERATE + f"--drafter {__file__}:none": "test_one_line.py has no none; it has without, refus",
    GENERATE + "--drafter zoo:model": "zoo:model drafts for --target zoo only",
    GENERATE + "--top-p 0.5": "--top-p belongs to sampling; pass a --temperature above 0",
    GENERATE + "--seed 1": "--seed belongs to sampling",
    GENERATE + "--draft-temperature 0.5": "--draft-temperature belongs to sampling",
    GENERATE + "--trace trace.csv": "--trace must end in .html, .jsonl or .parquet, got trace.csv",
    GENERATE + "--trace nowhere/trace.html": "--trace nowhere/.*: there is no folder nowhere",
    GENERATE + "--trace trace.parquet": r"needs pyarrow: pip install 'specdec-torch\[plots\]'",
    SAMPLED + "--drafter none --draft-temperature 1": "there is none",
    SAMPLED + "--drafter lookup --proposal argmax": "not to lookup",
    "evaluate --seed 1": "--seed belongs to sampling; pass a --temperature",
    "evaluate --limit 0": "'--limit': .*1",
    "evaluate --chat-template-kwargs [1]": r"must be an object in JSON, got \[1\]",
    "evaluate --prompts none.jsonl": "none.jsonl",
    f"certify --target {TARGET} --device gpu": "device gpu cannot be used",
    "certify --samples x": "'--samples': .* valid integer",
    "certify --prompt a --prompts 2": "--prompts belongs to prompts of source",
    "certify --temperature=-1": "--temperature must be",
    f"inspect {HEAD} --prompt a": "--prompt belongs to the parity check .*pass --target",
    f"inspect {HEAD} --num-draft-tokens 8": "--num-draft-tokens belongs to the parity",
    "inspect lookup --max-new-tokens 8": "--max-new-tokens belongs to the parity check of a head",
    "generate --target somebody/model --prompt x": NOWHERE,
    GENERATE + "--drafter eagle:somebody/model": NOWHERE,
    "inspect somebody/model": NOWHERE,
    TRAIN + "--target somebody/model": NOWHERE,
    TRAIN + "--mlp-width -1": "'--mlp-width': .*1",
    TRAIN + "--max_steps x": "argument --max_steps/--max-steps: invalid int value: 'x'",
    TRAIN + "--steps 1 --minutes 1": "--minutes takes the place of --steps",
}


@pytest.mark.usefixtures("nothing_is_loaded")
@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_right_is_told_before_anything_is_loaded(
    command, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    started = time.monotonic()
    assert re.search(REFUSED[command], line := refused(capsys, *command.split(" "))), line
    assert time.monotonic() - started < 20  # the hub's own client tries for a minute
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *((f"generate --prompt x --target {PLACE}", name) for name in DAMAGED),
        (f"certify --target {PLACE}", "escapes"),
        (f"inspect {HEAD} --target {PLACE}", "escapes"),
        (f"train eagle3 --target {PLACE} --data zoo --output x", "escapes"),
    ],
)
def test_a_folder_that_is_no_model_is_told_in_one_line(command, name, tmp_path, capsys):
    if DAMAGED[name]:
        (tmp_path / "config.json").write_text(DAMAGED[name])
    with on_a_cpu():
        line = refused(capsys, *command.replace(PLACE, str(tmp_path)).split())
    assert str(tmp_path)[:60] in line
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


def test_an_interrupt_is_one_line(monkeypatch, capsys):
    def load(*args, **kwargs):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(zoo, "load_target", load)
    # A shell that runs a command in the background tells it to ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    assert main(["generate", "--target", "zoo", *PROMPT]) == 130
    signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "specdec: interrupted\n"


@pytest.mark.parametrize("command", [TRAIN, "demo"])
def test_an_interrupt_while_libraries_are_imported_is_one_line(command):
    done = without("KeyboardInterrupt", *command.split())
    assert done.returncode == 130
    assert done.stderr == "specdec: interrupted\n"


def test_an_interrupted_training_says_where_it_goes_on(monkeypatch, capsys, tmp_path, small):
    (tmp_path / "text.txt").write_text("def f(x):\n    return x\n" * 2000)
    from specdec.lab.training import PackedStream

    batches = PackedStream.batches

    def interrupted(self, shapes, *, skip=0):
        for index, rows in enumerate(batches(self, shapes, skip=skip)):
            if index == 4:
                signal.raise_signal(signal.SIGINT)
            yield rows

    command = f"train eagle3 --target {small} --data {tmp_path}/text.txt --output {tmp_path}/head "
    command += "--steps 6 --tokens-per-step 64 --length 32 --precision no --evaluation-prompts 0"
    with on_a_cpu(), monkeypatch.context() as patch:
        patch.setattr(PackedStream, "batches", interrupted)
        assert main(command.split()) == 130
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("specdec: interrupted: step 5 is saved in ")
    assert last.endswith("the same command goes on from there")
    assert not (tmp_path / "head" / "config.json").exists()
    with on_a_cpu():
        assert main(command.split()) == 0
    shown = capsys.readouterr().out
    head = tmp_path / "head"
    assert f"measure: specdec evaluate --target {small} --drafter eagle:{head}" in shown
    assert f'serve: vllm serve {small} --speculative-config \'{{"method": "eagle3",' in shown
    before = (head / "model.safetensors").read_bytes()
    shutil.rmtree(head / "run")
    assert "that would be lost; name a new folder" in refused(capsys, *command.split())
    assert (head / "model.safetensors").read_bytes() == before


def test_prompts_that_begin_alike_are_not_certified_twice(monkeypatch, capsys, small):
    fast = ["--target", small, "--samples", "2", "--max-new-tokens", "4", "--audit-tokens", "2"]
    same = ["--prompt", "import os", "--prompt", "import os", "--prompt", "def main():"]
    assert main(["certify", *fast, *same]) == 0
    assert "2 prompts" in capsys.readouterr().out
    monkeypatch.setattr(zoo, "heldout_prompts", lambda n: [f"import os  # {i}" for i in range(n)])
    line = refused(capsys, "certify", *fast, "--prompt-tokens", "1")
    assert "of 32 sources only 1 begin with different 1 tokens; pass --prompt-tokens" in line


@pytest.mark.parametrize(
    ("option", "number", "message"),
    [
        ("--target-bias", 2, "--target-bias must be"),
        ("--prompts", 99999999999, "of 4096 sources only [0-9]+ begin with different 8 tokens"),
    ],
)
def test_what_cannot_be_certified_is_told_at_once(option, number, message, capsys, small):
    line = refused(capsys, "certify", "--target", small, option, number)
    assert re.search(message, line), line


def test_to_be_sure_needs_a_bias_to_be_sure_of(capsys, small):
    line = refused(capsys, "certify", "--target", small, "--until-sure")
    assert "--until-sure goes on until --target-bias would have been seen; pass one" in line


@pytest.mark.parametrize("command", ["", "generate", "train"])
def test_help_waits_for_no_library(command):
    done = without("ImportError", *command.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Usage: specdec {command}" in done.stdout


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


@pytest.mark.parametrize(
    "head", first(["zoo:eagle3", str(zoo.WEIGHTS_DIR / "draft")], ["zoo:eagle3"])
)
def test_how_a_drafter_draws_is_an_option(head, monkeypatch, capsys):
    made, start = [], SpeculativeGenerator.generate

    def generate(self, *args, **kwargs):
        made.append((self.drafter.proposal, self.drafter.visible))
        return start(self, *args, **kwargs)

    monkeypatch.setattr(SpeculativeGenerator, "generate", generate)
    command = ["generate", "--target", "zoo", "--drafter", head, "--temperature", "1", *PROMPT]
    for options in ("--seed 3", "--proposal argmax", "--draft-temperature 0.5 --visible 4+20"):
        assert main([*command, *options.split()]) == 0
    seen = Visible(sinks=4, recent=20)
    assert made == [(Proposal(), None), (Proposal("argmax"), None), (Proposal("sample", 0.5), seen)]
    assert "seed 3" in capsys.readouterr().out
    assert "draft_temperature must be" in refused(capsys, *command, "--draft-temperature", "0")


def test_a_checkpoint_of_no_known_kind_is_refused_in_full_with_a_way_out(tmp_path, capsys):
    from safetensors.torch import save_file

    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    save_file(
        {f"block.{i}.mine": torch.zeros(2) for i in range(40)}, tmp_path / "model.safetensors"
    )
    assert main(["inspect", str(tmp_path)]) == 2
    line = capsys.readouterr().err.strip()
    assert "..." not in line
    assert all(family.marks in line for family in FAMILIES.values())
    assert "block.0.mine" in line
    assert "mine.py:NAME:PATH" in line
