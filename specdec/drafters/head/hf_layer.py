"""`HFLayer`: a decoder layer of an HF architecture as a part of a head.

The prediction modules that DeepSeek-V3, GLM-4.5 and others ship are decoder layers of the target's
own class. Such a layer is called as the library's own `DecoderLayer`: HF calls a registered
attention function, which hands queries, keys and values on to the pass.

Legend: B rows, N tokens of a pass, H width, D rotated width of an attention head, S positions.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from specdec.drafters.head.layers import Attend
from specdec.drafters.head.rotary import cosines_and_sines
from specdec.hf.layers import decoder_layers, set_implementation
from specdec.hf.lookups import ATTENTION_FIELD
from specdec.kernels import AttentionOptions
from specdec.slots.layout import KeyValueShape

HEAD_ATTENTION = "specdec_head"
"""The name under which HF layers of heads attend."""


def pass_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    attend: Attend,
    window: int | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """HF's attention of new tokens `[B, heads, N, D]`, by the pass's `attend`; other Args as
    `slot_attention`.
    """
    options = AttentionOptions(scaling, softcap, s_aux, window)
    return attend(module.layer_idx, query, key, value, options).transpose(1, 2), None


AttentionInterface.register(HEAD_ATTENTION, pass_attention)


class HFLayer(nn.Module):
    """A new layer of an HF class, with weights of its own. It works on a copy of the configuration,
    so the model that both come from is left as it is.

    Args:
        layer_class: `LlamaDecoderLayer`, for instance.
        config: of the architecture's text model.
        like: index of the layer of the architecture that this one is built as, where layers differ
            (dense or mixture of experts, full or sliding attention).
        index: of this layer, for `Attend`.

    Example:
        >>> from specdec.lab import zoo
        >>> from specdec.drafters.head.causal import attend_causally
        >>> config = HFLayerConfig.of(zoo.load_target(), like=15)
        >>> layer, table = config.build(index=0), config.rotary_table(4, dtype=torch.float32)
        >>> layer(torch.zeros(2, 4, 128), table[None, None], attend_causally).shape
        torch.Size([2, 4, 128])
    """

    def __init__(
        self, layer_class: type[nn.Module], config: PreTrainedConfig, *, like: int, index: int
    ):
        super().__init__()
        config = copy.deepcopy(config)
        set_implementation(config, ATTENTION_FIELD, HEAD_ATTENTION)
        self.layer = layer_class(config, like)
        layer_types = getattr(config, "layer_types", None) or ()
        is_sliding = like < len(layer_types) and layer_types[like] == "sliding_attention"
        self._sliding_window = config.sliding_window if is_sliding else None
        for module in self.layer.modules():
            if "layer_idx" in vars(module):
                module.layer_idx = index

    def forward(self, hidden: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        """`[B, N, H]`, given the residual stream `[B, N, H]` and angles `[B, 1, N, 2 D]`, rows of
        `HFLayerConfig.rotary_table`.
        """
        out = self.layer(
            hidden,
            attention_mask=None,
            position_embeddings=angles[:, 0].chunk(2, dim=-1),
            attend=attend,
            window=self._sliding_window,
        )
        return out[0] if isinstance(out, tuple) else out


class _KeysSeen(Exception):  # noqa: N818, it is no error
    """Ends a forward of which only the keys and values are wanted."""


@dataclass(frozen=True)
class HFLayerConfig:
    """What `HFLayer`s are made of: the counterpart of `LayerConfig` for HF's own classes.

    Args:
        layer_class: `DeepseekV3DecoderLayer`, for instance.
        rotary_class: of the architecture's rotary module; `None` if it has none.
        config: of the architecture's text model.
        like: see `HFLayer`.
    """

    layer_class: type[nn.Module]
    rotary_class: type[nn.Module] | None
    config: PreTrainedConfig
    like: int

    @classmethod
    def of(cls, model: PreTrainedModel, *, like: int) -> HFLayerConfig:
        """Of a layer of a model, which may be on the `meta` device."""
        config = model.config.get_text_config()
        backbone, layers = decoder_layers(model)
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
        """A new layer, with the given index for `Attend`."""
        return HFLayer(self.layer_class, self.config, like=self.like, index=index)

    def key_value_shape(self, *, dtype: torch.dtype, device: torch.device) -> KeyValueShape:
        """What a layer stores of a token, seen in a forward without memory."""
        seen = []

        def record(index: int, query: Tensor, key: Tensor, value: Tensor, options) -> Tensor:
            seen.extend((key.shape[1], key.shape[3], value.shape[3]))
            raise _KeysSeen

        meta = torch.device("meta")
        angles = self.rotary_table(1, dtype=torch.float32, device=meta)[None, None]
        try:
            with meta:
                self.build(0)(torch.zeros(1, 1, self.hidden_size), angles, record)
        except _KeysSeen:
            pass
        return KeyValueShape(*seen, dtype, device)

    def rotary_table(
        self, num_positions: int, *, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> Tensor:
        """As `LayerConfig.rotary_table`: `[S, 2 D]`, cosines, then sines.

        Raises:
            ValueError: the architecture has no rotary module beside its decoder layers.
        """
        if self.rotary_class is None:
            raise ValueError(
                f"the model of {self.layer_class.__name__} has no module rotary_emb beside its "
                "decoder layers; such layers cannot be part of a head"
            )
        # A new module: a model's own may be on another device, or rounded with the model.
        with torch.device("cpu"):
            rotary = self.rotary_class(self.config)
        types = getattr(self.config, "layer_types", None)
        kind = types[self.like] if types else None
        angles = cosines_and_sines(rotary, num_positions, kind)
        return torch.cat(angles, dim=-1).to(device, dtype)
