"""`specdec train` with parts of a target, or of a head, in each of two processes: heads as in one.
`--spread-target` (tensor parallelism), `--shard-target` (FSDP2), `accelerate launch --use_fsdp`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from architectures import ARCHITECTURES
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, TrainerState

from specdec import SpeculativeGenerator, processes, zoo
from specdec.lab.cli import main
from specdec.lab.training import target_parts
from specdec.lab.training.callbacks import BatchSizes
from specdec.lab.training.eagle import new_head
from specdec.lab.training.target_parts import keep_tables_whole, load_spread_target, spread_plan
from specdec.lab.training.target_parts import load_sharded_target as load_sharded
from specdec.lab.training.teacher import Teacher
from specdec.lab.training.trainer import ObjectiveTrainer, last_checkpoint
from specdec.loading import load_pretrained
from specdec.loop.capturing import why_never

ROOT = Path(__file__).parents[2]
TEXT = "".join(f"def function_{i}(x):\n    return x + {i % 7}\n\n\n" for i in range(150))
SMALL = ["--steps", "4", "--tokens-per-step", "128", "--length", "32", "--precision", "no"]
SMALL += ["--mlp-width", "24", "--evaluation-prompts", "2", "--num-draft-tokens", "3"]
SMALL += ["--checkpoint-minutes", "0", "--save_total_limit", "9", "--logging_steps", "1"]
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random Llama with the zoo's tokenizer, and a text."""
    folder, tokenizer = tmp_path_factory.mktemp("spread"), zoo.load_tokenizer()
    special = {f"{name}_token_id": tokenizer.eos_token_id for name in ("bos", "eos", "pad")}
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 192}
    config = LlamaConfig(**ARCHITECTURES["llama"][1] | sizes | special)
    target = LlamaForCausalLM(config)
    with torch.no_grad():  # far from uniform distributions, so that losses show the target
        for weight in target.parameters():
            weight.mul_(1 if weight.dim() == 1 else 8)
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    (folder / "text.py").write_text(TEXT)
    return folder


def start(kind, folder, output, *more, launcher=(), program=("-m", "specdec")):
    words = ["train", kind, "--target", str(folder / "target"), "--data", str(folder / "text.py")]
    command = [sys.executable, *launcher, *program, *words, *SMALL, *more]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 500}
    return subprocess.run([*command, "--output", str(output)], **options)


def train(*args, **options):
    done = start(*args, **options)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("saved in") == 1


def interrupted(output, copy, *, at):
    """A copy of a run that was stopped after so many steps."""
    shutil.copytree(output, copy)
    for folder in (copy / "run").glob("checkpoint-*"):
        if int(folder.name.split("-")[1]) > at:
            shutil.rmtree(folder)
    return copy


def logs_of(output):
    """Losses of all steps, and the acceptance that was measured last."""
    history = TrainerState.load_from_json(last_checkpoint(output / "run") / "trainer_state.json")
    losses = [log["loss"] for log in history.log_history if "loss" in log]
    figures = [log for log in history.log_history if "acceptance_length (T = 0)" in log]
    return losses, {k: v for k, v in figures[-1].items() if k.startswith("acceptance")}


def assert_same_head(one, other):
    heads = [load_file(path / "model.safetensors") for path in (one, other)]
    assert heads[0].keys() == heads[1].keys()
    for key, weight in heads[0].items():
        torch.testing.assert_close(heads[1][key], weight, rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["--spread-target", "--shard-target"])
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_spread_target_trains_as_a_whole_one_does(kind, way, folder, tmp_path):
    """MTP modules use the target's vocabulary head, EAGLE-3 its embeddings alone. A run of two
    processes goes on in one.
    """
    train(kind, folder, tmp_path / "one")
    train(kind, folder, tmp_path / "two", way, launcher=TWO)
    (losses, figures), (others, measured) = logs_of(tmp_path / "one"), logs_of(tmp_path / "two")
    assert len(losses) == 4
    assert others == pytest.approx(losses, rel=2e-5)
    assert measured == pytest.approx(figures, abs=0.3)  # of text that is sampled
    assert_same_head(tmp_path / "one", tmp_path / "two")
    onward = interrupted(tmp_path / "two", tmp_path / "onward", at=2)
    before = load_file(onward / "run" / "checkpoint-2" / "model.safetensors")
    train(kind, folder, onward)
    after = load_file(onward / "run" / "checkpoint-4" / "model.safetensors")
    assert any(not before[key].equal(weight) for key, weight in after.items())
    assert_same_head(tmp_path / "one", onward)
    # And one of one process in two.
    onward = interrupted(tmp_path / "one", tmp_path / "back", at=2)
    train(kind, folder, onward, way, launcher=TWO)
    assert logs_of(onward)[0] == pytest.approx(losses, rel=2e-5)
    assert_same_head(tmp_path / "one", onward)


