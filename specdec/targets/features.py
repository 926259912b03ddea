"""Hidden states of an HF model, for the drafters that read them.

They have HF's numbers: `hidden_states[b]` is the residual stream after b decoder layers (0: the
embeddings, L: before the final norm); `"final"` is the state after the final norm. `Queries(i)` are
those of decoder layer i. Of layers that run several times the last run counts, and of several
streams (Gemma 3n) the one that attention reads.
"""

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.arguments import shown
from specdec.hf.layers import decoder_layers
from specdec.targets.route import Route
from specdec.types import FeatureLayer, Queries

Features = dict[FeatureLayer, Tensor]


def check_layers(
    layers: Sequence[FeatureLayer], model: PreTrainedModel, route: Route
) -> tuple[FeatureLayer, ...]:
    """Feature layers of a model that is run by a route, as a tuple.

    Raises:
        TypeError: not a tuple or list.
        ValueError: a layer that does not exist, also where a hidden state is not one vector, or the
            keys of a layer are not all that its queries read.
    """
    num_layers, name = len(decoder_layers(model)[1]), type(model).__name__
    if not isinstance(layers, tuple | list):
        got = f"got {shown(layers)}"
        raise TypeError(f"feature_layers must be a tuple, {got}; hidden states, or 'final'")
    for layer in layers:
        is_index = type(layer) is int and 0 <= layer <= num_layers
        has_queries = isinstance(layer, Queries) and layer.layer in range(num_layers)
        if layer != "final" and not is_index and not has_queries:
            raise ValueError(
                f"feature layer {layer!r} does not exist: expected Queries of a layer below "
                f"{num_layers}, 'final' or a hidden state 0..{num_layers}"
            )
    if route.has_streams and (some := [i for i in layers if isinstance(i, int)]):
        raise ValueError(
            f"{name} hands on several streams of hidden states, so that hidden state {some[0]} "
            "is not one vector of each token; use 'final', what its vocabulary head reads"
        )
    compressed = {place.layer for place in route.compressors}
    queries = (one.layer for one in layers if isinstance(one, Queries))
    if some := [i for i in queries if i in compressed]:
        raise ValueError(
            f"queries of layer {some[0]} of {name} read entries of several tokens beside keys, "
            "so they are no feature; use 'final'"
        )
    return tuple(layers)


def widths(layers: Sequence[FeatureLayer], config: PreTrainedConfig, route: Route) -> list[int]:
    """Width of each of these features of a text model."""
    return [
        config.num_attention_heads * route.shapes[layer.layer].key_width
        if isinstance(layer, Queries)
        else config.hidden_size
        for layer in layers
    ]
