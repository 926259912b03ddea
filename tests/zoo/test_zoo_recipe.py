"""The zoo's recipe, on a corpus of three files and with a step or two per stage."""

import json

import numpy as np
import pytest
import torch
from architectures import VOCAB, build
from safetensors.torch import load_file
from training_runs import on_a_cpu
from transformers import LlamaForCausalLM

from recipes.zoo import models, recipe, sources
from recipes.zoo.owntext import continue_windows
from specdec import zoo
from specdec.drafters import EagleDrafter, MaskTokenDrafter, MTPDrafter
from specdec.lab.zoo import corpus


@pytest.fixture(autouse=True)
def _on_a_cpu():
    with on_a_cpu():
        yield


def documents():
    generator = np.random.default_rng(0)
    return [generator.integers(1, VOCAB, 40).astype(np.uint16) for _ in range(5)]


def target():
    model = build("llama")
    model.config.eos_token_id = 3
    model.generation_config.eos_token_id = 3
    return model


def windows_of(rows, length):
    return [tuple(row[:length].tolist()) for row in rows]


def test_the_targets_own_text_begins_in_the_corpus_and_goes_on_in_its_words():
    model, stream = target(), np.concatenate(documents()).tolist()
    options = {"num_rows": 12, "prompt_tokens": 6, "new_tokens": 8, "batch_size": 6}
    rows = continue_windows(model, documents(), **options)
    places = {tuple(stream[i : i + 6]) for i in range(len(stream) - 5)}
    assert len(rows) == 12
    assert set(windows_of(rows, 6)) <= places
    for row in rows:
        behind = row[6:].tolist()
        assert row.dtype == np.uint16
        assert 1 <= len(behind) <= 8
        assert 3 not in behind[:-1]  # cut behind the end of the sequence
        assert len(behind) == 8 or behind[-1] == 3

    def is_greedy(row):
        logits = model(input_ids=torch.tensor(row[:-1].astype(np.int64))[None]).logits[0]
        return logits.argmax(-1)[5:].tolist() == row[6:].tolist()

    assert all(map(is_greedy, rows[:6]))  # the first batch
    assert not any(map(is_greedy, rows[6:]))  # the second


def test_the_targets_own_text_depends_on_its_seed_alone():
    options = {"num_rows": 4, "prompt_tokens": 6, "new_tokens": 8, "batch_size": 2}
    model = target()
    torch.manual_seed(5)
    expected = torch.rand(2).tolist()
    torch.manual_seed(5)
    first = continue_windows(model, documents(), **options)
    assert torch.rand(2).tolist() == expected
    again, other = (continue_windows(model, documents(), **options, seed=s) for s in (0, 1))
    assert [r.tolist() for r in first] == [r.tolist() for r in again]
    assert windows_of(first, 6) != windows_of(other, 6)


@pytest.mark.parametrize(
    ("build_head", "sizes"),
    [
        (models.build_eagle3_head, {}),
        (models.build_mask_token_head, {"num_layers": 2}),
        (models.build_mtp_head, {"num_depths": 2}),
    ],
)
def test_a_new_head_starts_with_the_targets_norm_and_vocabulary_head(build_head, sizes):
    model = zoo.load_target()
    heads = [build_head(model, **sizes, mlp_width=16, seed=seed) for seed in (2, 2, 3)]
    first, again, other = (head.state_dict() for head in heads)
    assert all(weight.equal(again[name]) for name, weight in first.items())
    assert not all(weight.equal(other[name]) for name, weight in first.items())
    head = heads[0]
    norms = [depth.norm for depth in head.layers] if "num_depths" in sizes else [head.norm]
    shared = [(norm.weight, model.model.norm.weight) for norm in norms]
    if head.config.has_lm_head:
        assert head.config.feature_layers == (2, 8, 13)
        shared.append((head.lm_head.weight, model.lm_head.weight))
    for own, theirs in shared:
        assert own.equal(theirs)
        assert own.data_ptr() != theirs.data_ptr()


def test_encoded_files_are_their_text_and_the_end(tmp_path):
    tokenizer, path = zoo.load_tokenizer(), tmp_path / "a.py"
    path.write_text("def f(x):\n    return 'é'\n")
    (ids,) = sources.encode_files(tokenizer, [path])
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1].tolist()) == path.read_text()


