"""`specdec train --spread-target`: part of a target in each of two processes, heads as in one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, TrainerState

from specdec import processes, zoo
from specdec.cli import main
from specdec.loading import load_spread_target
from specdec.training.trainer import last_checkpoint

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
    LlamaForCausalLM(config).save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    (folder / "text.py").write_text(TEXT)
    return folder


def train(kind, folder, output, *more, launcher=()):
    words = ["train", kind, "--target", str(folder / "target"), "--data", str(folder / "text.py")]
    command = [sys.executable, *launcher, "-m", "specdec", *words, *SMALL, *more]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 500}
    done = subprocess.run([*command, "--output", str(output)], **options)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("saved in") == 1


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
@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_spread_target_trains_as_a_whole_one_does(kind, folder, tmp_path):
    """MTP modules use the target's vocabulary head, EAGLE-3 its embeddings alone. A run of two
    processes goes on in one.
    """
    train(kind, folder, tmp_path / "one")
    train(kind, folder, tmp_path / "two", "--spread-target", launcher=TWO)
    (losses, figures), (others, measured) = logs_of(tmp_path / "one"), logs_of(tmp_path / "two")
    assert len(losses) == 4
    assert others == pytest.approx(losses, rel=2e-5)
    assert measured == pytest.approx(figures, abs=0.3)  # of text that is sampled
    assert_same_head(tmp_path / "one", tmp_path / "two")
    for step in (3, 4):
        shutil.rmtree(tmp_path / "two" / "run" / f"checkpoint-{step}")
    before = load_file(tmp_path / "two" / "run" / "checkpoint-2" / "model.safetensors")
    train(kind, folder, tmp_path / "two")
    after = load_file(tmp_path / "two" / "run" / "checkpoint-4" / "model.safetensors")
    assert any(not before[key].equal(weight) for key, weight in after.items())
    assert_same_head(tmp_path / "one", tmp_path / "two")


def test_one_process_has_nothing_to_spread_over(folder, tmp_path, capsys):
    with pytest.raises(ValueError, match="start them with torchrun"):
        load_spread_target("zoo")
    words = ["train", "eagle3", "--target", "zoo", "--data", "zoo", "--spread-target"]
    assert main([*words, "--output", str(tmp_path / "head")]) == 2
    assert "start them with torchrun" in capsys.readouterr().err
    words[1] = "mtp"
    assert main([*words, "--layout", "DeepSeek", "--output", str(tmp_path / "head")]) == 2
    assert "--layout saves a whole target" in capsys.readouterr().err


def test_a_whole_target_reads_its_own_rows():
    model, rows = nn.Linear(1, 1), torch.tensor([[1, 2]])
    assert not processes.is_spread(model)
    (found,), own = processes.rows_of_all(rows, model)
    assert (own, found is rows) == (0, True)