FSDP = ["-m", "accelerate.commands.launch", "--use_fsdp", "--fsdp_version", "2", "--num_processes"]
ON_CPUS = {"program": [str(Path(__file__).with_name("fsdp_on_cpus.py"))]}


@pytest.mark.slow
def test_a_head_in_parts_trains_as_a_whole_one_does(folder, tmp_path):
    """The head under accelerate's FSDP2, beside a whole target and one in parts; it is measured and
    saved, and its checkpoints go on in any number of processes that has them in parts.
    """
    ids = ["--draft-vocab-size", "300"]  # a buffer that no checkpoint holds
    train("eagle3", folder, tmp_path / "one", *ids)
    train("eagle3", folder, tmp_path / "two", *ids, launcher=[*FSDP, "2"], **ON_CPUS)
    (losses, figures), (others, measured) = logs_of(tmp_path / "one"), logs_of(tmp_path / "two")
    assert others == pytest.approx(losses, rel=2e-5)
    assert measured == pytest.approx(figures, abs=0.3)
    assert_same_head(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two" / "run" / "checkpoint-2" / "pytorch_model_fsdp_0").is_dir()
    for count, more in (("4", ()), ("2", ("--shard-target",))):
        onward = interrupted(tmp_path / "two", tmp_path / count, at=2)
        train("eagle3", folder, onward, *ids, *more, launcher=[*FSDP, count], **ON_CPUS)
        assert logs_of(onward)[0] == pytest.approx(losses, rel=2e-5)
        assert_same_head(tmp_path / "one", onward)
    onward = interrupted(tmp_path / "two", tmp_path / "alone", at=2)
    assert "go on under accelerate launch" in start("eagle3", folder, onward, *ids).stderr
    # A finished run is loaded by any.
    (tmp_path / "two" / "config.json").unlink()
    (tmp_path / "two" / "model.safetensors").unlink()
    train("eagle3", folder, tmp_path / "two", *ids)
    assert_same_head(tmp_path / "one", tmp_path / "two")


def test_one_process_has_nothing_to_spread_over(folder, tmp_path, capsys):
    usual = ["--target", "zoo", "--data", "zoo", "--output", str(tmp_path / "head")]
    for way, load in (("--spread-target", load_spread_target), ("--shard-target", load_sharded)):
        with pytest.raises(ValueError, match="start them with torchrun"):
            load("zoo")
        assert main(["train", "eagle3", *usual, way]) == 2
        assert "start them with torchrun" in capsys.readouterr().err
        assert main(["train", "mtp", *usual, way, "--layout", "DeepSeek"]) == 2
        assert f"--layout saves a whole target, and {way}" in capsys.readouterr().err
    assert main(["train", "eagle3", *usual, "--spread-target", "--shard-target"]) == 2
    assert "take one" in capsys.readouterr().err


def test_a_whole_target_reads_its_own_rows():
    model, rows = nn.Linear(1, 1), torch.tensor([[1, 2]])
    assert not processes.is_spread(model)
    (found,), own = processes.rows_of_all(rows, model)
    assert (own, found is rows) == (0, True)


def tiny():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**ARCHITECTURES["llama"][1])).eval()


def test_of_others_rows_a_process_keeps_nothing(monkeypatch):
    """Three processes have a row each, and this is the second: its own row is read as if alone, and
    of the others no logits are computed, but for one position.
    """
    target, rows = tiny(), [torch.tensor([[i, 7, 2, 9]]) for i in range(3)]
    teacher, widths = Teacher(target, (1, "final")), []
    logits, features = teacher(rows[1])
    own = target.lm_head.forward

    def counted(hidden):
        widths.append(hidden.shape[1])
        return own(hidden)

    monkeypatch.setattr(target.lm_head, "forward", counted)
    monkeypatch.setattr(processes, "rows_of_all", lambda *_: (rows, 1))
    found = Teacher(target, (1, "final"))(rows[1])
    assert widths == [1, 4, 1]
    assert found[0].equal(logits)
    assert found[1].equal(features)


