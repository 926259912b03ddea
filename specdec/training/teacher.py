"""`Teacher`: the frozen target that objectives compare with."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.target.features import FeatureLayer, PlainFeatures


class Teacher:
    """A frozen target that returns logits, and features where an objective needs them.

    It is no module, so that an objective that holds it neither trains nor saves the target.

    Args:
        target: an HF causal LM; it is frozen, put into eval mode, and moved to where the ids are.
        feature_layers: boundaries, or `"final"`.
    """

    def __init__(self, target: PreTrainedModel, feature_layers: tuple[FeatureLayer, ...] = ()):
        self.target = target.eval().requires_grad_(False)
        self.feature_layers = feature_layers
        num_layers = target.config.get_text_config().num_hidden_layers
        self._plain = PlainFeatures(target, num_layers, feature_layers)

    @torch.compiler.disable  # any target, with hooks in it: only what is trained is compiled
    @torch.no_grad()
    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits `[B, T, V]` and features `[B, T, F]` of ids `[B, T]`."""
        target = self.target
        if target.device != ids.device:
            target.to(ids.device)
        logits = self._plain.model(input_ids=ids, use_cache=False).logits
        if not self.feature_layers:
            return logits, None
        caught = [self._plain.features[layer] for layer in self.feature_layers]
        return logits, torch.cat(caught, dim=-1)
