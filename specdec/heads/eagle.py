"""EAGLE-1, 2 and 3 heads: how one is wired (`EagleConfig`), and its weights (`EagleHead`).

Legend: B rows, N tokens of a pass, H width of the head, F width of all features together, V target
vocabulary, Vd ids that the head can propose, D width of an attention head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from specdec.arguments import check_choice
from specdec.heads.features import FeatureHead, FeatureHeadConfig, FusingLayer
from specdec.heads.layers import Attend, DecoderLayer, RMSNorm


@dataclass(frozen=True)
class _Fusion:
    """The first field of `EagleConfig`."""

    fusion: Literal["input", "attention"]


@dataclass(frozen=True)
class EagleConfig(FeatureHeadConfig, _Fusion):
    """Sizes and flags of an EAGLE head.

    Args:
        fusion: `"input"`: embedding and feature go through `fc` together, before the first layer
            (EAGLE-1, EAGLE-2). `"attention"`: `fc` joins the features alone, and the first layer's
            queries, keys and values read embedding and feature side by side (EAGLE-3).
        layer, vocab_size, ..., logit_scale: see `FeatureHeadConfig`.
        has_fc: features pass through `fc`; without it the one feature is the hidden state itself.
        feedback_norm: what feeds the next draft step is the normalised output, not the raw one.

    Example:
        >>> from specdec.heads.layers import LayerConfig
        >>> config = EagleConfig("attention", LayerConfig(8, 16, 2, 2, 4), 9, 9, (1, 2, 3), 8)
        >>> config.hidden_size, config.feature_width
        (8, 24)
    """

    has_fc: bool = True
    feedback_norm: bool = False

    @property
    def fc_width(self) -> int | None:
        """Width of what `fc` reads; `None` without `fc`."""
        if not self.has_fc:
            return None
        return self.feature_width + (self.hidden_size if self.fusion == "input" else 0)

    @property
    def joins_features(self) -> bool:
        """Features go through an `fc` of their own."""
        return self.fusion == "attention" and self.has_fc

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        check_choice("EagleConfig.fusion", self.fusion, ("input", "attention"))
        width, hidden = self.feature_width, self.hidden_size
        has_early_norm = self.norm_before_fc or self.fc_norm
        is_input = self.fusion == "input"
        yield (
            is_input and (has_early_norm or self.norm_before_residual or not self.has_fc),
            "fusion='input' joins embedding and feature in fc: has_fc must be True, and "
            "norm_before_fc, fc_norm and norm_before_residual have no meaning",
        )
        yield (
            (is_input or not self.has_fc) and width != hidden,
            f"features are {width} wide in all and the head is {hidden} wide; only an fc in front "
            "of fusion='attention' can join or resize features",
        )
        yield (
            not self.has_fc and (has_early_norm or self.fc_bias),
            "norm_before_fc, fc_norm and fc_bias need has_fc=True",
        )
        yield from super()._contradictions()


class EagleHead(FeatureHead):
    """The weights of a head, under the names of the public checkpoints.

    Row t of its inputs holds (embedding of token t + 1, feature of position t), sits at rotary
    position t and predicts token t + 2. Every method works on any number of rows and tokens.

    Example:
        >>> from specdec.heads.layers import LayerConfig
        >>> config = EagleConfig("attention", LayerConfig(8, 16, 2, 2, 4), 9, 9, (1, 2, 3), 8)
        >>> head = EagleHead(config)
        >>> sorted(name for name in head.state_dict() if "layers" not in name)
        ['fc.weight', 'lm_head.weight', 'norm.weight']
        >>> head.fuse(torch.zeros(1, 5, 24)).shape
        torch.Size([1, 5, 8])

    Reference: Li et al., arXiv:2401.15077 (EAGLE), arXiv:2406.16858 (EAGLE-2), arXiv:2503.01840
    (EAGLE-3).
    """

    def __init__(self, config: EagleConfig, target_ids: Tensor | None = None):
        super().__init__(config, target_ids)
        if config.feedback_norm and not config.output_norm:
            self.norm = RMSNorm(config.hidden_size, config.layer.rms_norm_eps)

    def build_first_layer(self) -> nn.Module:
        """One that fuses, or a plain one without the norm that `fc` makes needless."""
        config = self.config
        if config.fusion == "input":
            return DecoderLayer(config.layer, 0, has_input_norm=False)
        return FusingLayer(config.layer, norm_before_residual=config.norm_before_residual)

    def forward(self, embeds: Tensor, hidden: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        """One pass.

        Args:
            embeds: `[B, N, H]`, of the tokens that follow the positions of `hidden`.
            hidden: `[B, N, H]`, from `fuse`, or from `feedback` of the pass before.
            angles: `[B, 1, N, 2 D]`, rows of `rotary_table` at the positions of `hidden`.
            attend: how queries find keys (see `Attend`).

        Returns:
            `[B, N, H]`, for `logits` and `feedback`.
        """
        first, *later = self.layers
        if self.config.fusion == "attention":
            out = first(embeds, hidden, angles, attend)
        else:
            out = first(self.fc(torch.cat([embeds, hidden], dim=-1)), angles, attend)
        for layer in later:
            out = layer(out, angles, attend)
        return out

    def feedback(self, out: Tensor) -> Tensor:
        """The hidden states `[B, N, H]` of the next pass, where the target's are not known yet."""
        return self.norm(out) if self.config.feedback_norm else out
