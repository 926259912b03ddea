"""Medusa: a configuration, a head and its drafter, each in a class; a family of heads in one file.

Legend: B rows, N new tokens, J heads, K draft tokens, H width, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.arguments import check_integer
from specdec.drafters.head.config import check_fields
from specdec.drafters.head.drafter import HeadDrafter
from specdec.drafters.head.state import HeadState
from specdec.drafters.tree import TreePlan
from specdec.samplers.noise import Drawing
from specdec.types import Context, Draft, FeatureLayer


@dataclass(frozen=True)
class MedusaConfig:
    """Sizes of a head.

    Args:
        num_heads: J, tokens that it predicts.
        num_blocks: residual blocks of each.
        hidden_size: H, of the target.
        vocab_size: V of the target.
        has_bias: the blocks have biases.

    Example:
        >>> MedusaConfig(num_heads=4, num_blocks=1, hidden_size=8, vocab_size=9).max_draft_tokens
        4

    Reference: Cai et al., arXiv:2401.10774, section 2.1.1.
    """

    num_heads: int
    num_blocks: int
    hidden_size: int
    vocab_size: int
    has_bias: bool = True
    feature_layers: ClassVar[tuple[FeatureLayer, ...]] = ("final",)
    has_embed_tokens: ClassVar[bool] = False
    has_lm_head: ClassVar[bool] = True

    def __post_init__(self):
        check_fields(self)
        for name in ("num_heads", "num_blocks", "hidden_size", "vocab_size"):
            check_integer(f"MedusaConfig.{name}", getattr(self, name), 1)

    @property
    def max_draft_tokens(self) -> int:
        """J."""
        return self.num_heads

    @property
    def target_hidden_size(self) -> int:
        """H."""
        return self.hidden_size

    @property
    def draft_vocab_size(self) -> int:
        """All ids of the target."""
        return self.vocab_size


class MedusaHead(nn.Module):
    """J independent heads over the target's last hidden state: blocks `x + silu(W x + b)`, then a
    vocabulary matrix.

    The state that produced the last committed token is read by head j, which predicts the token
    j + 1 places after that token. It proposes all ids, so `target_ids` is `None`.

    Example:
        >>> head = MedusaHead(MedusaConfig(3, 1, 8, 9))
        >>> head(torch.zeros(2, 1, 8)).shape
        torch.Size([2, 1, 3, 9])
    """

    target_ids: ClassVar[None] = None

    def __init__(self, config: MedusaConfig, target_ids: Tensor | None = None):
        super().__init__()
        if target_ids is not None:
            raise ValueError("a Medusa head proposes all ids; pass target_ids=None")
        self.config, width = config, config.hidden_size
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                nn.Linear(width, width, bias=config.has_bias) for _ in range(config.num_blocks)
            )
            for _ in range(config.num_heads)
        )
        self.lm_heads = nn.ModuleList(
            nn.Linear(width, config.vocab_size, bias=False) for _ in range(config.num_heads)
        )

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return self.lm_heads[0].weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.lm_heads[0].weight.device

    def hidden(self, features: Tensor, index: int) -> Tensor:
        """What vocabulary matrix `index` reads of features `[..., H]`: `[..., H]`."""
        hidden = features.to(self.dtype)
        for block in self.blocks[index]:
            hidden = hidden + F.silu(block(hidden))
        return hidden

    def forward(self, features: Tensor, num_heads: int | None = None) -> Tensor:
        """Logits `[B, N, J, V]` of features `[B, N, H]`, of the first `num_heads` heads."""
        each = range(self.config.num_heads if num_heads is None else num_heads)
        return torch.stack([self.lm_heads[i](self.hidden(features, i)) for i in each], dim=2)


class MedusaDrafter(HeadDrafter):
    """Drafts K tokens from one hidden state of the target, each by a head of its own.

    Tokens are predicted independently of each other. `tree=Tree(ranks=...)` is the fixed tree of
    the paper, "Medusa choices": node (2, 0) is the most likely token of the second head after the
    third likely one of the first. `tree=Tree(nodes=31, depth=4)` takes the most likely paths in
    every step. A row whose prompt has one token proposes nothing in its first step, since the
    target has read nothing yet.

    The paper accepts by `TypicalSampler()`, which is lossy; the lossless rules serve as well.

    Args and Raises: as `HeadDrafter`; the head is a `MedusaHead`, whose J bounds the tokens of a
    path.

    Example:
        >>> from specdec import SpeculativeGenerator, zoo
        >>> from specdec.lab.training.medusa import new_head
        >>> target = zoo.load_target()
        >>> drafter = MedusaDrafter(new_head(target, 4), target, tree="12x4")
        >>> SpeculativeGenerator(target, drafter).target.feature_layers
        ('final',)

    Reference: Cai et al., arXiv:2401.10774 (Medusa).
    """

    head_type = MedusaHead

    def tree_plan(self, device: torch.device) -> TreePlan | None:
        """What follows a node depends on its depth alone, so the head reads no nodes."""
        return self.tree and TreePlan(self.tree, device, is_read=False)

    def prefill(self, context: Context, state: HeadState) -> None:
        """There is nothing to remember of a prompt."""

    def newest(self, context: Context) -> Tensor:
        """The state `[B, 1, H]` that produced each row's last committed token; of rows with
        `context.num_new` 0, for which there is none yet, it is any.
        """
        self.check_features(context)
        index = (context.num_new - 1).clamp(min=0)[:, None, None]
        return context.features.gather(1, index.expand(-1, 1, context.features.shape[2]))

    def propose(self, context: Context, state: HeadState, drawing: Drawing) -> Draft:
        """The heads' logits of the state that produced the last token, and a draft of them."""
        count = drawing.num_draft_tokens
        num_heads = min(self.tree_depth or count, count)
        logits = self.head(self.newest(context), num_heads)[:, 0]  # [B, J, V]
        num_valid = context.num_new.clamp(0, 1) * count
        if state.plan is None:
            drafting = self.proposal.begin(drawing)
            drafting.draw(logits)
            return drafting.end(num_valid)

        def expand(nodes):
            return logits[:, nodes.depth : nodes.depth + 1]

        return state.plan.grow(self.proposal, drawing, logits[:, :1], expand, num_valid)
