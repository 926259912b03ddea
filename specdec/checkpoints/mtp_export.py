"""Writes multi-token prediction heads, in a layout of the library's own: tensors under the names
that the head gives them, and a section `specdec_mtp` in config.json.

Engines read such modules from the target's own checkpoint only, each under the names of one target,
so there is no layout that all of them read.
"""

from __future__ import annotations

from pathlib import Path

from specdec.checkpoints.export import layer_keys, write_checkpoint
from specdec.checkpoints.mtp import LAYER_FLAGS, SECTION
from specdec.heads.config import LayerConfig
from specdec.heads.mtp import MTPHead

_FLAGS = ("semantics", "target_state", "hidden_first", "output_norm", "feedback_norm")
_FLAGS += ("zero_first_embedding", "centred_norms", "projection_bias")
_FLAGS += ("has_embed_tokens", "has_lm_head", "lm_head_per_depth")


def save_head(head: MTPHead, folder: str | Path) -> None:
    """Writes `config.json` and `model.safetensors`, which load back bit for bit.

    Args:
        head: the weights.
        folder: made if need be; files in it are replaced.
    """
    config, layer = head.config, head.config.layer
    section = {"num_depths": config.num_layers} | {name: getattr(config, name) for name in _FLAGS}
    if isinstance(layer, LayerConfig):
        keys = layer_keys(layer, config.num_layers, config.vocab_size)
        keys |= {"rope_parameters": dict(layer.rope)}
        section |= {name: getattr(layer, name) for name in LAYER_FLAGS}
    else:
        keys = layer.config.to_dict()
        section["hf_layer"] = layer.like
    keys |= {"torch_dtype": str(head.dtype).removeprefix("torch."), SECTION: section}
    write_checkpoint(folder, keys, dict(head.state_dict()))
