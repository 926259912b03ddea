"""`EagleConfig`: sizes and flags of an EAGLE head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from specdec.arguments import check_choice
from specdec.drafters.head.feature_config import FeatureHeadConfig


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
        sees_pictures: it reads the rows of a prompt whose token is one of a picture: the embedding
            of the placeholder beside the target's feature. Else they are left out, as if the
            text went on in their place at the same positions.

    Example:
        >>> from specdec.drafters.head.layer_config import LayerConfig
        >>> config = EagleConfig("attention", LayerConfig(8, 16, 2, 2, 4), 9, 9, (1, 2, 3), 8)
        >>> config.hidden_size, config.feature_width
        (8, 24)
    """

    has_fc: bool = True
    feedback_norm: bool = False
    sees_pictures: bool = True

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
