"""New mask-token heads and their objective: P-EAGLE's rollouts of masks from random anchors.

Row t of a text holds (embedding of token t + 1, feature of position t) and predicts token t + 2. A
rollout from anchor a adds rows of depth 1, 2, ... at positions a + 1, a + 2, ..., of masks, which
predict tokens a + 3, a + 4, ...: what a draft after token a + 1 will be.

Legend: B rows, T tokens, R positions of a row that are trained, A anchors of a row, M depths, F
width of all features together, H width of the head, V vocabulary, Vd ids of the head, D width of
an attention head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor
from transformers import PreTrainedModel

from specdec.arguments import check_integer, check_number
from specdec.drafters.mask_token import MaskTokenDrafter
from specdec.heads.layers import attend_causally
from specdec.heads.mask_token import MaskTokenConfig, MaskTokenHead
from specdec.training.heads import layer_like, untrained, usual_boundaries
from specdec.training.losses import check_row_length, decayed_mean, soft_cross_entropy_of
from specdec.training.teacher import HeadObjective, SoftLabels


def mask_token_config(
    target: PreTrainedModel,
    *,
    num_layers: int = 2,
    mlp_width: int | None = None,
    mask_token_id: int | None = None,
    draft_vocab_size: int | None = None,
) -> MaskTokenConfig:
    """The usual P-EAGLE head for a target: its width, its attention heads, EAGLE-3's features.

    Args:
        target: an HF causal LM of at least three layers.
        num_layers: decoder layers; the public heads have two to four, since one pass must do what
            K passes of an EAGLE head do.
        mlp_width: of the head's MLP; `None` is the target's own.
        mask_token_id: whose embedding masks have; `None` is the target's id for padding or the end
            of a text, or its last id. Masks differ from tokens by their learned feature.
        draft_vocab_size: ids that the head can propose; `None` for all of the target's.

    Example:
        >>> from specdec import zoo
        >>> config = mask_token_config(zoo.load_target())
        >>> config.alignment, config.feature_layers, config.num_layers
        ('shifted', (2, 8, 13), 2)
    """
    check_integer("num_layers", num_layers, 1)
    theirs = target.config.get_text_config()
    return MaskTokenConfig(
        alignment="shifted",
        context="input",
        layer=layer_like(target, mlp_width=mlp_width),
        vocab_size=theirs.vocab_size,
        draft_vocab_size=draft_vocab_size or theirs.vocab_size,
        feature_layers=usual_boundaries(target),
        target_hidden_size=theirs.hidden_size,
        num_layers=num_layers,
        mask_token_id=_mask_token(theirs) if mask_token_id is None else mask_token_id,
    )


def _mask_token(config) -> int:
    for name in ("pad_token_id", "eos_token_id"):
        token = getattr(config, name, None)
        token = token[0] if isinstance(token, list) and token else token
        if isinstance(token, int) and 0 <= token < config.vocab_size:
            return token
    return config.vocab_size - 1


def new_head(
    target: PreTrainedModel,
    *,
    num_layers: int = 2,
    mlp_width: int | None = None,
    mask_token_id: int | None = None,
    target_ids: Tensor | None = None,
    seed: int = 0,
) -> MaskTokenHead:
    """An untrained head in float32, on the CPU, whose `lm_head` has the target's rows.

    Args:
        target, num_layers, mlp_width, mask_token_id: as for `mask_token_config`.
        target_ids: `[Vd]` int64, the target's ids that the head can propose (`frequent_ids`);
            `None` for all.
        seed: the weights depend on it alone.

    Example:
        >>> from specdec import zoo
        >>> target = zoo.load_target()
        >>> drafter = MaskTokenDrafter(new_head(target), target, num_draft_tokens=6)
    """
    sizes = {"num_layers": num_layers, "mlp_width": mlp_width, "mask_token_id": mask_token_id}
    count = None if target_ids is None else len(target_ids)
    config = mask_token_config(target, **sizes, draft_vocab_size=count)
    head = untrained(lambda: MaskTokenHead(config, target_ids), target, seed=seed)
    head.mask_hidden.data.normal_(generator=torch.Generator().manual_seed(seed))
    return head


class MaskRollouts(HeadObjective):
    """Rolls masks out after random anchors, as drafting will, and compares the distribution of
    every depth with the target's.

    Depth 0 are the rows of the text itself, all of which are trained. Each depth m >= 1 has a row
    per anchor, which sees the text's rows up to its anchor and the shallower rows of its own
    rollout.

    Args:
        drafter: whose head is to be trained; of alignment `"shifted"`.
        target: the teacher, and the drafter's target; frozen.
        num_depths: M, the largest K that the head is to draft.
        anchor_share: A, as a share of the positions of a row. Anchors are drawn from torch's global
            generator, without replacement.
        depth_weight: the weight of a depth, as a multiple of that of the one before.

    Example:
        >>> from specdec import zoo
        >>> target = zoo.load_target()
        >>> drafter = MaskTokenDrafter(new_head(target), target)
        >>> MaskRollouts(drafter, target)(torch.zeros(2, 33, dtype=torch.long)).shape
        torch.Size([])

    Reference: Hui et al., arXiv:2602.01469 (P-EAGLE).
    """

    def __init__(
        self,
        drafter: MaskTokenDrafter,
        target: PreTrainedModel,
        num_depths: int = 8,
        anchor_share: float = 0.25,
        depth_weight: float = 0.9,
    ):
        super().__init__(drafter, target)
        alignment = drafter.config.alignment
        if alignment != "shifted":
            raise ValueError(
                f"rollouts of masks train heads of alignment 'shifted' (P-EAGLE), got {alignment!r}"
            )
        self.num_depths = check_integer("num_depths", num_depths, 1)
        self.anchor_share = check_number("anchor_share", anchor_share, None, 1, above=0)
        self.depth_weight = check_number("depth_weight", depth_weight, 0)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean nats per prediction of ids `[B, T + 1]`, averaged by the weights of the depths."""
        check_row_length(ids, self.num_depths, "depths")
        labels, features = self._teacher.labels(ids, self.drafter.head.target_ids)
        anchors = self.draw_anchors(ids)
        return decayed_mean(self._losses(ids, features, anchors, labels), self.depth_weight)

    def _losses(
        self, ids: Tensor, features: Tensor, anchors: Tensor, labels: SoftLabels
    ) -> Iterator[Tensor]:
        """Of every depth."""
        text, *rollouts = self.roll_out(ids, features, anchors)
        yield soft_cross_entropy_of(text, self.drafter.logits, labels.at(1, text.shape[1]))
        for depth, out in enumerate(rollouts, start=1):
            due = labels.gather(anchors + depth + 1)
            yield soft_cross_entropy_of(out, self.drafter.logits, due)

    def draw_anchors(self, ids: Tensor) -> Tensor:
        """Anchors `[B, A]` of ids `[B, T + 1]`, ascending; every depth of each has a label."""
        count = ids.shape[1] - self.num_depths  # positions 0 to T - M
        num_anchors = max(1, round(self.anchor_share * count))
        order = torch.rand(len(ids), count, device=ids.device).argsort(dim=1)
        return order[:, :num_anchors].sort(dim=1).values

    def roll_out(self, ids: Tensor, features: Tensor, anchors: Tensor) -> list[Tensor]:
        """The head's outputs of every depth.

        Args:
            ids: `[B, T + 1]`.
            features: `[B, T + 1, F]`, the target's.
            anchors: `[B, A]` int64, positions in 0..T - 1.

        Returns:
            For `drafter.logits`: `[B, T, H]` of the text's rows, where row t predicts token t + 2;
            then for each depth m = 1..M - 1 `[B, A, H]`, which predict token anchor + m + 2.
        """
        drafter, head, depths = self.drafter, self.drafter.head, self.num_depths - 1
        count, num_anchors = ids.shape[1] - 1, anchors.shape[1]
        num_masks = num_anchors * depths
        masks = ids.new_full((len(ids), num_masks), head.config.mask_token_id or 0)
        tokens = torch.cat([ids[:, 1:], masks], dim=1)  # [B, T + A (M - 1)]
        embeds = head.with_masks(drafter.embed(tokens), count)
        hidden = head.hidden_states(features[:, :-1], num_masks)
        depth = torch.arange(1, depths + 1, device=ids.device)
        masks_at = rearrange(anchors[..., None] + depth, "b a m -> b (a m)")
        text_at = torch.arange(count, device=ids.device).expand(len(ids), -1)
        angles = F.embedding(torch.cat([text_at, masks_at], 1), self.angles(count + depths)[0, 0])
        attend = RolloutAttention(anchors, count, depths)
        out = head(embeds, hidden, angles[:, None], attend)
        rolled = rearrange(out[:, count:], "b (a m) h -> m b a h", a=num_anchors)
        return [out[:, :count], *rolled]


