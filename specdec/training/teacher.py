"""`Teacher`: the frozen target that objectives compare with."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.features import CaughtFeatures, FeatureLayer


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

    @torch.compiler.disable  # any target, with hooks in it: only what is trained is compiled
    @torch.no_grad()
    def __call__(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits `[B, T, V]` and features `[B, T, F]` of ids `[B, T]`."""
        target = self.target
        if target.device != ids.device:
            target.to(ids.device)
        if not self.feature_layers:
            return target(input_ids=ids, use_cache=False).logits, None
        num_layers = target.config.get_text_config().num_hidden_layers
        with CaughtFeatures(target, num_layers, self.feature_layers) as caught:
            logits = target(input_ids=ids, use_cache=False).logits
        return logits, caught.joined()
