"""What writing a head has in common in every family and layout."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from specdec.arguments import check_folder, make_folder
from specdec.checkpoints.vocab_map import write_vocab_map
from specdec.heads.config import LayerConfig
from specdec.heads.features import FeatureHeadConfig
from specdec.show.text import printable


def write_checkpoint(folder: str | Path, keys: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes `config.json` and `model.safetensors`.

    Args:
        folder: made if need be; a head of the same tensors in it is replaced.
        keys: of config.json.
        tensors: by their names in the file.

    Raises:
        TypeError: no path.
        ValueError: no folder, or one that holds another model, a target perhaps; nothing has been
            written.
    """
    folder = check_folder("folder", folder)
    _refuse_another_model(folder, tensors.keys())
    make_folder("folder", folder)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    (folder / "model.safetensors").write_bytes(save(tensors, metadata={"format": "pt"}))
    text = json.dumps(keys | {"producer": "specdec"}, indent=2)
    (folder / "config.json").write_text(f"{text}\n", encoding="utf-8")


def _refuse_another_model(folder: Path, names: Collection[str]) -> None:
    file, found = folder / "model.safetensors", None
    if file.exists():
        try:
            with safe_open(file, framework="pt") as stored:
                found = set(stored.keys())
        except Exception:  # no safetensors file, or a damaged one
            found = {"a file that cannot be read"}
    elif (folder / "model.safetensors.index.json").exists():
        found = {"a model in several files"}
    if found is not None and found != set(names):
        shown = ", ".join(sorted(map(printable, found - set(names)))[:3]) or "fewer tensors"
        raise ValueError(
            f"{folder} holds another model ({shown}), which would be lost; choose a new folder, or "
            "delete it first"
        )


def with_vocab_map(
    tensors: dict[str, Tensor], target_ids: Tensor, vocab_size: int
) -> dict[str, Tensor]:
    """A head's tensors with `d2t` and `t2d`, and its draft ids in ascending order: engines that
    read `t2d` take them so.

    Args:
        tensors: with `lm_head.weight`.
        target_ids: `[Vd]` ids of the target.
        vocab_size: V.

    Raises:
        ValueError: a permuted full vocabulary, which no layout can express.
    """
    if len(target_ids) == vocab_size:
        raise ValueError("no layout can express a permuted full vocabulary")
    order = target_ids.argsort()
    d2t, t2d = write_vocab_map(target_ids[order], vocab_size)
    return {**tensors, "lm_head.weight": tensors["lm_head.weight"][order], "d2t": d2t, "t2d": t2d}


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


def features_of_layers(config: FeatureHeadConfig) -> dict[str, Any]:
    """Keys that vLLM reads where it reads those of the layers: in `transformer_layer_config` of a
    speculators file, since its reader keeps hardly any other (0.32.0,
    `transformers_utils/configs/speculators/algos.py`), and without them builds a head of three
    features, a P-EAGLE head without norms of each.
    """
    return {"num_aux_hidden_states": len(config.feature_layers), "fc_norm": config.fc_norm}


def speculators_keys(
    algorithm: str,
    layer: LayerConfig,
    num_layers: int,
    vocab_size: int,
    *,
    layers: dict[str, Any],
    dtype: str,
    num_draft_tokens: int,
    verifier: str | None,
) -> dict[str, Any]:
    """Nested keys of a speculators file: its layers, as a difference to HF's defaults, with more of
    them in `layers`, and what it proposes to draft for which target.

    Raises:
        ValueError: no verifier; speculators would ask the hub for "None".
    """
    if not verifier:
        raise ValueError(
            "a speculators file names its target: pass verifier=, a Hugging Face id or folder"
        )
    layer_class = Qwen3Config if layer.has_qk_norm else LlamaConfig
    filled = layer_class(
        **layer_keys(layer, num_layers, vocab_size),
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
        "transformer_layer_config": filled.to_diff_dict() | layers,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    }