class RolloutAttention:
    """Attention of a text's rows and of rollouts after it: an `Attend` function.

    Rows of the text see what precedes them. A row of a rollout sees the text up to its anchor, and
    the rows of its own rollout up to itself.

    Args:
        anchors: `[B, A]`.
        num_text: rows of the text; the others are rollouts, anchor by anchor.
        num_depths: rows of each rollout.
    """

    def __init__(self, anchors: Tensor, num_text: int, num_depths: int):
        self.num_text = num_text
        owner = anchors.repeat_interleave(num_depths, dim=1)  # [B, A M], each row's anchor
        rollout = torch.arange(anchors.shape[1], device=anchors.device)
        rollout = rollout.repeat_interleave(num_depths)  # [A M]
        index = torch.arange(len(rollout), device=anchors.device)
        sees_text = torch.arange(num_text, device=anchors.device) <= owner[..., None]
        sees_own = (rollout[:, None] == rollout) & (index <= index[:, None])
        sees = torch.cat([sees_text, sees_own.expand(len(anchors), -1, -1)], dim=2)
        self.sees = sees[:, None]  # [B, 1, A M, T + A M]

    def __call__(self, index: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`[B, Hq, T + A M, D]`."""
        count = self.num_text
        text = attend_causally(index, *(x[:, :, :count] for x in (query, key, value)))
        if query.shape[2] == count:
            return text
        options = {"attn_mask": self.sees, "enable_gqa": query.shape[1] != key.shape[1]}
        rolled = F.scaled_dot_product_attention(query[:, :, count:], key, value, **options)
        return torch.cat([text, rolled], dim=2)
