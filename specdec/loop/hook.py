"""A call of HF's `generate` that is handed to a generator; see `SpeculativeGenerator.__call__`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from specdec.hf.generation import call_of_generate
from specdec.loop.columns import ending
from specdec.request.hook import HookOutput, output_of, read_hook
from specdec.results import GenerationResult
from specdec.targets import Target


def generate_for_hf(
    generate: Callable[..., GenerationResult],
    target: Target,
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    *,
    streamer: BaseStreamer | None,
    **options: Any,
) -> Tensor | HookOutput:
    """What HF's `generate` returns, from a function `(request, streamer=)` of the generator."""
    call = call_of_generate()
    streamer = call.get("streamer") if streamer is None else streamer
    with ending(streamer):
        request = read_hook(
            *(target, model, call, input_ids, logits_processor, stopping_criteria),
            *(generation_config, model_kwargs),
            **options,
        )
        result = generate(request, streamer=streamer)
    return output_of(result, generation_config)
