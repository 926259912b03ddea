"""Lets a private view read prompts that are more than token ids: `PromptInputs` in a window."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.hf.layers import decoder_layers
from specdec.slots.cache import LAST
from specdec.targets.view import wrap_forward


def edit_prompts(view: PreTrainedModel) -> None:
    """Makes the text decoder of a view read the chunk of its window, in place of what the view's
    own outer forward makes of the token ids; and the embedding of a prompt's last token, where the
    call brought one, in place of that of its id.
    """
    try:
        decoder = decoder_layers(view)[0]
    except ValueError:  # no such model is decoded, and the self-test says so
        return
    embedding = view.get_input_embeddings()
    wrap_forward(decoder, partial(_decode, view))
    if embedding is not None:
        wrap_forward(embedding, partial(_embed, view))


def _decode(view: PreTrainedModel, forward: Callable, *args, **kwargs: Any):
    window = view.running.window
    if window is None or window.prompt is None:
        return forward(*args, **kwargs)
    own = window.prompt.arguments(window.num_attended, view.dtype)
    ids = {} if "inputs_embeds" not in own else {"input_ids": None}
    return forward(**{**kwargs, **ids, **own})


def _embed(view: PreTrainedModel, forward: Callable, ids: Tensor, *args, **kwargs: Any) -> Tensor:
    out, window = forward(ids, *args, **kwargs), view.running.window
    if window is None or LAST not in window.row_inputs:
        return out
    last = window.row_inputs[LAST].to(out.device, out.dtype)
    is_last = (window.since_prompt == 0).to(out.device)
    return torch.where(is_last[..., None], last[:, None], out)
