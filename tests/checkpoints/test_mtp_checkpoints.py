"""Prediction modules under every producer's names, read from a target's own checkpoint.

The reference of each decoder layer is the HF layer itself, called with eager attention and a causal
mask over a whole text. Tensors go into the file under names that are written down here once more.
"""

import shutil
from dataclasses import dataclass, field, fields, replace

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, VOCAB
from mtp_checkpoints import (
    eager,
    edit_config,
    random_model,
    run_layer,
    shard,
    unfused,
    write_numbered,
)
from refusals import refused
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

from specdec.checkpoints import survey_checkpoint
from specdec.checkpoints.mtp import MTP, save_modules
from specdec.drafters import MTPDrafter
from specdec.drafters.head.causal import attend_causally
from specdec.drafters.head.window import Pass
from specdec.lab.inspection import alternatives, describe

WIDTH, LENGTH = 32, 9
COMMON = ARCHITECTURES["qwen3"][1] | {"max_position_embeddings": 64}
_QWEN = COMMON | {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 100.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
    },
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_MIMO_V2 = COMMON | {
    "num_key_value_heads": 2,
    "head_dim": 12,
    "v_head_dim": 8,
    "sliding_window": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}
_STEP = COMMON | {
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 3,
    "sliding_window": 4,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"]
    + ["sliding_attention"] * 3,
    "mlp_layer_types": ["dense", "sparse", "sparse"] + ["dense"] * 3,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "moe_intermediate_size": 24,
}


@dataclass(frozen=True)
class Producer:
    """How a producer's file looks; in `prefix`, `{d}` is a depth and `{n}` that of the target and
    the depth together.
    """

    family: str  # with config, the target
    config: dict
    prefix: str  # of the names of a depth
    names: dict  # enorm, hnorm, eh_proj and norm in the file
    expected: dict  # flags of the head
    block: str = ""  # prefix of the decoder layer's tensors after `prefix`
    renamed: tuple = ()  # names of the layer's tensors that differ from HF's
    like: int = -1  # layer of the target that the module is built as
    changes: dict = field(default_factory=dict)  # to the configuration of the module's layer
    num_depths: int = 1  # in the file
    keys: dict = field(default_factory=dict)  # added to config.json


