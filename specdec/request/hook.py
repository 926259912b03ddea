"""HF's decoding hook: what `model.generate` hands to a decoding function, and what it withholds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput

from specdec.arguments import check_choice
from specdec.hf.forward import CACHES
from specdec.request.call import Request, request_of
from specdec.request.given import through_hook
from specdec.request.hints import warn_of_seed
from specdec.request.options import check_config
from specdec.request.stop_strings import with_stop_strings
from specdec.targets import Target


@dataclass
class HookOutput(GenerateDecoderOnlyOutput):
    """HF's output record, and what `output_logprobs=True` asked for.

    Args:
        logprobs, raw_logprobs: see `GenerationResult`.
    """

    logprobs: Tensor | None = None
    raw_logprobs: Tensor | None = None


def read_hook(
    target: Target,
    model: PreTrainedModel,
    call: Mapping[str, Any],
    input_ids: Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    model_kwargs: dict,
    *,
    synced_gpus: bool,
    stop_strings: str | list[str] | None,
    seed: int | list[int] | None,
    output_logprobs: bool,
) -> Request:
    """The call that HF hands to its decoding method; see `SpeculativeGenerator.__call__`.

    Args:
        call: what its `generate` was given, of `hf.generation.call_of_generate`.
    """
    check_choice("output_logprobs", output_logprobs, (True, False))
    if stop_strings is not None:
        criteria = with_stop_strings(criteria, stop_strings, call.get("tokenizer"))
    check_config(config)
    row_inputs = None
    if model is not target.model:
        model_kwargs, row_inputs = of_other_model(target, model, call, model_kwargs)
    check_hook(call, synced_gpus, model_kwargs)
    request = request_of(
        *(target, input_ids, model_kwargs.get("attention_mask"), processors, criteria, config),
        row_inputs=row_inputs,
        tokenizer=call.get("tokenizer"),
        seed=seed,
        beside=through_hook(target, config, model_kwargs),
        output_logprobs=output_logprobs,
    )
    if seed is not None and request.seeds is None:
        warn_of_seed(call)
    return request


def output_of(result: Any, config: GenerationConfig) -> Tensor | HookOutput:
    """What HF's `generate` returns of a `GenerationResult`."""
    if not config.return_dict_in_generate:
        return result.sequences
    names = "sequences", "scores", "logits", "logprobs", "raw_logprobs"
    return HookOutput(**{name: getattr(result, name) for name in names})


def of_other_model(
    target: Target, model: PreTrainedModel, call: Mapping[str, Any], model_kwargs: dict
) -> tuple[dict, Mapping[str, Any]]:
    """What HF hands to a decoding method of an encoder-decoder, whose decoder is the target: as of
    a decoder-only model, and the row inputs of the source.

    Raises:
        ValueError: the target is of another model.
    """
    if model is not getattr(target.model, "whole", None):
        raise ValueError(
            "custom_generate was called on another model than the generator's target; call "
            "generator.target.model.generate(..., custom_generate=generator)"
        )
    from specdec.request.source import through_hook as of_source

    return of_source(target, call, model_kwargs)


def check_hook(
    call: Mapping[str, Any],
    synced_gpus: bool,
    model_kwargs: dict,
) -> None:
    """Raises `ValueError` for what HF may hand to a decoding method and specdec would silently
    ignore: inputs, and what HF withheld, which is in `hf.generation.call_of_generate()`.
    """
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
