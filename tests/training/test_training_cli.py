"""`python -m specdec.training`: from text to a head that loads again; mistakes are one line."""

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from itertools import pairwise

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from training_runs import on_a_cpu
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specdec import SpeculativeGenerator, zoo
from specdec.cli.train import main
from specdec.drafters import EagleDrafter, MaskTokenDrafter, MTPDrafter
from specdec.evaluation import evaluate
from specdec.training import new_head
from specdec.training.data import PROMPT_TOKENS, encode_texts, hold_out, prompts_of
from specdec.zoo import corpus

TEXT = "".join(f"def function_{i}(x):\n    return x + {i % 7}\n\n\n" for i in range(150))
SMALL = ["--steps", "2", "--tokens-per-step", "128", "--length", "32", "--precision", "no"]
SMALL += ["--mlp-width", "24", "--evaluation-prompts", "2", "--num-draft-tokens", "3"]


@pytest.fixture(autouse=True)
def _on_a_cpu():
    with on_a_cpu():
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Folder of a tiny random Llama with the zoo's tokenizer."""
    folder, tokenizer = tmp_path_factory.mktemp("target"), zoo.load_tokenizer()
    special = {f"{name}_token_id": tokenizer.eos_token_id for name in ("bos", "eos", "pad")}
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 256}
    config = LlamaConfig(**ARCHITECTURES["llama"][1] | sizes | special)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.py"
    path.write_text(TEXT)
    return path


def saved_progress(output):
    """What the run has kept of itself."""
    return torch.load(output / "run" / "checkpoint" / "custom_checkpoint_0.pkl", weights_only=False)


CLASSES = {
    "eagle3": EagleDrafter,
    "eagle1": EagleDrafter,
    "mask-token": MaskTokenDrafter,
    "mtp": MTPDrafter,
}


