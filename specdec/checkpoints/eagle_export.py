"""Writes EAGLE heads in the layouts that other engines read.

A layout is written exactly: what it has no key or no tensor for is refused, since a file that
another engine misreads is worse than none. What only some of its readers misread is noted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from specdec.checkpoints.export import (
    features_of_layers,
    layer_keys,
    speculators_keys,
    with_vocab_map,
    write_checkpoint,
)
from specdec.heads.eagle import EagleConfig, EagleHead

Layout = Literal["safeailab", "speculators"]


def save_head(
    head: EagleHead,
    folder: str | Path,
    layout: Layout = "safeailab",
    *,
    lm_head: Tensor | None = None,
    embeddings: Tensor | None = None,
    num_draft_tokens: int = 4,
    verifier: str | None = None,
    target_layers: int | None = None,
) -> tuple[str, ...]:
    """Writes `config.json` and `model.safetensors`.

    `"safeailab"` is the layout of yuhuili's heads (EAGLE-1: `layers.0.*`; EAGLE-3: `midlayer.*`),
    which SafeAILab's own code, vLLM and SGLang read (vLLM without a bias in EAGLE-1's `fc`).
    `"speculators"` is that of RedHatAI's, read by vLLM; it has keys for the norms that distinguish
    the newer dialects, and for several layers.
    Layers of features are written for both of the conventions in use.

    speculators reads a file without embeddings into memory that nobody has written, and without a
    verifier asks the hub for "None"; so its files always have both.

    Args:
        head: the weights.
        folder: made if need be; files in it are replaced.
        layout: see above.
        lm_head: `[V, H]`, the target's vocabulary head, written for an EAGLE-3 head without one of
            its own, since engines expect one in the file.
        embeddings: `[V, H]`, the target's embeddings, written to a speculators file for a head
            without its own.
        num_draft_tokens: what a speculators file proposes to draft per step.
        verifier: Hugging Face id or folder of the target, for a speculators file.
        target_layers: decoder layers N of the target, from which the usual features follow.

    Returns:
        What some of the layout's readers do not understand, one line each.

    Raises:
        ValueError: an unknown layout, a head that the layout cannot express, or a speculators file
            without a verifier or embeddings. Nothing has been written then.
    """
    if layout not in ("safeailab", "speculators"):
        raise ValueError(f"layout must be 'safeailab' or 'speculators', got {layout!r}")
    config = head.config
    obstacles = [what for is_there, what in _obstacles(config, layout) if is_there]
    if obstacles:
        other = " (layout='speculators' may)" if layout == "safeailab" else ""
        raise ValueError(f"the {layout} layout cannot express {', '.join(obstacles)}{other}")
    tensors = dict(head.state_dict())
    if config.fusion == "attention" and not config.has_lm_head:
        if lm_head is None:
            raise ValueError("the head uses the target's vocabulary head; pass it as lm_head")
        tensors["lm_head.weight"] = lm_head.to(head.dtype)
    if head.target_ids is not None:
        tensors = with_vocab_map(tensors, head.target_ids, config.vocab_size)
    dtype = str(head.dtype).removeprefix("torch.")
    if layout == "speculators":
        if not config.has_embed_tokens:
            tensors["embed_tokens.weight"] = _plain_table(embeddings, config)
        proposal = {"num_draft_tokens": num_draft_tokens, "verifier": verifier}
        keys = _speculators(config, dtype=dtype, **proposal)
    else:
        keys = _safeailab(config, dtype)
        if config.fusion == "attention":
            tensors = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    write_checkpoint(folder, keys, tensors)
    return tuple(_notes(config, target_layers)) if layout == "safeailab" else ()


def _plain_table(embeddings: Tensor | None, config: EagleConfig) -> Tensor:
    """The target's embeddings in their own type; `ValueError` if they cannot be copied."""
    shape = [config.vocab_size, config.hidden_size]
    if embeddings is None or not embeddings.is_floating_point() or list(embeddings.shape) != shape:
        found = None if embeddings is None else (list(embeddings.shape), embeddings.dtype)
        raise ValueError(
            f"the head uses the target's embeddings, and a speculators file holds them: pass them "
            f"as embeddings, {shape} floats, got {found}"
        )
    return embeddings


