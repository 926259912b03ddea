"""`specdec train`: from text to a head that loads again; mistakes are one line."""

import os
import shutil
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES
from diagonal import first
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing
from training_runs import assert_same, on_a_cpu
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerState,
)

from specdec import SpeculativeGenerator, zoo
from specdec.drafters import EagleDrafter, MaskTokenDrafter, MTPDrafter
from specdec.lab.cli import main, training_run
from specdec.lab.cli.training_options import Run
from specdec.lab.cli.training_run import arguments_of, objective_of
from specdec.lab.evaluation import evaluate
from specdec.lab.evaluation.prompts import as_prompts
from specdec.lab.training import callbacks, new_head
from specdec.lab.training.data import PROMPT_TOKENS, encode_texts, hold_out, prompts_of
from specdec.lab.training.divergences import ce, tv
from specdec.lab.training.step_weights import DPace
from specdec.lab.training.teacher import Teacher
from specdec.lab.training.trainer import last_checkpoint
from specdec.lab.zoo import corpus

TEXT = "".join(f"def function_{i}(x):\n    return x + {i % 7}\n\n\n" for i in range(150))
SMALL = ["--steps", "2", "--tokens-per-step", "128", "--length", "32", "--precision", "no"]
SMALL += ["--mlp-width", "24", "--evaluation-prompts", "0", "--num-draft-tokens", "3"]
MEASURED = ["--evaluation-prompts", "2"]


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
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 192}
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
    "dflash": MaskTokenDrafter,
    "dspark": MaskTokenDrafter,
    "mtp": MTPDrafter,
}


def run(kind, target, text, output, *more):
    """What the command returns."""
    usual = ["--target", str(target), "--data", str(text), "--output", str(output)]
    return main(["train", kind, *usual, *SMALL, *more])


def assert_trained(head, output):
    """The head has the weights of the run's checkpoint."""
    trained = load_file(output / "run" / "checkpoint-2" / "model.safetensors")
    assert_same({f"drafter.head.{key}": each for key, each in head.state_dict().items()}, trained)


@pytest.mark.parametrize("kind", first(CLASSES, ["eagle3", "dflash"]))
def test_what_is_saved_is_what_was_trained(kind, target, text, tmp_path, capsys):
    output = tmp_path / "new" / "head"
    assert run(kind, target, text, output) == 0
    assert f"saved in {output}" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    drafter = CLASSES[kind].from_pretrained(output, model, 3)
    assert drafter.config.layer.intermediate_size == 24
    assert_trained(drafter.head, output)


@pytest.mark.parametrize("kind", [*CLASSES, "medusa"])
def test_a_loss_and_weights_of_steps_are_trained_by_name(kind, target, text, tmp_path):
    more = ["--loss", "ce:0.7,tv:0.3"]
    more += [] if kind == "eagle1" else ["--step-weights", "dpace:0.4"]
    made = Run(kind, "zoo", "zoo", tmp_path, loss=more[1], step_weights=(more[2:] or [None])[-1])
    _, objective = objective_of(made, zoo.load_target(), None)
    log_q, log_p = torch.randn(2, 3, 5).log_softmax(-1)
    wanted = 0.7 * ce(log_q, log_p) + 0.3 * tv(log_q, log_p)
    torch.testing.assert_close(objective.loss(log_q, log_p), wanted)
    assert kind == "eagle1" or objective.step_weights == DPace(0.4)
    if kind == "eagle3":
        assert run(kind, target, text, tmp_path / "head", *more) == 0
        assert run(kind, target, text, tmp_path / "plain") == 0
        heads = [load_file(tmp_path / name / "model.safetensors") for name in ("head", "plain")]
        assert not heads[0]["lm_head.weight"].equal(heads[1]["lm_head.weight"])


@pytest.mark.swept
def test_a_head_with_a_window_is_trained_and_saved_with_it(target, text, tmp_path):
    assert run("eagle3", target, text, tmp_path / "head", "--window", "9") == 0
    assert run("eagle3", target, text, tmp_path / "plain") == 0
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    found = [EagleDrafter.from_pretrained(tmp_path / n, model, 3).head for n in ("head", "plain")]
    assert [head.config.layer.windows for head in found] == [(9,), ()]
    keys = [head.layers[0].self_attn.k_proj.weight for head in found]
    assert not keys[0].equal(keys[1])  # the window counted in training, too


def test_a_step_that_is_measured_has_its_loss_in_the_log(target, text, tmp_path):
    """HF would leave it out, in the first process alone: the others then wait for its loss."""
    assert run("eagle1", target, text, tmp_path, *MEASURED, "--logging_steps", "1") == 0
    history = state_of(tmp_path).log_history
    assert [log["step"] for log in history if "loss" in log] == [1, 2]
    assert [log["step"] for log in history if "acceptance_length (T = 0)" in log] == [2]