@pytest.mark.parametrize("kind", CLASSES)
def test_what_is_saved_is_what_was_trained_and_drafts_as_it_was_measured(
    kind, target, text, tmp_path, capsys
):
    output = tmp_path / "new" / "head"
    arguments = [kind, "--target", str(target), "--data", str(text), "--output", str(output)]
    assert main([*arguments, *SMALL]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == f"saved in {output}"
    assert "step 2: acceptance length at T = 0 " in printed.out
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    drafter = CLASSES[kind].from_pretrained(output, model, 3)
    assert drafter.config.layer.intermediate_size == 24
    trained = load_file(output / "run" / "checkpoint" / "model.safetensors")
    assert {f"drafter.head.{key}" for key in drafter.head.state_dict()} == set(trained)
    for key, weight in drafter.head.state_dict().items():
        assert weight.equal(trained[f"drafter.head.{key}"])
    _, held_out = hold_out(encode_texts([TEXT], zoo.load_tokenizer()), 2)
    prompts = prompts_of(held_out)
    generator = SpeculativeGenerator(model, drafter)
    (evaluation,) = saved_progress(output)["evaluations"]
    assert evaluation == {"step": 2} | {
        f"acceptance length at T = {t}": evaluate(
            generator, prompts, temperature=t
        ).stats.acceptance_length
        for t in (0, 1)
    }


def test_a_head_of_fewer_ids_is_trained_saved_and_loaded_in_both_layouts(target, text, tmp_path):
    arguments = ["eagle3", "--target", str(target), "--data", str(text), *SMALL]
    output = tmp_path / "head"
    assert main([*arguments, "--output", str(output), "--draft-vocab-size", "300"]) == 0
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    drafter = EagleDrafter.from_pretrained(output, model, 3)
    ids = drafter.head.target_ids
    assert drafter.config.draft_vocab_size == len(ids) == 300
    seen = np.unique(np.concatenate(encode_texts([TEXT], zoo.load_tokenizer())))
    assert set(seen.tolist()) <= set(ids.tolist())
    assert load_file(output / "model.safetensors")["t2d"].nonzero()[:, 0].equal(ids)
    drafter.save_pretrained(tmp_path / "other", layout="speculators")
    loaded = EagleDrafter.from_pretrained(tmp_path / "other", model)
    assert loaded.head.target_ids.equal(ids)
    for key, weight in drafter.head.state_dict().items():
        assert loaded.head.state_dict()[key].equal(weight), key
    prompt = torch.tensor([[5, 6, 7, 8]])
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(prompt, **options)
    assert (
        SpeculativeGenerator(model, drafter).generate(prompt, **options).sequences.equal(expected)
    )


def test_rows_end_as_long_as_the_target_has_positions_unless_said_otherwise(target, text, tmp_path):
    usual = ["eagle3", "--target", str(target), "--data", str(text), "--mlp-width", "24"]
    usual += ["--precision", "no", "--evaluation-prompts", "2", "--tokens-per-step", "512"]
    assert main([*usual, "--output", str(tmp_path), "--steps", "1"]) == 0
    (evaluation,) = saved_progress(tmp_path)["evaluations"]
    lengths = [f"after {count} tokens" for count in (128, 256 - 4 - 64)]  # 256 positions, K = 4
    assert [key for key in evaluation if key.startswith("after")] == lengths
    assert saved_progress(tmp_path)["num_tokens"] == 512


def test_the_module_runs_the_command():
    assert import_module("specdec.training.__main__").main is main


def test_a_run_goes_on_when_it_is_started_again(target, text, tmp_path):
    arguments = ["eagle3", "--target", str(target), "--data", str(text), *SMALL]
    arguments += ["--evaluation-prompts", "0"]
    assert main([*arguments, "--output", str(tmp_path / "a")]) == 0
    assert main([*arguments, "--output", str(tmp_path / "a"), "--steps", "3"]) == 0
    progress = saved_progress(tmp_path / "a")
    assert progress["num_steps"] == 3
    assert progress["num_tokens"] == 3 * 128
    assert progress["evaluations"] == []


@pytest.fixture
def _little_library(monkeypatch):
    files = [corpus.stdlib_root() / name for name in ("copy.py", "ast.py", "dis.py")]
    monkeypatch.setattr(corpus, "library_files", lambda: files)


@pytest.mark.usefixtures("_little_library")
def test_the_zoo_trains_a_head_for_its_own_target(tmp_path):
    output = tmp_path / "head"
    arguments = ["eagle3", "--target", "zoo", "--data", "zoo", "--output", str(output), *SMALL]
    assert main([*arguments, "--evaluation-prompts", "0"]) == 0
    drafter = EagleDrafter.from_pretrained(output, zoo.load_target())
    assert drafter.feature_layers == (2, 8, 13)


@pytest.mark.usefixtures("_little_library")
def test_the_zoos_text_can_train_for_another_target(target, tmp_path):
    arguments = ["--target", str(target), "--data", "zoo", "--output", str(tmp_path / "head")]
    assert main(["eagle1", *arguments, *SMALL]) == 0
    assert json.loads((tmp_path / "head" / "config.json").read_text())["hidden_size"] == 32


MISTAKES = {
    "no such data": (["--data", "nowhere.txt"], "no training data at nowhere.txt"),
    "no such target": (["--target", "./no/such"], "cannot load './no/such': it must be a folder"),
    "no steps": (["--steps", "0"], "steps must be an integer >= 1, got 0"),
    "no tokens": (["--tokens-per-step", "8"], "tokens_per_step = 8 has not a row of 32 tokens"),
    "too many tokens": (["--tokens-per-step", "65536"], "give more text or train with fewer"),
    "no ids": (["--draft-vocab-size", "0"], "--draft-vocab-size must be an integer >= 1, got 0"),
    "rows too short": (["--length", "4"], "rows of 4 tokens are too short for 5 unrolled steps"),
    "no unrolled steps": (["--unrolled-steps", "0"], "--unrolled-steps must be an integer >= 1"),
    "too many ids": (
        ["--draft-vocab-size", "9999"],
        "must have 1 to 2048 ids, those of the target",
    ),
    "negative prompts": (["--evaluation-prompts", "-1"], "must be an integer >= 0, got -1"),
    "negative K": (["--num-draft-tokens", "-1"], "num_draft_tokens must be an integer >= 0"),
    "no batches": (["--accumulation", "0"], "accumulation must be an integer >= 1, got 0"),
    "output is a file": (["--output", __file__], "--output must be the path of a folder, but"),
    "absurd rate": (["--lr", "1e30"], "the loss of step"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_in_one_line(case, target, text, tmp_path, capsys):
    wrong, message = MISTAKES[case]
    usual = ["--target", str(target), "--data", str(text), "--output", str(tmp_path / "head")]
    assert main(["eagle3", *usual, *SMALL, *wrong]) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error" in line.lower()]
    assert len(errors) == 1
    assert errors[0].startswith("error: ")
    assert message in errors[0]
    assert len(errors[0]) < 420
    assert not (tmp_path / "head" / "config.json").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--minutes", "3"], "argument --minutes: not allowed with argument --steps"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--precision", "fp16"], "argument --precision: invalid choice: 'fp16'"),
        (["--data"], "argument --data: expected one argument"),
    ],
)
def test_a_wrong_option_is_told_in_one_line(wrong, message, capsys):
    arguments = ["eagle3", "--target", "zoo", "--data", "zoo", "--output", "x", *SMALL, *wrong]
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")
    assert line.endswith("; see --help")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "fine"}\n{"txet": "typo"}\n', "text.jsonl, line 2 must be an object with"),
        ("", "there is no text to train on"),
        ('{"text": "short"}\n', "a batch takes 129 tokens and the text has"),
    ],
)
def test_data_that_cannot_be_trained_on_is_told_in_one_line(content, message, tmp_path, capsys):
    path = tmp_path / "text.jsonl"
    path.write_text(content)
    arguments = ["eagle3", "--target", "zoo", "--data", str(path), "--output", str(tmp_path / "x")]
    assert main([*arguments, *SMALL]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_a_checkpoint_of_another_head_is_told_in_one_line(target, text, tmp_path, capsys):
    usual = ["--target", str(target), "--data", str(text), "--output", str(tmp_path), *SMALL]
    assert main(["eagle3", *usual, "--evaluation-prompts", "0"]) == 0
    assert main(["eagle1", *usual, "--evaluation-prompts", "0"]) == 2
    expected = (
        f"error: the checkpoint in {tmp_path}/run/checkpoint is of another run, delete it or "
        "choose another --output; they differ in kind (eagle3 there, eagle1 here)"
    )
    assert capsys.readouterr().err.splitlines()[-1] == expected


@given(st.lists(st.integers(0, 400), max_size=12), st.integers(0, 6))
def test_prompts_are_held_out_from_the_end_and_nothing_is_lost(lengths, num_prompts):
    ends = np.cumsum([0, *lengths])
    documents = [np.arange(a, b) for a, b in pairwise(ends)]
    rest, held_out = hold_out(documents, num_prompts)
    prompts = prompts_of(held_out)
    assert len(prompts) == len(held_out)
    assert prompts.shape[0] <= num_prompts
    assert prompts.shape[1] == PROMPT_TOKENS
    trained_on = [token for ids in rest for token in ids.tolist()]
    assert len(set(trained_on)) == len(trained_on)
    assert not set(trained_on) & set(prompts.flatten().tolist())
    total = ends[-1]
    assert len(rest) >= 3 * len(prompts)
    for prompt in prompts.tolist():
        assert prompt == list(range(prompt[0], prompt[0] + PROMPT_TOKENS))
        assert sum(len(ids) >= PROMPT_TOKENS and ids[0] > prompt[0] for ids in rest) == 0
    if num_prompts == 0:
        assert len(trained_on) == total
    elif max(lengths, default=0) == total >= 4 * num_prompts * PROMPT_TOKENS:
        assert len(prompts) == num_prompts  # also of a single text


@pytest.mark.slow
def test_the_command_runs_unchanged_under_accelerate_launch(target, text, tmp_path):
    """Slow: three interpreters start. `--cpu` would launch one process whatever is asked for."""
    arguments = ["eagle3", "--target", str(target), "--data", str(text), *SMALL]
    assert main([*arguments, "--output", str(tmp_path / "one")]) == 0
    launch = "--multi_gpu --num_processes 2 --num_machines 1 --main_process_port 0 --dynamo_backend"
    command = [sys.executable, "-m", "accelerate.commands.launch", *launch.split(), "no"]
    command += ["--mixed_precision", "bf16", "-m", "specdec.training", *arguments]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "two")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("saved in") == 1
    assert done.stdout.count("step 2: acceptance length") == 1
    one, two = (saved_progress(tmp_path / name) for name in ("one", "two"))
    assert two["num_tokens"] == one["num_tokens"]
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5)
    heads = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    for key, weight in heads[0].items():
        torch.testing.assert_close(heads[1][key], weight, rtol=0, atol=1e-3)
    assert len(list((tmp_path / "two" / "run" / "checkpoint").glob("random_states_*"))) == 2


