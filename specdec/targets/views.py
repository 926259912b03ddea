"""The private views of a model that run, and one forward of them over slots.

A view has the model's weights and modules and configurations of its own (view.py), so the model
itself is never changed: it may be called, by anybody and from any thread, while specdec generates
with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.graphs.tree import weight_addresses
from specdec.hf.forward import cache_argument, forward_arguments
from specdec.hf.layers import ATTENTION_FIELD, Streams, decoder_layers, set_implementation
from specdec.hf.positions import position_limit
from specdec.slots.attention import window_mask
from specdec.slots.cache import SlotCache, Window
from specdec.targets.attention import ATTENTION
from specdec.targets.edits.edit import Edit, Running, apply_edit
from specdec.targets.families import families_of
from specdec.targets.route import Route
from specdec.targets.view import private_view, wrap_forward
from specdec.types import FeatureLayer, Queries


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


def open_views(
    model: PreTrainedModel,
    route: Route,
    feature_layers: tuple[FeatureLayer, ...] = (),
    edits: Sequence[Edit] = (),
) -> Views:
    """The views that run a model over slots. Here, and nowhere else, the model's storage changes:
    parameters of joined products become views of one buffer each.

    Args:
        model: without wrappers.
        route: of `find_route`, or a candidate for it.
        feature_layers: hidden states that forwards hand out.
        edits: of the user, or of a part of the model, after those of the route.

    Raises:
        ValueError: an edit cannot be made, or changes the model itself.
    """
    for edit in route.edits:
        edit.prepare(model)
    step = chunk = open_view(model, route, feature_layers, edits)
    of_chunks = tuple(edit for edit in route.edits if edit.why_not_in_chunks is None)
    if of_chunks != route.edits:
        chunk = open_view(model, replace(route, edits=of_chunks), feature_layers, edits)
    stored_anew = [module for edit in route.edits for module in edit.stored_anew(model)]
    arguments = forward_arguments(model)
    limit = position_limit(model.config.get_text_config())
    names = arguments, cache_argument(model)
    places = stored_anew, weight_addresses(*stored_anew)
    queries = frozenset(one.layer for one in feature_layers if isinstance(one, Queries))
    return Views(step, chunk, route, feature_layers, queries, places, *names, limit)


def open_view(
    model: PreTrainedModel,
    route: Route,
    feature_layers: tuple[FeatureLayer, ...] = (),
    edits: Sequence[Edit] = (),
) -> PreTrainedModel:
    """One private view of a model; Args and Raises as `open_views`, weights where they are."""
    view = private_view(model)
    view.running = Running()
    edits = [*route.edits, *mixing(route), *(partial(apply_edit, edit) for edit in edits)]
    attend_by(view, route.attention)
    for family in families_of(model):
        family.edit(view, route.attention)
    for edit in edits:
        edit(view)
    catch_features(view, feature_layers)
    return view


def mixing(route: Route) -> list[Edit]:
    """Of a model with recurrent layers, what lets them read and write a window's memory."""
    if not route.mixers:
        return []
    from specdec.targets.edits.memory import edit_memory

    return [partial(edit_memory, mixers=route.mixers)]


def attend_by(view: PreTrainedModel, attention: str | None) -> None:
    """Makes a view call an attention function of that name, `None` for its own, and be in
    evaluation mode.
    """
    # Sub-models can own configurations of their own (a text model inside a multimodal one).
    for module in view.modules():
        module.training = False
        fields = vars(module.config) if isinstance(module, PreTrainedModel) else {}
        if isinstance(module, PreTrainedModel):
            # GPT-2 searches its input for padding: the host would wait.
            module.warn_if_padding_and_no_attention_mask = _no_warning
        if fields.get("use_bidirectional_attention") == "vision":
            # Text alone is causal, and HF's mask for images knows only the tokens of one forward.
            fields["use_bidirectional_attention"] = None
        if attention is not None and fields:
            set_implementation(module.config, ATTENTION_FIELD, attention)
        if attention == ATTENTION and getattr(module, "attn_temperature_tuning", False):
            # Llama 4's own is of positions that count from one length for all rows.
            module.attn_temperature_tuning = False
            module.tempers_queries = not module.use_rope


def _no_warning(*args: Tensor) -> None:
    """There is no padding in a window."""


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
    is_alone = is_plain and "forward" not in vars(head)
    is_watched = is_alone and (head._forward_hooks or head._forward_pre_hooks)
    return slice(0, 0) if is_alone and not is_watched else 1  # others may want a token


def catch_features(view: PreTrainedModel, layers: Collection[FeatureLayer]) -> None:
    """Makes the forwards of a private view note hidden states down, in the features of the window
    that it runs. Queries are noted where attention is called, see `slot_attention`.
    """
    layers = [layer for layer in layers if not isinstance(layer, Queries)]
    if not layers:
        return
    backbone, blocks = decoder_layers(view)
    outputs = {"final": backbone, len(blocks): blocks[-1]}  # the others are inputs
    streams = Streams.of(view)
    for layer in layers:
        module = outputs[layer] if layer in outputs else blocks[layer]
        stacked = None if layer == "final" else streams
        wrap_forward(module, partial(_catch, view.running, layer, layer in outputs, stacked))


def _catch(running, layer, is_output: bool, streams, forward: Callable, *args, **kwargs):
    if not is_output:
        state = args[0] if args else kwargs["hidden_states"]
        running.window.features[layer] = state if streams is None else streams.feature(state)
        return forward(*args, **kwargs)
    out = forward(*args, **kwargs)
    state = out if isinstance(out, Tensor) else out[0]
    running.window.features[layer] = state if streams is None else streams.feature(state)
    return out
