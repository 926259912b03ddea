"""FeatureHeadConfig: what the configurations of EAGLE and mask-token heads have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from specdec.drafters.head.config import check_fields, refuse
from specdec.drafters.head.layer_config import LayerConfig
from specdec.types import FeatureLayer


@dataclass(frozen=True)
class FeatureHeadConfig(ABC):
    """What EAGLE and mask-token heads have in common. No field depends on the training library;
    loaders convert.

    Args:
        layer: of every decoder layer.
        vocab_size: V of the target.
        draft_vocab_size: ids that the head can propose; V for all.
        feature_layers: target features, as hidden states (or `"final"`), in the order in which they
            are joined.
        target_hidden_size: width of each feature.
        num_layers: decoder layers; layers after the first are plain ones.
        norm_before_fc: one norm over all features together, before `fc`.
        fc_norm: one norm per feature, before `fc`.
        fc_bias: `fc` has a bias.
        norm_before_residual: the first layer's residual stream is the normalised hidden state.
        output_norm: a norm stands before the vocabulary head.
        has_embed_tokens: the head has embeddings of its own; else it reads the target's table.
        has_lm_head: the head has a vocabulary head of its own; else it uses the target's.
        logit_scale: multiplies the logits.
    """

    layer: LayerConfig
    vocab_size: int
    draft_vocab_size: int
    feature_layers: tuple[FeatureLayer, ...]
    target_hidden_size: int
    num_layers: int = 1
    norm_before_fc: bool = False
    fc_norm: bool = False
    fc_bias: bool = False
    norm_before_residual: bool = False
    output_norm: bool = True
    has_embed_tokens: bool = False
    has_lm_head: bool = True
    logit_scale: float = 1.0
    ties_embeddings: ClassVar[bool] = False
    """The head's table of embeddings is its vocabulary head as well."""

    def __post_init__(self):
        check_fields(self)
        refuse(self._contradictions())

    @property
    def hidden_size(self) -> int:
        """H of the head."""
        return self.layer.hidden_size

    @property
    def feature_width(self) -> int:
        """F: width of all features together."""
        return len(self.feature_layers) * self.target_hidden_size

    @property
    @abstractmethod
    def joins_features(self) -> bool:
        """Features go through an `fc` of their own; else they become hidden states as they are."""

    @property
    def fc_width(self) -> int | None:
        """Width of what `fc` reads; `None` without `fc`."""
        return self.feature_width if self.joins_features else None

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        """Pairs (condition, message) for `refuse`."""
        count, size = self.draft_vocab_size, self.vocab_size
        yield (
            self.norm_before_fc and self.fc_norm,
            "norm_before_fc is one norm over all features, fc_norm one for each; choose one",
        )
        yield self.num_layers < 1, f"num_layers must be >= 1, got {self.num_layers}"
        expected = f"draft_vocab_size must be in 1..vocab_size = {size}"
        yield not 0 < count <= size, f"{expected}, got {count}"
        yield (
            count < size and not self.has_lm_head,
            f"a head of {count} ids cannot use the target's vocabulary head of {size}; "
            "has_lm_head must be True",
        )