def _notes(config: EagleConfig, target_layers: int | None) -> Iterator[str]:
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


_SCALINGS = ("linear", "dynamic")
"""Rotary scalings that SafeAILab's code knows; it wants exactly `type` and `factor`, a float."""


def _obstacles(config: EagleConfig, layout: Layout) -> Iterator[tuple[bool, str]]:
    """Pairs (is it there, its name) of what a layout cannot express."""
    is_attention, layer = config.fusion == "attention", config.layer
    boundaries = [layer for layer in config.feature_layers if layer != "final"]
    yield config.logit_scale != 1, "logit_scale"
    if is_attention:
        yield not config.has_fc or len(boundaries) < len(config.feature_layers), "final features"
        yield list(boundaries) != sorted(boundaries), "features that are not in the order of layers"
        yield config.fc_bias, "fc_bias"
        yield not config.output_norm, "output_norm=False"
    if layout == "speculators":
        yield not is_attention, "an EAGLE-1 head"
        yield layer.attention_bias != layer.attention_output_bias, "biases of q, k, v alone"
        return
    yield layer.has_qk_norm, "has_qk_norm"
    more = sorted(layer.rope.keys() - {"rope_type", "rope_theta", "factor"})
    is_scaled = layer.rope["rope_type"] in _SCALINGS
    yield is_scaled and bool(more), f"{', '.join(more)} of a {layer.rope['rope_type']} rope_scaling"
    if is_attention:
        yield config.num_layers > 1, "several layers"
        yield layer.attention_bias or layer.attention_output_bias, "attention biases"
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "feedback_norm"):
            yield getattr(config, name), name
        yield len(boundaries) != 3, "other than three features"
        yield 0 in boundaries, "features of the embeddings"
    else:
        yield config.feature_layers != ("final",), "other features than the final ones"
        yield layer.attention_output_bias, "a bias of the output projection"
        yield config.has_lm_head, "an EAGLE-1 head with its own vocabulary head"
        yield config.output_norm or config.feedback_norm, "norms after the layers of EAGLE-1"


def _safeailab(config: EagleConfig, dtype: str) -> dict[str, Any]:
    layer = config.layer
    scaling = {key: value for key, value in layer.rope.items() if key != "rope_theta"}
    if scaling["rope_type"] == "default":
        scaling = None
    elif scaling["rope_type"] in _SCALINGS:
        scaling = {"type": scaling["rope_type"], "factor": float(scaling["factor"])}
    else:
        scaling["type"] = scaling["rope_type"]  # the reference's older name
    keys = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **layer_keys(layer, config.num_layers, config.vocab_size),
        "rope_theta": layer.rope["rope_theta"],
        "rope_scaling": scaling,
        "torch_dtype": dtype,
    }
    if config.fusion == "input":
        return {**keys, "bias": config.fc_bias, "qkv_bias": layer.attention_bias}
    if config.target_hidden_size != config.hidden_size:
        keys["target_hidden_size"] = config.target_hidden_size
    # vLLM reads the key at the top, as boundaries; SGLang the nested one, as outputs of layers.
    boundaries, key = list(config.feature_layers), "eagle_aux_hidden_state_layer_ids"
    return {
        **keys,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        key: boundaries,
        "eagle_config": {key: [b - 1 for b in boundaries], "use_aux_hidden_state": True},
    }


def _speculators(config: EagleConfig, *, dtype: str, **proposal: Any) -> dict[str, Any]:
    sizes = config.layer, config.num_layers, config.vocab_size
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.0.0",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.feedback_norm,
        "embed_requires_grad": False,
        "dtype": dtype,
        "tie_word_embeddings": False,
        **speculators_keys(
            "eagle3", *sizes, layers=features_of_layers(config), dtype=dtype, **proposal
        ),
    }
