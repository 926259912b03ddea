"""Writes EAGLE heads in the layouts that other engines read.

A layout is written exactly: what it has no key or no tensor for is refused, since a file that
another engine misreads is worse than none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from safetensors.torch import save
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from specdec.drafters.checkpoints.vocab_maps import write_vocab_map
from specdec.drafters.eagle_config import EagleConfig
from specdec.drafters.eagle_head import EagleHead

Layout = Literal["safeailab", "speculators"]


def save_head(
    head: EagleHead,
    folder: str | Path,
    layout: Layout = "safeailab",
    *,
    lm_head: Tensor | None = None,
    num_draft_tokens: int = 4,
    verifier: str | None = None,
) -> None:
    """Writes `config.json` and `model.safetensors`.

    `"safeailab"` is the layout of yuhuili's heads (EAGLE-1: `layers.0.*`; EAGLE-3: `midlayer.*`),
    which SafeAILab's own code, vLLM and SGLang read (vLLM without a bias in EAGLE-1's `fc`).
    `"speculators"` is that of RedHatAI's, read by vLLM; it has keys for the norms that distinguish
    the newer dialects, and for several layers.
    Layers of features are written for both of the conventions in use.

    Args:
        head: the weights.
        folder: made if need be; files in it are replaced.
        layout: see above.
        lm_head: `[V, H]`, the target's vocabulary head, written for an EAGLE-3 head without one of
            its own, since engines expect one in the file.
        num_draft_tokens: what a speculators file proposes to draft per step.
        verifier: Hugging Face id of the target, for a speculators file.

    Raises:
        ValueError: an unknown layout, or a head that the layout cannot express.
    """
    if layout not in ("safeailab", "speculators"):
        raise ValueError(f"layout must be 'safeailab' or 'speculators', got {layout!r}")
    config = head.config
    obstacles = [what for is_there, what in _obstacles(config, layout) if is_there]
    is_identity = head.target_ids is None
    if not is_identity and config.draft_vocab_size == config.vocab_size:
        obstacles.append("a permuted full vocabulary")
    if obstacles:
        other = " (layout='speculators' may)" if layout == "safeailab" else ""
        raise ValueError(f"the {layout} layout cannot express {', '.join(obstacles)}{other}")
    tensors = dict(head.state_dict())
    if config.fusion == "attention" and not config.has_lm_head:
        if lm_head is None:
            raise ValueError("the head uses the target's vocabulary head; pass it as lm_head")
        tensors["lm_head.weight"] = lm_head.to(head.dtype)
    if not is_identity:
        # Engines that read t2d take draft ids for ascending ids of the target.
        order = head.target_ids.argsort()
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order]
        tensors["d2t"], tensors["t2d"] = write_vocab_map(head.target_ids[order], config.vocab_size)
    dtype = str(head.dtype).removeprefix("torch.")
    if layout == "speculators":
        content = _speculators(config, dtype, num_draft_tokens, verifier)
    else:
        content = _safeailab(config, dtype)
        if config.fusion == "attention":
            tensors = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    data = save(tensors, metadata={"format": "pt"})
    (folder / "model.safetensors").write_bytes(data)
    text = json.dumps(content, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _obstacles(config: EagleConfig, layout: Layout):
    """Pairs (is it there, what it is) of things that a layout has no words for."""
    is_attention = config.fusion == "attention"
    boundaries = [layer for layer in config.feature_layers if layer != "final"]
    yield config.logit_scale != 1, "logit_scale"
    if is_attention:
        yield not config.has_fc or len(boundaries) < len(config.feature_layers), "final features"
        yield list(boundaries) != sorted(boundaries), "features that are not in the order of layers"
        yield config.fc_bias, "fc_bias"
        yield not config.output_norm, "output_norm=False"
    if layout == "speculators":
        yield not is_attention, "an EAGLE-1 head"
        yield config.attention_bias != config.attention_output_bias, "biases of q, k, v alone"
        return
    yield config.has_qk_norm, "has_qk_norm"
    if is_attention:
        yield config.num_layers > 1, "several layers"
        yield config.attention_bias or config.attention_output_bias, "attention biases"
        for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "feedback_norm"):
            yield getattr(config, name), name
        yield len(boundaries) != 3, "other than three features"
        yield 0 in boundaries, "features of the embeddings"
    else:
        yield config.feature_layers != ("final",), "other features than the final ones"
        yield config.attention_output_bias, "a bias of the output projection"
        yield config.has_lm_head, "an EAGLE-1 head with its own vocabulary head"
        yield config.output_norm or config.feedback_norm, "norms behind the layers of EAGLE-1"


def _layer_keys(config: EagleConfig) -> dict:
    """Keys of an HF configuration of the head's layers."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
    }


def _safeailab(config: EagleConfig, dtype: str) -> dict:
    scaling = {key: value for key, value in config.rope.items() if key != "rope_theta"}
    if scaling["rope_type"] == "default":
        scaling = None
    else:
        scaling["type"] = scaling["rope_type"]  # the reference's older name
    content = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_layer_keys(config),
        "rope_theta": config.rope["rope_theta"],
        "rope_scaling": scaling,
        "torch_dtype": dtype,
    }
    if config.fusion == "input":
        return {**content, "bias": config.fc_bias, "qkv_bias": config.attention_bias}
    if config.target_hidden_size != config.hidden_size:
        content["target_hidden_size"] = config.target_hidden_size
    # vLLM reads the key at the top, as boundaries; SGLang the nested one, as outputs of layers.
    boundaries, key = list(config.feature_layers), "eagle_aux_hidden_state_layer_ids"
    return {
        **content,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        key: boundaries,
        "eagle_config": {key: [b - 1 for b in boundaries], "use_aux_hidden_state": True},
    }


def _speculators(
    config: EagleConfig, dtype: str, num_draft_tokens: int, verifier: str | None
) -> dict:
    layer_class = Qwen3Config if config.has_qk_norm else LlamaConfig
    layers = layer_class(
        **_layer_keys(config),
        attention_bias=config.attention_bias,
        rope_parameters=dict(config.rope),
        dtype=dtype,
    )
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_draft_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
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
        "transformer_layer_config": layers.to_diff_dict(),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    }