def test_a_folder_with_another_model_is_left_alone(target, text, tmp_path, capsys):
    before = (target / "model.safetensors").read_bytes()
    arguments = ["eagle3", "--target", str(target), "--data", str(text), *SMALL]
    assert main([*arguments, "--output", str(target)]) == 2
    assert "holds a model that no earlier run of this command wrote" in capsys.readouterr().err
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    drafter = EagleDrafter(new_head(model, "eagle3", mlp_width=24), model)
    with pytest.raises(ValueError, match=r"holds another model .* choose a new folder"):
        drafter.save_pretrained(target)
    assert (target / "model.safetensors").read_bytes() == before
    for _ in range(2):  # its own file is replaced
        drafter.save_pretrained(tmp_path / "head")
    for name in ("model.safetensors", "model.safetensors.index.json"):
        other = tmp_path / name
        other.mkdir()
        (other / name).write_bytes(b"something")
        with pytest.raises(ValueError, match="holds another model"):
            drafter.save_pretrained(other)
        assert [path.name for path in other.iterdir()] == [name]


@pytest.mark.parametrize("value", ["no", "False", 1, None])
def test_allow_pickle_is_a_boolean(value, target):
    model = AutoModelForCausalLM.from_pretrained(target)
    with pytest.raises(TypeError, match="allow_pickle must be True or False"):
        EagleDrafter.from_pretrained(target, model, allow_pickle=value)


