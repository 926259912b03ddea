"""The memory of a step, on tensors without data: the witness is torch's profiler of a real one."""

import json

import pytest
import torch
from architectures import build
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import profile
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.training_memory import (
    LiveBytes,
    StepMemory,
    _gathering,
    _of_process,
    main,
    move_parameters,
    step_memory,
)
from specdec import EagleDrafter, MaskTokenDrafter, zoo
from specdec.lab.training import BlockRollouts, TrainingTimeTest
from specdec.lab.training.eagle import new_head as eagle_head
from specdec.lab.training.mask_token import new_head as mask_head
from specdec.lab.training.optimizer import MuonAdamW

CONFIG = LlamaConfig(
    vocab_size=1024,
    hidden_size=96,
    intermediate_size=256,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=2,
)
OBJECTIVES = {
    "eagle3": lambda m: TrainingTimeTest(EagleDrafter(eagle_head(m, "eagle3"), m, 4), m),
    "dflash": lambda m: BlockRollouts(
        MaskTokenDrafter(mask_head(m, block=("same-position", 5)), m, 4), m
    ),
}


def parts(name):
    torch.manual_seed(0)
    target = LlamaForCausalLM(CONFIG).eval()
    objective = OBJECTIVES[name](target).train()
    optimizer = MuonAdamW(objective, lr=0.01, lr_others=0.01, weight_decay=0.1)
    return objective, target, optimizer, torch.zeros(2, 257, dtype=torch.long)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_fake_tensors_take_what_the_allocator_of_a_real_step_gives(name, tmp_path):
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = step_memory(*parts(name))
    objective, _, optimizer, ids = parts(name)

    def step():
        loss = objective(ids)
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile(profile_memory=True) as profiler:
        step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    most = max(e["args"]["Total Allocated"] for e in events if e.get("name") == "[memory]")
    grown = found.most - found.target - found.head - found.optimizer
    assert grown == pytest.approx(most, rel=0.1)  # kernels hold a little inside
    weights = sum(weight.nbytes for weight in objective.parameters())
    assert found.head == pytest.approx(weights, rel=0.05)  # and buffers
    # Gradients alone would be far less, so activations are in it.
    assert grown > 2 * weights


def test_live_bytes_count_a_storage_once_and_until_it_goes():
    with LiveBytes() as live:
        x = torch.ones(1000, dtype=torch.float32)
        y = x.view(10, 100)[2:]
        assert live.now == 4000
        z = y * 2
        assert live.now == 4000 + 3200
        del z
        assert (live.now, live.most) == (4000, 7200)
    del x
    assert live.now == 4000  # y holds it
    del y
    assert live.now == 0


def test_parameters_that_are_shared_stay_shared():
    model = build("llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    count = sum(1 for _ in model.parameters())
    move_parameters(model, torch.device("meta"))
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert sum(1 for _ in model.parameters()) == count
    part = nn.BatchNorm1d(3)
    move_parameters(part, torch.device("meta"))
    assert part.running_mean.device.type == "meta"


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "mask-token", "dspark", "mtp", "medusa"])
def test_it_needs_a_configuration_alone_and_writes_nothing(kind, tmp_path, capsys):
    CONFIG.save_pretrained(tmp_path / "target")
    output = tmp_path / "head"
    usual = ["--target", str(tmp_path / "target"), "--data", "zoo", "--output", str(output)]
    more = ["--draft-vocab-size", "200"] if kind == "eagle3" else []
    sizes = ["--tokens-per-step", "512", "--length", "256"]
    main([kind, *usual, *sizes, *more])
    header, line, *_ = capsys.readouterr().out.splitlines()
    assert header.split() == ["rows", "x", "tokens", "target", "head", "optimiser", "at", "most"]
    shape, target, head, optimizer, most = line.replace("2 x 256", "2x256").split()
    assert shape == "2x256"
    whole = sum(weight.nbytes for weight in LlamaForCausalLM(CONFIG).parameters())
    assert float(target) == pytest.approx(whole / 1e9, rel=0.01)
    assert float(most) > float(target) + float(head) + float(optimizer)
    assert not output.exists()


def test_of_a_spread_target_a_process_has_its_part_and_all_that_is_whole():
    """By hand: 40 of 100 bytes are whole, half of the other 60 is elsewhere; gradients twice."""
    step = StepMemory(100, 10, 20, 200)
    assert _of_process(step, 2, 40) == StepMemory(70, 10, 20, 200 - 30 + 10)
    assert _of_process(step, 2, 100) == StepMemory(100, 10, 20, 210)
    assert _of_process(step, 1, 40) == step
    # FSDP2 has its part of the 40 beside them.
    assert _of_process(step, 2, 40, is_sharded=True) == StepMemory(90, 10, 20, 200 - 10 + 10)


def test_layers_in_parts_are_gathered_one_after_the_other(tmp_path):
    """Against the sum by hand: a layer and its buffer, beside what the same forward takes with all
    layers in one process.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        objective, target, *_ = parts("eagle3")
        layers = [*target.model.layers]
        size = sum(weight.nbytes for weight in layers[0].parameters())
        ids = torch.zeros(1, 8, dtype=torch.long)
        with LiveBytes() as live, _gathering(layers):
            objective._teacher(ids)
            assert live.most > 2 * size
            held = live.now
        with LiveBytes() as plain:
            objective._teacher(ids)
        # The last buffer stays for the rest of the step.
        assert size <= held - plain.now < 1.01 * size
        assert size <= live.most - plain.most <= 2 * size
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in layers)


@pytest.mark.parametrize("way", ["--spread-target", "--shard-target"])
def test_parts_need_no_other_process(way, tmp_path, capsys):
    CONFIG.save_pretrained(tmp_path / "target")
    usual = ["--target", str(tmp_path / "target"), "--data", "zoo", "--output", str(tmp_path / "h")]
    main(["eagle3", *usual, "--length", "64", way])
    assert "at most" in capsys.readouterr().out


def test_that_of_the_zoo_is_of_its_weights(tmp_path, capsys):
    usual = ["--target", "zoo", "--data", "zoo", "--output", str(tmp_path / "head")]
    main(["eagle3", *usual, "--length", "128"])
    target = capsys.readouterr().out.splitlines()[1].split()[3]
    model = zoo.load_target()
    assert float(target) == pytest.approx(sum(w.nbytes for w in model.parameters()) / 1e9, rel=0.01)