SEVEN = {"rope_type": "default", "rope_theta": 7.0}
_EH = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj"}
_OF_QWEN = (
    "mtp.",
    {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc"}
    | {"norm": "norm"},
    {"centred_norms": True, "target_state": "final", "feedback_norm": True},
    "layers.0.",
)
PRODUCERS = {
    "Qwen": Producer(
        "Qwen3Next",
        _QWEN | _MOE | {"shared_expert_intermediate_size": 24, "mlp_only_layers": []},
        *_OF_QWEN,
    ),
    "Qwen, 3.5": Producer("Qwen3_5Text", _QWEN, *_OF_QWEN, keys={"mtp_num_hidden_layers": 1}),
    "MiMo": Producer(
        "Qwen2",
        ARCHITECTURES["qwen2"][1],
        "model.mtp_layers.{d}.",
        {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"}
        | {"norm": "final_layernorm"},
        {"hidden_first": True, "target_state": 3, "zero_first_embedding": True},
        keys={"num_nextn_predict_layers": 1},
    ),
    "MiMo-V2": Producer(
        "MiMoV2Flash",
        _MIMO_V2,
        "model.mtp.layers.{d}.",
        _EH | {"norm": "final_layernorm"},
        {"semantics": "target", "target_state": 3, "num_layers": 3},
        renamed=(
            ("post_attention_layernorm", "pre_mlp_layernorm"),
            ("self_attn.sinks", "self_attn.attention_sink_bias"),
        ),
        like=0,
        changes={"layer_types": ["sliding_attention"] * 3, "mlp_layer_types": ["dense"] * 3},
        num_depths=3,
    ),
    "Ernie": Producer(
        "Ernie4_5",
        ARCHITECTURES["llama"][1],
        "model.",
        {"enorm": "mtp_emb_norm.0", "hnorm": "mtp_hidden_norm.0", "eh_proj": "mtp_linear_proj.0"},
        {"output_norm": False, "feedback_norm": False, "zero_first_embedding": True},
        block="mtp_block.0.",
        keys={"num_nextn_predict_layers": 1},
    ),
    "Step": Producer(
        "Step3p7Text",
        _STEP,
        "model.layers.{n}.",
        _EH | {"norm": "transformer.shared_head.norm", "lm_head": "transformer.shared_head.output"},
        {
            **{"centred_norms": True, "target_state": 3, "feedback_norm": False},
            **{"lm_head_per_depth": True, "semantics": "chain"},
        },
        block="transformer.",
        like=0,
        num_depths=3,
    ),
}


class Written:
    """A producer's checkpoint, and what its modules compute, from HF's own layers."""

    def __init__(self, folder, producer, *, seed=0):
        self.folder, self.producer = folder, producer
        config = getattr(transformers, f"{producer.family}Config")(**producer.config)
        torch.manual_seed(seed)
        self.generator = torch.Generator().manual_seed(seed)
        if producer.family == "Step3p7Text":  # HF has it as a part of a model of texts and images
            self.model = Step3p7TextModel(config).eval()
        else:
            self.model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        self.num_layers = self.model.config.get_text_config().num_hidden_layers
        config.save_pretrained(folder)
        edit_config(folder, **producer.keys)
        self.layers = [self._layer() for _ in range(producer.num_depths)]
        self.parts = [self._parts() for _ in self.layers]
        tensors = {"model.embed_tokens.weight": torch.zeros(2, 2)}  # of the rest of the target
        for depth, (layer, parts) in enumerate(zip(self.layers, self.parts, strict=True)):
            prefix = producer.prefix.format(d=depth, n=self.num_layers + depth)
            for part, name in producer.names.items():
                tensors[f"{prefix}{name}.weight"] = parts[part]
            for name, tensor in unfused(layer.state_dict()).items():
                for ours, theirs in producer.renamed:
                    name = name.replace(ours, theirs)
                tensors[f"{prefix}{producer.block}{name}"] = tensor
        tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator)

    @torch.no_grad()
    def _layer(self) -> nn.Module:
        producer = self.producer
        is_step = producer.family.startswith("Step")
        text = self.model.config.get_text_config()
        config = eager(self.model.config.get_mtp_config() if is_step else text)
        for name, value in producer.changes.items():
            setattr(config, name, value)
        layers = self.model.base_model.layers
        layer = type(layers[0])(config, producer.like % len(layers)).float().eval()
        for tensor in (*layer.parameters(), *layer.buffers()):
            noise = self.normal(*tensor.shape)
            tensor.copy_(0.2 * noise if tensor.dim() > 1 else tensor.nan_to_num() + 0.3 * noise)
        self.config = config
        return layer

    def _parts(self) -> dict[str, Tensor]:
        parts = {name: self.normal(WIDTH) for name in ("enorm", "hnorm", "norm")}
        return parts | {
            "eh_proj": self.normal(WIDTH, 2 * WIDTH),
            "lm_head": self.normal(VOCAB, WIDTH),
        }

    def run(self, layer, x):
        return run_layer(self.model, layer, self.producer.like, x, self.config)


def whole_text(config, count) -> Pass:
    angles = config.layer.rotary_table(count, dtype=torch.float32)
    return Pass(angles[None, None], attend_causally, torch.arange(count)[None])


READINGS = [*((name, False) for name in PRODUCERS), ("Qwen", True), ("MiMo", True), ("Step", True)]


@pytest.mark.parametrize(("name", "with_target"), READINGS)
@torch.no_grad()
def test_a_head_is_what_its_producer_means(tmp_path, name, with_target):
    """Its flags (what each does is shown in `drafters/test_parity.py`), the place of every
    tensor, and what its decoder layers compute.
    """
    producer, written = PRODUCERS[name], Written(tmp_path, PRODUCERS[name])
    target = written.model if with_target else None
    if name == "MiMo":
        edit_config(tmp_path, model_type="mimo", architectures=["MiMoForCausalLM"])
    survey = survey_checkpoint(tmp_path, target, families=(MTP,))
    assert survey.source.producer == name.partition(",")[0]
    assert not survey.faults
    assert not survey.unread_keys
    head = survey.load(target).build()
    usual = {"target_state": "final", "semantics": "chain", "feedback_norm": True}
    usual |= {"hidden_first": False, "zero_first_embedding": False, "centred_norms": False}
    for flag, value in (usual | {"output_norm": True} | producer.expected).items():
        assert getattr(head.config, flag) == value, flag
    hidden, step = written.normal(2, LENGTH, WIDTH), whole_text(head.config, LENGTH)
    assert len(head.layers) == len(written.layers)
    for module, layer, parts in zip(head.layers, written.layers, written.parts, strict=True):
        out = module.block(hidden, step.angles, step.attend)
        torch.testing.assert_close(out, written.run(layer, hidden), rtol=0, atol=2e-5)
        for part in producer.names:
            assert module.get_parameter(f"{part}.weight").equal(parts[part]), part


@pytest.mark.parametrize("name", ["Qwen", "MiMo", "Step"])
@torch.no_grad()
def test_what_is_saved_loads_back_bit_for_bit(tmp_path, name):
    written = Written(tmp_path / "theirs", PRODUCERS[name])
    head = survey_checkpoint(tmp_path / "theirs", families=(MTP,)).load().build()
    config = replace(head.config, target_state="final", semantics="target")
    head.config = config
    save_modules(head, tmp_path / "ours")
    again = survey_checkpoint(tmp_path / "ours", families=(MTP,)).load().build()
    names = [entry.name for entry in fields(config) if entry.name != "layer"]
    assert [getattr(again.config, n) for n in names] == [getattr(config, n) for n in names]
    ours = head.state_dict()
    assert ours.keys() == again.state_dict().keys()
    for key, tensor in again.state_dict().items():
        assert tensor.equal(ours[key]), key
    hidden, step = written.normal(1, LENGTH, WIDTH), whole_text(config, LENGTH)
    assert again(0, hidden, hidden, step).equal(head(0, hidden, hidden, step))


# DeepSeek and GLM; what they compute is compared with HF's own code in drafters/test_mtp_hf.py.


@pytest.mark.parametrize("family", ["DeepseekV3", "Glm4Moe"])
def test_only_the_files_of_the_modules_are_opened(tmp_path, family):
    model, tensors = write_numbered(tmp_path, family, num_depths=1)
    shard(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"not a file of tensors")
    head = MTPDrafter.from_pretrained(tmp_path, model, 2).head
    assert head.layers[0].enorm.weight.equal(tensors["model.layers.3.enorm.weight"])
    experts = head.layers[0].block.layer.mlp.experts
    per_expert = "model.layers.3.mlp.experts.2"
    gate, up = (tensors[f"{per_expert}.{part}_proj.weight"] for part in ("gate", "up"))
    assert experts.gate_up_proj[2].equal(torch.cat([gate, up]))
    assert experts.down_proj[2].equal(tensors[f"{per_expert}.down_proj.weight"])


@pytest.mark.parametrize("num_depths", [1, 3])
def test_stored_copies_of_the_targets_tables_are_shared(tmp_path, num_depths):
    model, tensors = write_numbered(tmp_path, "DeepseekV3", num_depths=num_depths)
    checkpoint = survey_checkpoint(tmp_path, model, families=(MTP,)).load(model)
    assert checkpoint.shared == ("embed_tokens", "lm_head")
    drafter = MTPDrafter.from_pretrained(tmp_path, model, 3)
    assert not [name for name, _ in drafter.named_parameters() if "lm_head" in name]
    changed = dict(tensors)
    changed["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"] + 1
    save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    drafter = MTPDrafter.from_pretrained(tmp_path, model, 3)
    assert drafter.head.lm_head.weight.equal(tensors["lm_head.weight"] + 1)
    assert not drafter.config.lm_head_per_depth


def test_the_bias_that_chooses_experts_stays_float32(tmp_path):
    model, tensors = write_numbered(tmp_path, "DeepseekV3", num_depths=1)
    name = "model.layers.3.mlp.gate.e_score_correction_bias"
    drafter = MTPDrafter.from_pretrained(tmp_path, model.to(torch.bfloat16), 2)
    gate = drafter.head.layers[0].block.layer.mlp.gate
    assert gate.e_score_correction_bias.dtype == torch.float32
    assert gate.e_score_correction_bias.equal(tensors[name].float())
    assert gate.weight.dtype == torch.bfloat16 == drafter.head.dtype


def test_options_are_what_a_caller_knows_better(tmp_path):
    model, _ = write_numbered(tmp_path, "Glm4Moe", num_depths=2)
    options = {"semantics": "target", "feedback_norm": False, "hidden_first": True}
    survey = survey_checkpoint(
        tmp_path, model, families=(MTP,), zero_first_embedding=True, feature_layers=(3,), **options
    )
    assert (survey.config.target_state, survey.config.zero_first_embedding) == (3, True)
    for name, value in options.items():
        assert getattr(survey.config, name) == value
        assert f"as asked for: {name} = {value!r}" in survey.notes


def test_inspect_shows_the_reading_and_every_misreading_has_its_option(tmp_path):
    model, _ = write_numbered(tmp_path, "Glm4Moe", num_depths=2)
    survey = survey_checkpoint(tmp_path, model, families=(MTP,))
    checkpoint = survey.load(model)
    text = describe(survey, checkpoint)
    assert "MTP, 2 layers of Glm4MoeDecoderLayer, width 32" in text
    assert "semantics chain, hidden_first False" in text
    readings = alternatives(survey, checkpoint, model)
    assert len({reading.name for reading in readings}) == len(readings) == 6
    for reading in readings[1:]:
        options = eval(f"dict({reading.how})")
        again = survey_checkpoint(tmp_path, model, families=(MTP,), **options)
        shared = {"has_embed_tokens": False, "has_lm_head": False}
        assert replace(again.config, **shared) == reading.checkpoint.config
        reading.checkpoint.build()


def test_keys_that_shape_no_layer_and_other_spellings_may_differ(tmp_path):
    model, _ = write_numbered(tmp_path, "DeepseekV3", num_depths=1)
    expected = survey_checkpoint(tmp_path, model, families=(MTP,)).load(model).build().state_dict()
    edit_config(
        tmp_path,
        **{"rope_parameters": None, "rope_theta": 10000, "rope_scaling": None},
        **{"dtype": None, "torch_dtype": "bfloat16", "transformers_version": "4.40.0"},
        **{"architectures": ["SomethingElse"], "eos_token_id": [3, 4], "use_cache": False},
        **{"quantization_config": {"quant_method": "fp8"}, "num_nextn_predict_layers": None},
        **{"auto_map": None, "model_type": "unheard_of"},
    )
    model.config.pad_token_id = 7
    found = survey_checkpoint(tmp_path, model, families=(MTP,)).load(model).build().state_dict()
    assert all(found[name].equal(tensor) for name, tensor in expected.items())


# What does not fit is refused: tensors of the file (`None` is gone), keys of its configuration
# (`None` is gone) and options, each with pieces of the error.

THIRD = "model.layers.3"
FLOAT8 = torch.zeros(32, 64).to(torch.float8_e4m3fn)
REFUSED = [
    ("missing layers.0.hnorm.weight", {f"{THIRD}.hnorm.weight": None}, {}, {}),
    (
        *("missing layers.0.block.layer.mlp.experts.gate_up_proj",),
        *({f"{THIRD}.mlp.experts.1.up_proj.weight": None}, {}, {}),
    ),
    (
        *("unexpected layers.0.block.layer.surprise.weight",),
        *({f"{THIRD}.surprise.weight": torch.zeros(2)}, {}, {}),
    ),
    ("quantised weights (F8_E4M3)", {f"{THIRD}.eh_proj.weight": FLOAT8}, {}, {}),
    ("quantised weights", {f"{THIRD}.eh_proj.weight_scale_inv": torch.ones(1, 1)}, {}, {}),
    ("are two names for one tensor", {"layers.3.enorm.weight": torch.ones(32)}, {}, {}),
    ("88 depths (at most 32)", {"model.layers.90.enorm.weight": torch.ones(32)}, {}, {}),
    ("unknown option hidden_last", {}, {}, {"hidden_last": True}),
    ("must be 'chain' or 'target', got 'both'", {}, {}, {"semantics": "both"}),
    ("one feature, 'final' or a hidden state", {}, {}, {"feature_layers": (1, 2)}),
    ("rope_theta is for heads of the library's own layers", {}, {}, {"rope_theta": 5.0}),
    ("layers is 2, but the files hold 1", {}, {"num_nextn_predict_layers": 2}, {}),
    ("rope_parameters is .. 7.0", {}, {"rope_parameters": None, "rope_theta": 7.0}, {}),
    ("rope_parameters is .. 7.0 .. and .. 10000.0", {}, {"rope_parameters": SEVEN}, {}),
    ("num_attention_heads is 2 and 4", {}, {"num_attention_heads": 2}, {}),
    ("hidden_size is 31 and 32", {}, {"hidden_size": 31}, {}),
    ("model_type is 'llama' and 'deepseek_v3'", {}, {"model_type": "llama"}, {}),
    ("is 0.5 and 1e-06", {}, {"model_type": "unheard_of", "rms_norm_eps": 0.5}, {}),
    ("routed_scaling_factor is .. and 3.0", {}, {"routed_scaling_factor": None}, {}),
    ("config.json: .. hidden_act", {}, {"hidden_act": [1]}, {}),
]


@pytest.fixture(scope="module", name="numbered")
def _numbered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbered")
    return write_numbered(folder, "DeepseekV3", num_depths=1, routed_scaling_factor=3.0)[0], folder


@pytest.mark.parametrize(("message", "tensors", "keys", "options"), REFUSED)
def test_what_does_not_fit_is_refused(numbered, tmp_path, message, tensors, keys, options):
    (model, folder), written = numbered, shutil.copytree(numbered[1], tmp_path / "head")
    found = load_file(folder / "model.safetensors") | tensors
    found = {name: tensor for name, tensor in found.items() if tensor is not None}
    save_file(found, written / "model.safetensors", metadata={"format": "pt"})
    edit_config(written, **keys)
    with refused(message):
        MTPDrafter.from_pretrained(written, model, **options)


def test_modules_of_another_target_or_of_none_are_refused(numbered, tmp_path):
    model, folder = numbered
    other = random_model("DeepseekV3", vocab_size=VOCAB + 3)
    with refused("a vocabulary of 61, but DeepseekV3ForCausalLM has 64"):
        MTPDrafter.from_pretrained(folder, other)
    random_model("DeepseekV3").save_pretrained(tmp_path / "plain")
    with refused("look like a head of none of the families"):
        MTPDrafter.from_pretrained(tmp_path / "plain", model)
    unheard = shutil.copytree(folder, tmp_path / "unheard")
    edit_config(unheard, model_type="unheard_of")
    with refused("no model_type 'unheard_of'; pass the target"):
        survey_checkpoint(unheard, families=(MTP,))


NEGATIVE = {"rope_type": "default", "rope_theta": -100}
NUMBERS = [
    ("Qwen", {"rope_parameters": None, "rope_theta": -100}, "rope_theta must be a pos .. -100"),
    ("Qwen", {"rope_parameters": NEGATIVE}, "rope_theta must be a positive number, got -100"),
    ("Qwen", {"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number, got -1.0"),
    ("Qwen", {"sliding_window": -1}, "sliding_window must be an integer in 1 .. got -1"),
    ("MiMo-V2", {"sliding_window": -1}, "config.json: sliding_window must .. got -1"),
    ("MiMo-V2", {"sliding_window": 2.5}, "sliding_window must be an integer .. got 2.5"),
]


@pytest.mark.parametrize(("name", "keys", "message"), NUMBERS)
def test_numbers_that_no_layer_computes_with_are_refused_without_a_target(
    tmp_path, name, keys, message
):
    Written(tmp_path, PRODUCERS[name])
    survey_checkpoint(tmp_path, families=(MTP,))
    edit_config(tmp_path, **keys)
    with refused(message):
        survey_checkpoint(tmp_path, families=(MTP,))
