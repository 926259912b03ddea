"""How producers name and wire EAGLE and mask-token heads: a table.

SafeAILab (yuhuili), SpecForge (lmsys), speculators (RedHatAI), NVIDIA Model-Optimizer, DeepSpec,
AngelSlim, amazon, AMD, z-lab, TorchSpec and Hugging Face write the same few tensors under different
names, keys and conventions. They use the same keys with other meanings (`norm_output`, layer ids).

P-EAGLE heads are EAGLE-3 heads with a learned feature of masks. PARD models are causal language
models with the id of a mask. DFlash heads read features as keys and values; DSpark, Domino, DFlash
2 and XPress are DFlash heads with a correction inside the block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.checkpoints import file_parts, limits, refusals, rules
from specdec.checkpoints.layout import HeadLayout, Key
from specdec.checkpoints.marks import Clues
from specdec.drafters.eagle import EagleConfig
from specdec.drafters.mask_token.correction import (
    DominoConfig,
    MarkovConfig,
    SelectorConfig,
    XPressConfig,
)
from specdec.drafters.mask_token.head import MaskTokenConfig

NONE = type(None)
IDS = "eagle_aux_hidden_state_layer_ids"
NESTED_IDS = f"eagle_config.{IDS}"
FLASH_IDS = "dflash_config.target_layer_ids"
BLOCK_IDS = "aux_hidden_state_layer_ids"
Q_PROJ, Q_NORM, Q_BIAS, O_BIAS = (
    f"layers.0.self_attn.{name}"
    for name in ("q_proj.weight", "q_norm.weight", "q_proj.bias", "o_proj.bias")
)
_OF_VLLM = "tensors layers.0.*, no key of a producer"
_OF_EAGLE1 = "tensors fc and layers.0.*, no hidden_norm: EAGLE-1"
_OF_P_EAGLE = "tensor mask_hidden beside an EAGLE-3 head's"
EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"

_TABLES = ("has_embed_tokens", "has_lm_head")
_COPIES = ("lm_head", "embed_tokens")
_LAYERS = ("num_layers", "attention_bias", "attention_output_bias", "has_qk_norm")


# EAGLE heads. Trainers copy layer_types from the target, and most of them never look at them.

_WINDOWS = Key("layer_types", read=rules.windows, write=file_parts.window_keys)
_EAGLE_LAYER = {
    "has_qk_norm": lambda r: Q_NORM in r.tensors,
    "attention_bias": Key("attention_bias", False, also=("qkv_bias",)),
    "attention_output_bias": (lambda r: r.fields.flag("attention_bias") and O_BIAS in r.tensors),
}
_HF_LAYER = _EAGLE_LAYER | {"attention_output_bias": Key("attention_bias", False)}
_SPECULATORS_LAYER = _HF_LAYER | {"has_qk_norm": rules.has_qk_norm, "windows": _WINDOWS}
_EAGLE_TABLES = {
    "has_embed_tokens": lambda r: r.is_other_width or EMBEDDINGS in r.tensors,
    "has_lm_head": lambda r: r.is_other_width or HEAD in r.tensors or r.has_fewer_ids,
    "logit_scale": Key("logit_scale", 1.0),
}
_EAGLE1 = {
    "fusion": "input",
    "layer": rules.layer,
    "vocab_size": Key("vocab_size", int),
    "draft_vocab_size": lambda r: r.values["vocab_size"],
    "target_hidden_size": rules.target_hidden_size,
    "feature_layers": rules.final_feature,
    "fc_bias": Key("bias", False, read=rules.eagle1_bias),
    "output_norm": False,
    "num_layers": rules.num_layers_of_eagle,
    **_EAGLE_TABLES,
}
_EAGLE3 = {
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
    **_EAGLE_TABLES,
}
_EAGLE_IDS = {
    IDS: ("boundary", 0),
    BLOCK_IDS: ("boundary", 0),
    "target_layer_ids": ("layer_output", -1),  # DeepSpec's -1 are the embeddings
    "eagle3_layers_to_capture": ("layer_output", 0),
    "aux_hidden_states_layer_ids": ("layer_output", 0),  # AngelSlim's
    "eagle_config.layer_ids": ("boundary", 0),
    # So NVIDIA's are read by vLLM and, after measurement, by SGLang (sgl-project/sglang#32334).
    NESTED_IDS: ("boundary", 0),
}
_HOOKED_IDS = _EAGLE_IDS | {NESTED_IDS: ("layer_output", 0)}
"""SpecForge's trainer hooks the outputs of layers."""

