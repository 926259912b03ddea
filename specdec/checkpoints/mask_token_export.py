"""Writes mask-token heads in the layouts that other engines read.

A layout is written exactly: what it has no key or no tensor for is refused, since a file that
another engine misreads is worse than none.
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
from specdec.heads.mask_token import MaskTokenConfig, MaskTokenHead

Layout = Literal["speculators", "vllm", "huggingface", "z-lab"]

LAYOUTS: dict[str, tuple[Layout, ...]] = {
    "shifted": ("speculators", "vllm"),
    "unshifted": ("huggingface",),
    "same-position": ("z-lab", "speculators"),
    "next-token": ("speculators",),
}
"""Layouts that can express each alignment, the default first."""


def save_head(
    head: MaskTokenHead,
    folder: str | Path,
    layout: Layout | None = None,
    *,
    embed_tokens: Tensor,
    lm_head: Tensor,
    num_draft_tokens: int = 4,
    verifier: str | None = None,
) -> None:
    """Writes `config.json` and `model.safetensors`.

    `"speculators"` is RedHatAI's layout, read by vLLM: `peagle`, `dflash`, or for rows that predict
    the next token `dspark`, without a Markov head. `"vllm"` is that of amazon's P-EAGLE heads:
    EAGLE-3's with `ptd_token_id`. `"huggingface"` is a causal language model with `pard_token`, as
    AMD's PARD models. `"z-lab"` is that of the public DFlash heads.

    Args:
        head: the weights.
        folder: made if need be; files in it are replaced.
        layout: `None` is the usual one of the head's alignment, the first in `LAYOUTS`.
        embed_tokens: `[V, H]`, the target's embeddings, written for a head without its own where
            the layout has them (a speculators file, a language model).
        lm_head: `[V, H]`, the target's vocabulary head, alike.
        num_draft_tokens: what a speculators file proposes to draft per step. The proposal for a
            block is all of it: the rows see each other, and vLLM's blocks have 1 + K of them.
        verifier: Hugging Face id or folder of the target, for a speculators file.

    Raises:
        ValueError: an unknown layout, a head that the layout cannot express, or a speculators file
            without a verifier.
    """
    config = head.config
    usual, *others = LAYOUTS[config.alignment]
    layout = layout or usual
    if layout not in (usual, *others):
        raise ValueError(
            f"layout of a head with alignment {config.alignment!r} must be one of "
            f"{', '.join((usual, *others))}, got {layout!r}"
        )
    obstacles = [what for is_there, what in _obstacles(config, layout) if is_there]
    if obstacles:
        raise ValueError(f"the {layout} layout cannot express {', '.join(obstacles)}")
    tensors = dict(head.state_dict())
    if config.context != "keys":
        shared = {"lm_head.weight": lm_head, "embed_tokens.weight": embed_tokens}
        if config.ties_embeddings:
            del shared["lm_head.weight"]
        if layout == "vllm":
            del shared["embed_tokens.weight"]
        tensors = {name: t.to(head.dtype) for name, t in shared.items()} | tensors
    elif layout == "speculators":  # which would read missing embeddings into unwritten memory
        tensors = {"embed_tokens.weight": embed_tokens} | tensors
    if head.target_ids is not None:
        tensors = with_vocab_map(tensors, head.target_ids, config.vocab_size)
    dtype = str(head.dtype).removeprefix("torch.")
    if layout == "speculators":
        num_draft_tokens = config.max_draft_tokens or num_draft_tokens
        proposal = {"num_draft_tokens": num_draft_tokens, "verifier": verifier}
        keys = _speculators(config, dtype=dtype, **proposal)
    else:
        keys = {"vllm": _vllm, "huggingface": _huggingface, "z-lab": _z_lab}[layout](config, dtype)
    if layout == "huggingface":
        tensors = {_in_model(name): tensor for name, tensor in tensors.items()}
    write_checkpoint(folder, keys, tensors)


def _in_model(name: str) -> str:
    return name if name.startswith("lm_head.") else f"model.{name}"


def _obstacles(config: MaskTokenConfig, layout: Layout) -> Iterator[tuple[bool, str]]:
    """Pairs (is it there, its name) of what a layout cannot express."""
    layer = config.layer
    boundaries = [layer for layer in config.feature_layers if layer != "final"]
    yield config.logit_scale != 1, "logit_scale"
    yield config.fc_bias, "fc_bias"
    yield not config.output_norm, "output_norm=False"
    yield len(boundaries) < len(config.feature_layers), "final features"
    yield list(boundaries) != sorted(boundaries), "features that are not in the order of layers"
    is_keys = config.context == "keys"
    yield is_keys and config.is_causal, "rows of a block that do not see each other (is_causal)"
    yield is_keys and config.block_size is None, "a head without block_size"
    yield config.context != "keys" and not config.is_causal, "is_causal=False"
    yield config.context != "none" and config.max_positions is not None, "max_positions"
    yield config.context != "none" and config.ties_embeddings, "ties_embeddings"
    if layout == "vllm":
        yield layer.has_qk_norm, "has_qk_norm"
        yield layer.attention_bias or layer.attention_output_bias, "attention biases"
        yield config.mask_token_id is None, "a mask without an id"
        return
    if layout == "huggingface":
        is_other = config.max_positions != layer.max_position_embeddings
        yield is_other, "max_positions other than max_position_embeddings"
        yield config.draft_vocab_size < config.vocab_size, "fewer ids than the target has"
        yield config.mask_token_id is None, "a mask without an id"
        is_qwen2 = layer.attention_bias and not layer.attention_output_bias
        yield is_qwen2 and layer.has_qk_norm, "biases of q, k, v alone beside has_qk_norm"
        yield layer.attention_output_bias and not layer.attention_bias, "a bias of o_proj alone"
        return
    yield layer.attention_bias != layer.attention_output_bias, "biases of q, k, v alone"
    yield config.mask_token_id is None, "a mask without an id"
    # vLLM's DFlash norms queries and keys, whether or not the file has weights for that.
    yield is_keys and not layer.has_qk_norm, "layers without norms of queries and keys"
    if layout == "z-lab":
        yield config.has_embed_tokens or config.has_lm_head, "tables of the head's own"
        yield config.target_hidden_size != config.hidden_size, "another width than the target's"
        yield 0 in boundaries, "features of the embeddings"


def _speculators(config: MaskTokenConfig, *, dtype: str, **proposal: Any) -> dict[str, Any]:
    sizes = config.layer, config.num_layers, config.vocab_size
    kind, name = {
        "shifted": ("peagle", "PEagle"),
        "same-position": ("dflash", "DFlash"),
        "next-token": ("dspark", "DSpark"),  # vLLM runs every dflash file in the same position
    }[config.alignment]
    keys = {
        "architectures": [f"{name}DraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.0.0",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "mask_token_id": config.mask_token_id,
        "dtype": dtype,
        "tie_word_embeddings": False,
    }
    layers = {}
    if config.context == "input":
        layers = features_of_layers(config)
        keys |= {
            "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
            "norm_before_residual": config.norm_before_residual,
            "norm_before_fc": config.norm_before_fc,
            "fc_norm": config.fc_norm,
            "norm_output": False,
            "embed_requires_grad": True,
        }
    else:
        keys |= {
            "aux_hidden_state_layer_ids": list(config.feature_layers),
            "block_size": config.block_size,
            "sample_from_anchor": config.alignment == "next-token",
            # Without a sliding layer. vLLM makes every layer causal where it is false
            # (transformers_utils/configs/speculators/algos.py, update_dflash).
            "sliding_window_non_causal": True,
        }
    if kind == "dspark":
        keys |= {"markov_rank": 0, "enable_confidence_head": False}
    return keys | speculators_keys(kind, *sizes, dtype=dtype, layers=layers, **proposal)


def _vllm(config: MaskTokenConfig, dtype: str) -> dict[str, Any]:
    boundaries = list(config.feature_layers)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **_model_keys(config, dtype),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": boundaries,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        **features_of_layers(config),
        "ptd_token_id": config.mask_token_id,
        "parallel_drafting": True,
    }


def _huggingface(config: MaskTokenConfig, dtype: str) -> dict[str, Any]:
    layer = config.layer
    kind, name = "llama", "Llama"
    if layer.has_qk_norm:
        kind, name = "qwen3", "Qwen3"
    elif layer.attention_bias and not layer.attention_output_bias:
        kind, name = "qwen2", "Qwen2"
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": kind,
        **_model_keys(config, dtype),
        "attention_bias": layer.attention_output_bias,
        "tie_word_embeddings": config.ties_embeddings,
        "spd_type": "pard",
        "pard_token": config.mask_token_id,
    }


def _z_lab(config: MaskTokenConfig, dtype: str) -> dict[str, Any]:
    # z-lab's ids are outputs of layers, counted from 0.
    masks = {"target_layer_ids": [boundary - 1 for boundary in config.feature_layers]}
    if config.mask_token_id is not None:
        masks["mask_token_id"] = config.mask_token_id
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **_model_keys(config, dtype),
        "attention_bias": config.layer.attention_bias,
        "layer_types": ["full_attention"] * config.num_layers,
        "block_size": config.block_size,
        "dflash_config": masks,
    }


def _model_keys(config: MaskTokenConfig, dtype: str) -> dict[str, Any]:
    """Keys of an HF configuration, rope in its new and its old form."""
    layer = config.layer
    scaling = {key: value for key, value in layer.rope.items() if key != "rope_theta"}
    return {
        **layer_keys(layer, config.num_layers, config.vocab_size),
        "rope_theta": layer.rope["rope_theta"],
        "rope_scaling": None if scaling["rope_type"] == "default" else scaling,
        "torch_dtype": dtype,
    }
