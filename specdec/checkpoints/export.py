"""Writes heads in the layouts that other engines read.

A layout is written exactly: what it has no key or no tensor for is refused, since a file that
another engine misreads is worse than none. What only some of its readers misread is noted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Literal

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from specdec.arguments import check_choice, check_path, shown
from specdec.checkpoints.correction import TENSORS, correction_keys
from specdec.checkpoints.vocab_map import write_vocab_map
from specdec.heads.config import HeadConfig
from specdec.heads.correction import DominoConfig, MarkovConfig, SelectorConfig, XPressConfig
from specdec.heads.features import FeatureHead, FeatureHeadConfig
from specdec.heads.layers import LayerConfig
from specdec.heads.mask_token import MaskTokenConfig
from specdec.show.text import printable

Layout = Literal["safeailab", "speculators", "vllm", "huggingface", "z-lab"]
Pairs = Iterator[tuple[bool, str]]
"""Is it there, and its name."""


def save_head(
    head: FeatureHead,
    folder: str | Path,
    layout: Layout | None = None,
    *,
    embed_tokens: Tensor,
    lm_head: Tensor,
    num_draft_tokens: int = 4,
    verifier: str | None = None,
    target_layers: int | None = None,
) -> tuple[str, ...]:
    """Writes `config.json` and `model.safetensors` of an EAGLE or a mask-token head.

    `"safeailab"` is the layout of yuhuili's heads (EAGLE-1: `layers.0.*`; EAGLE-3: `midlayer.*`),
    which SafeAILab's own code, vLLM and SGLang read (vLLM without a bias in EAGLE-1's `fc`).
    `"speculators"` is that of RedHatAI's, read by vLLM: `eagle3`, with keys for the norms that
    distinguish the newer dialects and for several layers; `peagle`, `dflash`, and by a head's
    correction `dspark` (also without one, for rows that predict the next token), `dflash2` or
    `xpress`. A `peagle` file of a head with a Markov correction has its keys and tensors under
    DSpark's names, which this library alone reads. `"vllm"` is that of amazon's P-EAGLE
    heads: EAGLE-3's with `ptd_token_id`. `"huggingface"` is a causal language model with
    `pard_token`, as AMD's PARD models. `"z-lab"` is that of the public DFlash heads,
    and of SpecForge's DSpark and Domino.
    EAGLE-3's layers of features are written for both of the conventions in use.

    speculators reads a file without embeddings into memory that nobody has written, and without a
    verifier asks the hub for "None"; so its files always have both.

    Args:
        head: the weights.
        folder: made if need be; files in it are replaced.
        layout: `None` is the usual one of the head's design, the first of `layouts_of`.
        embed_tokens: `[V, H]`, the target's embeddings, written for a head without its own where
            the layout has them (a speculators file, a language model).
        lm_head: `[V, H]`, the target's vocabulary head, written for a head without one of its own
            where engines expect one in the file (EAGLE-3, P-EAGLE, PARD).
        num_draft_tokens: what a speculators file proposes to draft per step. The proposal for a
            block is all of it: the rows see each other, and vLLM's blocks have 1 + K of them.
        verifier: Hugging Face id or folder of the target, for a speculators file.
        target_layers: decoder layers N of the target, from which EAGLE-3's usual features follow.

    Returns:
        What some of the layout's readers do not understand, one line each.

    Raises:
        ValueError: an unknown layout, a head that the layout cannot express, or a speculators file
            without a verifier or embeddings. Nothing has been written then.
    """
    config, design = head.config, getattr(head.config, "fusion", None) or head.config.alignment
    layouts = layouts_of(design)
    layout = layouts[0] if layout is None else layout
    check_choice(f"layout of {design!r} heads", layout, layouts)
    if obstacles := sorted(_obstacles(config, design, layout)):
        other = " (layout='speculators' may)" if layout == "safeailab" else ""
        raise ValueError(f"the {layout} layout cannot express {', '.join(obstacles)}{other}")
    tensors = dict(head.state_dict())
    if design not in ("input", "same-position", "next-token") and not config.has_lm_head:
        tensors["lm_head.weight"] = lm_head.to(head.dtype)
    if layout in ("speculators", "huggingface") and not config.has_embed_tokens:
        table = _plain_table(embed_tokens, config)
        is_masked_text = design in ("shifted", "unshifted")
        tensors["embed_tokens.weight"] = table.to(head.dtype) if is_masked_text else table
    if head.target_ids is not None:
        tensors = _with_vocab_map(tensors, head.target_ids, config.vocab_size)
    dtype = str(head.dtype).removeprefix("torch.")
    if layout == "speculators":
        num_draft_tokens = getattr(config, "max_draft_tokens", None) or num_draft_tokens
        keys = _speculators(config, design, dtype, num_draft_tokens, verifier)
    else:
        keys = _KEYS[layout](config, dtype)
    starts = TENSORS.get(type(getattr(config, "correction", None)), {})
    tensors = {_name_in(layout, design, name, starts): x for name, x in tensors.items()}
    write_checkpoint(folder, keys, tensors)
    return tuple(_notes(config, target_layers)) if layout == "safeailab" else ()


def layouts_of(design: str) -> tuple[Layout, ...]:
    """Layouts that exist for a design of heads, the usual one first: the fusion of EAGLE heads, the
    alignment of mask-token heads.

    Example:
        >>> layouts_of("same-position")
        ('z-lab', 'speculators')
    """
    return tuple(layout for other, layout in _EXPRESSED if other == design)


def write_checkpoint(folder: str | Path, keys: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes `config.json` and `model.safetensors` into a folder, which is made if need be. A head
    of the same tensors in it is replaced; another model in it, a target perhaps, is a `ValueError`.
    """
    folder = check_path("folder", folder, what="a folder")
    refuse_another_model(folder, tensors.keys())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"folder {folder} cannot be made: {error.strerror}") from error
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    text = json.dumps(keys | {"producer": "specdec"}, indent=2)
    (folder / "config.json").write_text(f"{text}\n", encoding="utf-8")


