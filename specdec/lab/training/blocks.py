"""Training heads over blocks: DFlash's and DSpark's shapes.

Legend: B rows, T + 1 tokens of a row, A anchors of a row, R rows of a block, M draft tokens of it,
F width of the target's features, H width of the head.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from specdec.drafters.mask_token.correction import CorrectionConfig, MarkovConfig
from specdec.drafters.mask_token.drafter import MaskTokenDrafter
from specdec.drafters.mask_token.head import Alignment
from specdec.lab.training.divergences import Loss, soft_ce
from specdec.lab.training.kind import Kind
from specdec.lab.training.losses import losses_of
from specdec.lab.training.mask_token import OPTIONS, RolloutObjective, new_head
from specdec.lab.training.step_weights import StepWeights
from specdec.lab.training.teacher import SoftLabels


class BlockRollouts(RolloutObjective):
    """Drafts a block after random anchors, as drafting will, and compares the distribution of every
    draft token with the target's.

    A block is the token of its anchor and masks. Its rows see the target's features of what
    precedes the anchor, and each other. So a head learns from its blocks alone, in one pass for all
    of a text.

    Args:
        drafter, target, anchor_share, depth_weight, rolled_out, loss: as for `RolloutObjective`, of
            alignment `"same-position"` or `"next-token"`.
        num_depths: M; `None` for as many as the head's block predicts.

    Example:
        >>> from specdec.lab import zoo
        >>> from specdec.lab.training.mask_token import new_head
        >>> target = zoo.load_target()
        >>> drafter = MaskTokenDrafter(new_head(target, block=("same-position", 5)), target, 4)
        >>> BlockRollouts(drafter, target)(torch.zeros(2, 33, dtype=torch.long)).shape
        torch.Size([])

    Reference: Chen et al., arXiv:2602.06036 (DFlash), section 4, whose weights of depths decay
    likewise.
    """

    alignments = ("same-position", "next-token")

    def __init__(
        self,
        drafter: MaskTokenDrafter,
        target: PreTrainedModel,
        num_depths: int | None = None,
        anchor_share: float = 0.125,
        depth_weight: float | StepWeights = 0.9,
        rolled_out: bool = False,
        loss: Loss = soft_ce,
    ):
        depths = num_depths or drafter.config.max_draft_tokens or drafter.num_draft_tokens
        super().__init__(drafter, target, depths, anchor_share, depth_weight, rolled_out, loss)
        most = drafter.config.max_draft_tokens
        if most is not None and self.num_depths > most:
            raise ValueError(f"the head's block predicts {most} tokens, got num_depths={depths}")

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss per draft token of ids `[B, T + 1]`, averaged by the weights of the depths."""
        labels, features = self.read(ids, self.num_depths, "depths")
        last = self.draw_anchors(ids) + 1  # before the first token there is nothing to read
        found, measured, shares = zip(*self._losses(ids, features, last, labels), strict=True)
        weights = self.step_weights(torch.stack(measured).detach())
        total = found[0].new_zeros(())
        for weight, loss, share in zip(weights, found, shares, strict=True):
            tiny = torch.finfo(share.dtype).tiny
            total = total + (weight * share * loss).sum() / share.sum().clamp(min=tiny)
        return total

    def _losses(
        self, ids: Tensor, features: Tensor, last: Tensor, labels: SoftLabels
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of every depth the losses, what its weights depend on, and the shares of its rows in its
        mean, `[B, A]` each.
        """
        head, losses = self.drafter.head, self.step_weights.beside(self.loss)
        blocks = self.roll_out(ids, features, last)
        outs = blocks[:, :, head.config.rows.first_row :].unbind(dim=2)
        log_share = torch.zeros(last.shape, dtype=torch.float32, device=ids.device)
        if self.is_corrected:
            known = torch.stack([ids.gather(1, last - 1), ids.gather(1, last)], dim=-1)
            state = head.correction.begin(head.normed(blocks).flatten(0, 1), known.flatten(0, 1))
            state = state[:, 0].unflatten(0, last.shape)
        padded = F.pad(ids, (0, 1))  # so that every row has a token to predict
        for depth, out in zip(range(self.num_depths), outs, strict=False):
            at = last + depth
            due = labels.gather(at)
            if not self.is_corrected:
                found = losses_of(out, self.drafter.logits, due, *losses)
                yield found[0], found[-1], torch.ones_like(found[0])
                continue
            tokens = padded.gather(1, at), padded.gather(1, at + 1)
            log_prob, state, found = self._corrected(depth, out, *tokens, state, due)
            yield found[0], found[-1], log_share.exp()
            if self.rolled_out:
                log_share = log_share + log_prob

    def roll_out(self, ids: Tensor, features: Tensor, last: Tensor) -> Tensor:
        """The head's outputs of the blocks.

        Args:
            ids: `[B, T + 1]`.
            features: `[B, T + 1, F]`, the target's.
            last: `[B, A]` int64, positions of the last known token, in 1..T.

        Returns:
            `[B, A, R, H]`, for `drafter.logits`.
        """
        drafter, head = self.drafter, self.drafter.head
        config, count = head.config, ids.shape[1] - 1
        size = config.num_later(self.num_depths)
        masks = ids.new_full((*last.shape, size - 1), config.mask_token_id or 0)
        tokens = torch.cat([ids.gather(1, last)[..., None], masks], dim=-1)  # [B, A, R]
        embeds = head.with_masks(drafter.embed(tokens.flatten(0, 1)), 1)  # [B A, R, H]
        embeds = embeds.unflatten(0, last.shape).flatten(1, 2)
        rows_at = (last[..., None] + torch.arange(size, device=ids.device)).flatten(1)
        text_at = torch.arange(count, device=ids.device).expand(len(ids), -1)
        angles = F.embedding(torch.cat([text_at, rows_at], 1), self.angles(count + size)[0, 0])
        attend = BlockAttention(last, count, size, is_causal=config.is_causal)
        out = head(embeds, head.hidden_states(features[:, :-1]), angles[:, None], attend)
        return out.unflatten(1, (last.shape[1], size))


class BlockAttention:
    """Attention of blocks to a text's features and to themselves: an `Attend` function.

    Args:
        last: `[B, A]`, positions of the blocks' first tokens; features before them are seen.
        num_text: rows of features; the others are blocks, one after the other.
        size: rows of a block.
        is_causal: of a block, rows see themselves and what precedes them; else all of it.
    """

    def __init__(self, last: Tensor, num_text: int, size: int, *, is_causal: bool):
        device, count = last.device, last.shape[1]
        owner = last.repeat_interleave(size, dim=1)[..., None]  # [B, A R, 1]
        sees_text = torch.arange(num_text, device=device) < owner
        index = torch.arange(count * size, device=device)
        sees_own = index[:, None] // size == index // size
        if is_causal:
            sees_own = sees_own & (index <= index[:, None])
        sees = torch.cat([sees_text, sees_own.expand(len(last), -1, -1)], dim=2)
        self.sees = sees[:, None]  # [B, 1, A R, T + A R]

    def __call__(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`[B, Hq, A R, D]`."""
        options = {"attn_mask": self.sees, "enable_gqa": query.shape[1] != key.shape[1]}
        return F.scaled_dot_product_attention(query, key, value, **options)


def _new(
    target: PreTrainedModel,
    k: int,
    *,
    alignment: Alignment,
    correction: CorrectionConfig | None = None,
    depths: int = 8,
    layers: int = 2,
    mlp_width: int | None = None,
    target_ids: Tensor | None = None,
    seed: int = 0,
    **losses: Any,
):
    # At `same-position` the first row of a block is the root, which predicts nothing.
    block = alignment, depths + (alignment == "same-position")
    sizes = {"mlp_width": mlp_width, "target_ids": target_ids, "seed": seed}
    head = new_head(target, num_layers=layers, block=block, correction=correction, **sizes)
    drafter = MaskTokenDrafter(head, target, min(k, depths))
    return drafter, BlockRollouts(drafter, target, **losses)


_DFLASH = partial(_new, alignment="same-position")
_DSPARK = partial(_new, alignment="next-token", correction=MarkovConfig(256))  # the public rank
KINDS = {
    "dflash": Kind(_DFLASH, "mask-token", {"method": "dflash"}, OPTIONS, weights="depth_weight"),
    "dspark": Kind(_DSPARK, "mask-token", {"method": "dspark"}, OPTIONS, weights="depth_weight"),
}
