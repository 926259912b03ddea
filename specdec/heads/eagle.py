"""EAGLE-1, 2 and 3 heads: how one is wired (`EagleConfig`), and its weights (`EagleHead`).

Legend: B rows, N tokens of a pass, H width of the head, F width of all features together, V target
vocabulary, Vd ids that the head can propose, D width of an attention head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from specdec.arguments import check_fields
from specdec.heads.config import LayerConfig, refuse, vocabulary_contradictions
from specdec.heads.features import FusingLayer, join_features
from specdec.heads.layers import Attend, DecoderLayer, RMSNorm
from specdec.heads.sharing import apply_lm_head, check_target_ids, over_target_ids
from specdec.target.features import FeatureLayer


@dataclass(frozen=True)
class EagleConfig:
    """Sizes and flags of a head. No field depends on the training library; loaders convert.

    Args:
        fusion: `"input"`: embedding and feature go through `fc` together, before the first layer
            (EAGLE-1, EAGLE-2). `"attention"`: `fc` joins the features alone, and the first layer's
            queries, keys and values read embedding and feature side by side (EAGLE-3).
        layer: of every decoder layer.
        vocab_size: V of the target.
        draft_vocab_size: ids that the head can propose; V for all.
        feature_layers: target features, as boundaries (or `"final"`), in the order in which they
            are joined.
        target_hidden_size: width of each feature.
        num_layers: decoder layers; layers after the first are plain ones.
        has_fc: features pass through `fc`; without it the one feature is the hidden state itself.
        fc_bias: `fc` has a bias.
        norm_before_fc: one norm over all features together, before `fc`.
        fc_norm: one norm per feature, before `fc`.
        norm_before_residual: the first layer's residual stream is the normalised hidden state.
        output_norm: a norm stands before the vocabulary head.
        feedback_norm: what feeds the next draft step is the normalised output, not the raw one.
        has_embed_tokens: the head has embeddings of its own; else it reads the target's table.
        has_lm_head: the head has a vocabulary head of its own; else it uses the target's.
        logit_scale: multiplies the logits.

    Raises:
        TypeError: a field of another type.
        ValueError: flags or sizes that contradict each other.

    Example:
        >>> config = EagleConfig("attention", LayerConfig(8, 16, 2, 2, 4), 9, 9, (1, 2, 3), 8)
        >>> config.hidden_size, config.feature_width
        (8, 24)
    """

    fusion: Literal["input", "attention"]
    layer: LayerConfig
    vocab_size: int
    draft_vocab_size: int
    feature_layers: tuple[FeatureLayer, ...]
    target_hidden_size: int
    num_layers: int = 1
    has_fc: bool = True
    fc_bias: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    output_norm: bool = True
    feedback_norm: bool = False
    has_embed_tokens: bool = False
    has_lm_head: bool = True
    logit_scale: float = 1.0

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
    def joins_features(self) -> bool:
        """Features go through an `fc` of their own."""
        return self.fusion == "attention" and self.has_fc

    def _contradictions(self):
        """Pairs (condition, message) for `refuse`."""
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
        yield (
            self.norm_before_fc and self.fc_norm,
            "norm_before_fc is one norm over all features, fc_norm one for each; choose one",
        )
        yield self.num_layers < 1, f"num_layers must be >= 1, got {self.num_layers}"
        yield from vocabulary_contradictions(self)


class EagleHead(nn.Module):
    """The weights of a head, under the names of the public checkpoints.

    Row t of its inputs holds (embedding of token t + 1, feature of position t), sits at rotary
    position t and predicts token t + 2. Every method works on any number of rows and tokens.

    Args:
        config: sizes and flags.
        target_ids: `[Vd]` int64, see `check_target_ids`. A buffer outside the state dict.

    Raises:
        ValueError: ids that cannot be right.

    Example:
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
        super().__init__()
        self.config = config
        width, eps = config.hidden_size, config.layer.rms_norm_eps
        is_fused_in_attention = config.fusion == "attention"
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.feature_width, eps)
        if config.fc_norm:
            norms = (RMSNorm(config.target_hidden_size, eps) for _ in config.feature_layers)
            self.fc_norm = nn.ModuleList(norms)
        if config.has_fc:
            fc_width = config.feature_width + (0 if is_fused_in_attention else width)
            self.fc = nn.Linear(fc_width, width, bias=config.fc_bias)
        if is_fused_in_attention:
            first = FusingLayer(config.layer, norm_before_residual=config.norm_before_residual)
        else:
            first = DecoderLayer(config.layer, 0, has_input_norm=False)
        later = (DecoderLayer(config.layer, i) for i in range(1, config.num_layers))
        self.layers = nn.ModuleList([first, *later])
        if config.output_norm or config.feedback_norm:
            self.norm = RMSNorm(width, eps)
        if config.has_lm_head:
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        if config.has_embed_tokens:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.register_buffer("target_ids", check_target_ids(target_ids, config), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return self.layers[0].mlp.down_proj.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.layers[0].mlp.down_proj.weight.device

    def fuse(self, features: Tensor) -> Tensor:
        """The hidden states that features `[B, N, F]` of the target become, `[B, N, H]`.

        Raises:
            ValueError: features of another width.
        """
        return join_features(self, features)

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

    def logits(self, out: Tensor, lm_head: nn.Module | None = None) -> Tensor:
        """What the outputs of `forward` predict.

        Args:
            out: `[B, N, H]`.
            lm_head: the target's, for a head that has none of its own.

        Returns:
            `[B, N, Vd]`, over the ids that the head can propose.
        """
        config = self.config
        if config.output_norm:
            out = self.norm(out)
        logits = self.lm_head(out) if config.has_lm_head else apply_lm_head(lm_head, out)
        return logits if config.logit_scale == 1 else logits * config.logit_scale

    def over_target_ids(self, logits: Tensor) -> Tensor:
        """Logits `[B, N, Vd]` over the target's vocabulary, `[B, N, V]`."""
        return over_target_ids(logits, self.target_ids, self.config.vocab_size)

    def feedback(self, out: Tensor) -> Tensor:
        """The hidden states `[B, N, H]` of the next pass, where the target's are not known yet."""
        return self.norm(out) if self.config.feedback_norm else out
