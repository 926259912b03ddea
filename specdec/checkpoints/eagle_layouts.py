"""How producers name and wire EAGLE heads: a table, and the order in which files are tried.

SafeAILab (yuhuili), SpecForge (lmsys), speculators (RedHatAI), NVIDIA Model-Optimizer, DeepSpec and
AngelSlim write the same few tensors under different names, keys and conventions. They use the same
keys with other meanings (`norm_output`, layer ids).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from specdec.checkpoints import file_parts, rules
from specdec.checkpoints.layout import Key, Layout
from specdec.checkpoints.marks import Clues
from specdec.checkpoints.tensor_rules import Named
from specdec.drafters.eagle_config import EagleConfig

IDS = "eagle_aux_hidden_state_layer_ids"
NESTED_IDS = f"eagle_config.{IDS}"
BLOCK_IDS = "aux_hidden_state_layer_ids"
KIND = "speculators_model_type"
Q_PROJ, Q_NORM, Q_BIAS, O_BIAS = (
    f"layers.0.self_attn.{name}"
    for name in ("q_proj.weight", "q_norm.weight", "q_proj.bias", "o_proj.bias")
)
EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"
BOTH_TABLES = ("lm_head", "embed_tokens")

# Trainers copy layer_types from the target, and most of them never look at them.
WINDOWS = Key("layer_types", read=rules.windows, write=file_parts.window_keys)
EAGLE_LAYER = {
    "layer.has_qk_norm": lambda r: Q_NORM in r.tensors,
    "layer.attention_bias": Key("attention_bias", False, also=("qkv_bias",)),
    "layer.attention_output_bias": (
        lambda r: r.fields.flag("attention_bias") and O_BIAS in r.tensors
    ),
}
_HF_LAYER = EAGLE_LAYER | {"layer.attention_output_bias": Key("attention_bias", False)}
_SPECULATORS_LAYER = _HF_LAYER | {
    "layer.has_qk_norm": rules.has_qk_norm,
    "layer.windows": WINDOWS,
}
# No producer has it: SpecForge (core/eagle3.py until July 2026, 1e759089) and AngelSlim
# (train/trainer/eagle3_trainer.py) embed the ids of placeholders, at the target's three positions.
SEES_PICTURES = Key("sees_pictures", True, is_written=lambda config: not config.sees_pictures)
_EAGLE_TABLES = {
    "has_embed_tokens": lambda r: r.is_other_width or EMBEDDINGS in r.tensors,
    "has_lm_head": lambda r: r.is_other_width or HEAD in r.tensors or r.has_fewer_ids,
    "logit_scale": Key("logit_scale", 1.0),
}
_EAGLE1 = {
    "fusion": "input",
    "layer": rules.layer,
    "vocab_size": Key("vocab_size", int),
    "draft_vocab_size": lambda r: r["vocab_size"],
    "target_hidden_size": rules.target_hidden_size,
    "feature_layers": rules.final_feature,
    "fc_bias": Key("bias", False, read=rules.eagle1_bias),
    "output_norm": False,
    "num_layers": rules.num_layers_of_eagle,
    "sees_pictures": SEES_PICTURES,
    **_EAGLE_TABLES,
}
EAGLE3 = {
    "fusion": "attention",
    "layer": rules.layer,
    "vocab_size": Key("vocab_size", int),
    "draft_vocab_size": Key("draft_vocab_size", int, read=rules.draft_vocab_size),
    "target_hidden_size": Key("target_hidden_size", int, read=rules.target_hidden_size),
    "has_fc": rules.joins_features,
    "norm_before_fc": Key("norm_before_fc", False, also=("eagle_config.norm_before_fc",)),
    "fc_norm": Key("fc_norm", False, also=("use_aux_norm",)),
    "norm_before_residual": Key("norm_before_residual", False),
    "fc_bias": lambda r: r.fields.flag("bias") and "fc.bias" in r.tensors,
    "feedback_norm": Key("norm_output", False),
    "output_norm": Key("eagle_config.use_last_layernorm", True),
    "feature_layers": rules.eagle_features,
    "num_layers": rules.num_layers_of_eagle,
    "sees_pictures": SEES_PICTURES,
    **_EAGLE_TABLES,
}
OF_SPECULATORS = {
    "draft_vocab_size": replace(
        EAGLE3["draft_vocab_size"],
        read=partial(rules.draft_vocab_size, usual=32000, why="speculators' default"),
    ),
}
EAGLE3_OF_SPECULATORS = (
    EAGLE3
    | OF_SPECULATORS
    | _SPECULATORS_LAYER
    | {
        "norm_before_residual": Key(
            "norm_before_residual",
            False,
            absent="no norm_before_residual: false, speculators' default (vLLM would take it for "
            "true)",
        )
    }
)
EAGLE3_OF_SPECFORGE = (
    EAGLE3
    | EAGLE_LAYER
    | {
        "feedback_norm": False,  # its trainer always feeds the raw output back
        "output_norm": rules.output_norm_of_specforge,
        "target_hidden_size": replace(
            EAGLE3["target_hidden_size"],
            is_written=lambda config: config.target_hidden_size != config.hidden_size,
        ),
    }
)
EAGLE_IDS = {
    IDS: ("hidden_state", 0),
    BLOCK_IDS: ("hidden_state", 0),
    "target_layer_ids": ("layer_output", -1),  # DeepSpec's -1 are the embeddings
    "eagle3_layers_to_capture": ("layer_output", 0),
    "aux_hidden_states_layer_ids": ("layer_output", 0),  # AngelSlim's
    "eagle_config.layer_ids": ("hidden_state", 0),
    # So NVIDIA's are read by vLLM and, after measurement, by SGLang (sgl-project/sglang#32334).
    NESTED_IDS: ("hidden_state", 0),
}
HOOKED_IDS = EAGLE_IDS | {NESTED_IDS: ("layer_output", 0)}
"""SpecForge's trainer hooks the outputs of layers."""
MIDLAYER = Named({"midlayer.": "layers.0."})
SGLANG = Named(
    {f"aux_norm_{level}.": f"fc_norm.{i}." for i, level in enumerate(("low", "mid", "high"))}
)
COPIED = dict.fromkeys(
    ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"), ...
)
"""Keys of the target's sliding windows, which trainers copy and no layer of a head reads."""
_EAGLE_INERT = COPIED | {
    "eagle_config.parallel_draft_step": (1,),
    "eagle_config.parallel_draft_heads_num_layers": ...,  # of no heads
    "eagle_config.use_mtp_layernorm": (False,),
    "eagle_config.use_input_layernorm_in_first_layer": (True,),
    "eagle_config.next_layer_regular": (True,),
    "eagle_config.use_last_layernorm": (True,),
}
_OF_HUNYUAN = {
    **dict.fromkeys(("add_classification_head", "class_num", "pool_type", "dense_list"), ...),
    **dict.fromkeys(("im_start_id", "im_end_id", "im_newline_id", "mask_init_id"), ...),
    **dict.fromkeys(("text_start_id", "text_end_id", "pad_id", "org_vocab_size"), ...),
    "cla_share_factor": ...,
    # Its trainer's layers (train/models/draft/llama_eagle3.py) have neither.
    **dict.fromkeys(("use_qk_norm", "rope_scaling.alpha"), ...),
    "attention_head_dim": lambda width, r: width == r["layer"].head_dim,
}
"""Keys of a target's that AngelSlim's configurations copy."""