VLLM = HeadLayout(  # names and keys as vLLM reads them, without a mark of the producer
    producer="vLLM",
    kind="EAGLE-3",
    config=EagleConfig,
    keys=_EAGLE3,
    of_layer=_EAGLE_LAYER,
    ids=_EAGLE_IDS,
    marks={5: lambda c: "layers.0.hidden_norm.weight" in c.eagle and _OF_VLLM},
    refuse=refusals.of_eagle,
    inert=("eagle_config.parallel_draft_heads_num_layers",),
)
_SGLANG = {f"aux_norm_{level}.": f"fc_norm.{i}." for i, level in enumerate(("low", "mid", "high"))}
SAFEAILAB = replace(
    VLLM,
    producer="SafeAILab",
    ids=_HOOKED_IDS,
    marks={3: lambda c: c.has_midlayer and "tensors midlayer.*, no key of another producer"},
    tensors={"midlayer.": "layers.0."},
)
SPECFORGE = replace(
    SAFEAILAB,
    producer="SpecForge",
    marks={2: Clues.specforge},
    tensors=SAFEAILAB.tensors | _SGLANG,
    keys=_EAGLE3
    | {
        # Its trainer always feeds the raw output back.
        "feedback_norm": False,
        "output_norm": Key(
            "norm_output",
            True,
            present="norm_output is taken as SpecForge's: the norm before the vocabulary head; raw "
            "feedback (vLLM and SGLang would take it for normalised feedback)",
        ),
        "target_hidden_size": replace(
            _EAGLE3["target_hidden_size"],
            is_written=lambda config: config.target_hidden_size != config.hidden_size,
        ),
    },
    unused={
        "norm.weight": (
            "output_norm",
            "norm_output is false: no norm before the vocabulary head",
        )
    },
    name="safeailab",
    designs=("attention",),
    file=(
        file_parts.model_of_safeailab("LlamaForCausalLMEagle3"),
        *("target_hidden_size", "draft_vocab_size"),
        # vLLM reads the ids at the top, as boundaries; SGLang the nested ones, as outputs.
        *(IDS, NESTED_IDS, ("eagle_config.use_aux_hidden_state", True)),
    ),
    copies=("lm_head",),
    says=_TABLES,
    limits=(limits.safeailab,),
)
SAFEAILAB_EAGLE1 = replace(
    SAFEAILAB,
    kind="EAGLE-1",
    keys=_EAGLE1,
    of_layer=_EAGLE_LAYER
    | {
        "attention_bias": replace(
            _EAGLE_LAYER["attention_bias"],
            write=lambda config: {"qkv_bias": config.layer.attention_bias},
        )
    },
    marks={6: lambda c: c.eagle >= {"fc.weight", Q_PROJ} and _OF_EAGLE1},
    tensors={},
    name="safeailab",
    designs=("input",),
    file=(file_parts.model_of_safeailab("LlamaForCausalLM"), "fc_bias", "attention_bias"),
    says=("num_layers", "has_embed_tokens"),
    instead={"has_lm_head": False},
    limits=(limits.safeailab,),
)
SPECULATORS = replace(
    VLLM,
    producer="speculators",
    keys=_EAGLE3
    | {
        "norm_before_residual": Key(
            "norm_before_residual",
            False,
            absent="no norm_before_residual: false, speculators' default (vLLM would take it for "
            "true)",
        )
    },
    of_layer=_SPECULATORS_LAYER,
    marks={0: lambda c: c.speculators(is_first=False)},
    name="speculators",
    designs=("attention",),
    file=(
        file_parts.speculators("eagle3", "Eagle3"),
        *(IDS, "norm_before_residual", "norm_before_fc", "fc_norm", "feedback_norm"),
        ("embed_requires_grad", False),
        file_parts.types,
        file_parts.end_of_speculators("eagle3", counts_features=True),
    ),
    copies=_COPIES,
    says=(*_TABLES, *_LAYERS, "windows"),
    limits=(limits.one_bias,),
)
EAGLES = (
    SAFEAILAB,
    SPECFORGE,
    SAFEAILAB_EAGLE1,
    SPECULATORS,
    replace(
        VLLM,
        producer="speculators",
        kind="EAGLE-1",
        keys=_EAGLE1 | {"fc_bias": Key("fusion_bias", False)},
        of_layer=_SPECULATORS_LAYER,
        marks={0: lambda c: c.speculators(is_first=True)},
        tensors={"fusion_fc.": "fc.", "transformer.": "layers.0."},
    ),
    replace(
        VLLM,
        producer="DeepSpec",
        keys=_EAGLE3 | {"feature_layers": rules.features_of_deepspec},
        of_layer=_HF_LAYER | {"has_qk_norm": True, "windows": _WINDOWS},
        marks={1: Clues.deepspec},
    ),
    replace(
        VLLM,
        producer="NVIDIA",
        keys=_EAGLE3 | {"feature_layers": rules.features_of_nvidia},
        of_layer=_HF_LAYER,
        marks={4: Clues.nvidia},
    ),
    VLLM,
)