@pytest.mark.parametrize(
    ("kind", "flag", "owners"),
    [
        ("eagle3", "depths", "mask-token and mtp"),
        ("eagle3", "layers", "mask-token"),
        ("eagle1", "depths", "mask-token and mtp"),
        ("eagle1", "layers", "mask-token"),
        ("eagle1", "unrolled-steps", "eagle3"),
        ("mask-token", "unrolled-steps", "eagle3"),
        ("mtp", "unrolled-steps", "eagle3"),
        ("mtp", "layers", "mask-token"),
        ("mtp", "draft-vocab-size", "eagle3 and mask-token"),
        ("eagle1", "draft-vocab-size", "eagle3 and mask-token"),
    ],
)
def test_a_flag_of_another_kind_of_head_is_refused(kind, flag, owners, tmp_path, capsys):
    usual = ["--target", "zoo", "--data", "zoo", "--output", str(tmp_path / "head")]
    assert main([kind, *usual, f"--{flag}", "3"]) == 2
    line = capsys.readouterr().err
    assert line == f"error: --{flag} belongs to {owners}; leave it out for {kind}\n"
    assert not (tmp_path / "head").exists()


def test_a_run_with_other_flags_does_not_go_on(target, text, tmp_path, capsys):
    usual = ["--target", str(target), "--data", str(text), "--output", str(tmp_path / "head")]
    assert main(["eagle1", *usual, *SMALL]) == 0
    for change, difference in (
        (["--seed", "4"], "--seed (0 there, 4 here)"),
        (["--lr", "0.3"], "--lr (0.005 there, 0.3 here)"),
        (["--mlp-width", "8"], "--mlp-width (24 there, 8 here)"),
    ):
        capsys.readouterr()
        assert main(["eagle1", *usual, *SMALL, *change]) == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.endswith(f"another --output; they differ in {difference}")
    text.write_text(TEXT + "x")
    assert main(["eagle1", *usual, *SMALL]) == 2
    assert "another --output; they differ in data." in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_text("[")])
