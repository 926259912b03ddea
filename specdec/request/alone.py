"""Logits processors of a row as it would stand alone."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel

from specdec.hf.generation import processors_of
from specdec.request.warpers import split_warpers


def processors_alone(
    model: PreTrainedModel,
    config: GenerationConfig,
    own: LogitsProcessorList,
    width: int,
    ids: Tensor,
) -> LogitsProcessorList:
    """What HF makes of a configuration for a prompt `[1, t]` of a batch of this width: its row gets
    as many new tokens, and all that is counted from the prompt is counted from its own.
    """
    config, missing = copy.copy(config), width - ids.shape[1]
    config.max_length -= missing
    if config.min_new_tokens is not None:  # HF has made a min_length of it
        config.min_length -= missing
    processors = processors_of(
        model,
        config,
        input_ids_seq_length=ids.shape[1],
        encoder_input_ids=ids,
        logits_processor=own,
        device=ids.device,
        model_kwargs={"attention_mask": torch.ones_like(ids) if ids.numel() else None},
    )
    return split_warpers(processors, config)[0]
