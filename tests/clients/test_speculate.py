"""`speculate` inside TRL's trainers: rollouts are the updated policy's own, and a run with the same
draws ends in the same weights, bit for bit, whoever writes its rollouts.

TRL lives in an environment of its own (CONTRIBUTING.md).
"""

import json
import os
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
from autocast_text import is_own_text
from rollout_runs import GROUP, KINDS, PROMPTS, STEPS, run, trainer_of
from safetensors.torch import load_file
from transformers import TrainerCallback

from specdec import zoo
from specdec.lab.integrations.trl import speculate
from specdec.lab.training import SentinelCallback

pytest.importorskip("trl")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CALL = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
INPUTS = zoo.load_tokenizer()(PROMPTS[:3], return_tensors="pt", padding=True, padding_side="left")


def greedy(model):
    """The model's greedy text by HF alone, and what its own `generate` returns."""
    own = model.generate(**INPUTS, **CALL)
    return type(model).generate(model, **INPUTS, **CALL), own


class AfterEveryStep(TrainerCallback):
    """Compares both texts; notes them, and the rollouts that the generator wrote."""

    def __init__(self, is_rounded):
        self.texts, self.generator, self.rollouts = [], None, []
        self.is_rounded = is_rounded

    def on_step_begin(self, args, state, control, model=None, **_):
        self.generator.last_result = None

    def on_step_end(self, args, state, control, model=None, **_):
        self.rollouts.append(self.generator.last_result)
        assert model.training
        model.eval()
        expected, found = greedy(model)
        if self.is_rounded:
            assert is_own_text(model, INPUTS, found[:, INPUTS.input_ids.shape[1] :])
        else:
            assert found.equal(expected)
        self.texts.append(found)
        model.train()


ADAPTER = {"r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj", "down_proj"]}


