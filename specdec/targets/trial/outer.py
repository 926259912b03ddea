"""The self-test of what stands around a model: a wrapper, or a `generate` of somebody's own.

A wrapper may act outside of the layers of the model inside of it, which is what specdec runs. So
the wrapper's own `generate` goes on with two texts, and so does transformers' of the model inside:
greedily, and by sampling with one seed. Both are HF's code, so ids and scores are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.hf.forward import device_of
from specdec.targets.activation import ACTIVATED
from specdec.targets.forward import forward, open_window
from specdec.targets.route import Route
from specdec.targets.trial.witness import (
    NUM_STEPS,
    as_it_was,
    generate_of,
    is_same_reading,
    trial_texts,
)
from specdec.targets.views import open_views

NUM_TOKENS = 10
"""Of the texts."""


def fault_of_outer(outer: nn.Module, model: PreTrainedModel, route: Route) -> str | None:
    """Why a generator's own calls would write other text than `generate` of the model does, for a
    model whose `generate` is none of transformers'; `None` where they write the same.

    Args:
        outer: what the user has handed over.
        model: the HF model inside, or `outer` itself.
        route: of the model, which passed the self-test.

    Raises:
        ValueError: a wrapper writes other text than the model inside of it.
    """
    tokens = trial_texts(model, NUM_TOKENS)
    fault = _difference(outer, model, tokens)
    if fault is None and _activated(outer, model):
        fault = _difference_of_activated(outer, model, route, tokens)
    if fault is None:
        return None
    name, inside = type(outer).__name__, type(model).__name__
    if outer is model:
        return (
            f"expected a generate of transformers', and {name} has one of its own, which writes "
            f"other text ({fault}); call it: model.generate(..., custom_generate=generator)"
        )
    config = getattr(outer, "active_peft_config", None)
    kind = name if config is None else f"{name} ({type(config).__name__})"
    raise ValueError(
        f"expected a wrapper that acts inside of the layers of its model, and {kind} writes other "
        f"text than the {inside} inside of it ({fault}), which specdec would decode; use the "
        "wrapper's own generate, or put its work into the model (PEFT: merge_and_unload)"
    )


def _difference(outer: nn.Module, model: PreTrainedModel, tokens: Tensor) -> str | None:
    """What texts of the two differ in, `None` for nothing."""
    off, args = {ACTIVATED: [0, 0]} if _activated(outer, model) else {}, (tokens,)
    if model.config.is_encoder_decoder:  # PEFT's wrapper takes keywords alone
        off, args = {**off, "input_ids": tokens}, ()
    for do_sample in (False, True):
        options = _options(tokens, do_sample)
        try:
            expected = _written(model, generate_of(model), model, tokens, **options)
        except Exception:  # HF's own generate fails: nothing to compare with
            continue
        try:
            found = _written(outer, getattr(outer, "generate", None), *args, **options, **off)
        except Exception as error:
            return f"its generate raises {type(error).__name__}: {error}"
        how = "by sampling" if do_sample else "greedily"
        if type(found) is not type(expected):
            return f"{how} it returns a {type(found).__name__}"
        if not found.sequences.equal(expected.sequences):
            return f"{how} it writes other ids"
        for name in ("logits", "scores"):
            one, other = (torch.stack(out[name]) for out in (found, expected))
            if not is_same_reading((one, None), (other, None)):
                return f"{how} its {name} differ by up to {float((one - other).abs().max()):.3g}"
    return None


def _options(tokens: Tensor, do_sample: bool) -> dict[str, Any]:
    """Of `generate`. Where a generator is its decoding function, as in training, HF's own is."""
    options = {"max_new_tokens": NUM_STEPS, "do_sample": do_sample, "eos_token_id": None}
    options |= {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}
    options |= {"attention_mask": torch.ones_like(tokens), "pad_token_id": 0}
    return options | {"custom_generate": None}


def _written(outer: nn.Module, generate: Any, *args: Any, **options: Any) -> Any:
    """What `generate` returns, with one seed; the numbers of a caller go on as they would have."""
    device = device_of(outer)
    on_gpu = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(on_gpu), as_it_was(outer), torch.no_grad():
        torch.manual_seed(0)
        return generate(*args, **options)


def _activated(outer: nn.Module, model: PreTrainedModel) -> bool:
    """Whether a wrapper of PEFT's begins Activated LoRA in a prompt."""
    config = getattr(outer, "active_peft_config", None)
    return outer is not model and bool(getattr(config, "alora_invocation_tokens", None))


@torch.no_grad()
def _difference_of_activated(
    outer: nn.Module, model: PreTrainedModel, route: Route, tokens: Tensor
) -> str | None:
    """How far a window over texts of the wrapper is from the wrapper's logits, where adapters begin
    in the prompts. The yardstick is the same window where they do not begin.
    """
    errors = []
    for offsets in ([0, 0], [4, NUM_TOKENS]):
        own = {ACTIVATED: offsets}
        out = _written(outer, outer.generate, tokens, **_options(tokens, False), **own)
        views, length = open_views(model, route), out.sequences.shape[1] - 1
        cache = route.init_cache(2, length, max_window=length)
        ends = torch.full((2,), NUM_TOKENS - 1, device=tokens.device)
        own = torch.tensor(offsets, device=tokens.device)
        cache.row_inputs = {ACTIVATED: own, "prompt_end": ends}
        slots = torch.arange(length, device=tokens.device).expand(2, -1)
        window = open_window(views, cache, slots, logits_to_keep=NUM_STEPS)
        found = forward(views, out.sequences[:, :-1], cache, window)[0]
        theirs = torch.stack(out.logits, dim=1).to(found.device)
        errors.append(float((found.float() - theirs.float()).abs().max()))
    least = 64 * torch.finfo(model.dtype).eps * float(theirs.abs().max())
    if errors[1] <= max(8 * errors[0], least):
        return None
    return f"where Activated LoRA begins, logits differ by {errors[1]:.3g}"
