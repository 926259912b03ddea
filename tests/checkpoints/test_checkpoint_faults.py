"""A checkpoint whose tensors or numbers cannot be right ends in one error that lists them."""

import pytest
import torch
from checkpoint_parts import (
    HIDDEN,
    TARGET,
    Files,
    read_checkpoint,
    refuses,
    survey_checkpoint,
    tiny_llama,
)
from checkpoint_writer import nvidia, safeailab_eagle3, speculators, vllm

from specdec.drafters import EagleDrafter


def with_tensor(name, change):
    """A sound file in which one tensor is another."""
    files = safeailab_eagle3()
    return Files(files.config, files.tensors | {name: change(files.tensors[name].clone())})


UP = "midlayer.mlp.up_proj.weight"
DAMAGED = {
    "missing fc.weight, layers.0.hidden_norm.weight": safeailab_eagle3().but(
        "fc.weight", "midlayer.hidden_norm.weight"
    ),
    "must bring the map d2t": safeailab_eagle3().but("d2t"),
    "midlayer.hidden_norm.weight.* two names for one tensor": safeailab_eagle3().plus(
        layers__0__hidden_norm__weight=torch.ones(HIDDEN)
    ),
    # vLLM takes one of the two for the norm of a later layer, SGLang the other.
    "unexpected layers.1.hidden_norm.weight": vllm(num_hidden_layers=2).plus(
        layers__1__hidden_norm__weight=torch.ones(HIDDEN),
        layers__1__input_layernorm__weight=torch.ones(HIDDEN),
    ),
    r"norm.weight has shape \[33\], not \[32\]": safeailab_eagle3().plus(
        norm__weight=torch.ones(HIDDEN + 1)
    ),
    "NaN or infinity in layers.0.mlp.up_proj.weight": with_tensor(UP, lambda t: t / 0 * 0),
    "fc.weight.* is stored as I8": with_tensor("fc.weight", lambda t: t.to(torch.int8)),
    "d2t is stored as F32": with_tensor("d2t", lambda t: t.float()),
}


@pytest.mark.parametrize("message", DAMAGED)
def test_tensors_that_cannot_be_right_are_listed(message, tmp_path):
    refuses(DAMAGED[message].write(tmp_path), message)


def test_unexpected_tensors_are_listed_and_can_be_ignored_by_name(tmp_path):
    files = vllm().plus(extra__weight=torch.ones(3), layers__0__input_norm__bias=torch.ones(3))
    folder = files.write(tmp_path)
    refuses(folder, "unexpected extra.weight, layers.0.input_norm.bias")
    names = ["extra.weight", "layers.0.input_norm.bias"]
    refuses(folder, "unexpected layers.0.input_norm.bias", ignore_tensors=names[:1])
    survey = survey_checkpoint(folder, TARGET, ignore_tensors=names)
    assert survey.unread == dict.fromkeys(names, "ignored on request")
    assert survey.load(TARGET).tensors.keys().isdisjoint(names)


def test_tensors_known_to_be_harmless_are_left_unread(tmp_path):
    names = ("rotary_emb.inv_freq", "midlayer.self_attn.rotary_emb.inv_freq")
    extra = {name: torch.ones(4) for name in (*names, "verifier_norm.weight")}
    survey = survey_checkpoint(safeailab_eagle3().plus(**extra).write(tmp_path), TARGET)
    assert set(survey.unread) == {name.replace("midlayer", "layers.0") for name in extra}
    assert not survey.faults


def test_weights_that_overflow_the_targets_type_are_refused(tmp_path):
    files = safeailab_eagle3()
    files.tensors["norm.weight"][0] = 1e5
    with pytest.raises(ValueError, match=r"infinity in norm.weight, read as torch.float16"):
        EagleDrafter.from_pretrained(files.write(tmp_path), tiny_llama().half())


def test_a_head_for_another_target_is_refused_naming_both(tmp_path):
    with pytest.raises(ValueError, match="hidden size of 32, but LlamaForCausalLM has 16"):
        read_checkpoint(nvidia().write(tmp_path), tiny_llama(hidden_size=16))


def test_layers_that_the_target_does_not_have_are_refused(tmp_path):
    folder = speculators(ids=(2, 4, 7)).write(tmp_path)
    with pytest.raises(ValueError, match=r"boundaries 2..7 outside of 0..6 of the target's 6"):
        read_checkpoint(folder, tiny_llama(num_layers=6))
    with pytest.raises(ValueError, match=r"defaults? .*coincide for a target of N = 4"):
        read_checkpoint(safeailab_eagle3().write(tmp_path / "b"), tiny_llama(num_layers=4))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_size": 2**40}, "hidden_size must be an integer in 1..8388608, got 1099511627776"),
        ({"hidden_size": True}, "hidden_size must be an integer"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be an integer in 1..4096"),
        ({"draft_vocab_size": 62}, "62 draft ids are more than the vocabulary's 61"),
        ({"truncated_vocab_size": 19}, "draft_vocab_size and truncated_vocab_size differ"),
        ({"num_key_value_heads": 3}, "do not divide evenly"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
        ({"norm_before_residual": 1}, "norm_before_residual must be true or false"),
        ({"hidden_act": "no such"}, "hidden_act 'no such' is not one of HF's"),
        ({"eagle_config": [1]}, "eagle_config must be an object"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of strings"),
        ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a number"),
        ({"rope_theta": -1.0}, "rope_theta must be a positive number"),
    ],
)
def test_values_of_the_configuration_are_checked_before_anything_is_made(keys, message, tmp_path):
    refuses(safeailab_eagle3().but(**keys).write(tmp_path), message)


def test_so_are_those_of_a_nested_configuration(tmp_path):
    refuses(speculators(layers={"hidden_size": 10**10}).write(tmp_path), "hidden_size must be an")


D2T = {
    "outside of 0..60": lambda d2t: d2t.index_fill(0, torch.tensor([4]), 1000),
    "outside of 0..60, hint": lambda d2t: d2t + torch.arange(20),
    "repeat the target id": lambda d2t: d2t.index_copy(0, torch.tensor([4]), d2t[3:4] - 1),
    "t2d contradicts d2t in 2 ids": lambda d2t: d2t.index_add(
        0, torch.tensor([4]), torch.tensor([1])
    ),
}


@pytest.mark.parametrize("message", D2T)
def test_a_vocabulary_map_must_be_one(message, tmp_path):
    files = safeailab_eagle3()
    d2t = {"d2t": D2T[message](files.tensors["d2t"])}
    folder = Files(files.config, files.tensors | d2t).write(tmp_path)
    if message.endswith("hint"):
        # Absolute ids 1, 4, 7, ... would be sound, but offsets they are not.
        message = "repeat the target id|outside of 0..60.*d2t holds offsets"
    refuses(folder, message)
