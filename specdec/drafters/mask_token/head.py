"""Mask-token heads: how one is wired (`MaskTokenConfig`), and its weights (`MaskTokenHead`).

One pass over the last known token and masks after it predicts all draft tokens. Public families
differ in five ways, each an argument of `MaskTokenConfig`: which token a row predicts
(`alignment`), how the head gets the target's features (`context`), what stands for a token that is
not known yet (`mask_token_id`), whether rows of a window see the rows after them (`is_causal`), and
what tokens chosen earlier in a draft change in the logits of later ones (`correction`).

Legend: B rows, R committed rows of a pass, M rows after them, H width of the head, F width of all
features together, V target vocabulary, Vd ids that the head can propose, D width of an attention
head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from specdec.arguments import check_choice
from specdec.drafters.head.decoder_layer import build_layer
from specdec.drafters.head.feature_config import FeatureHeadConfig
from specdec.drafters.head.features import FeatureHead, FusingLayer
from specdec.drafters.head.layers import Attend, RMSNorm
from specdec.drafters.mask_token.correction import CorrectionConfig, HeadSizes, MarkovConfig

Alignment = Literal["shifted", "unshifted", "same-position", "next-token"]
FeatureContext = Literal["input", "keys", "none"]


class RowLayout(NamedTuple):
    """Where the rows of a pass sit and what they predict.

    Args:
        shift: committed rows stand `shift` positions before their tokens.
        opens_with_last: the rows after the committed ones begin with the last committed token.
        first_row: which of the rows after the committed ones predicts the first draft token; -1 is
            the last committed row.
    """

    shift: int
    opens_with_last: bool
    first_row: int


ROWS: dict[str, RowLayout] = {
    "shifted": RowLayout(shift=1, opens_with_last=False, first_row=-1),
    "unshifted": RowLayout(shift=0, opens_with_last=False, first_row=-1),
    "same-position": RowLayout(shift=1, opens_with_last=True, first_row=1),
    "next-token": RowLayout(shift=1, opens_with_last=True, first_row=0),
}
"""What each alignment means."""


@dataclass(frozen=True)
class _Wiring:
    """The first fields of `MaskTokenConfig`."""

    alignment: Alignment
    context: FeatureContext


@dataclass(frozen=True)
class MaskTokenConfig(FeatureHeadConfig, _Wiring):
    """Sizes and flags of a mask-token head.

    The last committed token is x_n; the target's features are those of positions 0 to n - 1.

    Args:
        alignment: what the rows are and what they predict.
            `"shifted"` (P-EAGLE): row t holds the embedding of token t + 1 beside the feature of
            position t, and predicts token t + 2; masks follow at positions n, n + 1, ....
            `"unshifted"` (PARD): token t stands at position t and predicts token t + 1; masks
            follow at n + 1, n + 2, ....
            `"same-position"` (DFlash): a block [x_n, masks] at n, n + 1, ...; each mask predicts
            the token of its own position.
            `"next-token"` (DSpark): the same block; each row predicts the token after its position.
        context: how the target's features reach the head.
            `"input"`: through `fc`, beside the embedding in the first layer (EAGLE-3's).
            `"keys"`: through `fc` and `hidden_norm`, as further keys and values of every layer.
            `"none"`: not at all; the head is a language model of its own.
        layer, vocab_size, ..., logit_scale: see `FeatureHeadConfig`.
        mask_token_id: id whose embedding masks have; `None` is an embedding of their own
            (`mask_embedding`). With `context="input"` masks also have a learned feature
            (`mask_hidden`), which takes the way of the real ones.
        block_size: rows of a window, the last committed token included, whatever K is: a head that
            sees the masks after a row is trained for one number of them. `None` where rows see
            only what precedes them, since further masks then make no difference.
        is_causal: rows see themselves and what precedes them; else the whole block.
        ties_embeddings: the head's table of embeddings is its vocabulary head as well.
        max_positions: positions that the head can be given; `None` for no limit. Drafts end there.
        correction: what tokens chosen earlier in a draft change in the logits of later ones; `None`
            for independent predictions.
        confidence: the head estimates whether a draft token will be accepted, from its row's state
            (`"hidden"`), or from that and the embedding of the token before (`"markov"`).

    Example:
        >>> from specdec.drafters.head.layer_config import LayerConfig
        >>> layer = LayerConfig(8, 16, 2, 2, 4)
        >>> config = MaskTokenConfig("shifted", "input", layer, 9, 9, (1, 2, 3), 8, mask_token_id=0)
        >>> config.num_later(4), config.rows.first_row
        (3, -1)
    """

    mask_token_id: int | None = None
    block_size: int | None = None
    is_causal: bool = True
    ties_embeddings: bool = False
    max_positions: int | None = None
    correction: CorrectionConfig | None = None
    confidence: Literal["hidden", "markov"] | None = None

    @property
    def joins_features(self) -> bool:
        """Features go through an `fc`."""
        return self.context != "none"

    @property
    def rows(self) -> RowLayout:
        """Where the rows of a pass sit and what they predict."""
        return ROWS[self.alignment]

    @property
    def max_draft_tokens(self) -> int | None:
        """The largest K that the head can draft; `None` for any."""
        return None if self.block_size is None else self.block_size - self.rows.first_row

    @property
    def sizes(self) -> HeadSizes:
        """For `correction`."""
        sizes = self.hidden_size, self.vocab_size, self.draft_vocab_size, self.block_size
        return HeadSizes(*sizes, self.rows.first_row, self.layer.rms_norm_eps)

    def num_later(self, num_draft_tokens: int) -> int:
        """M: rows after the committed ones that predict K draft tokens, and fill the block."""
        return self.block_size or self.rows.first_row + num_draft_tokens

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        check_choice("MaskTokenConfig.alignment", self.alignment, ROWS)
        fitting = {"shifted": "input", "unshifted": "none"}.get(self.alignment, "keys")
        yield (
            self.context != fitting,
            f"alignment={self.alignment!r} goes with context={fitting!r}, got {self.context!r}",
        )
        is_none = self.context == "none"
        yield (
            is_none != (not self.feature_layers),
            f"context={self.context!r} and feature_layers={self.feature_layers} contradict each "
            "other: features are joined by 'input' and 'keys' and by nothing else",
        )
        has_early_norm = self.norm_before_fc or self.fc_norm
        yield (
            self.context != "input" and (has_early_norm or self.norm_before_residual),
            "norm_before_fc, fc_norm and norm_before_residual are of context='input'",
        )
        yield from self._block_contradictions()
        yield from self._correction_contradictions()
        token, size = self.mask_token_id, self.vocab_size
        yield (
            token is not None and not 0 <= token < size,
            f"mask_token_id must be an id in 0..{size - 1}, got {token}",
        )
        yield (
            self.ties_embeddings and not (self.has_lm_head and self.has_embed_tokens),
            "ties_embeddings is about tables of the head's own; has_embed_tokens and has_lm_head "
            "must be True",
        )
        yield from super()._contradictions()

    def _correction_contradictions(self) -> Iterator[tuple[bool, str]]:
        check_choice("MaskTokenConfig.confidence", self.confidence, (None, "hidden", "markov"))
        is_markov = isinstance(self.correction, MarkovConfig)
        yield (
            self.confidence == "markov" and not is_markov,
            f"confidence='markov' reads the embeddings of a MarkovConfig, got correction="
            f"{self.correction}",
        )

    def _block_contradictions(self):
        size, is_block = self.block_size, self.rows.opens_with_last
        yield (
            size is not None and not is_block,
            f"block_size is of 'same-position' and 'next-token', not of {self.alignment!r}",
        )
        yield (
            not self.is_causal and size is None,
            "rows that see the whole block (is_causal=False) need its block_size",
        )
        least = self.rows.first_row + 1
        yield (
            size is not None and size < least,
            f"a block of alignment {self.alignment!r} has at least {least} rows, got {size}",
        )


class MaskTokenHead(FeatureHead):
    """The weights of a head, under the names of the public checkpoints.

    Every method works on any number of rows and tokens.

    Example:
        >>> from specdec.drafters.head.layer_config import LayerConfig
        >>> layer = LayerConfig(8, 16, 2, 2, 4)
        >>> config = MaskTokenConfig("shifted", "input", layer, 9, 9, (1, 2, 3), 8, mask_token_id=0)
        >>> head = MaskTokenHead(config)
        >>> sorted(name for name in head.state_dict() if "layers" not in name)
        ['fc.weight', 'lm_head.weight', 'mask_hidden', 'norm.weight']
        >>> head.hidden_states(torch.zeros(1, 5, 24), num_masks=3).shape
        torch.Size([1, 8, 8])

    Reference: An et al., arXiv:2504.18583 (PARD); Hui et al., arXiv:2602.01469 (P-EAGLE); Chen et
    al., arXiv:2602.06036 (DFlash).
    """

    def __init__(self, config: MaskTokenConfig, target_ids: Tensor | None = None):
        super().__init__(config, target_ids)
        if config.context == "keys":
            self.hidden_norm = RMSNorm(config.hidden_size, config.layer.rms_norm_eps)
        if config.context == "input":
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, config.feature_width))
        if config.mask_token_id is None:
            self.mask_embedding = nn.Parameter(torch.zeros(1, 1, config.hidden_size))
        if config.correction is not None:
            self.correction = config.correction.build(config.sizes)
        if config.confidence is not None:
            more = config.correction.rank if config.confidence == "markov" else 0
            self.confidence_head = nn.Linear(config.hidden_size + more, 1)

    def build_first_layer(self) -> nn.Module:
        """One that fuses where features stand beside embeddings, else a plain one."""
        config = self.config
        if config.context != "input":
            return build_layer(config.layer, 0)
        return FusingLayer(config.layer, norm_before_residual=config.norm_before_residual)

    def hidden_states(self, features: Tensor, num_masks: int = 0) -> Tensor:
        """The target's features as the head's own states, and those of masks after them.

        The learned feature of masks is joined as one more row of the same product, so it costs
        nothing and never falls behind weights that are being trained.

        Args:
            features: `[B, R, F]`.
            num_masks: masks after them, with `context="input"`.

        Returns:
            `[B, R + num_masks, H]`.
        """
        if self.config.context == "keys":
            return self.hidden_norm(self.fuse(features))
        if num_masks == 0:
            return self.fuse(features)
        mask = self.mask_hidden.to(features.dtype).expand(len(features), -1, -1)
        joined = self.fuse(torch.cat([features, mask], dim=1))  # [B, R + 1, H]
        masks = joined[:, -1:].expand(-1, num_masks, -1)
        return torch.cat([joined[:, :-1], masks], dim=1)

    def with_masks(self, embeds: Tensor, num_known: int) -> Tensor:
        """Embeddings `[B, N, H]`, of which those from `num_known` on are masks: as they are, where
        masks have an id, else the head's own embedding of masks.
        """
        if self.config.mask_token_id is not None:
            return embeds
        num_masks = max(embeds.shape[1] - num_known, 0)
        masks = self.mask_embedding.expand(len(embeds), num_masks, -1)
        return torch.cat([embeds[:, :num_known], masks.to(embeds.dtype)], dim=1)

    def forward(
        self, embeds: Tensor, hidden: Tensor | None, angles: Tensor, attend: Attend
    ) -> Tensor:
        """One pass.

        Args:
            embeds: `[B, N, H]`: N is R + M rows, or with `context="keys"` the M rows of the block.
            hidden: from `hidden_states`: `[B, R + M, H]`, masks included, which the first layer
                joins with the embeddings (`context="input"`); `[B, R, H]`, for further keys and
                values of every layer (`"keys"`); `None` with `"none"`.
            angles: `[B, 1, R + M, 2 D]`, rows of `rotary_table` at the rows' positions.
            attend: how queries find keys (see `Attend`).

        Returns:
            `[B, N, H]`, before the final norm, which `logits` applies.
        """
        first, *later = self.layers
        if self.config.context == "input":
            out, context = first(embeds, hidden, angles, attend), None
        else:
            out, context = first(embeds, angles, attend, hidden), hidden
        for layer in later:
            out = layer(out, angles, attend, context)
        return out