# Heads of masks.

_INERT = (
    "parallel_drafting",  # vLLM's switch
    "enable_confidence_head",  # its tensors say so
    "confidence_head_with_markov",
    "confidence_head_alpha",  # of training
    "attention_mode",  # whether there are fewer key heads
    "projector_type",
    "speculators_model_type",
)
_P_EAGLE = {
    "alignment": "shifted",
    "context": rules.joined_input,
    "is_causal": True,
    "correction": rules.correction,
}


def _p_eagle(base: HeadLayout, mask_id: str, **changes: Any) -> HeadLayout:
    """An EAGLE-3 layout with what masks are."""
    keys = base.keys | _P_EAGLE | {"mask_token_id": Key(mask_id, read=rules.mask_token)}
    masks = {"config": MaskTokenConfig, "refuse": refusals.of_mask_token, "inert": _INERT}
    masks |= {"kind": "P-EAGLE", "designs": ("shifted",)}
    return replace(base, keys=keys, unused={}, **masks, **changes)


P_EAGLES = (
    _p_eagle(
        SPECULATORS,
        "mask_token_id",
        marks={0: lambda c: c.value("speculators_model_type", "peagle")},
        corrections=(NONE, MarkovConfig),
        file=(
            file_parts.speculators("peagle", "PEagle"),
            *("mask_token_id", file_parts.types),
            *(IDS, "norm_before_residual", "norm_before_fc", "fc_norm"),
            *(("norm_output", False), ("embed_requires_grad", True)),
            file_parts.corrected(),
            file_parts.end_of_speculators("peagle", counts_features=True),
        ),
        says=(*_TABLES, *_LAYERS, "windows", "correction"),
        limits=(limits.one_bias, limits.markov_alone),
    ),
    _p_eagle(
        VLLM,
        "ptd_token_id",
        producer="amazon",
        follows="vLLM",
        marks={6: lambda c: c.key("ptd_token_id")},
        name="vllm",
        file=(
            file_parts.model("LlamaForCausalLMEagle3", "llama"),
            *("draft_vocab_size", "target_hidden_size", IDS),
            *("norm_before_residual", "norm_before_fc", file_parts.number_of_features),
            *("mask_token_id", ("parallel_drafting", True)),
        ),
        copies=("lm_head",),
        says=(*_TABLES, "fc_norm", "num_layers"),
        limits=(limits.markov_alone,),
    ),
    _p_eagle(
        SPECFORGE,
        "mask_token_id",
        marks={
            2: lambda c: c.architecture(".*PEagle"),
            8: lambda c: c.has_tensors("mask_hidden", "hidden_norm.weight") and _OF_P_EAGLE,
        },
        name="",
    ),
)
_Q_BIAS = Key(
    "attention_bias",
    False,
    read=lambda r: (
        r.fields.flag("attention_bias")
        or (Q_BIAS in r.tensors and r.fields.get("model_type") == "qwen2")
    ),
)
PARD = HeadLayout(
    producer="AMD",
    kind="PARD",
    config=MaskTokenConfig,
    keys={
        "alignment": "unshifted",
        "context": "none",
        "is_causal": True,
        "feature_layers": (),
        "has_embed_tokens": True,
        "vocab_size": rules.fitted_vocab_size,
        "draft_vocab_size": (lambda r: min(r.fields.integer("vocab_size"), r.values["vocab_size"])),
        "layer": rules.layer,
        "target_hidden_size": (
            lambda r: r.fields.integer("hidden_size") if r.text is None else r.text.hidden_size
        ),
        "num_layers": Key("num_hidden_layers", int),
        "mask_token_id": Key("pard_token", read=rules.mask_token),
        "ties_embeddings": Key(
            "tie_word_embeddings",
            False,
            read=lambda r: HEAD not in r.tensors and r.fields.flag("tie_word_embeddings"),
        ),
        "max_positions": Key("max_position_embeddings", 2048),
    },
    of_layer={
        "has_qk_norm": rules.has_qk_norm,
        "attention_bias": _Q_BIAS,
        "attention_output_bias": (
            lambda r: r.fields.flag("attention_bias") and r.fields.get("model_type") != "qwen2"
        ),
        "windows": _WINDOWS,
    },
    marks={1: lambda c: c.key("pard_token", "spd_type", "pard2_target_layers", "pard2_target_dim")},
    refuse=refusals.of_mask_token,
    no_options=("feature_layers", "layer_convention", "norm_before_residual"),
    inert=_INERT,
    name="huggingface",
    designs=("unshifted",),
    file=(
        *(file_parts.language_model, "ties_embeddings"),
        *(("spd_type", "pard"), "mask_token_id"),
    ),
    prefix="model.",
    copies=_COPIES,
    says=(*_TABLES, *_LAYERS, "max_positions"),
    limits=(limits.language_model,),
)