_NVIDIA_KEYS = {
    *("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"),
    *("use_mtp_layernorm", "next_layer_regular", "parallel_draft_step"),
}
_SPECFORGE_KEYS = {"eagle_config", "fc_norm", "norm_output", "use_aux_norm"}


def _mark_of_speculators(clues: Clues, *, is_first: bool) -> str:
    """The key with any value: of an EAGLE-1 head, or of another."""
    kind = clues.fields.raw.get(KIND, ...)
    is_so = kind is not ... and (kind == "eagle") == is_first
    return f"config.json has {KIND} {kind!r}" if is_so else ""


def _mark_of_deepspec(clues: Clues) -> str:
    """Architecture and ids of its EAGLE-3."""
    is_so = any(name.endswith("Eagle3Model") for name in clues.architectures)
    is_so = is_so and "target_layer_ids" in clues.fields.raw
    return f"architectures {clues.architectures} and target_layer_ids" if is_so else ""


def _mark_of_specforge(clues: Clues) -> str:
    """A `midlayer`, with keys or an architecture of its own."""
    found = sorted(_SPECFORGE_KEYS & clues.fields.raw.keys())
    found += [name for name in clues.architectures if name.endswith("Eagle3")]
    is_so = found and clues.has_midlayer
    return f"tensors midlayer.* with {', '.join(found)}" if is_so else ""