@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_checkpointing": True}, {"bf16": True, "gradient_checkpointing": True}],
    ids=["float32", "checkpointing", "bf16 checkpointing"],
)
@pytest.mark.parametrize("is_adapted", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_after_every_update_the_text_is_the_updated_models(kind, is_adapted, settings, tmp_path):
    """Float32 and LoRA, which `generate` runs in float32 in any case, token for token; a plain
    model with `bf16=True`, which accelerate runs under autocast, up to what that rounds.
    """
    callback = AfterEveryStep(is_rounded="bf16" in settings and not is_adapted)
    more = {"callbacks": [callback]}
    if is_adapted:
        more["peft_config"] = peft.LoraConfig(**ADAPTER)
        settings = settings | {"learning_rate": 3e-2}
    trainer = trainer_of(kind, zoo.load_target(), tmp_path, more=more, **settings)
    untrained = greedy(trainer.model.eval())[0]
    callback.generator = speculate(trainer, "zoo:eagle3")
    trainer.train()
    assert len(callback.texts) == STEPS
    assert not callback.texts[-1].equal(untrained)
    assert all(result.stats.acceptance_rate > 0 for result in callback.rollouts)


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_same_draws_rewards_and_weights_are_those_of_a_run_without(kind, tmp_path):
    """HF's own `generate` is made to draw what the coupling sampler draws."""
    drafters = None, "none", "lookup", "suffix", "zoo:eagle3"
    plain, *others = (run(kind, drafter, tmp_path) for drafter in drafters)
    for other in others:
        assert other["completions"] == plain["completions"]
        assert other["rewards"] == plain["rewards"]
        assert other["weights"] == plain["weights"]
    assert others[-1]["acceptance_length"] > 1.3
    seeded = run(kind, "zoo:eagle3", tmp_path, seed=43)
    assert seeded["completions"] != plain["completions"]
    assert seeded["weights"] != plain["weights"]


def run_in_two_processes(folder, **options):
    """What `run` returns in each of two processes of gloo that share a folder."""
    folder.mkdir(exist_ok=True)
    file = folder / "options.json"
    file.write_text(json.dumps({"folder": str(folder), **options}), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "tests/rollout_runs.py", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    options = {"capture_output": True, "text": True, "timeout": 600}
    done = subprocess.run(command, cwd=ROOT, env=environment, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"options.{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_the_weights_that_they_train_without(kind, tmp_path):
    """Each process writes the rollouts of its own prompts, with draws of its own. A drafter that
    follows learns from those of both.
    """
    eagle3 = {"drafter": "zoo:eagle3"}
    runs = {"plain": {"drafter": None}, "drafted": eagle3, "followed": eagle3 | {"follows": True}}
    found = {n: run_in_two_processes(tmp_path / n, kind=kind, **run) for n, run in runs.items()}
    plain = found.pop("plain")
    assert plain[0]["weights"] == plain[1]["weights"]
    assert plain[0]["completions"] != plain[1]["completions"]
    for drafted in found.values():
        for one, other in zip(plain, drafted, strict=True):
            assert one["completions"] == other["completions"]
            assert one["rewards"] == other["rewards"]
            assert one["weights"] == other["weights"]
            assert other["acceptance_length"] > 1.3
    first, second = (of_process["drafters"] for of_process in found["followed"])
    assert first == second
    assert len({*first, found["drafted"][0]["drafters"][0]}) == STEPS + 1


def test_a_run_goes_on_from_its_checkpoint_with_the_draws_that_it_would_have_had(tmp_path):
    """The trainer saves and loads torch's generator, from which seeds are drawn."""
    saving = {"save_strategy": "steps", "save_steps": STEPS // 2}
    whole = run("GRPO", "suffix", tmp_path, **saving)
    checkpoint = tmp_path / f"checkpoint-{STEPS // 2}"
    again = run("GRPO", "suffix", tmp_path, resume=str(checkpoint), **saving)
    assert again["completions"] == whole["completions"][STEPS // 2 :]
    assert again["weights"] == whole["weights"]


def test_a_run_goes_on_with_the_memory_of_its_checkpoint(tmp_path):
    """Two prompts, each in three steps of one epoch; a sampler whose draws depend on the drafts."""
    options = {"prompts": PROMPTS[:2] * 3, "sampler": "block", "max_steps": 6}
    saving = {"save_strategy": "steps", "save_steps": 3}
    whole = run("GRPO", "suffix", tmp_path, **options, **saving)
    checkpoint = tmp_path / "checkpoint-3"
    memory = checkpoint / "memory-0-process-0-of-1.safetensors"
    again = run("GRPO", "suffix", tmp_path, resume=str(checkpoint), **options, **saving)
    assert again["completions"] == whole["completions"][3:]
    assert again["weights"] == whole["weights"]
    assert again["acceptance_length"] == whole["acceptance_length"]
    memory.unlink()
    without = run("GRPO", "suffix", tmp_path, resume=str(checkpoint), **options)
    assert without["completions"] != again["completions"]


def test_each_of_two_processes_goes_on_with_the_memory_of_its_own_rollouts(tmp_path):
    """Two prompts, again in each step of one epoch; a sampler whose draws depend on the drafts."""
    options = {"kind": "GRPO", "drafter": "suffix", "sampler": "block", "max_steps": 6}
    options |= {"prompts": PROMPTS[:2] * 6, "save_strategy": "steps", "save_steps": 3}
    whole = run_in_two_processes(tmp_path, **options)
    options["resume"] = str(tmp_path / "checkpoint-3")
    again = run_in_two_processes(tmp_path, **options)
    names = [f"memory-0-process-{rank}-of-2.safetensors" for rank in range(2)]
    memories = [tmp_path / "checkpoint-3" / name for name in names]
    for one, other, file in zip(whole, again, memories, strict=True):
        assert other["completions"] == one["completions"][3:]
        assert other["weights"] == one["weights"]
        assert other["acceptance_length"] == one["acceptance_length"]
        texts = [text for step in one["completions"][:3] for text in step]
        memory = groupby(load_file(file)["memory"].tolist(), lambda token: token >= 0)
        remembered = [list(tokens) for is_text, tokens in memory if is_text]
        for tokens, text in zip(remembered, texts, strict=True):  # each with its prompt's end
            assert tokens[-len(text) :] == text
    memories[1].unlink()
    without = run_in_two_processes(tmp_path, **options)
    assert without[0]["completions"][0] == again[0]["completions"][0]
    assert without[1]["completions"][0] != again[1]["completions"][0]


def test_a_sentinel_reads_every_rollout_and_lets_the_run_go_on(tmp_path):
    trainer = trainer_of("GRPO", zoo.load_target(), tmp_path)
    callback = SentinelCallback(speculate(trainer, "zoo:eagle3"))
    trainer.add_callback(callback)
    trainer.train()
    assert callback.sentinel.found.num_texts == STEPS * GROUP
    assert callback.sentinel.found.passed


def test_a_policy_that_is_followed_trains_alike_and_a_checkpoint_has_the_drafter(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": STEPS // 2, "follows": True}
    alone = run("GRPO", "zoo:eagle3", tmp_path / "alone")
    whole = run("GRPO", "zoo:eagle3", tmp_path, **saving)
    assert whole["completions"] == alone["completions"]
    assert whole["weights"] == alone["weights"]
    assert whole["drafters"][0] != alone["drafters"][0]
    checkpoint = tmp_path / f"checkpoint-{STEPS // 2}"
    again = run("GRPO", "zoo:eagle3", tmp_path, resume=str(checkpoint), **saving)
    assert again["weights"] == whole["weights"]
    assert again["drafters"] == whole["drafters"][STEPS // 2 :]