# Blocks of masks.

_IN_FLASH = "dflash_config."
_SAME = Key("sample_from_anchor", False, is_in_either=True, words=("next-token", "same-position"))
_NEXT = replace(_SAME, usual=True)
_BLOCK = {
    "layer": rules.layer,
    "vocab_size": Key("vocab_size", int),
    "draft_vocab_size": Key("draft_vocab_size", int, read=rules.draft_vocab_size_of_blocks),
    "target_hidden_size": rules.width_of_block_features,
    "correction": rules.correction,
    "alignment": _SAME,
    "context": "keys",
    "is_causal": Key("is_causal", False, is_in_either=True),
    "feature_layers": rules.block_features,
    "num_layers": Key("num_hidden_layers", 1),
    "mask_token_id": Key(f"{_IN_FLASH}mask_token_id", read=rules.mask_token),
    "block_size": Key("block_size", int, is_in_either=True, high=1024),
    "has_embed_tokens": lambda r: EMBEDDINGS in r.tensors,
    "has_lm_head": lambda r: HEAD in r.tensors or r.has_fewer_ids,
    "logit_scale": Key(f"{_IN_FLASH}output_multiplier", 1.0),
    "confidence": rules.confidence,
}
_BLOCK_SAYS = (*_LAYERS, "windows", "is_window_causal", "correction", "convolution", "confidence")


def _z_lab(name: str, *parts: Any) -> tuple[Any, ...]:
    """What config.json of a block head has, by its architecture; `parts` are of its correction."""
    return (
        *(file_parts.model(name, "qwen3"), "attention_bias", "windows", "block_size"),
        *(FLASH_IDS, "mask_token_id", *parts, "is_window_causal", "has_sinks"),
        file_parts.confidence_of_z_lab,
    )


DFLASH = HeadLayout(
    producer="z-lab",
    kind="DFlash",
    config=MaskTokenConfig,
    keys=_BLOCK,
    of_layer={
        "has_qk_norm": rules.has_qk_norm,
        "attention_bias": _Q_BIAS,
        "attention_output_bias": Key("attention_bias", False),
        "windows": _WINDOWS,
        # Layers with a window by use_swa alone see the whole block (MiMo's).
        "is_window_causal": Key(
            f"{_IN_FLASH}causal",
            read=lambda r: r.either.flag(
                "is_causal", default="sliding_attention" in r.fields.strings("layer_types")
            ),
            is_written=lambda config: config.layer.windows and not config.layer.is_window_causal,
        ),
        "has_sinks": Key(
            f"{_IN_FLASH}attention_sink_bias",
            read=lambda r: "layers.0.self_attn.sinks" in r.tensors,
            is_written=lambda config: config.layer.has_sinks,
        ),
        "convolution": rules.convolution,
    },
    ids={
        "target_layer_ids": ("layer_output", -1),
        FLASH_IDS: ("layer_output", 0),
        f"{_IN_FLASH}layer_ids": ("boundary", 0),
        BLOCK_IDS: ("boundary", 0),
    },
    marks={4: lambda c: c.key("dflash_config"), 5: lambda c: c.architecture("DFlash")},
    refuse=refusals.of_mask_token,
    no_options=("norm_before_residual",),
    inert=(*_INERT, "attention_sink_bias", "add_swa_attention_sink_bias"),
    name="z-lab",
    designs=("same-position",),
    file=_z_lab("DFlashDraftModel"),
    says=_BLOCK_SAYS,
    instead={"has_lm_head": False},
    limits=(limits.one_bias, limits.block, limits.block_of_z_lab),
)


_SPECULATORS_KEYS = _BLOCK | {
    "draft_vocab_size": _EAGLE3["draft_vocab_size"],
    "mask_token_id": Key("mask_token_id", read=rules.mask_token),
    "block_size": replace(
        _BLOCK["block_size"], usual=8, absent="no block_size: 8, speculators' default"
    ),
}
_CAUSAL = Key(
    "sliding_window_non_causal", False, words=(False, True), write=file_parts.causal_windows
)
_BOTH = ("same-position", "next-token")
_SHIFT_LABEL = replace(
    _SAME,
    name="shift_label",
    write=lambda config: {f"{_IN_FLASH}shift_label": config.alignment == "next-token"},
)


