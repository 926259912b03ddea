"""`EagleHead`: the weights of EAGLE-1, 2 and 3 heads, and what they compute.

Legend: B rows, N tokens of a pass, H width of the head, F width of all features together, V target
vocabulary, Vd ids that the head can propose, D width of an attention head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.drafters.eagle_config import EagleConfig
from specdec.drafters.layers import Attend, DecoderLayer, FusingLayer, RMSNorm


class EagleHead(nn.Module):
    """The weights of a head, under the names of the public checkpoints.

    Row t of its inputs holds (embedding of token t + 1, feature of position t), sits at rotary
    position t and predicts token t + 2. Every method works on any number of rows and tokens.

    Args:
        config: sizes and flags.
        target_ids: `[Vd]` int64, the target's id of each id that the head can propose (absolute
            ids, not the offsets `d2t` of checkpoint files); `None` when they are the same. A buffer
            outside the state dict.

    Raises:
        ValueError: ids that are missing, of another number than Vd, beyond V, or not distinct.

    Example:
        >>> from specdec.drafters import EagleConfig
        >>> config = EagleConfig("attention", 8, 16, 1, 2, 2, 4, 9, 9, (1, 2, 3), 8)
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
        width, eps = config.hidden_size, config.rms_norm_eps
        is_fused_in_attention = config.fusion == "attention"
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.feature_width, eps)
        if config.fc_norm:
            norms = (RMSNorm(config.target_hidden_size, eps) for _ in config.feature_layers)
            self.fc_norm = nn.ModuleList(norms)
        if config.has_fc:
            fc_width = config.feature_width + (0 if is_fused_in_attention else width)
            self.fc = nn.Linear(fc_width, width, bias=config.fc_bias)
        first = DecoderLayer(config, 0, has_input_norm=False)
        if is_fused_in_attention:
            first = FusingLayer(config)
        later = (DecoderLayer(config, i) for i in range(1, config.num_layers))
        self.layers = nn.ModuleList([first, *later])
        if config.output_norm or config.feedback_norm:
            self.norm = RMSNorm(width, eps)
        if config.has_lm_head:
            self.lm_head = nn.Linear(width, config.draft_vocab_size, bias=False)
        if config.has_embed_tokens:
            self.embed_tokens = nn.Embedding(config.vocab_size, width)
        _check_ids(target_ids, config)
        self.register_buffer("target_ids", target_ids, persistent=False)

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
        config = self.config
        if features.shape[-1] != config.feature_width:
            raise ValueError(
                f"the head reads {len(config.feature_layers)} features of width "
                f"{config.target_hidden_size}, {config.feature_width} in all, and the target's are "
                f"{features.shape[-1]} wide; it was made for another target"
            )
        features = features.to(self.dtype)
        if config.norm_before_fc:
            features = self.input_norm(features)
        if config.fc_norm:
            pieces = features.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(piece) for norm, piece in zip(self.fc_norm, pieces, strict=True)]
            features = torch.cat(normed, dim=-1)
        if config.fusion == "attention" and config.has_fc:
            return self.fc(features)
        return features

    def forward(self, embeds: Tensor, hidden: Tensor, angles: Tensor, attend: Attend) -> Tensor:
        """One pass.

        Args:
            embeds: `[B, N, H]`, of the tokens behind the positions of `hidden`.
            hidden: `[B, N, H]`, from `fuse`, or from `feedback` of the pass before.
            angles: `[B, N, 1, 2 D]`, rows of `rotary_table` at the positions of `hidden`.
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
        if config.has_lm_head:
            logits = self.lm_head(out)
        else:
            weight = lm_head.weight  # a quantised one takes any float
            logits = lm_head(out.to(weight.dtype) if weight.is_floating_point() else out)
        return logits if config.logit_scale == 1 else logits * config.logit_scale

    def over_target_ids(self, logits: Tensor) -> Tensor:
        """Logits `[B, N, Vd]` over the target's vocabulary `[B, N, V]`; ids that the head cannot
        propose are impossible.
        """
        if self.target_ids is None:
            return logits
        wide = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return wide.index_copy(-1, self.target_ids, logits)

    def feedback(self, out: Tensor) -> Tensor:
        """The hidden states `[B, N, H]` of the next pass, where the target's are not known yet."""
        return self.norm(out) if self.config.feedback_norm else out


def _check_ids(target_ids: Tensor | None, config: EagleConfig) -> None:
    count, vocab = config.draft_vocab_size, config.vocab_size
    if target_ids is None:
        if count != vocab:
            raise ValueError(
                f"a head of {count} ids for a target of {vocab} needs target_ids, the target's id "
                "of each"
            )
        return
    if target_ids.shape != (count,) or target_ids.dtype != torch.long:
        raise ValueError(
            f"target_ids must be {count} int64 ids (draft_vocab_size), got shape "
            f"{list(target_ids.shape)} of {target_ids.dtype}"
        )
    low, high, distinct = target_ids.min(), target_ids.max(), target_ids.unique().numel()
    if low < 0 or high >= vocab or distinct != count:
        raise ValueError(
            f"target_ids must be distinct ids in 0..{vocab - 1}, got {distinct} distinct ones in "
            f"{int(low)}..{int(high)}; checkpoints store offsets, id minus index"
        )
