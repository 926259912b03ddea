"""One forward of a model's private views over slots.

Legend: B rows, N tokens of a window, V vocabulary, F width of all features together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.slots.attention import window_mask
from specdec.slots.cache import SlotCache, Window
from specdec.targets.route import Route
from specdec.targets.watch import is_hooked
from specdec.types import FeatureLayer


class Views(NamedTuple):
    """Private views of a model, and what their forwards take.

    Args:
        step: for windows of steps.
        chunk: for chunks of prompts.
        route: by which they were opened.
        feature_layers: hidden states that they hand out.
        query_layers: those of them that are queries, by layer.
        stored_anew: modules of the model whose weights the route's edits have moved to buffers,
            and the addresses of these. Weights are elsewhere after they were replaced, cast or
            moved, while the views still compute with the buffers.
        arguments: names that forwards take.
        cache_name: the one for HF's cache.
        max_positions: longest sequence that the model has positions for; `None` for no limit.
    """

    step: PreTrainedModel
    chunk: PreTrainedModel
    route: Route
    feature_layers: tuple[FeatureLayer, ...]
    query_layers: frozenset[int]
    stored_anew: tuple[list[nn.Module], tuple[int, ...]]
    arguments: Collection[str]
    cache_name: str
    max_positions: int | None


def open_window(views: Views, cache: SlotCache, slots: Tensor, **options: Any) -> Window:
    """The window of the next forward over tokens at `slots` `[B, N]`, as the views' layers see it;
    options are those of `Window`.
    """
    layers = {"layer_windows": views.route.layer_windows, "query_layers": views.query_layers}
    return cache.open_window(slots, **layers, **options)


def forward(
    views: Views, tokens: Tensor, cache: SlotCache, window: Window
) -> tuple[Tensor, Tensor | None]:
    """One forward of a window; keys and values are written at its slots.

    Without an attention function of specdec's the view gets a dense mask: so run models that never
    call HF's attention interface but pass a 4-D mask through.

    Args:
        views: of `open_views`.
        tokens: `[B, N]` int64 ids of the vocabulary.
        cache: the rows' storage.
        window: of `open_window`.

    Returns:
        Logits `[B, N or logits_to_keep, V]`, and features `[B, N, F]` side by side in the order
        of `feature_layers`, on the device of the embeddings; `None` where none are wanted.
    """
    view = views.chunk if window.is_chunk else views.step
    inputs = {"input_ids": tokens, views.cache_name: cache, "use_cache": True}
    if "position_ids" in views.arguments:
        positions = window.positions_below(views.max_positions, cache.padding_slot)
        inputs["position_ids"] = positions
    if views.route.attention is None and views.max_positions is not None:
        # Tables of biases and masks, as of MPT and GPT-Neo, have a column for each position.
        window.num_attended = min(window.num_attended, views.max_positions)
    kept = window.logits_to_keep
    if "logits_to_keep" in views.arguments:
        inputs["logits_to_keep"] = kept if kept is not None else _no_logits(views, view)
    if views.route.attention is None:
        inputs["attention_mask"] = window_mask(window, tokens.shape[1], view.dtype)
    else:
        inputs["slot_window"] = window
    view.running.window = window
    try:
        logits = view(**inputs).logits
    finally:
        view.running.window = None
    if kept and logits.shape[1] > kept:  # its forward does not take the number, or drops it
        logits = logits[:, -kept:]
    if not views.feature_layers:
        return logits, None
    caught = [window.features[layer].to(tokens.device) for layer in views.feature_layers]
    return logits, torch.cat(caught, dim=-1)


def _no_logits(views: Views, view: PreTrainedModel) -> int | slice:
    """What `logits_to_keep` is where nobody reads logits. A forward takes any index of tokens: with
    an empty one a plain vocabulary head, a sixteenth of an 8B model's weights, is not read.
    """
    if getattr(view.config.get_text_config(), "num_kv_shared_layers", 0):
        # Gemma 4 then runs these layers for so many of the last tokens only, if it is a number.
        return slice(0, 0) if views.feature_layers else 1
    head = view.get_output_embeddings()
    is_plain = type(head) is nn.Linear and type(head.weight) is nn.Parameter
    return slice(0, 0) if is_plain and not is_hooked(head) else 1  # others may want a token


def note_feature(running, layer, is_output: bool, streams, forward: Callable, *args, **kwargs):
    """A module's forward, whose input or output is noted down as a feature of the window."""
    if not is_output:
        state = args[0] if args else kwargs["hidden_states"]
        running.window.features[layer] = state if streams is None else streams.feature(state)
        return forward(*args, **kwargs)
    out = forward(*args, **kwargs)
    state = out if isinstance(out, Tensor) else out[0]
    running.window.features[layer] = state if streams is None else streams.feature(state)
    return out
