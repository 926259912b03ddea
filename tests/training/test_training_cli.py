"""`specdec train`: from text to a head that loads again; mistakes are one line."""

import json
import os
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from training_runs import on_a_cpu
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainerState

from specdec import SpeculativeGenerator, zoo
from specdec.cli.train import _parser, main
from specdec.cli.training_run import _arguments
from specdec.drafters import EagleDrafter, MaskTokenDrafter, MTPDrafter
from specdec.evaluation import evaluate
from specdec.training import new_head
from specdec.training.data import PROMPT_TOKENS, encode_texts, hold_out, prompts_of
from specdec.training.trainer import last_checkpoint
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


def state_of(output):
    """What the last checkpoint of a run says of it."""
    return TrainerState.load_from_json(last_checkpoint(output / "run") / "trainer_state.json")


def figures_of(output):
    """The last evaluation of a run."""
    logs = [log for log in state_of(output).log_history if "acceptance_length (T = 0)" in log]
    return logs[-1] if logs else {}


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
    assert "'acceptance_length (T = 0)'" in printed.out
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    drafter = CLASSES[kind].from_pretrained(output, model, 3)
    assert drafter.config.layer.intermediate_size == 24
    trained = load_file(output / "run" / "checkpoint-2" / "model.safetensors")
    assert {f"drafter.head.{key}" for key in drafter.head.state_dict()} == set(trained)
    for key, weight in drafter.head.state_dict().items():
        assert weight.equal(trained[f"drafter.head.{key}"])
    _, held_out = hold_out(encode_texts([TEXT], zoo.load_tokenizer()), 2)
    prompts = prompts_of(held_out)
    generator = SpeculativeGenerator(model, drafter)
    figures = figures_of(output)
    assert figures["step"] == 2
    for t in (0, 1):
        stats = evaluate(generator, prompts, temperature=t).stats
        assert figures[f"acceptance_length (T = {t})"] == stats.acceptance_length


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
    lengths = [f"after {count} tokens" for count in (128, 256 - 4 - 64)]  # 256 positions, K = 4
    assert [key for key in figures_of(tmp_path) if key.startswith("after")] == lengths


def test_a_run_goes_on_when_it_is_started_again(target, text, tmp_path):
    arguments = ["eagle3", "--target", str(target), "--data", str(text), *SMALL]
    arguments += ["--evaluation-prompts", "0"]
    assert main([*arguments, "--output", str(tmp_path / "a")]) == 0
    assert main([*arguments, "--output", str(tmp_path / "a"), "--steps", "3"]) == 0
    assert state_of(tmp_path / "a").global_step == 3
    assert not figures_of(tmp_path / "a")


def test_options_of_hf_pass_through(target, text, tmp_path, capsys):
    """They come before ours; what is neither is a mistake of one line."""
    arguments = ["eagle1", "--target", str(target), "--data", str(text), *SMALL, "--output"]
    given = ["--max_steps", "1", "--logging_first_step", "--learning_rate", "0.125"]
    given += ["--lr_scheduler_kwargs", '{"min_lr_rate": 1.0}']
    assert main([*arguments, str(tmp_path / "a"), "--evaluation-prompts", "0", *given]) == 0
    state = state_of(tmp_path / "a")
    assert state.global_step == 1
    assert state.log_history[0]["learning_rate"] == 0.125
    capsys.readouterr()
    assert main([*arguments, str(tmp_path / "b"), "--lenght", "3"]) == 2
    assert "['--lenght', '3']" in capsys.readouterr().err


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
    assert main(["eagle1", *arguments, *SMALL, "--evaluation-prompts", "0"]) == 0
    assert json.loads((tmp_path / "head" / "config.json").read_text())["hidden_size"] == 32


