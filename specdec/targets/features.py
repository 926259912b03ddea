"""Hidden states of an HF model, for the drafters that read them.

They have HF's numbers: `hidden_states[b]` is the residual stream after b decoder layers (0: the
embeddings, L: before the final norm); `"final"` is the state after the final norm. `Queries(i)` are
those of decoder layer i. Of layers that run several times the last run counts, and of several
streams (Gemma 3n) the one that attention reads.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.arguments import shown


class Queries(NamedTuple):
    """The queries of a layer's attention, of all heads side by side, as they are multiplied by the
    keys of the cache: with their positions, and scaled.
    """

    layer: int


FeatureLayer = int | str | Queries
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


def decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """The module that runs the decoder layers and the final norm, and its list of layers.

    It need not be `base_model`: the LM head of OPT calls `model.decoder` itself. HRM's two stacks
    are one list.

    Raises:
        ValueError: the model has no list of as many layers as its configuration says.
    """
    config = model.config.get_text_config()
    # Towers of images may have as many layers as the language model beside them.
    base = model.base_model
    backbone = getattr(base, "language_model", None) or getattr(base, "text_model", None) or base
    # In LongCat-Flash layers have two attentions each, and the first number is that of these.
    for count in (config.num_hidden_layers, getattr(config, "num_layers", None)):
        for module in backbone.modules():
            for child in module.children():
                if isinstance(child, nn.ModuleList) and len(child) == count:
                    return module, child
    if hasattr(config, "num_layers_per_stack"):  # of HRM's, run in turns
        stacks = [child.layers for child in backbone.children() if hasattr(child, "layers")]
        return backbone, nn.ModuleList(chain(*stacks))
    raise ValueError(
        f"{type(model).__name__} has no list of {config.num_hidden_layers} decoder layers to take "
        "features from"
    )