def refuse_another_model(folder: Path, names: Collection[str] = ()) -> None:
    """`ValueError` if a folder holds a model, other than one of tensors of these names."""
    file, found = folder / "model.safetensors", None
    if file.exists():
        try:
            with safe_open(file, framework="pt") as stored:
                found = set(stored.keys())
        except Exception:  # no safetensors file, or a damaged one
            found = {"a file that cannot be read"}
    elif any(any(folder.glob(kind)) for kind in ("*.safetensors*", "pytorch_model*")):
        found = {"a model in other files"}
    if found is not None and found != set(names):
        others = ", ".join(sorted(map(printable, found - set(names)))[:3]) or "fewer tensors"
        raise ValueError(
            f"{folder} holds another model ({others}), which would be lost; choose a new folder, "
            "or delete it first"
        )


def _name_in(layout: Layout, design: str, name: str, starts: Mapping[str, str]) -> str:
    """The name of a tensor in the file; `starts` are those of a correction, see `TENSORS`."""
    for ours, theirs in {**starts, "confidence_head.": "confidence_head.proj."}.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    name = name.replace(".self_attn.sinks", ".self_attn.attention_sink_bias")
    if layout == "safeailab" and design == "attention":
        return name.replace("layers.0.", "midlayer.")
    is_model = layout == "huggingface" and not name.startswith("lm_head.")
    return f"model.{name}" if is_model else name


def _plain_table(embeddings: Tensor | None, config: HeadConfig) -> Tensor:
    """The target's embeddings in their own type; `ValueError` if they cannot be copied."""
    shape = [config.vocab_size, config.hidden_size]
    if embeddings is None or not embeddings.is_floating_point() or list(embeddings.shape) != shape:
        raise ValueError(
            f"the head uses the target's embeddings, and such a file holds them: pass them as "
            f"embed_tokens, {shape} floats, got {shown(embeddings)}"
        )
    return embeddings


def _with_vocab_map(
    tensors: dict[str, Tensor], target_ids: Tensor, vocab_size: int
) -> dict[str, Tensor]:
    """A head's tensors with `d2t` and `t2d`, and its draft ids in ascending order: engines that
    read `t2d` take them so.
    """
    if len(target_ids) == vocab_size:
        raise ValueError("no layout can express a permuted full vocabulary")
    order = target_ids.argsort()
    d2t, t2d = write_vocab_map(target_ids[order], vocab_size)
    ours = ("markov_w2", "embed_proj.2", "readout")  # what corrections have of the draft ids
    names = tensors.keys() & {"lm_head.weight", *(f"correction.{name}.weight" for name in ours)}
    return {**tensors, **{name: tensors[name][order] for name in names}, "d2t": d2t, "t2d": t2d}


