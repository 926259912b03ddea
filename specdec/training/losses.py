"""Losses of every family, and the objectives of language models.

An objective is a module that maps ids `[B, T + 1]` to a mean loss; its trainable parameters are
what `ObjectiveTrainer` trains. A target is run on the fly by a `Teacher`, outside the objective's
parameters.

Legend: B rows of a batch, T tokens of a row, H width of a head, V vocabulary, Vd ids that a head
can propose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from specdec.arguments import check_tensor
from specdec.training.teacher import SoftLabels, Teacher


class NextToken(nn.Module):
    """Cross-entropy of the text's next tokens: pre-training of a language model.

    Example:
        >>> from specdec import zoo
        >>> NextToken(zoo.load_target())(torch.zeros(2, 17, dtype=torch.long)).shape
        torch.Size([])
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Mean nats per token of ids `[B, T + 1]`."""
        check_row_length(ids, 1, "next tokens")
        logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits  # [B, T, V]
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


class Distillation(nn.Module):
    """Cross-entropy to the target's next-token distribution: KL(target || draft) and a constant.

    Args:
        model: the draft LM.
        target: the teacher, of the same vocabulary; frozen.

    Example:
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
        check_row_length(ids, 1, "next tokens")
        labels, _ = self._teacher.labels(ids[:, :-1])
        student = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        return soft_cross_entropy(student, labels.probs())


def soft_cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """Mean over positions of `-sum_v probs_v log softmax(logits)_v`, both `[..., Vd]`."""
    return -(probs * logits.float().log_softmax(dim=-1)).sum(dim=-1).mean()


def decayed_mean(losses: Iterable[Tensor], decay: float) -> Tensor:
    """Mean of the losses of steps or depths, each weighing `decay` times the one before."""
    total, total_weight = 0.0, 0.0
    for index, loss in enumerate(losses):
        weight = decay**index
        total, total_weight = total + weight * loss, total_weight + weight
    return total / total_weight


def check_row_length(ids: Tensor, count: int, what: str) -> None:
    """Refuses ids `[B, T + 1]` of fewer tokens T than steps or depths that are trained."""
    check_tensor("ids", ids, (None, None), (torch.long,))
    if ids.shape[1] <= count:
        raise ValueError(
            f"rows of {ids.shape[1] - 1} tokens are too short for {count} {what}; make them longer "
            "or train fewer"
        )


CHUNK_ELEMENTS = 2**26
"""Logits that `soft_cross_entropy_of` holds at once: 256 MB in float32."""


def soft_cross_entropy_of(
    out: Tensor,
    to_logits: Callable[[Tensor], Tensor],
    labels: SoftLabels,
    *,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Tensor:
    """`soft_cross_entropy` of logits that are never there all at once: each chunk of positions is
    computed, reduced and dropped, and computed again in the backward pass.

    Logits and probabilities of a large vocabulary are most of the memory of a training step.

    Args:
        out: `[B, T, H]`, the head's outputs.
        to_logits: `[n, H]` to `[n, Vd]`, the head's vocabulary part.
        labels: of the same positions.
        chunk_elements: logits held at once.
    """

    def nats_of(rows: Tensor, *label: Tensor) -> tuple[Tensor]:
        log_probs = to_logits(rows).float().log_softmax(dim=-1)
        return (-(SoftLabels(*label).probs() * log_probs).sum(dim=-1),)

    chunk = max(1, chunk_elements // labels.logits.shape[-1])
    rows = (out.flatten(0, 1), *(tensor.flatten(0, 1) for tensor in labels))
    return in_chunks(nats_of, rows, chunk)[0].mean()


def in_chunks(
    fn: Callable[..., tuple[Tensor, ...]], rows: tuple[Tensor, ...], chunk: int
) -> tuple[Tensor, ...]:
    """`fn(*rows)` of tensors `[n, ...]`, at most `chunk` rows at once; with more, each chunk is
    computed again in the backward pass.
    """
    if len(rows[0]) <= chunk:
        return fn(*rows)
    chunks = zip(*(tensor.split(chunk) for tensor in rows), strict=True)
    found = [checkpoint(fn, *each, use_reentrant=False) for each in chunks]
    return tuple(map(torch.cat, zip(*found, strict=True)))