def _mark_of_nvidia(clues: Clues) -> str:
    """Keys of its exporter."""
    found = sorted(_NVIDIA_KEYS & clues.fields.section("eagle_config").raw.keys())
    return f"eagle_config has {found[-1]}, tensors layers.0.*" if found else ""


def _eagle(producer: str, kind: str, mark: Any, fields: Any, **others: Any) -> Layout:
    """A layout of EAGLE heads, by what it does not share with the others."""
    inert = _EAGLE_INERT | others.pop("inert", {})
    others = {"ids": EAGLE_IDS, "inert": inert, "refuse": (rules.other_eagles,)} | others
    return Layout(producer, kind, EagleConfig, mark, fields, **others)


def _three_features(config: EagleConfig) -> Iterator[tuple[bool, str]]:
    """SafeAILab's own code joins so many."""
    layers = config.feature_layers
    is_other = config.fusion == "attention" and len(layers) != 3
    yield is_other, f"feature_layers={layers}, other than three"


def _notes_of_safeailab(config: EagleConfig, target_layers: int | None) -> Iterator[str]:
    """What SafeAILab's own code does not read of its layout, while vLLM and SGLang do."""
    layer, rope = config.layer, config.layer.rope
    kind, base, scalings = rope["rope_type"], rope["rope_theta"], file_parts.SCALINGS
    if kind not in ("default", *scalings):
        yield f"SafeAILab's own code cannot load rope_scaling of type {kind!r}"
    if kind in scalings and base != 10000:
        yield f"SafeAILab's own code takes a rope base of 10000 with scaling, not {base:g}"
    if layer.head_dim * layer.num_heads != layer.hidden_size:
        yield f"SafeAILab's older code takes hidden_size / heads for head_dim, not {layer.head_dim}"
    if not config.sees_pictures:
        yield "vLLM, SGLang and SafeAILab's own code show the head tokens of pictures all the same"
    n, layers = target_layers, list(config.feature_layers)
    if config.fusion == "attention" and n is not None and layers != [2, n // 2, n - 3]:
        yield f"SafeAILab's own code always reads hidden states {[2, n // 2, n - 3]}, not {layers}"


SPECULATORS = _eagle(
    "speculators",
    "EAGLE-3",
    partial(_mark_of_speculators, is_first=False),
    EAGLE3_OF_SPECULATORS,
    name="speculators",
    file=(
        file_parts.speculators("eagle3", "Eagle3"),
        *(IDS, "norm_before_residual", "norm_before_fc", "fc_norm", "feedback_norm"),
        *(("embed_requires_grad", False), file_parts.types),
        file_parts.end_of_speculators("eagle3", counts_features=True),
    ),
    inert={KIND: ("eagle3",)},
    copies=BOTH_TABLES,
    only={"has_sinks": (False,)},
)
SPECULATORS_EAGLE1 = _eagle(
    "speculators",
    "EAGLE-1",
    partial(_mark_of_speculators, is_first=True),
    _EAGLE1
    | _SPECULATORS_LAYER
    | {"fc_bias": Key("fusion_bias", False), "num_layers": rules.num_layers_in_file},
    tensors=(Named({"fusion_fc.": "fc.", "transformer.": "layers.0."}),),
    inert={
        KIND: ("eagle",),
        "layernorms": (False,),
        "transformer_layer_architecture": ("auto", "LlamaDecoderLayer", "Qwen3DecoderLayer"),
        # Of its layers' configuration, which is the target's.
        "num_hidden_layers": ...,
    },
)
DEEPSPEC = _eagle(
    "DeepSpec",
    "EAGLE-3",
    _mark_of_deepspec,
    EAGLE3
    | _HF_LAYER
    | {"layer.has_qk_norm": True, "layer.windows": WINDOWS}
    | {"feature_layers": rules.features_of_deepspec}
    # Its later layers read the embedding, too.
    | {"num_layers": Key("num_hidden_layers", 1, high=1)},
)
SPECFORGE = _eagle(
    "SpecForge",
    "EAGLE-3",
    _mark_of_specforge,
    EAGLE3_OF_SPECFORGE,
    ids=HOOKED_IDS,
    tensors=(MIDLAYER, SGLANG),
    name="safeailab",
    file=(
        file_parts.model_of_safeailab("LlamaForCausalLMEagle3"),
        *("target_hidden_size", "draft_vocab_size"),
        # vLLM reads the ids at the top, as hidden states; SGLang the nested ones, as outputs.
        *(IDS, NESTED_IDS, ("eagle_config.use_aux_hidden_state", True), "sees_pictures"),
    ),
    copies=("lm_head",),
    only={"num_layers": (1,), "has_qk_norm": (False,)},
    limits=(_three_features,),
    notes=_notes_of_safeailab,
)
ANGELSLIM = _eagle(
    "AngelSlim",
    "EAGLE-3",
    lambda c: (
        "Eagle3LlamaForCausalLM" in c.architectures
        and c.has_midlayer
        and "architecture Eagle3LlamaForCausalLM, tensors midlayer.*"
    ),
    EAGLE3 | EAGLE_LAYER | {"layer": rules.layer_of_angelslim},
    inert=_OF_HUNYUAN,
    ids=HOOKED_IDS,
    tensors=(MIDLAYER,),
)
SAFEAILAB = _eagle(
    "SafeAILab",
    "EAGLE-3",
    lambda c: c.has_midlayer and "tensors midlayer.*, no key of another producer",
    EAGLE3 | EAGLE_LAYER,
    ids=HOOKED_IDS,
    tensors=(MIDLAYER,),
)
SAFEAILAB_EAGLE1 = _eagle(
    "SafeAILab",
    "EAGLE-1",
    lambda c: (
        c.eagle >= {"fc.weight", Q_PROJ} and "tensors fc and layers.0.*, no hidden_norm: EAGLE-1"
    ),
    _EAGLE1
    | EAGLE_LAYER
    | {
        "layer.attention_bias": replace(
            EAGLE_LAYER["layer.attention_bias"],
            write=lambda config: {"qkv_bias": config.layer.attention_bias},
        )
    },
    ids=HOOKED_IDS,
    name="safeailab",
    file=(
        file_parts.model_of_safeailab("LlamaForCausalLM"),
        *("fc_bias", "layer.attention_bias"),
    ),
    only={"has_qk_norm": (False,), "has_lm_head": (False,)},
    notes=_notes_of_safeailab,
)
NVIDIA = _eagle(
    "NVIDIA",
    "EAGLE-3",
    _mark_of_nvidia,
    EAGLE3 | _HF_LAYER | {"feature_layers": rules.features_of_nvidia},
)
VLLM = _eagle(
    "vLLM",  # names and keys as it reads them, without a mark of the producer
    "EAGLE-3",
    lambda c: (
        "layers.0.hidden_norm.weight" in c.eagle and "tensors layers.0.*, no key of a producer"
    ),
    EAGLE3 | EAGLE_LAYER,
)

EAGLES = (
    *(SPECULATORS, SPECULATORS_EAGLE1, DEEPSPEC, SPECFORGE, ANGELSLIM, SAFEAILAB, NVIDIA, VLLM),
    SAFEAILAB_EAGLE1,
)
"""EAGLE heads, in the order in which files are tried."""
