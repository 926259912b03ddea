"""Losses of every family, and the objectives of language models.

An objective is a module that maps ids `[B, T + 1]` to a mean loss; its trainable parameters are
what `train` trains. A target is run on the fly by a `Teacher`, outside the objective's parameters.

Legend: B rows of a batch, T tokens of a row, V vocabulary, Vd ids that a head can propose.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.training.teacher import Teacher


class NextToken(nn.Module):
    """Cross-entropy of the text's next tokens: pre-training of a language model.

    Args:
        model: an HF causal LM.

    Example:
        >>> import torch
        >>> from specdec import zoo
        >>> NextToken(zoo.load_target())(torch.zeros(2, 17, dtype=torch.long)).shape
        torch.Size([])
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Mean nats per token of ids `[B, T + 1]`."""
        logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits  # [B, T, V]
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


class Distillation(nn.Module):
    """Cross-entropy to the target's next-token distribution: KL(target || draft) and a constant.

    Args:
        model: the draft LM.
        target: the teacher, of the same vocabulary; frozen.

    Example:
        >>> import torch
        >>> from specdec import zoo
        >>> target = zoo.load_target()
        >>> objective = Distillation(zoo.load_drafter("model").model, target)
        >>> objective(torch.zeros(2, 17, dtype=torch.long)).shape
        torch.Size([])

    Reference: Hinton et al., arXiv:1503.02531; Zhou et al., arXiv:2310.08461 (DistillSpec).
    """

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel):
        super().__init__()
        self.model = model
        self._teacher = Teacher(target)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean nats per token of ids `[B, T + 1]`."""
        teacher, _ = self._teacher(ids[:, :-1])
        student = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        return soft_cross_entropy(student, target_probs(teacher))


def target_probs(logits: Tensor, target_ids: Tensor | None = None) -> Tensor:
    """The target's distribution at the ids that a head can propose.

    Args:
        logits: `[B, T, V]`, the target's.
        target_ids: `[Vd]`; `None` for all ids.

    Returns:
        `[B, T, Vd]` float32. The sum is below 1 where the head's ids lack probability mass, which
        gives that position a smaller weight in `soft_cross_entropy`.
    """
    probs = logits.float().softmax(dim=-1)
    return probs if target_ids is None else probs[..., target_ids]


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """Mean over positions of `-sum_v probs_v log softmax(logits)_v`, both `[B, T, Vd]`."""
    return -(probs * logits.float().log_softmax(dim=-1)).sum(dim=-1).mean()
