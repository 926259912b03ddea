"""Targets that are spread: over two processes by tensor parallelism, and over a CPU and a disk by
`device_map`. The generator and every drafter work unchanged, captured steps too. (Two GPUs by
`device_map`: `tests/generator/test_gpu_half.py`.)
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, build
from drafting import perturbed, ragged_prompts
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from transformers import AutoModelForCausalLM

from specdec import EagleDrafter, ModelDrafter, SpeculativeGenerator, Target, zoo
from specdec.drafters.head.layers import look_up
from specdec.targets.edits.fusion import Fusion
from specdec.targets.edits.joint import siblings

ROOT = Path(__file__).parents[2]
LIMIT_S = 300
TWO_GPUS = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(name="folder")
def _folder(tmp_path, monkeypatch):
    """A small Llama whose vocabulary two processes can share equally."""
    family, config = ARCHITECTURES["llama"]
    monkeypatch.setitem(ARCHITECTURES, "llama", (family, {**config, "vocab_size": 64}))
    build("llama").save_pretrained(tmp_path)
    return tmp_path


def run(folder: Path, backend: str, ending: str) -> tuple[list[dict], list[str]]:
    """What both ranks report and print; fails where one of them fails or does not end."""
    script = Path(__file__).with_name("two_processes.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if backend == "gloo":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, str(script), str(folder), backend, ending]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [
        subprocess.Popen(command, env=environment | {"RANK": rank, "LOCAL_RANK": rank}, **options)
        for rank in ("0", "1")
    ]
    try:
        printed = [process.communicate(timeout=LIMIT_S)[0] for process in ranks]
    except subprocess.TimeoutExpired:
        for process in ranks:
            process.kill()
        printed = [process.communicate()[0] for process in ranks]
    codes = [process.returncode for process in ranks]  # -9 is a process that did not end
    assert codes == [0, 0], f"exit statuses {codes}\n" + "\n".join(printed)
    return [json.loads((folder / f"{ending}_{rank}.json").read_text()) for rank in (0, 1)], printed


@pytest.mark.slow
def test_every_drafter_and_sampler_on_a_target_over_two_processes(folder):
    """Slow: two interpreters start."""
    reports, _ = run(folder, "gloo", "texts")
    for report in reports:
        assert report["cases"] == 36
        assert report["different"] == []
        assert report["own_parameters"] < 0.6 * report["whole_parameters"]  # it really was spread
        for drafter in ("model", "eagle3", "mtp"):
            counts = [n for key, n in report["accepted"].items() if key.startswith(drafter)]
            assert min(counts) > 0
    assert reports[0]["accepted"] == reports[1]["accepted"]
    assert reports[0]["chosen_lengths"] == reports[1]["chosen_lengths"]


@pytest.mark.parametrize("ending", ["destroy", "exit"])
@pytest.mark.parametrize(
    "backend", [pytest.param("gloo", marks=pytest.mark.slow), pytest.param("nccl", marks=TWO_GPUS)]
)
def test_captured_steps_over_two_processes_equal_eager_ones_and_end(backend, ending, folder):
    reports, printed = run(folder, backend, ending)
    for report in reports:
        assert report["backend"] == backend
        for name, texts in report["texts"].items():
            assert texts["captured"] == texts["eager"], name
            assert texts["captured"] == texts["whole"], name
        assert all("captured in" in text for text in report["explain"])
        assert report["num_live"] >= len(report["texts"])
        assert report.get("num_left", 0) == 0
    assert reports[0]["texts"] == reports[1]["texts"]
    assert all("0 graphs are alive at the very end" in text for text in printed)


@pytest.fixture(name="mesh")
def _mesh(tmp_path):
    """A process group of one process, which runs the same code as many."""
    address = f"file://{tmp_path}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dim", [0, 1])
def test_a_table_that_is_spread_is_read_where_its_rows_are(mesh, dim):
    embeddings = nn.Embedding(11, 6)
    tokens = torch.tensor([[3, 0], [10, 3]])
    expected = look_up(embeddings, tokens)
    assert expected.equal(embeddings.weight[tokens])
    spread = nn.Embedding(11, 6)
    spread.weight = nn.Parameter(distribute_tensor(embeddings.weight.detach(), mesh, [Shard(dim)]))
    found = look_up(spread, tokens)
    assert not isinstance(found, DTensor)
    assert found.equal(expected)


def test_layers_that_are_spread_are_not_joined(mesh):
    model = build("llama")
    layer = model.model.layers[1].self_attn.k_proj
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    joined, note = siblings(model)
    assert len(joined) == 5
    assert note.endswith("left alone: 1 x q_proj, k_proj, v_proj (DTensor)")


@pytest.mark.parametrize("dim", [0, 1])
def test_a_head_is_loaded_for_a_target_that_is_spread(mesh, dim):
    heads = []
    for is_spread in (False, True):
        target = zoo.load_target()
        for module in (target.model.embed_tokens, target.lm_head) if is_spread else ():
            table = distribute_tensor(module.weight.detach(), mesh, [Shard(dim)])
            module.weight = nn.Parameter(table, requires_grad=False)
        drafter = EagleDrafter.from_pretrained(zoo.WEIGHTS_DIR / "eagle3", target)
        heads.append((drafter.head.config, sorted(drafter.head.state_dict())))
    assert heads[0] == heads[1]
    assert not heads[1][0].has_embed_tokens  # a copy of the target's, and used by reference


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_target_over_a_cpu_and_a_disk(folder, seed, fuse, tmp_path, monkeypatch):
    monkeypatch.setattr(Fusion, "fuse", lambda self, view: [])  # no Inductor
    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    layers = {f"model.layers.{i}": "cpu" for i in range(3)}
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {"lm_head": "cpu", **layers, "model.layers.1": "disk"}
    spread = AutoModelForCausalLM.from_pretrained(
        folder, device_map=places, offload_folder=tmp_path / "offloaded"
    ).eval()
    assert spread.model.layers[1].mlp.up_proj.weight.is_meta
    ids, mask = ragged_prompts(VOCAB, 3, 7, 5)
    options = {"max_new_tokens": 10, "do_sample": seed is not None, "seed": seed}
    texts = [
        SpeculativeGenerator(Target(target, fuse=fuse), ModelDrafter(perturbed(whole), 3)).generate(
            ids, mask, **{n: v for n, v in options.items() if v is not None}
        )
        for target in (whole, spread)
    ]
    assert texts[0].sequences.equal(texts[1].sequences)
    assert texts[0].stats.accepted == texts[1].stats.accepted
    assert spread.model.layers[1].mlp.up_proj.weight.is_meta
