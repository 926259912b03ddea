"""LiLiCorr: the best tokens of every row of a block, scored together.

A small transformer reads all S k candidates of a block at once, without a mask. It gives each one a
vector `out` and a vector `in`, of length 1. A token's score after the token before it is their
cosine, times a constant:

    score[s + 1, a, b] = scale * out[s, a] . in[s + 1, b]

The first token's `out` comes from the target's last feature. The probabilities are the softmax of a
row of scores, which holds no term of the parallel logits; ids outside the candidates have none.

Legend: B rows, W paths, S = block_size - 1 positions, k candidates of each, H width of the head, h
width of the transformer, f width of the vectors.

Reference: arXiv:2608.20530 (LiLiCorr); its layout as NVIDIA's Model-Optimizer writes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.arguments import check_number
from specdec.drafters.head.config import refuse
from specdec.drafters.head.layers import RMSNorm
from specdec.drafters.mask_token.correction import (
    Correction,
    CorrectionConfig,
    DraftBlock,
    DraftRow,
    HeadSizes,
    among,
    check_candidates,
)

NUM_FEATURES = 5
"""Of a candidate: its log-probability, its probability, the log-probability's distance from the
best one's, its rank from 0 to 1, and whether it is the best.
"""


@dataclass(frozen=True)
class LiLiCorrConfig(CorrectionConfig):
    """LiLiCorr's: only the best tokens of each row are drafted, by the scores of a transformer over
    all of them.

    The defaults are those of the public recipe, but for its width of 1024.

    Args:
        top_k: k (`lilicorr_candidate_topk`).
        width: h (`lilicorr_hidden_size`); 0 for H, and no `token_proj`.
        num_layers, num_heads, mlp_ratio: of the transformer.
        factor_dim: f.
        vector_eps: least length that a vector is divided by.
        scale: of cosines (`lilicorr_logit_scale`).

    Example:
        >>> lattice = LiLiCorrConfig(4, 8, num_heads=2).build(HeadSizes(16, 9, 9, 6, 1))
        >>> lattice.slot_embedding.shape, lattice.relative_slot_bias.shape
        (torch.Size([1, 1, 5, 1, 8]), torch.Size([2, 11]))

    Reference: arXiv:2608.20530.
    """

    top_k: int = 8
    width: int = 0
    num_layers: int = 2
    num_heads: int = 8
    mlp_ratio: float = 2.0
    factor_dim: int = 1024
    vector_eps: float = 1e-4
    scale: float = 8.0

    def __post_init__(self):
        super().__post_init__()
        for name in ("mlp_ratio", "vector_eps", "scale"):
            check_number(f"LiLiCorrConfig.{name}", getattr(self, name), above=0)

    def build(self, sizes: HeadSizes) -> Correction:
        """New weights; `ValueError` for a head of fewer ids than the target's vocabulary, one
        whose rows do not predict the tokens of their own positions, and an uneven width.
        """
        check_candidates("a lattice", self.top_k, sizes)
        width = self.width or sizes.hidden_size
        is_other = sizes.block_size is None or sizes.first_row != 1
        heads = f"LiLiCorrConfig.num_heads must divide the width {width}, got {self.num_heads}"
        blocks = "a lattice is of blocks with alignment='same-position' and block_size"
        refuse([(is_other, blocks), (width % self.num_heads, heads)])
        return LiLiCorr(self, sizes)


class LiLiCorr(Correction):
    """See `LiLiCorrConfig`."""

    reads_block = True

    def __init__(self, config: LiLiCorrConfig, sizes: HeadSizes):
        super().__init__()
        self.config, outer, width = config, sizes.hidden_size, config.width or sizes.hidden_size
        k, f, heads, eps = config.top_k, config.factor_dim, config.num_heads, sizes.rms_norm_eps
        self.token_proj = nn.Identity() if width == outer else nn.Linear(outer, width)
        self.pass_hidden_proj = nn.Linear(outer, width)
        self.feature_norm = nn.LayerNorm(NUM_FEATURES)
        self.feature_mlp = _MLP(NUM_FEATURES, width, width)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, sizes.block_size - 1, 1, width))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, k, width))
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * sizes.block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        self.context_proj = nn.Linear(outer, width)
        self.layers = nn.ModuleList(_Layer(config, width, eps) for _ in range(config.num_layers))
        self.output_norm, self.anchor_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head, self.in_head = nn.Linear(width, f), nn.Linear(width, f)
        self.anchor_out_head = nn.Linear(width, f)

    def read(self, block: DraftBlock) -> tuple[Tensor, Tensor]:
        """Candidates `[B, S, k]` int64, best first, and the scores `[B, S, k, k]` of each after
        each of the position before; of the first position all rows are alike.
        """
        exact = block.logits.to(torch.promote_types(block.logits.dtype, torch.float32))
        best, ids = exact.topk(self.config.top_k, dim=-1)  # [B, S, k]
        log_probs = best - exact.logsumexp(dim=-1, keepdim=True)  # of the whole vocabulary
        x = self.token_proj(block.embed(ids)) + self.pass_hidden_proj(block.hidden)[:, :, None]
        x = x + self.feature_mlp(self.feature_norm(_features(log_probs).to(x.dtype)))
        x = x + self.slot_embedding[:, 0] + self.rank_embedding[:, 0]  # [B, S, k, h]
        shape, bias = x.shape, self._bias(*ids.shape[1:]).to(x.dtype)
        x = x.flatten(1, 2)
        for layer in self.layers:
            x = layer(x, bias)
        x = self.output_norm(x).view(shape)
        last = self.anchor_norm(self.context_proj(block.feature))  # [B, h]
        spread = last[:, None, None].expand_as(x)
        x = F.silu(self.factor_input_proj(torch.cat([x, spread, x * spread], dim=-1)))
        outs, ins = self._unit(self.out_head(x)), self._unit(self.in_head(x))  # [B, S, k, f]
        first = self._unit(self.anchor_out_head(last))[:, None, None].expand_as(outs[:, :1])
        cosines = torch.cat([first, outs[:, :-1]], dim=1) @ ins.transpose(-1, -2)
        return ids, self.config.scale * cosines.to(exact.dtype)

    def forward(self, at: DraftRow) -> tuple[Tensor, Tensor]:
        """See `Correction`; `-inf` outside the candidates."""
        ids, scores = at.block
        scores = scores[:, at.index]  # [B, k, k]
        # Every token of a path but the first is one of the candidates at its position.
        before = ids[:, max(at.index - 1, 0), None] == at.tokens[..., None]  # [B, W, k]
        chosen = before.long().argmax(dim=-1, keepdim=True)
        scores = scores.gather(1, chosen.expand(-1, -1, scores.shape[-1]))
        return among(ids[:, at.index, None], scores, at), at.state

    def _bias(self, num_slots: int, k: int) -> Tensor:
        """What attention adds to its scores, `[heads, S k, S k]`: by the distance of positions, and
        once more within one.
        """
        slots = torch.arange(num_slots, device=self.same_slot_bias.device).repeat_interleave(
            k, output_size=num_slots * k
        )
        distance = slots[:, None] - slots
        by_distance = self.relative_slot_bias[:, distance + self.relative_slot_bias.shape[1] // 2]
        return by_distance + self.same_slot_bias[:, None, None] * (distance == 0)

    def _unit(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1, eps=self.config.vector_eps)


class _Layer(nn.Module):
    """Attention over all candidates and an MLP, each after a norm."""

    def __init__(self, config: LiLiCorrConfig, width: int, eps: float):
        super().__init__()
        self.attn_norm, self.mlp_norm = RMSNorm(width, eps), RMSNorm(width, eps)
        # Its weights alone: its own forward chooses between kernels on the host.
        self.attn = nn.MultiheadAttention(width, config.num_heads)
        self.mlp = _MLP(width, int(width * config.mlp_ratio), width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """`[B, S k, h]` to the same."""
        attn = self.attn
        joined = F.linear(self.attn_norm(x), attn.in_proj_weight, attn.in_proj_bias)
        qkv = joined.unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(*qkv, attn_mask=bias[None])  # [B, heads, S k, h/heads]
        x = x + attn.out_proj(out.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.mlp_norm(x))


class _MLP(nn.Module):
    def __init__(self, width: int, inner: int, out: int):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, inner), nn.Linear(inner, out)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., width]` to `[..., out]`."""
        return self.down_proj(F.silu(self.up_proj(x)))


def _features(log_probs: Tensor) -> Tensor:
    """`[B, S, k]` of candidates in order to `[B, S, k, 5]`; see `NUM_FEATURES`."""
    ranks = torch.arange(log_probs.shape[-1], device=log_probs.device)
    share = ranks.to(log_probs.dtype) / max(log_probs.shape[-1] - 1, 1)
    said = log_probs, log_probs.exp(), log_probs - log_probs[..., :1], share, ranks == 0
    return torch.stack([x.expand_as(log_probs).to(log_probs.dtype) for x in said], dim=-1)
