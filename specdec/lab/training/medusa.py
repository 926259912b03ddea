"""New Medusa heads and their objective: every head beside the target's distribution at its token.

Legend: B rows, T tokens, J heads, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.arguments import check_integer
from specdec.drafters.medusa import MedusaConfig, MedusaDrafter, MedusaHead
from specdec.lab.training.divergences import Loss, soft_ce
from specdec.lab.training.heads import drawn_from
from specdec.lab.training.kind import Kind
from specdec.lab.training.losses import UnrolledObjective
from specdec.lab.training.step_weights import StepWeights


def new_head(
    target: PreTrainedModel, num_heads: int = 4, num_blocks: int = 1, *, seed: int = 0
) -> MedusaHead:
    """An untrained head that predicts what the target itself does: blocks that add nothing, and the
    target's vocabulary matrix. Nothing of it is random, whatever the seed.

    Example:
        >>> from specdec.lab import zoo
        >>> new_head(zoo.load_target(), 2).config.num_heads
        2

    Reference: Cai et al., arXiv:2401.10774, section 2.1.1.
    """
    theirs = target.config.get_text_config()
    num_heads = check_integer("num_heads", num_heads, 1)
    with drawn_from(seed):
        head = MedusaHead(
            MedusaConfig(num_heads, num_blocks, theirs.hidden_size, theirs.vocab_size)
        )
    with torch.no_grad():
        for block in (block for blocks in head.blocks for block in blocks):
            block.weight.zero_()
            block.bias.zero_()
        for matrix in head.lm_heads:
            matrix.weight.copy_(target.get_output_embeddings().weight)
    return head


class EveryHead(UnrolledObjective):
    """Trains the heads of Medusa-1: the target is frozen, and head j at position t is compared with
    the target's distribution of token t + j + 2.

    Args:
        drafter, target, loss: as for `HeadObjective`.
        step_weight: of a head, as a multiple of that of the one before (the paper's lambda); or a
            `StepWeights`.

    Example:
        >>> from specdec.lab import zoo
        >>> target = zoo.load_target()
        >>> objective = EveryHead(MedusaDrafter(new_head(target), target), target)
        >>> objective(torch.zeros(2, 17, dtype=torch.long)).shape
        torch.Size([])

    Reference: Cai et al., arXiv:2401.10774, equation 1, with the target's probabilities for labels
    as in its self-distillation.
    """

    def __init__(
        self,
        drafter: MedusaDrafter,
        target: PreTrainedModel,
        step_weight: float | StepWeights = 0.8,
        loss: Loss = soft_ce,
    ):
        super().__init__(drafter, target, drafter.config.num_heads, step_weight, loss)

    def logits(self, out: Tensor, step: int) -> Tensor:
        """Logits `[n, V]` of what head `step` makes of a state."""
        return self.drafter.head.lm_heads[step](out)

    def unroll(self, ids: Tensor, features: Tensor) -> list[Tensor]:
        """What each vocabulary matrix reads, at every position that has a label of all heads."""
        hidden = partial(self.drafter.head.hidden, features[:, : ids.shape[1] - self.num_steps])
        return [hidden(index) for index in range(self.num_steps)]


def _new(
    target: PreTrainedModel, k: int, *, depths: int | None = None, seed: int = 0, **losses: Any
):
    head = new_head(target, depths or k, seed=seed)
    drafter = MedusaDrafter(head, target, min(k, head.config.num_heads))
    return drafter, EveryHead(drafter, target, **losses)


KINDS = {"medusa": Kind(_new, "medusa", {"method": "medusa"}, ("depths", "loss", "step_weights"))}
