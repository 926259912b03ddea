"""HF's decoding hook: what `model.generate` hands to a decoding function, and what it withholds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from specdec.hf.forward import CACHES
from specdec.targets import Target


@dataclass
class HookOutput(GenerateDecoderOnlyOutput):
    """HF's output record, and what `output_logprobs=True` asked for.

    Args:
        logprobs, raw_logprobs: see `GenerationResult`.
    """

    logprobs: Tensor | None = None
    raw_logprobs: Tensor | None = None


def check_hook(
    target: Target,
    model: PreTrainedModel,
    call: Mapping[str, Any],
    synced_gpus: bool,
    model_kwargs: dict,
) -> None:
    """Raises `ValueError` for what HF may hand to a decoding method and specdec would silently
    ignore: the model that `generate` was called on, its inputs, and what HF withheld, which is in
    `hf.generation.call_of_generate()`.
    """
    if model is not target.model:
        raise ValueError(
            "custom_generate was called on another model than the generator's target; call "
            "generator.target.model.generate(..., custom_generate=generator)"
        )
    if call.get("assistant_model") is not None:
        raise ValueError(
            "assistant_model has no effect beside custom_generate; leave it out and build the "
            "generator with ModelDrafter(assistant_model)"
        )
    if synced_gpus or call.get("synced_gpus"):
        raise ValueError("synced_gpus=True is not supported; generate on one process at a time")
    caches = [(name, model_kwargs[name]) for name in CACHES if model_kwargs.get(name) is not None]
    for name, cache in caches:
        if cache.get_seq_length() > 0:
            raise ValueError(f"{name} holds tokens already; pass the whole prompt without it")
    mask = model_kwargs.get("attention_mask")
    positions = model_kwargs.get("position_ids")
    if positions is not None and positions.dim() == 3:
        is_text = not bool((positions != positions[:1]).any())
        positions = positions[0] if is_text else None  # others are read with the prompt
    if positions is not None and not _follow_from_mask(positions, mask):
        raise ValueError(
            "position_ids other than 0, 1, 2, ... over the tokens of each prompt are not "
            "supported; leave position_ids out"
        )


def _follow_from_mask(position_ids: Tensor, attention_mask: Tensor | None) -> bool:
    """Whether positions are 0, 1, ... over the real tokens of each row."""
    mask = torch.ones_like(position_ids) if attention_mask is None else attention_mask
    is_real = mask.to(position_ids.device) != 0
    counted = is_real.long().cumsum(dim=-1) - 1
    is_alike = position_ids.shape == mask.shape
    return is_alike and not bool(((position_ids != counted) & is_real).any())