REFUSED_LOSSES = {
    "kl_div": ["eagle3", "--loss", "kl_div"],
    "weights of steps must be": ["mtp", "--step-weights", "half"],
    "--step-weights belongs to eagle3": ["eagle1", "--step-weights", "0.5"],
    "--window belongs to eagle3": ["dflash", "--window", "512"],
}


@pytest.mark.parametrize("words", REFUSED_LOSSES)
def test_a_loss_that_is_none_is_refused_before_anything_is_read(words, tmp_path, capsys):
    kind, *more = REFUSED_LOSSES[words]
    assert run(kind, "nowhere", "zoo", tmp_path / "head", *more) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert not (tmp_path / "head").exists()


def test_modules_of_a_layout_are_saved_with_their_target_as_engines_want_it(
    target, text, tmp_path, capsys
):
    others = [word for word in SMALL if word not in ("--mlp-width", "24")]
    usual = [
        "train",
        "mtp",
        "--target",
        str(target),
        "--data",
        str(text),
        "--layout",
        "DeepSeek",
        *others,
    ]
    assert main([*usual, "--output", str(tmp_path / "whole")]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").eval()
    assert AutoTokenizer.from_pretrained(tmp_path / "whole")("def f")["input_ids"]
    head = MTPDrafter.from_pretrained(tmp_path / "whole", model, 3).head
    assert_trained(head, tmp_path / "whole")
    assert main([*usual, "--output", str(tmp_path / "other"), "--mlp-width", "24"]) == 2
    assert "semantics and mlp_width are DeepSeek's own" in capsys.readouterr().err


def test_what_is_saved_drafts_as_it_was_measured(target, text, tmp_path, capsys):
    assert run("eagle3", target, text, tmp_path, *MEASURED) == 0
    shown = capsys.readouterr()
    assert "acceptance_length (T = 0) " in shown.out
    assert shown.err.count("\nevaluating on 2 prompts\n") == 1
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    generator = SpeculativeGenerator(model, EagleDrafter.from_pretrained(tmp_path, model, 3))
    prompts = prompts_of(hold_out(encode_texts([TEXT], zoo.load_tokenizer()), 2)[1])
    figures = figures_of(tmp_path)
    assert figures["step"] == 2
    for t in (0, 1):
        stats = evaluate(generator, prompts, temperature=t).stats
        assert figures[f"acceptance_length (T = {t})"] == stats.acceptance_length


def test_rows_prompts_and_chosen_ids_are_read_as_texts_begin(target, text, tmp_path, monkeypatch):
    begun, found = tmp_path / "target", {"learned": [], "evaluated": [], "counted": []}
    shutil.copytree(target, begun)
    tokenizer = zoo.load_tokenizer()
    (first,) = tokenizer.convert_tokens_to_ids(["def"])
    processor = TemplateProcessing(single="def $A", special_tokens=[("def", first)])
    tokenizer.backend_tokenizer.post_processor = processor
    tokenizer.save_pretrained(begun)

    def noting(owner, name, kind, rows_of):
        known = getattr(owner, name)

        def noted(*args, **kwargs):
            found[kind].extend(rows_of(*args, **kwargs))
            return known(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    noting(Teacher, "__call__", "learned", lambda self, ids: ids.tolist())
    for home in (training_run, callbacks):
        noting(home, "evaluate", "evaluated", lambda _, prompts, **more: as_prompts(prompts))
    noting(training_run, "frequent_ids", "counted", lambda *_, beginning, **more: [beginning])
    options = [*MEASURED, "--draft-vocab-size", "300", "--length", "96", "--tokens-per-step", "192"]
    assert run("eagle3", begun, text, tmp_path / "head", *options) == 0
    assert all(found.values())
    found["evaluated"] = [prompt.turns[0] for prompt in found["evaluated"]]
    for kind, rows in found.items():
        assert {int(row[0]) for row in rows} == {first}, kind


def test_a_head_of_fewer_ids_has_those_of_the_data(target, text, tmp_path):
    assert run("eagle3", target, text, tmp_path / "head", "--draft-vocab-size", "300") == 0
    model = AutoModelForCausalLM.from_pretrained(target).eval()
    ids = EagleDrafter.from_pretrained(tmp_path / "head", model, 3).head.target_ids
    assert len(ids) == 300
    seen = np.unique(np.concatenate(encode_texts([TEXT], zoo.load_tokenizer())))
    assert set(seen.tolist()) <= set(ids.tolist())


@pytest.mark.swept
def test_rows_end_as_long_as_the_target_has_positions_unless_said_otherwise(target, text, tmp_path):
    usual = [
        "train",
        "eagle3",
        "--target",
        str(target),
        "--data",
        str(text),
        "--mlp-width",
        "24",
        *MEASURED,
    ]
    usual += ["--precision", "no", "--tokens-per-step", "192", "--output", str(tmp_path)]
    assert main([*usual, "--steps", "1"]) == 0
    lengths = {f"after {count} tokens" for count in (96, 192 - 4 - 64)}  # 192 positions, K = 4
    assert {key for key in figures_of(tmp_path) if key.startswith("after")} == lengths


def test_a_run_goes_on_when_it_is_started_again(target, text, tmp_path):
    assert run("eagle3", target, text, tmp_path) == 0
    assert run("eagle3", target, text, tmp_path, "--steps", "3") == 0
    assert state_of(tmp_path).global_step == 3
    assert not figures_of(tmp_path)


def test_minutes_are_those_of_steps_and_it_says_so(target, text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("test_training_cli.SMALL", [*SMALL[2:], "--minutes", "0.01"])
    assert run("eagle1", target, text, tmp_path / "a") == 0
    assert "training for 0.01 minutes, beside encoding the data\n" in capsys.readouterr().err
    assert state_of(tmp_path / "a").global_step >= 1


def test_options_of_hf_pass_through(target, text, tmp_path, capsys):
    """They come before ours; what is neither is a mistake of one line."""
    given = ["--max_steps", "1", "--logging_first_step", "--learning_rate", "0.125"]
    given += ["--lr_scheduler_kwargs", '{"min_lr_rate": 1.0}']
    assert run("eagle1", target, text, tmp_path / "a", *given) == 0
    state = state_of(tmp_path / "a")
    assert state.global_step == 1
    assert state.log_history[0]["learning_rate"] == 0.125
    assert run("eagle1", target, text, tmp_path / "b", "--lenght", "3") == 2
    assert "['--lenght', '3']" in capsys.readouterr().err


def test_the_zoo_trains_a_head_for_its_own_target(tmp_path, monkeypatch):
    files = [corpus.stdlib_root() / name for name in ("copy.py", "dis.py")]
    monkeypatch.setattr(corpus, "library_files", lambda: files)
    assert run("eagle3", "zoo", "zoo", tmp_path / "head", "--steps", "1") == 0
    drafter = EagleDrafter.from_pretrained(tmp_path / "head", zoo.load_target())
    assert drafter.feature_layers == (2, 8, 13)


MISTAKES = {
    "no such data": (["--data", "nowhere.txt"], "no training data at nowhere.txt"),
    "no such target": (["--target", "./no/such"], "cannot load './no/such': it must be a folder"),
    "no tokens": (["--tokens-per-step", "8"], "tokens_per_step = 8 has not a row of 32 tokens"),
    "rows too short": (["--length", "4"], "rows of 4 tokens are too short for 5 unrolled steps"),
    "output is a file": (["--output", __file__], "--output must be a folder, and"),
    "absurd rate": (["--lr", "1e30"], "the loss of step"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_told_in_one_line(case, target, text, tmp_path, capsys):
    wrong, message = MISTAKES[case]
    assert run("eagle3", target, text, tmp_path / "head", *wrong) == 2
    lines = capsys.readouterr().err.splitlines()
    errors = [line for line in lines if line.startswith("specdec: ") or "Error" in line]
    assert len(errors) == 1
    assert errors[0].startswith("specdec: ")
    assert message in errors[0]
    assert len(errors[0]) < 420
    assert not (tmp_path / "head" / "config.json").exists()


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
    arguments = ["eagle3", "--target", str(target), "--data", str(text), *SMALL, *MEASURED]
    assert main(["train", *arguments, "--output", str(tmp_path / "one")]) == 0
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
    assert done.stdout.count("acceptance_length (T = 0) ") == 1
    heads = [load_file(tmp_path / name / "model.safetensors") for name in ("one", "two")]
    for key, weight in heads[0].items():
        torch.testing.assert_close(heads[1][key], weight, rtol=0, atol=1e-3)
    assert len(list((tmp_path / "two" / "run" / "checkpoint-2").glob("rng_state_*"))) == 2


def test_a_folder_with_another_model_is_left_alone(target, text, tmp_path, capsys):
    before = (target / "model.safetensors").read_bytes()
    assert run("eagle3", target, text, target) == 2
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


def test_a_flag_of_another_kind_of_head_is_refused(tmp_path, capsys):
    assert run("mtp", "zoo", "zoo", tmp_path / "head", "--draft-vocab-size", "3") == 2
    line = capsys.readouterr().err
    owners = "eagle3 and mask-token and dflash and dspark; leave it out for mtp"
    assert line == f"specdec: --draft-vocab-size belongs to {owners}\n"
    assert not (tmp_path / "head").exists()


def test_a_run_with_other_arguments_or_files_does_not_go_on(target, text, tmp_path, capsys):
    assert run("eagle1", target, text, tmp_path / "head") == 0
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    def refusal(kind, *change):
        capsys.readouterr()
        assert run(kind, target, text, tmp_path / "head", *change) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "is of another run, delete it or choose another --output" in line
        return line.split("they differ in ")[1]

    assert refusal("eagle3") == "kind ('eagle1' there, 'eagle3' here)"
    assert refusal("eagle1", "--seed", "4") == "--seed (0 there, 4 here)"
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == files
    text.write_text(TEXT + "x")
    assert refusal("eagle1").startswith("the files of --data")
    (tmp_path / "head" / "run" / "command.json").write_text("[")
    assert "--data (None there" in refusal("eagle1")


def test_a_cpu_trains_in_small_steps_of_full_precision(tmp_path):
    for more in ({}, {"tokens_per_step": 640, "precision": "bf16"}):
        args = arguments_of(Run("eagle1", "zoo", "zoo", tmp_path, **more), [])
        assert (args.tokens_per_step, args.bf16) == ((640, True) if more else (512, False))


def test_a_run_that_is_complete_says_so_at_once(target, text, tmp_path, capsys, monkeypatch):
    arguments = ["eagle1", target, text, tmp_path, *MEASURED]
    assert run(*arguments) == 0
    figures = {n: v for n, v in figures_of(tmp_path).items() if n not in ("step", "epoch")}
    measured = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
    capsys.readouterr()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    def loaded(*args, **kwargs):
        raise OSError("something was loaded")

    with monkeypatch.context() as patch:
        patch.setattr("specdec.lab.cli.training_run.load_target", loaded)
        for change in ([], ["--steps", "1"]):
            assert run(*arguments, *change) == 0
            shown = capsys.readouterr().out.splitlines()
            assert shown[:2] == [f"already complete at step 2: {measured}", f"saved in {tmp_path}"]
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
        assert run(*arguments, "--steps", "3") == 2
        (tmp_path / "config.json").unlink()
        assert run(*arguments) == 2
        assert capsys.readouterr().err.count("something was loaded") == 2
    assert run(*arguments) == 0  # the head is written again
    assert (tmp_path / "config.json").exists()


OWN = """
from specdec.drafters import EagleDrafter
from specdec.lab.training import TrainingTimeTest, new_head

def make(target, num_draft_tokens, depths=5):
    if depths > 2:
        raise ValueError(f"a head of {depths} depths cannot be made")
    head = new_head(target, "eagle3", mlp_width=24)
    return TrainingTimeTest(EagleDrafter(head, target, num_draft_tokens), target, depths)
"""


def test_a_function_of_ones_own_gets_depths(target, text, tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    plain = [word for word in SMALL if word not in ("--mlp-width", "24")]
    words = ["train", f"{tmp_path / 'mine.py'}:make", "--target", str(target), "--data", str(text)]
    assert main([*words, *plain, "--output", str(tmp_path / "a"), "--depths", "2"]) == 0


UNMADE = {
    "a head of 5 depths cannot be made": ["{mine}:make"],
    "the number of draft ids must be": ["eagle3", "--draft-vocab-size", "99999"],
    "semantics and mlp_width are DeepSeek's own": ["mtp", "--layout", "DeepSeek", "--mlp-width=9"],
}


@pytest.mark.parametrize("message", UNMADE)
def test_an_objective_that_cannot_be_made_is_refused_before_the_corpus_is_read(
    message, target, text, tmp_path, capsys
):
    (tmp_path / "mine.py").write_text(OWN)
    words = [word.format(mine=tmp_path / "mine.py") for word in UNMADE[message]]
    usual = ["--target", str(target), "--data", str(text), "--output", str(tmp_path / "out")]
    assert main(["train", *words, *usual]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "encoding" not in error


@pytest.mark.swept
def test_an_evaluation_that_is_missing_says_why(target, tmp_path, capsys):
    path = tmp_path / "text.py"
    path.write_text(TEXT[:400])
    assert run("eagle1", target, path, tmp_path / "a", "--evaluation-prompts", "16") == 0
    shown = capsys.readouterr()
    (ids,) = encode_texts([path.read_text()], zoo.load_tokenizer())
    assert "evaluating on 0 prompts, not 16" in shown.err
    assert f"the data has {len(ids) // PROMPT_TOKENS}\n" in shown.err
    assert "acceptance_length" not in shown.out
    assert run("eagle1", target, path, tmp_path / "b") == 0
    assert "evaluating on" not in capsys.readouterr().err  # none was asked for
