"""`HFLayer`: a decoder layer of an HF architecture as a part of a head.

The prediction modules that DeepSeek-V3, GLM-4.5 and others ship are decoder layers of the target's
own class. Such a layer attends by itself, over a `Window` of a `SlotCache`, through the attention
function that specdec registers with HF.

Legend: B rows, N tokens of a pass, H width, D rotated width of an attention head, S positions.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from specdec.heads.rotary import cosines_and_sines
from specdec.target.attention import ATTENTION
from specdec.target.cache import KeyValueShape, ShapeRecorder, Window
from specdec.target.features import decoder_layers


class HFLayer(nn.Module):
    """A new layer of an HF class, with weights of its own. It works on a copy of the configuration,
    so the model that both come from is left as it is.

    Args:
        layer_class: `LlamaDecoderLayer`, for instance.
        config: of the architecture's text model.
        like: index of the layer of the architecture that this one is built as, where layers differ
            (dense or mixture of experts, full or sliding attention).
        index: of this layer in the head's cache.

    Example:
        >>> from specdec import zoo
        >>> layer = HFLayer.of(zoo.load_target(), like=15, index=0)
        >>> table = hf_rotary_table(zoo.load_target(), 4, dtype=torch.float32)
        >>> layer(torch.zeros(2, 4, 128), table[None, None], causal_window(4)).shape
        torch.Size([2, 4, 128])
    """

    def __init__(
        self, layer_class: type[nn.Module], config: PreTrainedConfig, *, like: int, index: int
    ):
        super().__init__()
        config = copy.deepcopy(config)
        config._attn_implementation = ATTENTION
        self.hidden_size = config.hidden_size
        self.layer = layer_class(config, like)
        layer_types = getattr(config, "layer_types", None) or ()
        is_sliding = like < len(layer_types) and layer_types[like] == "sliding_attention"
        self._windows = {index: config.sliding_window if is_sliding else None}
        for module in self.layer.modules():
            if "layer_idx" in vars(module):
                module.layer_idx = index

    @classmethod
    def of(cls, model: PreTrainedModel, *, like: int, index: int) -> HFLayer:
        """A new layer of the class and configuration of a model's."""
        return HFLayerConfig.of(model, like=like).build(index)

    def forward(
        self, hidden: Tensor, angles: Tensor, window: Window, cache: Cache | None = None
    ) -> Tensor:
        """One pass.

        Args:
            hidden: `[B, N, H]`, the residual stream.
            angles: `[B, 1, N, 2 D]`, rows of `hf_rotary_table`.
            window: slots of the tokens: `Pass.window`, or `causal_window`.
            cache: `Pass.cache`, written and read; `None` attends within the pass.

        Returns:
            `[B, N, H]`.
        """
        window = window.over_layers(self._windows)
        out = self.layer(
            hidden,
            attention_mask=None,
            position_ids=window.slots,
            position_embeddings=angles[:, 0].chunk(2, dim=-1),
            past_key_values=cache,
            slot_window=window,
        )
        return out[0] if isinstance(out, tuple) else out

    def key_value_shape(self, angles: Tensor) -> KeyValueShape:
        """What the layer stores of a token, given angles `[1, 1, 1, 2 D]`."""
        recorder, weight = ShapeRecorder(), next(self.parameters())
        hidden = weight.new_zeros(1, 1, self.hidden_size)
        with torch.no_grad():
            self(hidden, angles, causal_window(1, weight.device), recorder)
        (shape,) = recorder.shapes.values()
        return shape


def causal_window(count: int, device: torch.device | str = "cpu") -> Window:
    """A pass over positions `0..count - 1` without a cache: a token sees none that follow it."""
    return Window(torch.arange(count, device=device)[None], count)


@dataclass(frozen=True)
class HFLayerConfig:
    """What `HFLayer`s are made of: the counterpart of `LayerConfig` for HF's own classes.

    Args:
        layer_class: `DeepseekV3DecoderLayer`, for instance.
        rotary_class: of the architecture's rotary module; `None` if it has none.
        config: of the architecture's text model.
        like: see `HFLayer`.

    Example:
        >>> from specdec import zoo
        >>> config = HFLayerConfig.of(zoo.load_target(), like=15)
        >>> config.layer_class.__name__, config.hidden_size
        ('LlamaDecoderLayer', 128)
    """

    layer_class: type[nn.Module]
    rotary_class: type[nn.Module] | None
    config: PreTrainedConfig
    like: int

    @classmethod
    def of(cls, model: PreTrainedModel, *, like: int) -> HFLayerConfig:
        """Of a layer of a model, which may be on the `meta` device."""
        config = model.config.get_text_config()
        backbone, layers = decoder_layers(model, config.num_hidden_layers)
        rotary = getattr(backbone, "rotary_emb", None)
        return cls(type(layers[like]), rotary and type(rotary), config, like)

    @property
    def hidden_size(self) -> int:
        """H, width of the residual stream."""
        return self.config.hidden_size

    @property
    def rms_norm_eps(self) -> float:
        """Of the architecture's norms."""
        return self.config.rms_norm_eps

    def build(self, index: int) -> HFLayer:
        """A new layer, with the given index in a head's cache."""
        return HFLayer(self.layer_class, self.config, like=self.like, index=index)

    def rotary_table(
        self,
        num_positions: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """As `heads.rotary.rotary_table`: `[S, 2 D]`, cosines, then sines.

        Raises:
            ValueError: the architecture has no rotary module beside its decoder layers.
        """
        if self.rotary_class is None:
            raise ValueError(
                f"the model of {self.layer_class.__name__} has no module rotary_emb beside its "
                "decoder layers; such layers cannot be part of a head"
            )
        # A new module: a model's own may be on another device, or rounded with the model.
        rotary, types = self.rotary_class(self.config), getattr(self.config, "layer_types", None)
        kind = types[self.like] if types else None
        angles = cosines_and_sines(rotary, num_positions, kind)
        return torch.cat(angles, dim=-1).to(device, dtype)


def hf_rotary_table(
    model: PreTrainedModel,
    num_positions: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> Tensor:
    """`HFLayerConfig.rotary_table` of a model's layers."""
    layers = HFLayerConfig.of(model, like=0)
    return layers.rotary_table(num_positions, dtype=dtype, device=device)
