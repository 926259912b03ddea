"""Of a large sharded checkpoint only the files that hold wanted tensors are opened."""

import json

import pytest
import torch
from safetensors.torch import save_file

from specdec.checkpoints.files import MAX_TENSORS, CheckpointFolder


def is_of_the_head(name):
    return name.startswith("model.layers.61.")


@pytest.fixture
def folder(tmp_path):
    """A target's own checkpoint, whose last shard holds a prediction module; others are missing."""
    head = {"model.layers.61.eh_proj.weight": torch.arange(6.0).view(2, 3)}
    last = head | {"model.norm.weight": torch.ones(3)}
    save_file(last, tmp_path / "model-00002-of-00002.safetensors")
    weight_map = dict.fromkeys(last, "model-00002-of-00002.safetensors")
    others = {f"model.layers.{i}.weight": "model-00001-of-00002.safetensors" for i in range(5000)}
    del others["model.layers.61.weight"]
    index = {"weight_map": weight_map | others}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_only_the_shards_that_hold_them_are_opened(folder):
    tensors = CheckpointFolder(folder).tensors(is_of_the_head)
    assert list(tensors) == ["model.layers.61.eh_proj.weight"]
    (tensor,) = tensors.values()
    assert (tensor.dtype, tensor.shape) == ("F32", (2, 3))
    assert tensor.read().equal(torch.arange(6.0).view(2, 3))


def test_all_of_them_would_be_too_many(folder):
    with pytest.raises(ValueError, match=f"lists 5001 tensors; at most {MAX_TENSORS} are read"):
        CheckpointFolder(folder).tensors()


def test_a_shard_that_holds_others_than_the_index_lists_is_refused_all_the_same(folder):
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["model.norm.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"disagree on the tensors model\.norm\.weight"):
        CheckpointFolder(folder).tensors(is_of_the_head)


def test_a_whole_file_is_read_in_part(tmp_path):
    save_file({"a": torch.ones(2), "b": torch.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert list(CheckpointFolder(tmp_path).tensors(lambda name: name == "b")) == ["b"]
