"""New mask-token heads and their objective: P-EAGLE's rollouts of masks from random anchors.

Row t of a text holds (embedding of token t + 1, feature of position t) and predicts token t + 2. A
rollout from anchor a adds rows of depth 1, 2, ... at positions a + 1, a + 2, ..., of masks, which
predict tokens a + 3, a + 4, ...: what a draft after token a + 1 will be. Corrections inside the
block are trained with the text's tokens as those that were chosen before.

Legend: B rows, T tokens, R positions of a row that are trained, A anchors of a row, M depths, F
width of all features together, H width of the head, V vocabulary, Vd ids of the head, D width of
an attention head, S width of a correction's state, n rows of any kind.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.arguments import check_integer, check_number
from specdec.drafters.head.causal import attend_causally
from specdec.drafters.mask_token.correction import (
    CorrectionConfig,
    DominoConfig,
    DraftRow,
    MarkovConfig,
)
from specdec.drafters.mask_token.drafter import MaskTokenDrafter
from specdec.drafters.mask_token.head import Alignment, MaskTokenConfig, MaskTokenHead
from specdec.lab.training.divergences import Loss, soft_ce
from specdec.lab.training.heads import drawn_from, layer_like, untrained, usual_hidden_states
from specdec.lab.training.kind import Kind
from specdec.lab.training.losses import CHUNK_ELEMENTS, HeadObjective, in_chunks, losses_of
from specdec.lab.training.step_weights import StepWeights, weights_of
from specdec.lab.training.teacher import SoftLabels


def mask_token_config(
    target: PreTrainedModel,
    *,
    num_layers: int = 2,
    mlp_width: int | None = None,
    mask_token_id: int | None = None,
    draft_vocab_size: int | None = None,
    block: tuple[Alignment, int] | None = None,
) -> MaskTokenConfig:
    """The usual P-EAGLE head for a target: its width, its attention heads, EAGLE-3's features; or a
    head over blocks.

    Args:
        target: an HF causal LM of at least three layers.
        num_layers: decoder layers; the public heads have two to four, since one pass must do what
            K passes of an EAGLE head do.
        mlp_width: of the head's MLP; `None` is the target's own.
        mask_token_id: whose embedding masks have; `None` is the target's id for padding or the end
            of a text, or its last id. Masks differ from tokens by their learned feature.
        draft_vocab_size: ids that the head can propose; `None` for all of the target's.
        block: alignment and rows of the block of a head whose layers read the target's features as
            keys and values: `("same-position", K + 1)` for DFlash's shape, `("next-token", K)` for
            DSpark's, which also has a correction (`with_correction`). `None` for P-EAGLE's.

    Example:
        >>> from specdec.lab import zoo
        >>> config = mask_token_config(zoo.load_target())
        >>> config.alignment, config.feature_layers, config.num_layers
        ('shifted', (2, 8, 13), 2)
        >>> mask_token_config(zoo.load_target(), block=("same-position", 5)).max_draft_tokens
        4
    """
    check_integer("num_layers", num_layers, 1)
    theirs = target.config.get_text_config()
    layer = layer_like(target, mlp_width=mlp_width)
    wiring: dict[str, Any] = {"alignment": "shifted", "context": "input"}
    if block is not None:
        alignment, size = block
        wiring = {"alignment": alignment, "context": "keys", "block_size": size, "is_causal": False}
        layer = replace(layer, has_qk_norm=True)  # as engines run such heads
    return MaskTokenConfig(
        **wiring,
        layer=layer,
        vocab_size=theirs.vocab_size,
        draft_vocab_size=draft_vocab_size or theirs.vocab_size,
        feature_layers=usual_hidden_states(target),
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
    correction: CorrectionConfig | None = None,
    block: tuple[Alignment, int] | None = None,
    seed: int = 0,
) -> MaskTokenHead:
    """An untrained head in float32, on the CPU, whose `lm_head` has the target's rows.

    Args:
        target, num_layers, mlp_width, mask_token_id, block: as for `mask_token_config`.
        target_ids: `[Vd]` int64, the target's ids that the head can propose (`frequent_ids`);
            `None` for all.
        correction: as for `with_correction`.
        seed: the weights depend on it alone.

    Example:
        >>> from specdec.lab import zoo
        >>> target = zoo.load_target()
        >>> drafter = MaskTokenDrafter(new_head(target), target, num_draft_tokens=6)
    """
    sizes = {"num_layers": num_layers, "mlp_width": mlp_width, "mask_token_id": mask_token_id}
    count = None if target_ids is None else len(target_ids)
    config = mask_token_config(target, **sizes, draft_vocab_size=count, block=block)
    head = untrained(lambda: MaskTokenHead(config, target_ids), target, seed=seed)
    if block is None:
        head.mask_hidden.data.normal_(generator=torch.Generator().manual_seed(seed))
    return with_correction(head, correction, seed=seed)


def with_correction(
    head: MaskTokenHead, correction: CorrectionConfig | None, *, seed: int = 0
) -> MaskTokenHead:
    """A head with the weights of another and a new correction, which changes no logits yet.

    Args:
        head: trained or not, on the CPU; it is left as it was.
        correction: a `MarkovConfig` or a `DominoConfig`; `None` for the plain head.
        seed: the new weights depend on it alone.

    Example:
        >>> from specdec.lab import zoo
        >>> from specdec.drafters.mask_token.correction import MarkovConfig
        >>> head = with_correction(new_head(zoo.load_target()), MarkovConfig(rank=32))
        >>> head.requires_grad_(False).correction.requires_grad_(True)  # it alone will be trained
        Markov(
          (markov_w1): Embedding(2048, 32)
          (markov_w2): Linear(in_features=32, out_features=2048, bias=False)
        )
    """
    _check_correction(correction)
    with drawn_from(seed):
        new = MaskTokenHead(replace(head.config, correction=correction), head.target_ids)
    kept = {k: each for k, each in head.state_dict().items() if not k.startswith("correction.")}
    new.load_state_dict(kept, strict=False)
    if correction is not None:
        is_domino, part = isinstance(correction, DominoConfig), new.correction
        nn.init.zeros_((part.embed_proj[-1] if is_domino else part.markov_w2).weight)
    return new


def _check_correction(correction: CorrectionConfig | None) -> None:
    if not isinstance(correction, MarkovConfig | DominoConfig | None):
        raise ValueError(
            "rollouts of masks train a MarkovConfig or a DominoConfig as correction, got "
            f"{type(correction).__name__}"
        )


class RolloutObjective(HeadObjective):
    """What rollouts after random anchors have in common: which heads they train, the anchors, and
    losses of corrected logits.

    Args:
        drafter, target, loss: as for `HeadObjective`; of one of `alignments`, without sliding
            windows.
        num_depths: M, the largest K that the head is to draft.
        anchor_share: A, as a share of the positions of a row. Anchors are drawn from torch's global
            generator, without replacement.
        depth_weight: the weight of a depth, as a multiple of that of the one before; or a
            `StepWeights`, of drafts after anchors.
        rolled_out: for a head with a correction, which sees the text's tokens as those that were
            chosen before. Each depth's mean is then over drafts of the head's own instead: of these
            the ones that agree with the text so far have a label, and a row of the rollout weighs
            their probability.
    """

    alignments: tuple[str, ...] = ()

    def __init__(
        self,
        drafter: MaskTokenDrafter,
        target: PreTrainedModel,
        num_depths: int,
        anchor_share: float,
        depth_weight: float | StepWeights,
        rolled_out: bool,
        loss: Loss,
    ):
        super().__init__(drafter, target, loss)
        name, alignment, layer = type(self).__name__, drafter.config.alignment, drafter.config.layer
        if alignment not in self.alignments:
            others = " or ".join(map(repr, self.alignments))
            raise ValueError(f"{name} trains heads of alignment {others}, got {alignment!r}")
        for option in ("windows", "has_sinks", "convolution"):
            if getattr(layer, option):
                raise ValueError(
                    f"{name} trains layers that see all of the text, got {option}="
                    f"{getattr(layer, option)}"
                )
        self.is_corrected, self.rolled_out = drafter.config.correction is not None, rolled_out
        _check_correction(drafter.config.correction)
        if rolled_out and not self.is_corrected:
            raise ValueError("rolled_out weighs what a correction reads; the head has none")
        self.num_depths = check_integer("num_depths", num_depths, 1)
        self.anchor_share = check_number("anchor_share", anchor_share, None, 1, above=0)
        self.step_weights = weights_of(depth_weight, "depth_weight")

    def _corrected(
        self, index: int, out: Tensor, before: Tensor, after: Tensor, state: Tensor, due: SoftLabels
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Of outputs `[B, N, H]` for draft token `index`, with the tokens before and after it
        `[B, N]` and states `[B, N, S]`: log-probabilities of the tokens after `[B, N]`, without
        gradients, states, and the losses `[B, N]`.
        """
        drafter, head = self.drafter, self.drafter.head
        losses = self.step_weights.beside(self.loss)

        def of_rows(out, before, after, state, *label):
            hidden = head.normed(out)
            logits = head.unembed(hidden, drafter.borrowed.lm_head)
            at = DraftRow(index, logits, hidden, before, state, drafter.embed)
            logits, state = head.correction(at)
            log_q, log_p = logits.float().log_softmax(dim=-1), SoftLabels(*label).log_probs()
            wide = head.over_target_ids(log_q.detach())
            log_prob = wide.gather(-1, after[:, None])[:, 0]
            return log_prob, state, *(loss(log_q, log_p) for loss in losses)

        rows = [tensor.flatten(0, 1) for tensor in (out, before, after, state, *due)]
        chunk = max(1, CHUNK_ELEMENTS // due.logits.shape[-1])
        found = in_chunks(of_rows, (*rows,), chunk)
        log_prob, state, *rows = (each.unflatten(0, out.shape[:2]) for each in found)
        return log_prob, state, rows

    def draw_anchors(self, ids: Tensor) -> Tensor:
        """Anchors `[B, A]` of ids `[B, T + 1]`, ascending; every depth of each has a label."""
        count = ids.shape[1] - self.num_depths  # positions 0 to T - M
        num_anchors = max(1, round(self.anchor_share * count))
        order = torch.rand(len(ids), count, dtype=torch.float32, device=ids.device)
        order = order.argsort(dim=1)
        return order[:, :num_anchors].sort(dim=1).values


class MaskRollouts(RolloutObjective):
    """Rolls masks out after random anchors, as drafting will, and compares the distribution of
    every depth with the target's.

    Depth 0 are the rows of the text itself, all of which are trained. Each depth m >= 1 has a row
    per anchor, which sees the text's rows up to its anchor and the shallower rows of its own
    rollout.

    Args:
        drafter, target, num_depths, anchor_share, depth_weight, rolled_out, loss: as for
            `RolloutObjective`, of alignment `"shifted"`. Rows of the text that are no anchors weigh
            the mean of those that are.

    Example:
        >>> from specdec.lab import zoo
        >>> target = zoo.load_target()
        >>> drafter = MaskTokenDrafter(new_head(target), target)
        >>> MaskRollouts(drafter, target)(torch.zeros(2, 33, dtype=torch.long)).shape
        torch.Size([])

    Reference: Hui et al., arXiv:2602.01469 (P-EAGLE).
    """

    alignments = ("shifted",)

    def __init__(
        self,
        drafter: MaskTokenDrafter,
        target: PreTrainedModel,
        num_depths: int = 8,
        anchor_share: float = 0.25,
        depth_weight: float | StepWeights = 0.9,
        rolled_out: bool = False,
        loss: Loss = soft_ce,
    ):
        super().__init__(drafter, target, num_depths, anchor_share, depth_weight, rolled_out, loss)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss per prediction of ids `[B, T + 1]`, averaged by the weights of the depths."""
        labels, features = self.read(ids, self.num_depths, "depths")
        anchors = self.draw_anchors(ids)
        outs = self.roll_out(ids, features, anchors)
        kind = self._corrected_losses if self.is_corrected else self._losses
        (first, *losses), (measured, *others), shares = zip(
            *kind(ids, anchors, outs, labels), strict=True
        )
        at_anchors = torch.stack([measured.gather(1, anchors), *others]).detach()
        weights = self.step_weights(at_anchors)
        of_text = weights[0].mean().expand_as(first).scatter(1, anchors, weights[0])
        total = (of_text * first).mean()
        for weight, loss, share in zip(weights[1:], losses, shares[1:], strict=True):
            tiny = torch.finfo(share.dtype).tiny
            total = total + (weight * share * loss).sum() / share.sum().clamp(min=tiny)
        return total

    def _losses(
        self, ids: Tensor, anchors: Tensor, outs: list[Tensor], labels: SoftLabels
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Of every depth the losses, what its weights depend on, and the shares of its rows in its
        mean.
        """
        for depth, out in enumerate(outs):
            due = labels.gather(anchors + depth + 1) if depth else labels.at(1, out.shape[1])
            found = losses_of(out, self.drafter.logits, due, *self.step_weights.beside(self.loss))
            yield found[0], found[-1], torch.ones_like(found[0])

    def _corrected_losses(
        self, ids: Tensor, anchors: Tensor, outs: list[Tensor], labels: SoftLabels
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """As `_losses`, of corrected logits."""
        text, *rollouts = outs
        padded = F.pad(ids, (0, 1))  # so that every row has a token to predict
        tokens, due = (ids[:, 1:], padded[:, 2:]), labels.at(1, text.shape[1])
        state = self.drafter.head.correction.begin(text, ids[:, :2]).expand(-1, text.shape[1], -1)
        *others, found = self._corrected(0, text, *tokens, state, due)
        yield found[0], found[-1], torch.ones_like(found[0])
        rows = torch.arange(len(ids), device=ids.device)[:, None]
        log_prob, state = (each[rows, anchors] for each in others)
        log_share = torch.zeros_like(log_prob)
        for depth, out in enumerate(rollouts, start=1):
            if self.rolled_out:
                log_share = log_share + log_prob
            at = anchors + depth + 1
            tokens, due = (padded.gather(1, at), padded.gather(1, at + 1)), labels.gather(at)
            log_prob, state, found = self._corrected(depth, out, *tokens, state, due)
            yield found[0], found[-1], log_share.exp()

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


def _new(
    target: PreTrainedModel,
    k: int,
    *,
    depths: int = 8,
    layers: int = 2,
    mlp_width: int | None = None,
    target_ids: Tensor | None = None,
    seed: int = 0,
    **losses: Any,
):
    sizes = {"mlp_width": mlp_width, "target_ids": target_ids, "seed": seed}
    drafter = MaskTokenDrafter(new_head(target, num_layers=layers, **sizes), target, k)
    return drafter, MaskRollouts(drafter, target, depths, **losses)


OPTIONS = "draft_vocab_size", "depths", "mlp_width", "layers", "loss", "step_weights"
"""Of heads that draft all tokens in one pass."""
SERVED = {"method": "eagle3", "parallel_drafting": True}
KINDS = {"mask-token": Kind(_new, "mask-token", SERVED, OPTIONS, weights="depth_weight")}
