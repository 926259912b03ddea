"""How producers name and wire mask-token heads: a table, and the orders in which files are tried.

P-EAGLE heads (amazon, speculators, SpecForge) are EAGLE-3 heads with a learned feature of masks.
PARD models (AMD) are causal language models with the id of a mask. DFlash heads (z-lab, TorchSpec,
Hugging Face) read features as keys and values; DSpark, Domino, DFlash 2, XPress and LiLiCorr are
DFlash heads with a correction inside the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from specdec.checkpoints import correction, file_parts, rules
from specdec.checkpoints.eagle_layouts import (
    BLOCK_IDS,
    BOTH_TABLES,
    COPIED,
    EAGLE3,
    EAGLE3_OF_SPECFORGE,
    EAGLE3_OF_SPECULATORS,
    EAGLE_IDS,
    EAGLE_LAYER,
    EMBEDDINGS,
    HEAD,
    HOOKED_IDS,
    IDS,
    KIND,
    MIDLAYER,
    OF_SPECULATORS,
    Q_BIAS,
    SGLANG,
    WINDOWS,
)
from specdec.checkpoints.layout import Key, Layout, Reading
from specdec.checkpoints.marks import Clues
from specdec.checkpoints.tensor_rules import Ending, Named, Padded, Prefixed, Shaped
from specdec.drafters.mask_token.correction import MarkovConfig, SelectorConfig, XPressConfig
from specdec.drafters.mask_token.head import MaskTokenConfig

FLASH_IDS = "dflash_config.target_layer_ids"
_PROJECTOR = "dflash_config.projector_type"
NONE = type(None)

_HAS_SINKS = dict.fromkeys(
    ("attention_sink_bias", "add_swa_attention_sink_bias"),
    lambda has_sinks, r: has_sinks == r["layer"].has_sinks,
)


def _is_no_other_window(size: int, reading: Reading) -> bool:
    """A window of no layer, or the one that was read."""
    windows = reading["layer"].windows
    return not any(windows) or size in windows


_INERT = {
    "max_window_layers": ...,
    "sliding_window": _is_no_other_window,
    # Whether there are fewer key heads; confidence heads show in the tensors.
    "attention_mode": ("gqa", "mha"),
    **dict.fromkeys(("enable_confidence_head", "confidence_head_with_markov"), ...),
    **_HAS_SINKS,
}
_FLASH_INERT = {
    "use_aux_hidden_state": (True,),
    "target_hidden_size": lambda size, r: size == r["target_hidden_size"],
    "attention_value_scale": (1,),
    "input_embedding_scale": (1,),
    "final_logit_softcapping": (0,),
}
_OF_BLOCKS = _INERT | {f"dflash_config.{k}": v for k, v in (_INERT | _FLASH_INERT).items()}
_P_EAGLE = {
    "alignment": "shifted",
    "context": rules.joined_input,
    "is_causal": True,
    "correction": correction.correction,
}
_EMBEDDING_OF_MASKS = Shaped("mask_embedding", 3)
_MASK = Shaped("mask_hidden", 3), _EMBEDDING_OF_MASKS


_HAS_ID = {"mask_token_id": (int,)}  # engines embed an id
_HAS_NORMS = {"has_qk_norm": (True,)}  # vLLM's DFlash norms queries and keys, whatever the file has


def _mask_id(key: str) -> dict[str, Key]:
    return {"mask_token_id": Key(key, read=rules.mask_token)}


def _mark_of_masks(clues: Clues) -> str:
    """A tensor of P-EAGLE heads beside those of an EAGLE-3 head."""
    is_so = clues.has_tensors("mask_hidden", "hidden_norm.weight")
    return "tensor mask_hidden beside an EAGLE-3 head's" if is_so else ""


def _p_eagle(producer: str, mark: Any, fields: Any, mask_id: str, **others: Any) -> Layout:
    """A layout of EAGLE-3 with what masks are."""
    fields = fields | _P_EAGLE | _mask_id(mask_id)
    inert = COPIED | {"use_sliding_window": (False,)} | others.pop("inert", {})
    usual = {"ids": EAGLE_IDS, "tensors": _MASK, "inert": inert}
    usual |= {"refuse": (rules.files_beside, rules.other_eagles)} | others
    return Layout(producer, "P-EAGLE", MaskTokenConfig, mark, fields, **usual)


SPECULATORS_P_EAGLE = _p_eagle(
    "speculators",
    lambda c: c.value(KIND, "peagle"),
    EAGLE3_OF_SPECULATORS,
    "mask_token_id",
    inert={"use_sliding_window": ..., KIND: ("peagle",)},
    name="speculators",
    file=(
        file_parts.speculators("peagle", "PEagle"),
        *("mask_token_id", file_parts.types),
        *(IDS, "norm_before_residual", "norm_before_fc", "fc_norm"),
        *(("norm_output", False), ("embed_requires_grad", True)),
        file_parts.corrected(),
        file_parts.end_of_speculators("peagle", counts_features=True),
    ),
    copies=BOTH_TABLES,
    only={**_HAS_ID, "correction": (NONE, MarkovConfig), "has_sinks": (False,)},
)
AMAZON = _p_eagle(
    "amazon",
    lambda c: c.key("ptd_token_id"),
    EAGLE3 | EAGLE_LAYER | {"feature_layers": partial(rules.eagle_features, convention_of="vLLM")},
    "ptd_token_id",
    name="vllm",
    file=(
        file_parts.model("LlamaForCausalLMEagle3", "llama"),
        *("draft_vocab_size", "target_hidden_size", IDS),
        *("norm_before_residual", "norm_before_fc", file_parts.number_of_features),
        *("mask_token_id", ("parallel_drafting", True)),
    ),
    copies=("lm_head",),
    only={**_HAS_ID, "correction": (NONE,), "has_qk_norm": (False,), "has_sinks": (False,)},
)
SPECFORGE_P_EAGLE = _p_eagle(
    "SpecForge",
    lambda c: c.architecture(".*PEagle"),
    EAGLE3_OF_SPECFORGE,
    "mask_token_id",
    ids=HOOKED_IDS,
    tensors=(MIDLAYER, SGLANG, *_MASK),
)
_Q_BIAS = Key(
    "attention_bias",
    False,
    read=lambda r: (
        r.fields.flag("attention_bias")
        or (Q_BIAS in r.tensors and r.fields.get("model_type") == "qwen2")
    ),
)
PARD = Layout(
    producer="AMD",
    kind="PARD",
    config=MaskTokenConfig,
    mark=lambda c: c.key("pard_token", "spd_type", "pard2_target_layers", "pard2_target_dim"),
    fields={
        "alignment": "unshifted",
        "context": "none",
        "is_causal": True,
        "feature_layers": (),
        "has_embed_tokens": True,
        "vocab_size": rules.fitted_vocab_size,
        "draft_vocab_size": lambda r: min(r.fields.integer("vocab_size"), r["vocab_size"]),
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
        "layer.has_qk_norm": rules.has_qk_norm,
        "layer.attention_bias": _Q_BIAS,
        "layer.attention_output_bias": (
            lambda r: r.fields.flag("attention_bias") and r.fields.get("model_type") != "qwen2"
        ),
        "layer.windows": WINDOWS,
    },
    tensors=(
        Prefixed("model.", bare=("lm_head.",)),
        Padded(EMBEDDINGS, lambda r: (r.fields.integer("vocab_size"), r["vocab_size"])),
        Padded(HEAD, lambda r: (r.fields.integer("vocab_size"), r["draft_vocab_size"])),
        rules.FirstIds(),
    ),
    refuse=(rules.files_beside, rules.other_language_models),
    inert=_INERT,
    name="huggingface",
    file=(
        *(file_parts.language_model, "ties_embeddings"),
        *(("spd_type", "pard"), "mask_token_id"),
    ),
    copies=BOTH_TABLES,
    only={**_HAS_ID, "correction": (NONE,), "has_sinks": (False,)},
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
    "correction": correction.correction,
    "alignment": _SAME,
    "context": "keys",
    "is_causal": Key("is_causal", False, read=lambda r: bool(rules.said_causal(r))),
    "feature_layers": rules.block_features,
    "num_layers": Key("num_hidden_layers", 1),
    "mask_token_id": Key(f"{_IN_FLASH}mask_token_id", read=rules.mask_token),
    "block_size": Key("block_size", int, is_in_either=True, high=1024),
    "has_embed_tokens": lambda r: EMBEDDINGS in r.tensors,
    "has_lm_head": lambda r: HEAD in r.tensors or r.has_fewer_ids,
    "logit_scale": Key(f"{_IN_FLASH}output_multiplier", 1.0),
    "confidence": rules.confidence,
    "layer.has_qk_norm": rules.has_qk_norm,
    "layer.attention_bias": _Q_BIAS,
    "layer.attention_output_bias": Key("attention_bias", False),
    "layer.windows": WINDOWS,
    # Layers with a window by use_swa alone see the whole block (MiMo's).
    "layer.is_window_causal": Key(
        f"{_IN_FLASH}causal",
        read=lambda r: (
            "sliding_attention" in r.fields.strings("layer_types")
            if (said := rules.said_causal(r)) is None
            else said
        ),
        is_written=lambda config: config.layer.windows and not config.layer.is_window_causal,
    ),
    "layer.has_sinks": Key(
        f"{_IN_FLASH}attention_sink_bias",
        read=lambda r: "layers.0.self_attn.sinks" in r.tensors,
        is_written=lambda config: config.layer.has_sinks,
    ),
    "layer.convolution": correction.convolution,
}
_BLOCK_TENSORS = (
    Named({"confidence_head.proj.": "confidence_head."}),
    Ending(".self_attn.attention_sink_bias", ".self_attn.sinks"),
    _EMBEDDING_OF_MASKS,
)
_BLOCK_IDS = {
    "target_layer_ids": ("layer_output", -1),
    FLASH_IDS: ("layer_output", 0),
    f"{_IN_FLASH}layer_ids": ("hidden_state", 0),
    **dict.fromkeys((BLOCK_IDS, IDS), ("hidden_state", 0)),
}


def _block(producer: str, kind: str, mark: Any, **changes: Any) -> Layout:
    """A layout of block heads, by what it does not share with the others; `fields` are added."""
    fields = _BLOCK | changes.pop("fields", {})
    inert = _OF_BLOCKS | changes.pop("inert", {})
    refuse = (rules.files_beside, rules.other_blocks)
    others = {"ids": _BLOCK_IDS, "tensors": _BLOCK_TENSORS, "refuse": refuse, "inert": inert}
    return Layout(producer, kind, MaskTokenConfig, mark, fields, **others | changes)


def _block_of_speculators(config: MaskTokenConfig) -> Iterator[tuple[bool, str]]:
    """Confidence heads beside Markov heads, and windows as vLLM runs them."""
    has_markov = type(config.correction) is MarkovConfig
    is_alone = config.confidence is not None and not has_markov
    yield is_alone, f"confidence={config.confidence} without a Markov head"
    # vLLM then makes every layer causal (transformers_utils/configs/speculators/algos.py).
    is_mixed = len(set(config.layer.windows)) == 2 and config.layer.is_window_causal
    yield is_mixed, "causal windows beside layers that see the whole block"


def _speculators(
    word: str, kind: str, only: Any, sees_block: bool = False, parts: Any = None, **fields: Any
) -> Layout:
    """A block head of speculators.

    Args:
        word: its word for the kind.
        kind: as in papers.
        only: as of the record, of the kind.
        sees_block: what an absent `sliding_window_non_causal` means.
        parts: of the file, for a correction.
        fields: of the kind.
    """
    causal = Key(
        "sliding_window_non_causal",
        sees_block,
        words=(False, True),
        write=file_parts.causal_windows,
    )
    block_size = replace(
        _BLOCK["block_size"], usual=8, absent="no block_size: 8, speculators' default"
    )
    return _block(
        "speculators",
        kind,
        lambda c: c.value(KIND, word),
        fields=OF_SPECULATORS
        | _mask_id("mask_token_id")
        | {"block_size": block_size, "layer.is_window_causal": causal}
        | {"feature_layers": partial(rules.block_features, must_name_them=True)}
        | fields,
        inert={KIND: (word,)},
        name="speculators",
        file=(
            *(file_parts.speculators(word, kind.replace(" ", "")), "mask_token_id"),
            *(file_parts.types, BLOCK_IDS, "block_size", "alignment", "layer.is_window_causal"),
            *(parts or (file_parts.corrected(),)),
            file_parts.end_of_speculators(word, counts_features=False),
        ),
        copies=("embed_tokens",),
        only={**_HAS_ID, **_HAS_NORMS, "has_sinks": (False,)} | only,
        limits=(_block_of_speculators,),
    )


SPECULATORS_DFLASH = _speculators(
    "dflash",
    "DFlash",
    # vLLM runs every dflash file so.
    {"correction": (NONE,), "alignment": ("same-position",)},
)
SPECULATORS_DSPARK = _speculators(
    "dspark",
    "DSpark",
    {"correction": (NONE, MarkovConfig)},
    parts=(file_parts.corrected(is_always=True), file_parts.confidence),
    alignment=replace(
        _NEXT,
        absent="no sample_from_anchor: true, speculators' default for dspark (vLLM's is false)",
    ),
    correction=partial(correction.correction, own=correction.MARKOV, is_usual=True),
)
SPECULATORS_DFLASH2 = _speculators(
    "dflash2",
    "DFlash 2",
    {"correction": (SelectorConfig,)},
    sees_block=True,
    correction=partial(correction.correction, own=correction.SELECTOR),
)
SPECULATORS_XPRESS = _speculators(
    "xpress",
    "XPress",
    {"correction": (XPressConfig,)},
    correction=partial(correction.correction, own=correction.XPRESS),
)
_MARKOV = {
    "alignment": _NEXT,
    "correction": partial(correction.correction, own=correction.MARKOV),
}
DEEPSPEC_DSPARK = _block(
    "DeepSpec",
    "DSpark",
    lambda c: (
        c.key("markov_rank", "markov_head_type", "dspark_noise_token_id")
        or c.architecture(".+DSpark")
    ),
    fields=_MARKOV,
)
SPECFORGE_DSPARK = _block(
    "SpecForge",
    "DSpark",
    lambda c: c.architecture("DSpark"),
    fields=_MARKOV,
    inert={_PROJECTOR: ("dspark",)},
)
SPECFORGE_DOMINO = _block(
    "SpecForge",
    "Domino",
    lambda c: c.architecture("Domino"),
    fields={
        "alignment": replace(_SAME, name="shift_label"),
        "correction": partial(correction.correction, own=correction.DOMINO),
    },
    inert={_PROJECTOR: ("domino",)},
)
DFLASH2 = _block(
    "z-lab",
    "DFlash 2",
    lambda c: c.architecture("DFlash2"),
    fields={"correction": partial(correction.correction, own=correction.SELECTOR)},
)


def _other_candidates(reading: Reading) -> Iterator[tuple[bool, str]]:
    """Engines embed candidates with the target's table, whatever the masks are embedded with."""
    yield EMBEDDINGS in reading.tensors, "LiLiCorr beside embeddings of its own (embed_tokens)"


