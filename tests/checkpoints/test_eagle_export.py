"""A head that is saved is the same head when it is loaded, and its files are what others read.

Round trips compare configuration, tensors and proposals; the files themselves are compared with the
public layouts.
"""

import json
import re

import pytest
import torch
from architectures import VOCAB
from checkpoint_cases import CASES
from checkpoint_parts import HIDDEN, TARGET, read_checkpoint, tiny_llama
from eagle_heads import head_for, random_head
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen3Config

from specdec import SpeculativeGenerator, Target
from specdec.checkpoints.export import save_head
from specdec.drafters import EagleDrafter

WRAPPED = Target(TARGET)
LLAMA3 = CASES["SpecForge, llama3 rope"][1].layer.rope
LAYERS = {"feature_layers": (1, 4, 7)}
WIRINGS = {
    "eagle 3": {},
    "default layers": {"feature_layers": (2, 4, 5)},
    "last boundary": {"feature_layers": (2, 4, 8)},
    "draft vocabulary": {"draft_vocab_size": 20},
    "own embeddings": {"has_embed_tokens": True},
    "target's vocabulary head": {"has_lm_head": False},
    "narrower": {"hidden_size": 16, "has_embed_tokens": True},
    "rope base": {"rope": {"rope_type": "default", "rope_theta": 5e5}},
    "linear rope": {"rope": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "llama3 rope": {"rope": LLAMA3},
    "odd sizes": {"rms_norm_eps": 1e-3, "head_dim": 10, "max_position_embeddings": 77},
}
ONLY_SPECULATORS = {
    "norm before residual": {"norm_before_residual": True},
    "norm before fc": {"norm_before_fc": True},
    "fc norm": {"fc_norm": True},
    "feedback norm": {"feedback_norm": True},
    "several layers": {"num_layers": 3},
    "norms of queries and keys": {"has_qk_norm": True},
    "biases": {"attention_bias": True, "attention_output_bias": True},
    "five features": {"feature_layers": (0, 1, 3, 5, 8)},
    "embedding feature": {"feature_layers": (0, 4, 7)},
}
IN_BOTH = {name: WIRINGS[name] for name in ("draft vocabulary", "narrower", "llama3 rope")}
NEITHER = {
    "biases of q, k, v alone": {"attention_bias": True},
    "fc_bias": {"fc_bias": True},
    "output_norm=False": {"output_norm": False},
    "logit_scale": {"logit_scale": 0.5},
    "final features": {"feature_layers": (1, 4, "final")},
    "not in the order of layers": {"feature_layers": (4, 1, 7)},
}
EAGLE1 = {
    "eagle 1": {},
    "fc bias": {"fc_bias": True},
    "biases": {"attention_bias": True},
    "own embeddings": {"has_embed_tokens": True},
    "several layers": {"num_layers": 2},
}
ROUND_TRIPS = [
    *(("safeailab", "attention", name, LAYERS | flags) for name, flags in WIRINGS.items()),
    *(
        ("speculators", "attention", name, LAYERS | flags)
        for name, flags in (ONLY_SPECULATORS | IN_BOTH).items()
    ),
    *(("safeailab", "input", name, flags) for name, flags in EAGLE1.items()),
]
NAMES = [f"{layout}, {kind}, {name}" for layout, kind, name, _ in ROUND_TRIPS]
PROMPTS = torch.tensor([[5, 17, 3, 41], [8, 60, 13, 2]])


def head_of(kind, flags):
    head = head_for(TARGET, kind=kind, **flags)
    if head.target_ids is not None:
        head.target_ids.copy_(head.target_ids.sort().values)
    return head


def proposals(drafter, **sampling):
    """The draft tokens of every step of a generation."""
    result = SpeculativeGenerator(WRAPPED, drafter).generate(
        PROMPTS, max_new_tokens=4, do_sample=True, temperature=1.0, trace=True, **sampling
    )
    return [[step.draft_tokens for step in row] for row in result.trace]


@pytest.mark.parametrize(("layout", "kind", "name", "flags"), ROUND_TRIPS, ids=NAMES)
def test_a_saved_head_is_the_same_when_it_is_loaded(layout, kind, name, flags, tmp_path):
    drafter = EagleDrafter(head_of(kind, flags), TARGET, num_draft_tokens=3)
    drafter.save_pretrained(tmp_path, layout, verifier="a/b")
    loaded = EagleDrafter.from_pretrained(tmp_path, TARGET, num_draft_tokens=3)
    assert loaded.config == drafter.config
    tensors, again = drafter.head.state_dict(), loaded.head.state_dict()
    assert tensors.keys() == again.keys()
    assert all(again[name].equal(tensor) for name, tensor in tensors.items())
    ids = drafter.head.target_ids
    assert loaded.head.target_ids is None if ids is None else loaded.head.target_ids.equal(ids)


@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
@pytest.mark.parametrize("name", NEITHER)
def test_what_a_layout_has_no_words_for_is_refused(layout, name, tmp_path):
    flags = LAYERS | NEITHER[name]
    drafter = EagleDrafter(head_for(TARGET, **flags), TARGET)
    message = "attention_bias" if layout == "safeailab" and "q, k, v" in name else name
    with pytest.raises(ValueError, match=f"the {layout} layout cannot express .*{message}"):
        drafter.save_pretrained(tmp_path / "head", layout, verifier="a/b")
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("name", ONLY_SPECULATORS)
def test_safeailabs_layout_has_none_of_the_newer_flags(name, tmp_path):
    drafter = EagleDrafter(head_for(TARGET, **(LAYERS | ONLY_SPECULATORS[name])), TARGET)
    with pytest.raises(ValueError, match=r"safeailab layout cannot express .*'speculators' may"):
        drafter.save_pretrained(tmp_path)


def test_other_layouts_and_eagle_1_for_speculators_are_refused(tmp_path):
    drafter = EagleDrafter(head_for(TARGET, kind="input"), TARGET)
    for layout in ("speculators", "vllm"):
        message = f"layout of 'input' heads must be 'safeailab', got '{layout}'"
        with pytest.raises(ValueError, match=message):
            drafter.save_pretrained(tmp_path, layout)


@pytest.mark.parametrize("has_own", [True, False])
def test_a_speculators_file_holds_embeddings_and_names_its_target(has_own, tmp_path):
    """speculators reads a file without embeddings into memory that nobody has written."""
    head = head_of("attention", {**LAYERS, "has_embed_tokens": has_own})
    drafter = EagleDrafter(head, TARGET)
    with pytest.raises(ValueError, match="names its target: pass verifier=, a Hugging Face id"):
        drafter.save_pretrained(tmp_path / "head", "speculators")
    assert not (tmp_path / "head").exists()
    assert drafter.save_pretrained(tmp_path / "head", "speculators", verifier="a/b") == ()
    table = load_file(tmp_path / "head" / "model.safetensors")["embed_tokens.weight"]
    assert table.equal(head.embed_tokens.weight if has_own else TARGET.model.embed_tokens.weight)


def test_the_verifier_is_where_the_target_was_loaded_from(tmp_path):
    TARGET.save_pretrained(tmp_path / "target")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target").eval()
    EagleDrafter(head_for(target, **LAYERS), target).save_pretrained(tmp_path, "speculators")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(tmp_path / "target")


def test_embeddings_that_cannot_be_copied_are_refused(tmp_path):
    head = head_of("attention", LAYERS)
    tables = {"verifier": "a/b", "lm_head": None}
    for table in (None, torch.zeros(VOCAB, HIDDEN, dtype=torch.int8), torch.zeros(3, HIDDEN)):
        with pytest.raises(ValueError, match="pass them as embed_tokens"):
            save_head(head, tmp_path / "x", "speculators", embed_tokens=table, **tables)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_safeailabs_scaling_is_exactly_a_type_and_a_factor(kind, tmp_path):
    """The check of its configuration class, written out: anything else it cannot load."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2}
    head = head_of("attention", {**LAYERS, "feature_layers": (2, 4, 5), "rope": rope})
    assert EagleDrafter(head, TARGET).save_pretrained(tmp_path) == EXPECTED_HEAD_DIM
    scaling = json.loads((tmp_path / "config.json").read_text())["rope_scaling"]
    assert scaling == {"type": kind, "factor": 2.0}
    assert isinstance(scaling["factor"], float)


EXPECTED_HEAD_DIM = ("SafeAILab's older code takes hidden_size / heads for head_dim, not 6",)


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ({"rope": LLAMA3}, "cannot load rope_scaling of type 'llama3'"),
        (
            {"rope": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
            "takes a rope base of 10000 with scaling, not 500000",
        ),
        ({"feature_layers": (1, 4, 7)}, r"always reads boundaries \[2, 4, 5\], not \[1, 4, 7\]"),
        ({"head_dim": 10}, "takes hidden_size / heads for head_dim, not 10"),
    ],
)
def test_what_only_safeailabs_own_code_misreads_is_noted(flags, note, tmp_path):
    flags = {"feature_layers": (2, 4, 5), "head_dim": 8} | flags
    notes = EagleDrafter(head_of("attention", flags), TARGET).save_pretrained(tmp_path)
    assert len(notes) == 1
    assert re.search(note, notes[0])


def test_a_scaling_of_more_than_type_and_factor_is_refused(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    rope["original_max_position_embeddings"] = 64
    head = head_of("attention", {**LAYERS, "rope": rope})
    with pytest.raises(ValueError, match="original_max_position_embeddings of a dynamic rope_scal"):
        EagleDrafter(head, TARGET).save_pretrained(tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_draft_ids_are_written_in_ascending_order(tmp_path):
    """As engines expect that read the mask; the head's rows move with them."""
    head = head_for(TARGET, draft_vocab_size=20, **LAYERS)
    assert (head.target_ids.diff() < 0).any()
    drafter = EagleDrafter(head, TARGET, num_draft_tokens=3)
    drafter.save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    assert (torch.arange(20) + files["d2t"]).equal(files["t2d"].nonzero()[:, 0])
    loaded = EagleDrafter.from_pretrained(tmp_path, TARGET, num_draft_tokens=3)
    assert proposals(loaded, seed=4) == proposals(drafter, seed=4)


def test_the_safeailab_layout_has_the_reference_names_and_keys(tmp_path):
    head = head_of("attention", {"draft_vocab_size": 20, **LAYERS})
    EagleDrafter(head, TARGET).save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    layer = {f"self_attn.{n}_proj" for n in "qkvo"} | {
        f"mlp.{n}_proj" for n in ("gate", "up", "down")
    }
    layer |= {"input_layernorm", "hidden_norm", "post_attention_layernorm"}
    names = {f"midlayer.{name}.weight" for name in layer}
    assert files.keys() == names | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert files["d2t"].dtype == torch.int64
    assert files["t2d"].dtype == torch.bool
    assert files["t2d"].shape == (VOCAB,)
    assert files["midlayer.self_attn.q_proj.weight"].shape[1] == 2 * HIDDEN
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["draft_vocab_size"] == 20
    assert config["vocab_size"] == VOCAB
    # vLLM reads the key at the top, as boundaries; SGLang the nested one, as outputs of layers.
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 7]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 3, 6]
    assert isinstance(AutoConfig.from_pretrained(tmp_path), LlamaConfig)