MISTAKES = {
    "no such data": (["--data", "nowhere.txt"], "no training data at nowhere.txt"),
    "no such target": (["--target", "./no/such"], "cannot load './no/such': it must be a folder"),
    "no steps": (["--steps", "0"], "expected either steps or minutes, got max_steps=0"),
    "no tokens": (["--tokens-per-step", "8"], "tokens_per_step = 8 has not a row of 32 tokens"),
    "too many tokens": (["--tokens-per-step", "65536"], "give more text or train with fewer"),
    "rows too short": (["--length", "4"], "rows of 4 tokens are too short for 5 unrolled steps"),
    "too many ids": (["--draft-vocab-size", "9999"], "draft ids must be an integer in 1..2048"),
    "negative prompts": (["--evaluation-prompts", "-1"], "must be an integer >= 0, got -1"),
    "negative K": (["--num-draft-tokens", "-1"], "num_draft_tokens must be an integer >= 0"),
    "no batches": (["--accumulation", "0"], "accumulation_steps must be an integer >= 1, got 0"),
    "output is a file": (["--output", __file__], "Not a directory"),
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
        (["--unrolled-steps", "0"], "argument --unrolled-steps: must be an integer >= 1, got 0"),
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
    command += ["--mixed_precision", "no", "-m", "specdec", "train", *arguments]
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
    assert done.stdout.count("'acceptance_length (T = 0)'") == 1
    heads = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    for key, weight in heads[0].items():
        torch.testing.assert_close(heads[1][key], weight, rtol=0, atol=1e-3)
    assert len(list((tmp_path / "two" / "run" / "checkpoint-2").glob("rng_state_*"))) == 2


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


@pytest.mark.parametrize(
    ("kind", "flag", "owners"),
    [
        ("eagle3", "layers", "mask-token"),
        ("eagle1", "unrolled-steps", "eagle3"),
        ("mask-token", "unrolled-steps", "eagle3"),
        ("mtp", "draft-vocab-size", "eagle3 and mask-token"),
    ],
)
def test_a_flag_of_another_kind_of_head_is_refused(kind, flag, owners, tmp_path, capsys):
    usual = ["--target", "zoo", "--data", "zoo", "--output", str(tmp_path / "head")]
    assert main([kind, *usual, f"--{flag}", "3"]) == 2
    line = capsys.readouterr().err
    assert line == f"error: --{flag} belongs to {owners}; leave it out for {kind}\n"
    assert not (tmp_path / "head").exists()


def test_a_run_with_other_arguments_or_files_does_not_go_on(target, text, tmp_path, capsys):
    usual = ["--target", str(target), "--data", str(text), "--output", str(tmp_path / "head")]
    usual += [*SMALL, "--evaluation-prompts", "0"]
    assert main(["eagle1", *usual]) == 0
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    def refusal(kind, *change):
        capsys.readouterr()
        assert main([kind, *usual, *change]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "is of another run, delete it or choose another --output" in line
        return line.split("they differ in ")[1]

    assert refusal("eagle3") == "kind ('eagle1' there, 'eagle3' here)"
    assert refusal("eagle1", "--seed", "4") == "--seed (0 there, 4 here)"
    assert refusal("eagle1", "--lr", "0.3") == "--lr (0.005 there, 0.3 here)"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files
    text.write_text(TEXT + "x")
    assert refusal("eagle1").startswith("the files of --data")
    (tmp_path / "head" / "run" / "command.json").write_text("[")
    assert "--data (None there" in refusal("eagle1")


def test_a_cpu_trains_in_small_steps_of_full_precision(tmp_path):
    usual = ["eagle1", "--target", "zoo", "--data", "zoo", "--output", str(tmp_path)]
    for more in ([], ["--tokens-per-step", "640", "--precision", "bf16"]):
        options, others = _parser("specdec train").parse_known_args([*usual, *more])
        args = _arguments(options, others, 100)
        assert (args.tokens_per_step, args.bf16) == ((640, True) if more else (512, False))


def test_a_run_that_is_complete_says_so_at_once(target, text, tmp_path, capsys, monkeypatch):
    arguments = ["eagle1", "--target", str(target), "--data", str(text), *SMALL]
    arguments += ["--output", str(tmp_path)]
    assert main(arguments) == 0
    figures = {n: v for n, v in figures_of(tmp_path).items() if n not in ("step", "epoch")}
    measured = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
    capsys.readouterr()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    def loaded(*args, **kwargs):
        raise OSError("something was loaded")

    with monkeypatch.context() as patch:
        patch.setattr("specdec.cli.training_run._load_data", loaded)
        for change in ([], ["--steps", "1"], ["--evaluate-every", "1"]):
            assert main([*arguments, *change]) == 0
            shown = capsys.readouterr().out.splitlines()
            assert shown == [f"already complete at step 2: {measured}", f"saved in {tmp_path}"]
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
        assert main([*arguments, "--steps", "3"]) == 2
        (tmp_path / "config.json").unlink()
        assert main(arguments) == 2
        assert capsys.readouterr().err.count("something was loaded") == 2
    assert main(arguments) == 0  # the head is written again
    assert (tmp_path / "config.json").exists()


@pytest.mark.parametrize("count", [10, 24])
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
    found, pieces = f"evaluating on {held_out} prompt", len(ids) // PROMPT_TOKENS
    assert found in shown.err
    assert f"the data has {pieces}\n" in shown.err
    assert ("acceptance_length" in shown.out) is (held_out > 0)
    assert main([*arguments, "--output", str(tmp_path / "b"), "--evaluation-prompts", "0"]) == 0
    assert "evaluating on" not in capsys.readouterr().err  # none was asked for
