"""Hidden states of an HF model, for the drafters that read them.

They have HF's numbers: `hidden_states[b]` is the residual stream after b decoder layers (0: the
embeddings, L: before the final norm); `"final"` is the state after the final norm. `Queries(i)` are
those of decoder layer i. Of layers that run several times the last run counts, and of several
streams (Gemma 3n) the one that attention reads.
"""

from collections.abc import Sequence

from torch import Tensor

from specdec.arguments import shown
from specdec.types import FeatureLayer, Queries

Features = dict[FeatureLayer, Tensor]


def check_layers(layers: Sequence[FeatureLayer], num_layers: int) -> tuple[FeatureLayer, ...]:
    """Feature layers of a model with so many decoder layers, as a tuple.

    Raises:
        TypeError: not a tuple or list.
        ValueError: a layer that does not exist.
    """
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
    return tuple(layers)