def _speculators(
    word: str, kind: str, designs: tuple[str, ...], corrections: tuple[type, ...]
) -> HeadLayout:
    """A block head of speculators, by its word for the kind."""
    name, is_dspark = kind.replace(" ", ""), kind == "DSpark"
    absent = "no sample_from_anchor: true, speculators' default for dspark (vLLM's is false)"
    alignment = replace(_NEXT, absent=absent) if is_dspark else _SAME
    return replace(
        DFLASH,
        producer="speculators",
        kind=kind,
        keys=_SPECULATORS_KEYS | {"alignment": alignment},
        of_layer=DFLASH.of_layer | {"is_window_causal": replace(_CAUSAL, usual=kind == "DFlash 2")},
        marks={0: lambda c: c.value("speculators_model_type", word)},
        name="speculators",
        designs=designs,
        corrections=corrections,
        file=(
            *(file_parts.speculators(word, name), "mask_token_id", file_parts.types),
            *(BLOCK_IDS, "block_size", "alignment", "is_window_causal"),
            file_parts.corrected(is_always=is_dspark),
            *((file_parts.confidence,) if is_dspark else ()),
            file_parts.end_of_speculators(word, counts_features=False),
        ),
        copies=("embed_tokens",),
        says=(*_BLOCK_SAYS, *_TABLES),
        instead={},
        limits=(limits.one_bias, limits.block, limits.block_of_speculators),
    )


_IN_SECTION = file_parts.corrected(_IN_FLASH)
BLOCKS = (
    DFLASH,
    replace(
        DFLASH,
        marks={},
        name="",
        tensors={"context_proj.": "fc.", "context_norm.": "hidden_norm.", "final_norm.": "norm."},
    ),
    replace(
        DFLASH,
        producer="Hugging Face",
        keys=_BLOCK | {"vocab_size": rules.vocab_size_of_target},
        of_layer=DFLASH.of_layer
        | {
            "windows": rules.longer_windows,
            "is_window_causal": Key("is_causal", False, is_in_either=True),
        },
        marks={7: lambda c: c.has_tensors("encoder.fc.weight") and "tensor encoder.fc"},
        tensors={"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."},
        name="",
    ),
    # vLLM runs every dflash file in the same position.
    _speculators("dflash", "DFlash", ("same-position",), (NONE,)),
    _speculators("dspark", "DSpark", _BOTH, (MarkovConfig, NONE)),
    _speculators("dflash2", "DFlash 2", _BOTH, (SelectorConfig,)),
    _speculators("xpress", "XPress", _BOTH, (XPressConfig,)),
    replace(
        DFLASH,
        producer="SpecForge",
        kind="DSpark",
        keys=_BLOCK | {"alignment": _NEXT},
        marks={
            2: lambda c: c.architecture("DSpark"),
            3: lambda c: c.value("projector_type", "dspark", "dflash_config"),
        },
        designs=("next-token",),
        corrections=(MarkovConfig,),
        file=_z_lab("DSparkDraftModel", (f"{_IN_FLASH}projector_type", "dspark"), _IN_SECTION),
    ),
    replace(
        DFLASH,
        producer="SpecForge",
        kind="Domino",
        keys=_BLOCK | {"alignment": _SHIFT_LABEL},
        marks={
            2: lambda c: c.architecture("Domino"),
            3: lambda c: c.value("projector_type", "domino", "dflash_config"),
        },
        designs=_BOTH,
        corrections=(DominoConfig,),
        file=_z_lab(
            *("DominoDraftModel", (f"{_IN_FLASH}projector_type", "domino")),
            *(_IN_SECTION, "alignment"),
        ),
    ),
    replace(
        DFLASH,
        kind="DFlash 2",
        marks={2: lambda c: c.architecture("DFlash2")},
        corrections=(SelectorConfig,),
        file=_z_lab("DFlash2DraftModel", _IN_SECTION),
    ),
    replace(
        DFLASH,
        producer="DeepSpec",
        kind="DSpark",
        keys=_BLOCK | {"alignment": _NEXT},
        marks={
            1: lambda c: c.key("markov_rank", "markov_head_type", "dspark_noise_token_id"),
            2: lambda c: c.architecture(".+DSpark"),
        },
        name="",
    ),
)

LAYOUTS = (*EAGLES, *P_EAGLES, PARD, *BLOCKS)
