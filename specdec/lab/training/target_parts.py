"""Targets of which each process has a part while a head is trained: HF's tensor parallelism, or
FSDP2 by HF's plan for the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES

from specdec.hf.layers import decoder_layers
from specdec.hf.prompts import auto_class
from specdec.loading import find_pretrained, load_causal_lm, load_pretrained, place_of


def load_spread_target(name: str, *, dtype: str | torch.dtype = "auto") -> tuple[Any, Any]:
    """As `load_target`, of the part of a causal LM that this process computes: its layers are
    spread over all processes of `torchrun` by HF's tensor parallelism. Embeddings and vocabulary
    head are whole in each, as heads use them for rows of their own.

    Args:
        name, dtype: as for `load_target`.

    Raises:
        ValueError: there is one process only, or the model cannot be spread over so many.
    """

    def plan(config: Any) -> DistributedConfig:
        return DistributedConfig(tp_size=_num_processes(), tp_plan=spread_plan(config))

    return _load_in_parts(name, dtype, plan)


def load_sharded_target(name: str, *, dtype: str | torch.dtype = "auto") -> tuple[Any, Any]:
    """As `load_spread_target`, but for FSDP2, by HF's plan for the model: each process keeps a part
    of every layer's weights, reads rows of its own, and collects the whole weights of a layer just
    before it computes that layer. All processes must call the model equally often.

    Args:
        name, dtype: as for `load_target`.

    Raises:
        ValueError: there is one process only, or HF has no such plan for the model.
    """
    found = _load_in_parts(name, dtype, lambda _: DistributedConfig(fsdp_size=_num_processes()))
    model, tokenizer = found
    keep_tables_whole(model.requires_grad_(False))
    return model, tokenizer


def keep_tables_whole(model: PreTrainedModel) -> None:
    """Gathers what lies outside of the decoder layers of a model under FSDP2, once and for all:
    embeddings, vocabulary head and norms.
    """
    layers = {id(part) for layer in decoder_layers(model)[1] for part in layer.modules()}
    for part in model.modules():
        if isinstance(part, FSDPModule) and id(part) not in layers:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()


def _num_processes() -> int:
    """How many were started together; raises ValueError for a single process."""
    count = int(os.environ.get("WORLD_SIZE", 1))
    if count == 1:
        raise ValueError("a target is spread over several processes; start them with torchrun")
    return count


def _load_in_parts(name: str, dtype: Any, plan: Callable[[Any], Any]) -> tuple[Any, Any]:
    """A model's part of this process, by HF's plan for its configuration, and its tokenizer."""
    _num_processes()  # before anything is read
    name, dtype = place_of(name, dtype)
    is_local = find_pretrained(name)
    tokenizer = load_pretrained("AutoTokenizer", name, local_files_only=is_local)
    config = load_pretrained("AutoConfig", name, local_files_only=is_local)
    options = {"device": None, "is_local": is_local, "distributed_config": plan(config)}
    return load_causal_lm(name, dtype=dtype, **options), tokenizer


def spread_plan(config: Any) -> dict[str, str]:
    """HF's plan of tensor parallelism for the layers of a causal LM, which leaves embeddings and
    vocabulary head whole.

    Args:
        config: of the model.

    Returns:
        The style of each module, by its path.
    """
    with torch.device("meta"):
        empty = getattr(transformers, auto_class(config)).from_config(config)
    tables = {id(part) for part in (empty.get_input_embeddings(), empty.get_output_embeddings())}
    paths = [path for path, part in empty.named_modules() if id(part) in tables]
    if "replicate" in ALL_PARALLEL_STYLES:  # the rest comes from the model's own plan
        return dict.fromkeys(paths, "replicate")
    # transformers 5.17 has no such style, and takes a plan in place of the model's own.
    return {path: style for path, style in empty.tp_plan.items() if path not in paths}
