"""HF's decoding hook: what `model.generate` hands to a decoding function, and what it withholds."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from specdec.target import Target


@dataclass(frozen=True, eq=False)
class HookCall:
    """What `model.generate` was given and keeps from decoding functions.

    In transformers 5.17 to 5.23 it can only be seen in the frames of the call: HF's own `generate`,
    and the `no_grad` wrapper around it, which still has the keywords that HF has taken out.

    Args:
        streamer: HF has handed it the prompt already; whoever decodes has to hand it the tokens.
        tokenizer: for stop strings.
        assistant_model: of HF's assisted generation.
        synced_gpus: whether several processes must stay in step; `None` where HF decides.
    """

    streamer: BaseStreamer | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    assistant_model: PreTrainedModel | None = None
    synced_gpus: bool | None = None

    @classmethod
    def find(cls) -> HookCall:
        """The call of HF's `generate` that this call comes from; empty if there is none."""
        of_hf = inspect.unwrap(GenerationMixin.generate).__code__
        frame = inspect.currentframe()
        while frame is not None and frame.f_code is not of_hf:
            frame = frame.f_back
        if frame is None:
            return cls()
        given = frame.f_back.f_locals.get("kwargs") if frame.f_back is not None else None
        return cls(
            streamer=frame.f_locals.get("streamer"),
            tokenizer=given.get("tokenizer") if isinstance(given, dict) else None,
            assistant_model=frame.f_locals.get("assistant_model"),
            synced_gpus=frame.f_locals.get("synced_gpus"),
        )


def with_stop_strings(
    criteria: StoppingCriteriaList | None,
    stop_strings: str | list[str] | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> StoppingCriteriaList:
    """Stopping criteria with HF's own for stop strings among them.

    Raises:
        ValueError: no tokenizer, or an empty stop string, which some tokenizers would meet at once.
    """
    criteria = StoppingCriteriaList(criteria or ())
    if stop_strings is None:
        return criteria
    strings = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    if not strings or not all(isinstance(string, str) and string for string in strings):
        raise ValueError(f"stop_strings must hold strings that are not empty, got {strings!r}")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(
            "stop_strings need the target's tokenizer: pass tokenizer=tokenizer, or "
            "stopping_criteria=StoppingCriteriaList([StopStringCriteria(tokenizer, stop_strings)])"
        )
    return StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, strings)])


def check_hook(
    target: Target, model: PreTrainedModel, call: HookCall, synced_gpus: bool, model_kwargs: dict
) -> None:
    """Refuses what HF may hand to a decoding method and specdec would silently ignore.

    Args:
        target: the generator's.
        model: that `generate` was called on.
        call: what HF withheld.
        synced_gpus: HF's request to keep several processes in step.
        model_kwargs: HF's inputs of the model.

    Raises:
        ValueError: says what was expected.
    """
    if model is not target.model:
        raise ValueError(
            "custom_generate was called on another model than the generator's target; call "
            "generator.target.model.generate(..., custom_generate=generator)"
        )
    if call.assistant_model is not None:
        raise ValueError(
            "assistant_model has no effect beside custom_generate; leave it out and build the "
            "generator with ModelDrafter(assistant_model)"
        )
    if synced_gpus or call.synced_gpus:
        raise ValueError("synced_gpus=True is not supported; generate on one process at a time")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            "past_key_values holds tokens already; specdec keeps its own cache, so pass the whole "
            "prompt"
        )
    _check_positions(model_kwargs.get("position_ids"), model_kwargs.get("attention_mask"))
    known = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
    unknown = [name for name, v in model_kwargs.items() if name not in known and v is not None]
    if unknown:
        raise ValueError(
            f"specdec generates from input_ids only and does not know: {', '.join(sorted(unknown))}"
        )


def _check_positions(position_ids: Tensor | None, attention_mask: Tensor | None) -> None:
    """Raises `ValueError` for positions that are not 0, 1, ... over the real tokens of each row."""
    if position_ids is None:
        return
    mask = torch.ones_like(position_ids) if attention_mask is None else attention_mask
    is_real = mask.to(position_ids.device) != 0
    counted = is_real.long().cumsum(dim=-1) - 1
    if position_ids.shape != mask.shape or bool(((position_ids != counted) & is_real).any()):
        raise ValueError(
            "position_ids other than 0, 1, 2, ... over the tokens of each prompt are not "
            "supported; leave position_ids out"
        )
