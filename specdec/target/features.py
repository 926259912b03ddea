"""Hidden states of an HF model, for the drafters that read them.

Layers are named by boundary: boundary b is the residual stream after b decoder layers (0: the
embeddings, L: before the final norm); `"final"` is the state after the final norm.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.target.view import private_view, wrap_forward

FeatureLayer = int | str
Features = dict[FeatureLayer, Tensor]


def catch_features(
    view: PreTrainedModel,
    num_layers: int,
    layers: tuple[FeatureLayer, ...],
    find_sink: Callable[[tuple, dict], Features],
) -> None:
    """Makes the forwards of a private view hand out hidden states, to where `find_sink` says, given
    the positional and keyword arguments of the module that has them.
    """
    backbone, blocks = decoder_layers(view, num_layers)
    for layer in layers:
        if layer == "final":
            wrap_forward(backbone, partial(_keep_output, find_sink, layer))
        elif layer == num_layers:
            wrap_forward(blocks[-1], partial(_keep_output, find_sink, layer))
        else:
            wrap_forward(blocks[layer], partial(_keep_input, find_sink, layer))


def _keep_input(find_sink, layer: FeatureLayer, forward: Callable, *args, **kwargs):
    find_sink(args, kwargs)[layer] = args[0] if args else kwargs["hidden_states"]
    return forward(*args, **kwargs)


def _keep_output(find_sink, layer: FeatureLayer, forward: Callable, *args, **kwargs):
    out = forward(*args, **kwargs)
    find_sink(args, kwargs)[layer] = out if isinstance(out, Tensor) else out[0]
    return out


class PlainFeatures:
    """The hidden states of a model's plain forwards, without a trace in the model itself.

    Args:
        model: an HF causal LM.
        num_layers: how many decoder layers it has.
        layers: which hidden states are wanted.

    Attributes:
        model: to be called instead of the model.
        features: by layer, of the last forward.

    Example:
        >>> from specdec import zoo
        >>> target = zoo.load_target()
        >>> plain = PlainFeatures(target, target.config.num_hidden_layers, (0, "final"))
        >>> _ = plain.model(input_ids=target.dummy_inputs["input_ids"])
        >>> sorted(map(str, plain.features))
        ['0', 'final']
    """

    def __init__(self, model: PreTrainedModel, num_layers: int, layers: tuple[FeatureLayer, ...]):
        self.model = private_view(model)
        self.features: Features = {}
        catch_features(self.model, num_layers, layers, self._sink)

    def _sink(self, args: tuple, kwargs: dict) -> Features:
        return self.features


def decoder_layers(model: PreTrainedModel, num_layers: int) -> tuple[nn.Module, nn.ModuleList]:
    """The module that runs the decoder layers and the final norm, and its list of layers.

    It need not be `base_model`: the LM head of OPT calls `model.decoder` itself.

    Raises:
        ValueError: the model has no list of that many layers.
    """
    # Towers of images may have as many layers as the language model beside them.
    backbone = getattr(model.base_model, "language_model", model.base_model)
    for module in backbone.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == num_layers:
                return module, child
    raise ValueError(
        f"{type(model).__name__} has no list of {num_layers} decoder layers to take features from"
    )