def test_the_eagle_1_layout_has_the_reference_names_and_keys(tmp_path):
    EagleDrafter(head_for(TARGET, kind="input", fc_bias=True), TARGET).save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    layer = {f"self_attn.{n}_proj" for n in "qkvo"} | {
        f"mlp.{n}_proj" for n in ("gate", "up", "down")
    }
    names = {f"layers.0.{name}.weight" for name in layer | {"post_attention_layernorm"}}
    assert files.keys() == names | {"fc.weight", "fc.bias"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["bias"], config["qkv_bias"], config["num_hidden_layers"]) == (True, False, 1)


@pytest.mark.parametrize(
    ("flags", "kind"), [({}, LlamaConfig), ({"has_qk_norm": True}, Qwen3Config)]
)
def test_the_speculators_layout_is_a_difference_to_hfs_defaults(flags, kind, tmp_path):
    head = head_for(TARGET, **LAYERS, **flags)
    EagleDrafter(head, TARGET, 5).save_pretrained(tmp_path, "speculators", verifier="a/b")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["norm_before_residual"] is False  # vLLM would take a missing key for true
    assert config["speculators_config"]["verifier"]["name_or_path"] == "a/b"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    layers = config["transformer_layer_config"]
    assert layers["num_aux_hidden_states"] == 3  # vLLM reads it there
    assert layers["model_type"] == kind.model_type
    filled = kind(**{key: value for key, value in layers.items() if key != "model_type"})
    assert (filled.hidden_size, filled.head_dim, filled.vocab_size) == (HIDDEN, 6, VOCAB)
    assert filled.rope_parameters["rope_theta"] == 10000.0
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "layers.0.hidden_norm.weight" in names
    assert not any("midlayer" in name for name in names)


def test_weights_keep_their_type(tmp_path):
    target = tiny_llama().to(torch.bfloat16)
    head = head_for(target, has_lm_head=False, **LAYERS).to(torch.bfloat16)
    EagleDrafter(head, target).save_pretrained(tmp_path)
    files = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in files.values()} == {torch.bfloat16}
    assert files["lm_head.weight"].equal(target.lm_head.weight)
    assert "lm_head" in read_checkpoint(tmp_path, target).shared


def test_a_permuted_full_vocabulary_cannot_be_written(tmp_path):
    config = head_for(TARGET, **LAYERS).config
    head = random_head(config, dtype=torch.float32)
    head.target_ids = torch.arange(VOCAB).flip(0)
    with pytest.raises(ValueError, match="can express a permuted full vocabulary"):
        EagleDrafter(head, TARGET).save_pretrained(tmp_path)