@pytest.mark.slow
def test_every_stage_makes_what_the_next_one_needs(tmp_path, monkeypatch):
    files = [corpus.stdlib_root() / name for name in ("copy.py", "dis.py", "types.py")]
    monkeypatch.setattr(corpus, "library_files", lambda: files)
    monkeypatch.setattr(sources, "package_files", lambda: files[:1])
    monkeypatch.setattr(corpus, "heldout_files", lambda: [corpus.stdlib_root() / "sched.py"])
    small = {"max_steps": 1, "tokens_per_step": 128, "row_lengths": ((1.0, 64),)}
    small |= {"torch_compile": False}
    for name in ("TARGET_PLAN", "DRAFTER_PLAN", "CORRECTION_PLAN"):
        monkeypatch.setattr(recipe, name, getattr(recipe, name) | small)
    monkeypatch.setattr(recipe, "TARGET_SHAPE", {"num_layers": 7, "mlp_width": 32})
    monkeypatch.setattr(recipe, "DRAFT_SHAPE", {"num_layers": 1, "mlp_width": 32})
    monkeypatch.setattr(recipe, "MASK_TOKEN_SHAPE", {"num_layers": 2, "mlp_width": 32})
    monkeypatch.setattr(recipe, "MTP_SHAPE", {"num_depths": 2, "mlp_width": 16})
    options = {"num_rows": 4, "prompt_tokens": 8, "new_tokens": 8, "batch_size": 2}
    monkeypatch.setattr(
        recipe, "continue_windows", lambda t, d, **_: continue_windows(t, d, **options)
    )
    out, work = tmp_path / "out", tmp_path / "work"
    folders = ["--out-dir", str(out), "--work-dir", str(work), "--threads", "1"]
    stages = ["tokenizer", "target", "text", "draft", "eagle3", "mask-token", "mtp"]
    recipe.main([*stages, *folders])
    _check_correction_stages(out, work, folders)
    model = LlamaForCausalLM.from_pretrained(out / "target", dtype=torch.float32).eval()
    drafter = EagleDrafter.from_pretrained(out / "eagle3", model)
    assert drafter.feature_layers == (2, 3, 4)
    parallel = MaskTokenDrafter.from_pretrained(out / "mask_token", model)
    assert parallel.config.num_layers == 2
    assert MTPDrafter.from_pretrained(out / "mtp", model).num_depths == 2
    shown_layers = {"target": 7, "draft": 1, "eagle3": 1, "mask_token": 2, "mtp": 2}
    for name, shown in shown_layers.items():
        card = json.loads((out / name / "card.json").read_text())
        assert card["model"]["num_layers"] == shown
        assert card["run"]["num_steps"] == card["recipe"]["max_steps"] == 1
        stage = name.replace("_", "-")
        stage = {"mask-token": "correction"}.get(stage, stage)
        assert card["recipe"]["command"] == f"python -m recipes.zoo.recipe {stage}"
        assert card["data"]["standard library"]["num_files"] == 3
        assert card["acceptance"] is None
    before = (out / "eagle3" / "model.safetensors").read_bytes()
    recipe.main(["eagle3", *folders])  # a finished run is exported again at once
    assert (out / "eagle3" / "model.safetensors").read_bytes() == before


def _check_correction_stages(out, work, folders):
    """The head's other weights stay as they are; the control has them trained, and no correction;
    another run of the stage, and the head's own stage again, do not mind what is there.
    """
    head, plain_card = out / "mask_token", json.loads((out / "mask_token/card.json").read_text())
    plain = load_file(head / "model.safetensors")
    recipe.main(["correction-control", "correction", *folders])
    given = load_file(head / "model.safetensors")
    assert all(given[name].equal(tensor) for name, tensor in plain.items())
    assert {name.rpartition(".")[0] for name in given.keys() - plain.keys()} == {
        f"markov_head.{part}" for part in ("markov_w1", "markov_w2", "gate_proj")
    }
    assert given["markov_head.markov_w2.weight"].abs().max() > 0
    control = load_file(work / "control" / "model.safetensors")
    assert control.keys() == plain.keys()
    assert any(not control[name].equal(tensor) for name, tensor in plain.items())
    recipe.main(["correction", *folders])
    again = load_file(head / "model.safetensors")
    assert all(again[name].equal(tensor) for name, tensor in given.items())
    card = json.loads((head / "card.json").read_text())
    assert card["plain head"] == {
        part: plain_card[part] for part in ("recipe", "run", "data", "versions")
    }
    kept = {path: path.read_bytes() for path in head.iterdir()}
    recipe.main(["mask-token", *folders])
    restored = load_file(head / "model.safetensors")
    assert restored.keys() == plain.keys()
    assert all(restored[name].equal(tensor) for name, tensor in plain.items())
    for path, data in kept.items():
        path.write_bytes(data)
