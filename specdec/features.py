"""Catches the hidden states of an HF model that drafters ask for.

Layers are named by boundary: boundary b is the residual stream after b decoder layers (0: the
embeddings, L: before the final norm); `"final"` is the state after the final norm.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

FeatureLayer = int | str


class CaughtFeatures:
    """Hooks that catch the residual stream at the wanted boundaries for the duration of one
    forward.
    """

    def __init__(self, model: PreTrainedModel, num_layers: int, layers: tuple[FeatureLayer, ...]):
        self.layers = layers
        self.caught: dict[FeatureLayer, Tensor] = {}
        self._handles: list = []
        self._backbone, self._blocks = decoder_layers(model, num_layers)

    def __enter__(self) -> "CaughtFeatures":
        for layer in self.layers:
            self._handles.append(self._hook(layer))
        return self

    def __exit__(self, *_) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, layer: FeatureLayer):
        def catch(hidden: Tensor | tuple) -> None:
            self.caught[layer] = hidden[0] if isinstance(hidden, tuple) else hidden

        def before(_, args, kwargs):
            catch(args[0] if args else kwargs["hidden_states"])

        def after(_, args, output):
            catch(output)

        def after_backbone(_, args, output):
            catch(output[0])

        if layer == "final":
            return self._backbone.register_forward_hook(after_backbone)
        if layer == len(self._blocks):
            return self._blocks[-1].register_forward_hook(after)
        return self._blocks[layer].register_forward_pre_hook(before, with_kwargs=True)

    def joined(self) -> Tensor:
        """Features side by side in the order asked for, `[B, N, F]`."""
        return torch.cat([self.caught[layer] for layer in self.layers], dim=-1)


def decoder_layers(model: PreTrainedModel, num_layers: int) -> tuple[nn.Module, nn.ModuleList]:
    """The module that runs the decoder layers and the final norm, and its list of layers.

    It need not be `base_model`: the LM head of OPT calls `model.decoder` itself.

    Args:
        model: an HF causal LM.
        num_layers: how many decoder layers it has.

    Raises:
        ValueError: the model has no list of that many layers.
    """
    for module in model.base_model.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == num_layers:
                return module, child
    raise ValueError(
        f"{type(model).__name__} has no list of {num_layers} decoder layers to take features from"
    )