LILICORR = _block(
    "NVIDIA",
    "LiLiCorr",
    lambda c: c.architecture("LiLiCorr"),
    fields={"correction": partial(correction.correction, own=correction.LILICORR)},
    refuse=(rules.files_beside, rules.other_blocks, _other_candidates),
    inert={
        _PROJECTOR: ("lilicorr",),
        f"{_IN_FLASH}lilicorr_enabled": (True,),
        **dict.fromkeys((f"{_IN_FLASH}conv_kernel_size", f"{_IN_FLASH}conv_group_size"), (0,)),
        "has_own_lm_head": lambda has_one, r: has_one == (HEAD in r.tensors),
    },
)
"""Model-Optimizer's files, which SGLang, vLLM and TensorRT-LLM serve: a DFlash head, eight keys
`dflash_config.lilicorr_*`, all of which must be there, and tensors `lilicorr.*`; with
`conv_kernel_size` and `conv_group_size` DFlash 2's convolutions. Log-probabilities of candidates
are of the whole vocabulary at temperature 1, of the target's vocabulary head or the file's own
(`has_own_lm_head`).
"""
DFLASH = _block(
    "z-lab",
    "DFlash",
    lambda c: c.key("dflash_config") or c.architecture("DFlash"),
    name="z-lab",
    file=(
        file_parts.model("DFlashDraftModel", "qwen3"),
        *("layer.attention_bias", "layer.windows", "block_size", FLASH_IDS, "mask_token_id"),
        *("layer.is_window_causal", "layer.has_sinks"),
    ),
    only={
        **{**_HAS_ID, **_HAS_NORMS, "correction": (NONE,), "confidence": (None,)},
        **{"has_embed_tokens": (False,), "has_lm_head": (False,)},
    },
)
TORCHSPEC = _block(
    "TorchSpec",
    "DFlash",
    lambda c: "",  # its architecture is z-lab's
    tensors=(
        *_BLOCK_TENSORS,
        Named({"context_proj.": "fc.", "context_norm.": "hidden_norm.", "final_norm.": "norm."}),
    ),
)
HUGGING_FACE = _block(
    "Hugging Face",
    "DFlash",
    lambda c: c.has_tensors("encoder.fc.weight") and "tensor encoder.fc",
    fields={
        "vocab_size": rules.vocab_size_of_target,
        "layer.windows": rules.longer_windows,
        "layer.is_window_causal": _BLOCK["is_causal"],
    },
    tensors=(
        *_BLOCK_TENSORS,
        Named({"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}),
    ),
)


def _also(layout: Layout, mark: Any) -> Layout:
    """A layout whose files are recognised by something else as well, which counts less."""
    return replace(layout, mark=mark)


MASKS_OF_SPECULATORS = (
    *(SPECULATORS_P_EAGLE, SPECULATORS_DFLASH, SPECULATORS_DSPARK),
    *(SPECULATORS_DFLASH2, SPECULATORS_XPRESS),
)
"""Mask-token heads that name their kind."""

MASKS = (
    *(PARD, DEEPSPEC_DSPARK, SPECFORGE_P_EAGLE, SPECFORGE_DSPARK, SPECFORGE_DOMINO, DFLASH2),
    LILICORR,
    _also(SPECFORGE_DSPARK, lambda c: c.value(_PROJECTOR, "dspark")),
    _also(SPECFORGE_DOMINO, lambda c: c.value(_PROJECTOR, "domino")),
    _also(
        LILICORR, lambda c: c.value(_PROJECTOR, "lilicorr") or c.key(f"{_IN_FLASH}lilicorr_enabled")
    ),
    *(HUGGING_FACE, DFLASH, TORCHSPEC, AMAZON, _also(SPECFORGE_P_EAGLE, _mark_of_masks)),
)
"""All other mask-token heads, in the order in which files are tried."""
