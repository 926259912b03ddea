"""`DecoderLayer`: a plain decoder layer of a head, and `build_layer`, which makes it or HF's own.

Legend: B rows, N tokens of a pass, H width of the head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from specdec.drafters.head.layers import Attend, Attention, GatedMLP, RMSNorm

if TYPE_CHECKING:
    from specdec.drafters.head.layer_config import LayerConfig


class DecoderLayer(nn.Module):
    """A plain pre-norm layer; the attention of the first layer of EAGLE-1 reads an input without
    norm. With convolutions its rows are those of one block.
    """

    def __init__(self, config: LayerConfig, index: int, *, has_input_norm: bool = True):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config, index)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(width, eps) if has_input_norm else nn.Identity()
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.has_convolutions = config.convolution is not None
        if self.has_convolutions:
            from specdec.drafters.head.convolution import BlockConvolution

            self.attention_conv = BlockConvolution(width, config.convolution)
            self.mlp_conv = BlockConvolution(width, config.convolution)

    def forward(
        self, hidden: Tensor, angles: Tensor, attend: Attend, context: Tensor | None = None
    ) -> Tensor:
        """`[B, N, H]`, given the residual stream `[B, N, H]`; other Args as `Attention.forward`."""

        x = self.input_layernorm(hidden)
        if self.has_convolutions:
            x = self.attention_conv(x, lambda x: self.self_attn(x, angles, attend, context))
            hidden = hidden + x
            return hidden + self.mlp_conv(self.post_attention_layernorm(hidden), self.mlp)
        hidden = hidden + self.self_attn(x, angles, attend, context)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def build_layer(config: LayerConfig, index: int) -> nn.Module:
    """A new layer with the given index in a head's cache: a plain one, or of a configuration that
    builds its own (`HFLayerConfig`).
    """
    build = getattr(config, "build", None)
    return DecoderLayer(config, index) if build is None else build(index)
