"""The private views of a model that run: how they are opened; see forward.py for what they run.

A view has the model's weights and modules and configurations of its own (view.py), so the model
itself is never changed: it may be called, by anybody and from any thread, while specdec generates
with it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor
from transformers import PreTrainedModel

from specdec.graphs.tree import weight_addresses
from specdec.hf.forward import cache_argument, forward_arguments
from specdec.hf.layers import Streams, decoder_layers, set_implementation
from specdec.hf.lookups import ATTENTION_FIELD
from specdec.hf.positions import position_limit
from specdec.targets.attention import ATTENTION
from specdec.targets.edits.edit import Edit, Running, apply_edit
from specdec.targets.families import families_of
from specdec.targets.forward import Views, note_feature
from specdec.targets.route import Route
from specdec.targets.view import private_view, wrap_forward
from specdec.types import FeatureLayer, Queries


def open_views(
    model: PreTrainedModel,
    route: Route,
    feature_layers: tuple[FeatureLayer, ...] = (),
    edits: Sequence[Edit] = (),
    layers: Sequence[int] | None = None,
) -> Views:
    """The views that run a model over slots. Here, and nowhere else, the model's storage changes:
    parameters of joined products become views of one buffer each.

    Args:
        model: without wrappers.
        route: of `find_route`, or a candidate for it.
        feature_layers: hidden states that forwards hand out.
        edits: of the user, after those of the route.
        layers: decoder layers that run; `None` for all.

    Raises:
        ValueError: an edit cannot be made, or changes the model itself.
    """
    if layers is not None:
        from specdec.targets.edits.layers import only_layers

        edits = (*edits, only_layers(layers, returns_tuples=route.returns_tuples))
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
        wrap_forward(module, partial(note_feature, view.running, layer, layer in outputs, stacked))