def test_a_refusal_without_the_commands_record_names_what_differs(
    damage, target, text, tmp_path, capsys
):
    usual = ["--target", str(target), "--data", str(text), "--output", str(tmp_path), *SMALL]
    assert main(["eagle1", *usual]) == 0
    damage(tmp_path / "run" / "command.json")
    assert main(["eagle1", *usual, "--mlp-width", "8"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith("differ in objective.head.layer.intermediate_size (24 there, 8 here)")


def test_a_cpu_trains_in_small_steps_of_full_precision(target, text, tmp_path, monkeypatch):
    plans = []

    def train(*args, plan, **kwargs):
        plans.append(plan)
        raise KeyboardInterrupt

    monkeypatch.setattr("specdec.cli.train.train", train)
    usual = ["eagle1", "--target", str(target), "--data", str(text), "--output", str(tmp_path)]
    assert main(usual) == 130
    assert main([*usual, "--tokens-per-step", "640", "--precision", "bf16"]) == 130
    assert [(plan.tokens_per_step, plan.precision) for plan in plans] == [
        (512, "no"),
        (640, "bf16"),
    ]


def test_a_run_that_is_complete_says_so_at_once(target, text, tmp_path, capsys, monkeypatch):
    arguments = ["eagle1", "--target", str(target), "--data", str(text), *SMALL]
    arguments += ["--output", str(tmp_path)]
    assert main(arguments) == 0
    measured = capsys.readouterr().out.splitlines()[0].removeprefix("step 2: ")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    def loaded(*args, **kwargs):
        raise OSError("something was loaded")

    with monkeypatch.context() as patch:
        patch.setattr("specdec.cli.train._load_data", loaded)
        for change in ([], ["--steps", "1"], ["--evaluate-every", "1"]):
            assert main([*arguments, *change]) == 0
            shown = capsys.readouterr().out.splitlines()
            assert shown == [f"already complete at step 2: {measured}", f"saved in {tmp_path}"]
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
        for change in (["--steps", "3"], ["--seed", "4"], ["--num-draft-tokens", "2"]):
            assert main([*arguments, *change]) == 2
        text.write_text(TEXT + "x")
        assert main(arguments) == 2
        text.write_text(TEXT)
        (tmp_path / "config.json").unlink()
        assert main(arguments) == 2
        assert capsys.readouterr().err.count("something was loaded") == 5
    assert main(arguments) == 0  # the head is written again
    assert (tmp_path / "config.json").exists()


@pytest.mark.parametrize("count", [10, 150])
def test_an_evaluation_that_is_smaller_or_missing_says_why(count, target, tmp_path, capsys):
    path = tmp_path / "text.py"
    path.write_text("".join(TEXT.splitlines(keepends=True)[: 4 * count]))
    arguments = ["eagle1", "--target", str(target), "--data", str(path), *SMALL, "--steps", "1"]
    assert main([*arguments, "--output", str(tmp_path / "a"), "--evaluation-prompts", "16"]) == 0
    shown = capsys.readouterr()
    (ids,) = encode_texts([path.read_text()], zoo.load_tokenizer())
    held_out = len(hold_out([ids], 16)[1])
    assert (held_out > 0) is (count > 10)
    assert held_out < 16
    found = f"evaluating on {held_out} prompts" if held_out else "no evaluation"
    assert shown.err.splitlines()[1] == (
        f"{found}: --evaluation-prompts 16 needs 64 pieces of text of 64 tokens or more, as every "
        f"fourth is kept from training, and the data has {len(ids) // PROMPT_TOKENS}"
    )
    assert ("acceptance length" in shown.out) is (held_out > 0)
    assert main([*arguments, "--output", str(tmp_path / "b"), "--evaluation-prompts", "0"]) == 0
    assert "--evaluation-prompts" not in capsys.readouterr().err  # none was asked for


def test_every_phase_has_its_name(target, text, tmp_path, capsys):
    arguments = [
        "eagle3",
        "--target",
        str(target),
        "--data",
        str(text),
        *SMALL,
        "--steps",
        "1",
        "--unrolled-steps",
        "2",
    ]
    arguments += ["--output", str(tmp_path), "--draft-vocab-size", "300"]
    assert main(arguments) == 0
    shown = capsys.readouterr().err.replace("\r", "\n").splitlines()
    shown = [line for line in shown if line.strip() and "Loading weights" not in line]
    assert shown[0] == f"encoding {text}"
    assert shown[1] == "finding the most frequent ids of the data and of the target's own text"
    assert "| first step" in shown[2]
    assert re.fullmatch(
        r"100%\|\S+\| step 1, loss [\d.]+, rows of 32 tokens, \d+ tokens/s", shown[-1]
    )