@pytest.mark.parametrize("has_style", [True, False])
def test_tables_stay_whole_whatever_the_plans_of_transformers_are(has_style, monkeypatch):
    """Of 5.17 there is no style for it, and a plan takes the place of the model's own."""
    styles = {"replicate": None} if has_style else {}
    monkeypatch.setattr(target_parts, "ALL_PARALLEL_STYLES", styles)
    plan = spread_plan(LlamaConfig(**ARCHITECTURES["llama"][1]))
    tables = {"lm_head", "model.embed_tokens"}
    if has_style:
        assert plan == dict.fromkeys(tables, "replicate")
    else:
        assert not tables & plan.keys()
        assert plan["model.layers.*.self_attn.q_proj"] == "colwise"


def test_a_target_is_no_model_that_fsdp_fills(folder, monkeypatch):
    """HF has all processes but the first load zeros where this variable says so."""
    name, seen = "FSDP_CPU_RAM_EFFICIENT_LOADING", []
    own = LlamaForCausalLM.from_pretrained.__func__

    def watched(cls, *args, **options):
        seen.append(os.environ.get(name))
        return own(cls, *args, **options)

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", classmethod(watched))
    path = str(folder / "target")
    load_pretrained("LlamaForCausalLM", path)
    assert name not in os.environ
    monkeypatch.setenv(name, "true")
    load_pretrained("LlamaForCausalLM", path)
    assert seen == [None, "false"]
    assert os.environ[name] == "true"


def test_a_run_does_not_go_on_with_other_rows():
    made, state = BatchSizes([6, 3], 3), TrainerState()
    made.check(state)  # of a checkpoint before there were such notes
    state.stateful_callbacks["BatchSizes"] = made.state()
    BatchSizes([6, 3], 1).check(state)
    with pytest.raises(ValueError, match=r"had 6, 3 rows, over 3 processes, and 2 would take 6, 2"):
        BatchSizes([6, 2], 2).check(state)


@pytest.mark.parametrize("in_parts", [True, False])
def test_a_checkpoint_of_the_other_form_is_refused(in_parts, tmp_path):
    (tmp_path / ("pytorch_model_fsdp_0" if in_parts else "optimizer.pt")).mkdir()
    trainer = object.__new__(ObjectiveTrainer)
    trainer.is_fsdp_enabled = in_parts
    trainer._check_layout(tmp_path)
    trainer.is_fsdp_enabled = not in_parts
    with pytest.raises(ValueError, match="go on under accelerate" if in_parts else "go on without"):
        trainer._check_layout(tmp_path)


@pytest.fixture(name="alone")
def _alone(tmp_path):
    """A process group of one process, which runs the same code as many."""
    address = f"file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_module_in_parts_is_whole_for_a_while(alone):
    mesh, head = init_device_mesh("cpu", (1,)), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    expected = head[0].weight.detach().clone()
    head[1].weight = head[0].weight
    fully_shard(head, mesh=mesh)
    parts = dict(head.named_parameters())
    assert all(isinstance(weight, DTensor) for weight in parts.values())
    with processes.gathered(head):
        assert head[0].weight is head[1].weight
        assert type(head[0].weight) is nn.Parameter
        assert head[0].weight.equal(expected)
        assert head.state_dict()["0.weight"].equal(expected)
    assert all(weight is parts[name] for name, weight in head.named_parameters())


def test_a_sharded_target_reads_rows_of_its_own_and_steps_are_eager(alone):
    target = tiny()
    ids = torch.tensor([[1, 5, 2, 9]])
    expected = Teacher(target, (1, "final"))(ids)
    new_tokens = SpeculativeGenerator(target, "lookup").generate(ids, max_new_tokens=8).new_tokens
    for layer in target.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
    fully_shard(target, mesh=init_device_mesh("cpu", (1,)))
    keep_tables_whole(target)
    assert processes.is_sharded(target)
    (rows,), _ = processes.rows_of_all(ids, target)
    assert rows is ids
    assert type(target.lm_head.weight) is nn.Parameter
    new_head(target, "eagle3")  # copies it
    for _ in range(2):
        found = Teacher(target, (1, "final"))(ids)
        assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
        generator = SpeculativeGenerator(target, "lookup")
        assert generator.generate(ids, max_new_tokens=8).new_tokens.equal(new_tokens)
    assert isinstance(target.model.layers[0].mlp.up_proj.weight, DTensor)
    wanted = SimpleNamespace(device=torch.device("cuda"), model=target)
    assert "FSDP2" in why_never(wanted, "auto")