_SCALINGS = ("linear", "dynamic")
"""Rotary scalings that SafeAILab's code knows; it wants exactly `type` and `factor`, a float."""
_SCALING_KEYS = {"rope_type", "rope_theta", "factor"}


def _notes(config: FeatureHeadConfig, target_layers: int | None) -> Iterator[str]:
    """What SafeAILab's own code does not read of its layout, while vLLM and SGLang do."""
    layer, rope = config.layer, config.layer.rope
    kind, base = rope["rope_type"], rope["rope_theta"]
    if kind not in ("default", *_SCALINGS):
        yield f"SafeAILab's own code cannot load rope_scaling of type {kind!r}"
    if kind in _SCALINGS and base != 10000:
        yield f"SafeAILab's own code takes a rope base of 10000 with scaling, not {base:g}"
    if layer.head_dim * layer.num_heads != layer.hidden_size:
        yield f"SafeAILab's older code takes hidden_size / heads for head_dim, not {layer.head_dim}"
    n, layers = target_layers, list(config.feature_layers)
    if config.fusion == "attention" and n is not None and layers != [2, n // 2, n - 3]:
        yield f"SafeAILab's own code always reads boundaries {[2, n // 2, n - 3]}, not {layers}"


_TABLES = {"has_embed_tokens", "has_lm_head"}
_NORMS = {"norm_before_residual", "norm_before_fc", "fc_norm"}
_OF_LAYERS = {
    **dict.fromkeys(("attention_bias", "attention_output_bias", "has_qk_norm", "has_sinks"), False),
    "windows": (),
    "is_window_causal": True,
    "convolution": None,
}
"""Flags of layers, and their defaults."""
_LAYERS = {"attention_bias", "attention_output_bias", "has_qk_norm", "num_layers"}
_WINDOWS = {"windows", "is_window_causal"}
_BLOCK = _LAYERS | _WINDOWS | {"mask_token_id", "block_size", "correction", "convolution"}
_MODEL = _LAYERS | {"mask_token_id", "ties_embeddings", "max_positions"}
_EXPRESSED: dict[tuple[str, Layout], set[str]] = {
    ("input", "safeailab"): {"num_layers", "fc_bias", "attention_bias", "has_embed_tokens"},
    ("attention", "safeailab"): _TABLES,
    ("attention", "speculators"): _TABLES | _NORMS | _LAYERS | {"feedback_norm", "windows"},
    ("shifted", "speculators"): _TABLES
    | _NORMS
    | _LAYERS
    | {"mask_token_id", "windows", "correction"},
    ("shifted", "vllm"): _TABLES | _NORMS | {"num_layers", "mask_token_id"},
    ("unshifted", "huggingface"): _TABLES | _MODEL,
    ("same-position", "z-lab"): _BLOCK | {"has_sinks"},
    ("same-position", "speculators"): _TABLES | _BLOCK | {"confidence"},
    ("next-token", "speculators"): _TABLES | _BLOCK | {"confidence"},
    ("next-token", "z-lab"): _BLOCK | {"has_sinks", "confidence"},
}
"""Flags of a head and of its layers that a layout has keys or tensors for. All others must have
their defaults, or the values in `_INSTEAD`.
"""
_INSTEAD: dict[tuple[str, Layout], dict[str, Any]] = {
    ("input", "safeailab"): {"output_norm": False, "has_lm_head": False},
    ("same-position", "z-lab"): {"is_causal": False, "has_lm_head": False},
    ("same-position", "speculators"): {"is_causal": False},
    ("next-token", "speculators"): {"is_causal": False},
    ("next-token", "z-lab"): {"is_causal": False, "has_lm_head": False},
}


def _obstacles(config: FeatureHeadConfig, design: str, layout: Layout) -> Iterator[str]:
    """What a layout cannot express."""
    kind, values = (design, layout), vars(config) | vars(config.layer)
    usual = {entry.name: entry.default for entry in fields(config) if entry.default is not MISSING}
    usual |= _OF_LAYERS | _INSTEAD.get(kind, {})
    for name in usual.keys() - _EXPRESSED[kind]:
        if values[name] != usual[name]:
            yield f"{name}={values[name]}"
    yield from (what for is_there, what in _others(config, *kind) if is_there)


def _others(config: FeatureHeadConfig, design: str, layout: Layout) -> Pairs:
    """What is no flag by itself."""
    layer, boundaries = config.layer, [b for b in config.feature_layers if b != "final"]
    bias, output_bias = layer.attention_bias, layer.attention_output_bias
    if design == "input":
        yield bool(boundaries), "other features than the final ones"
    else:
        yield len(boundaries) < len(config.feature_layers), "final features"
        yield boundaries != sorted(boundaries), "features that are not in the order of layers"
        has_embeddings = layout in ("safeailab", "z-lab") and 0 in boundaries
        yield has_embeddings, "features of the embeddings"
    if layout in ("speculators", "z-lab"):
        yield bias != output_bias, "biases of q, k, v alone"
    if layout == "safeailab":
        yield design == "attention" and len(boundaries) != 3, "other than three features"
        more, scaling = sorted(layer.rope.keys() - _SCALING_KEYS), layer.rope["rope_type"]
        is_more = scaling in _SCALINGS and bool(more)
        yield is_more, f"{', '.join(more)} of a {scaling} rope_scaling"
    if layout == "z-lab":
        yield config.target_hidden_size != config.hidden_size, "another width than the target's"
    if layout == "huggingface":
        is_qwen2 = bias and not output_bias
        yield is_qwen2 and layer.has_qk_norm, "biases of q, k, v alone beside has_qk_norm"
        yield output_bias and not bias, "a bias of o_proj alone"
        is_other = config.max_positions != layer.max_position_embeddings
        yield is_other, "max_positions other than max_position_embeddings"
        yield config.draft_vocab_size < config.vocab_size, "fewer ids than the target has"
    yield getattr(config, "mask_token_id", ...) is None, "a mask without an id"
    other = type(getattr(config, "correction", None)) not in (type(None), MarkovConfig)
    yield design == "shifted" and other, "a correction that is no MarkovConfig"
    is_block = "block_size" in _EXPRESSED[design, layout]
    if is_block:
        yield config.block_size is None, "a head without block_size"
        # vLLM's DFlash norms queries and keys, whether or not the file has weights for that.
        yield not layer.has_qk_norm, "layers without norms of queries and keys"
        yield from _other_corrections(config, design, layout)
    sizes = set(layer.windows)
    yield len(sizes - {None}) > 1, "windows of several sizes"
    # vLLM then makes every layer causal (transformers_utils/configs/speculators/algos.py).
    is_mixed = is_block and layout == "speculators" and len(sizes) == 2 and layer.is_window_causal
    yield is_mixed, "causal windows beside layers that see the whole block"


def _other_corrections(config: MaskTokenConfig, design: str, layout: Layout) -> Pairs:
    """Corrections that a layout of block heads has no place for."""
    kind, name = type(config.correction), type(config.correction).__name__
    is_selector, has_convolution = kind is SelectorConfig, config.layer.convolution is not None
    yield is_selector != has_convolution, "a selector or convolutions without the other"
    if layout == "speculators":
        yield kind is DominoConfig, name
        has_confidence = config.confidence is not None
        yield has_confidence and kind is not MarkovConfig, "confidence without a Markov head"
    elif design == "next-token":
        is_known = kind in (MarkovConfig, DominoConfig)
        yield not is_known, "next-token rows without a Markov head or Domino's GRU"
    else:
        yield kind in (MarkovConfig, XPressConfig), f"{name} of same-position rows"


def layer_keys(layer: LayerConfig, num_layers: int, vocab_size: int) -> dict[str, Any]:
    """Keys of an HF configuration of a head's decoder layers."""
    return {
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "hidden_act": layer.hidden_act,
        "rms_norm_eps": layer.rms_norm_eps,
        "max_position_embeddings": layer.max_position_embeddings,
        "vocab_size": vocab_size,
        "tie_word_embeddings": False,
    }


def _model_keys(name: str, kind: str, config: FeatureHeadConfig, dtype: str) -> dict[str, Any]:
    """Keys of an HF configuration: architecture, layers, rope in its new and its old form."""
    layer = config.layer
    scaling = {key: value for key, value in layer.rope.items() if key != "rope_theta"}
    return {
        "architectures": [name],
        "model_type": kind,
        **layer_keys(layer, config.num_layers, config.vocab_size),
        "rope_theta": layer.rope["rope_theta"],
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        "torch_dtype": dtype,
    }


_IDS = "eagle_aux_hidden_state_layer_ids"


def _safeailab(config: FeatureHeadConfig, dtype: str) -> dict[str, Any]:
    is_input, boundaries = config.fusion == "input", list(config.feature_layers)
    name = "LlamaForCausalLM" if is_input else "LlamaForCausalLMEagle3"
    keys = _model_keys(name, "llama", config, dtype)
    scaling = keys["rope_scaling"]
    if scaling is not None and scaling["rope_type"] in _SCALINGS:
        keys["rope_scaling"] = {"type": scaling["rope_type"], "factor": float(scaling["factor"])}
    elif scaling is not None:
        scaling["type"] = scaling["rope_type"]  # the reference's older name
    if is_input:
        return {**keys, "bias": config.fc_bias, "qkv_bias": config.layer.attention_bias}
    if config.target_hidden_size != config.hidden_size:
        keys["target_hidden_size"] = config.target_hidden_size
    # vLLM reads the key at the top, as boundaries; SGLang the nested one, as outputs of layers.
    return {
        **keys,
        "draft_vocab_size": config.draft_vocab_size,
        _IDS: boundaries,
        "eagle_config": {_IDS: [b - 1 for b in boundaries], "use_aux_hidden_state": True},
    }


def _vllm(config: FeatureHeadConfig, dtype: str) -> dict[str, Any]:
    return {
        **_model_keys("LlamaForCausalLMEagle3", "llama", config, dtype),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        _IDS: list(config.feature_layers),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        **_number_of_features(config),
        "ptd_token_id": config.mask_token_id,
        "parallel_drafting": True,
    }


def _huggingface(config: FeatureHeadConfig, dtype: str) -> dict[str, Any]:
    layer, name = config.layer, "Llama"
    if layer.has_qk_norm:
        name = "Qwen3"
    elif layer.attention_bias and not layer.attention_output_bias:
        name = "Qwen2"
    return {
        **_model_keys(f"{name}ForCausalLM", name.lower(), config, dtype),
        "attention_bias": layer.attention_output_bias,
        "tie_word_embeddings": config.ties_embeddings,
        "spd_type": "pard",
        "pard_token": config.mask_token_id,
    }


_Z_LAB = {
    MarkovConfig: ("DSparkDraftModel", {"projector_type": "dspark"}),
    DominoConfig: ("DominoDraftModel", {"projector_type": "domino"}),
    SelectorConfig: ("DFlash2DraftModel", {}),
}
"""Architecture and key of heads with a correction, SpecForge's and z-lab's own."""


def _z_lab(config: MaskTokenConfig, dtype: str) -> dict[str, Any]:
    outputs = [boundary - 1 for boundary in config.feature_layers]  # of layers, from 0
    flash = {"target_layer_ids": outputs, "mask_token_id": config.mask_token_id}
    name, keys = _Z_LAB.get(type(config.correction), ("DFlashDraftModel", {}))
    if config.correction is not None:
        flash |= keys | correction_keys(config.correction, config.layer.convolution)
    if isinstance(config.correction, DominoConfig):
        flash["shift_label"] = config.alignment == "next-token"
    if config.layer.windows and not config.layer.is_window_causal:
        flash["causal"] = False
    if config.layer.has_sinks:
        flash["attention_sink_bias"] = True
    if config.alignment == "next-token":
        flash |= _confidence_keys(config)
    return {
        **_model_keys(name, "qwen3", config, dtype),
        "attention_bias": config.layer.attention_bias,
        **_window_keys(config),
        "block_size": config.block_size,
        "dflash_config": flash,
    }


def _window_keys(config: FeatureHeadConfig) -> dict[str, Any]:
    """Which layers have a sliding window, in HF's words."""
    windows = config.layer.windows or (None,) * config.num_layers
    types = ["sliding_attention" if window else "full_attention" for window in windows]
    if not any(windows):
        return {"layer_types": types}
    size = max(window or 0 for window in windows)
    return {"layer_types": types, "use_sliding_window": True, "sliding_window": size}


def _confidence_keys(config: MaskTokenConfig) -> dict[str, Any]:
    return {
        "enable_confidence_head": config.confidence is not None,
        "confidence_head_with_markov": config.confidence == "markov",
    }


_KEYS: dict[str, Callable[[FeatureHeadConfig, str], dict[str, Any]]] = {
    "safeailab": _safeailab,
    "vllm": _vllm,
    "huggingface": _huggingface,
    "z-lab": _z_lab,
}


def _number_of_features(config: FeatureHeadConfig) -> dict[str, Any]:
    """Keys that vLLM reads where it reads those of the layers: in `transformer_layer_config` of a
    speculators file, since its reader keeps hardly any other (0.32.0,
    `transformers_utils/configs/speculators/algos.py`), and without them builds a head of three
    features, a P-EAGLE head without norms of each.
    """
    return {"num_aux_hidden_states": len(config.feature_layers), "fc_norm": config.fc_norm}


_ALGORITHMS = {
    "attention": ("eagle3", "Eagle3"),
    "shifted": ("peagle", "PEagle"),
    "same-position": ("dflash", "DFlash"),
    "next-token": ("dspark", "DSpark"),  # vLLM runs every dflash file in the same position
}

_CORRECTED = {
    MarkovConfig: ("dspark", "DSpark"),
    SelectorConfig: ("dflash2", "DFlash2"),
    XPressConfig: ("xpress", "XPress"),
}
"""Their names where a head has a correction."""


def _speculators(
    config: FeatureHeadConfig,
    design: str,
    dtype: str,
    num_draft_tokens: int,
    verifier: str | None,
) -> dict[str, Any]:
    """Keys of a speculators file; its layers are stored as a difference to HF's defaults."""
    if not verifier:  # speculators would ask the hub for "None"
        raise ValueError(
            "a speculators file names its target: pass verifier=, a Hugging Face id or folder"
        )
    correction = getattr(config, "correction", None)
    kind, name = _ALGORITHMS[design]
    if design != "shifted":
        kind, name = _CORRECTED.get(type(correction), (kind, name))
    keys = {
        "architectures": [f"{name}DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.0.0",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
    }
    types = {"dtype": dtype, "tie_word_embeddings": False}
    is_eagle, is_block = kind == "eagle3", "block_size" in _EXPRESSED[design, "speculators"]
    if not is_eagle:
        keys |= {"mask_token_id": config.mask_token_id, **types}
    if is_block:
        keys |= {
            "aux_hidden_state_layer_ids": list(config.feature_layers),
            "block_size": config.block_size,
            "sample_from_anchor": design == "next-token",
            # vLLM makes every layer causal where it is false
            # (transformers_utils/configs/speculators/algos.py, update_dflash).
            "sliding_window_non_causal": not (
                config.layer.windows and config.layer.is_window_causal
            ),
        }
    else:
        keys |= {
            _IDS: list(config.feature_layers),
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
            "fc_norm": config.fc_norm,
            "norm_output": is_eagle and config.feedback_norm,
            "embed_requires_grad": not is_eagle,
        }
    if is_eagle:
        keys |= types
    layer = config.layer
    if kind == "dspark" or correction is not None:
        keys |= correction_keys(correction, layer.convolution)
    if kind == "dspark":
        keys |= _confidence_keys(config)
    filled = (Qwen3Config if layer.has_qk_norm else LlamaConfig)(
        **layer_keys(layer, config.num_layers, config.vocab_size),
        **(_window_keys(config) if layer.windows else {}),
        attention_bias=layer.attention_bias,
        rope_parameters=dict(layer.rope),
        dtype=dtype,
    )
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        **keys,
        "transformer_layer_config": filled.to_diff_dict()
        | ({} if is_block else _number_of_features(config)),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    }
