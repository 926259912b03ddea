"""The objectives of language models, and what those of heads share. What a loss is stands in
`divergences`, what a step of a draft weighs in `step_weights`.

An objective is a module that maps ids `[B, T + 1]` to a mean loss; its trainable parameters are
what `ObjectiveTrainer` trains. A target is run on the fly by a `Teacher`, outside the objective's
parameters.

Legend: B rows of a batch, T tokens of a row, H width of a head, M steps of a draft, V vocabulary,
Vd ids that a head can propose.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from specdec.arguments import check_integer, check_tensor, shown
from specdec.drafters.head.drafter import HeadDrafter
from specdec.lab.training.divergences import Loss, soft_ce
from specdec.lab.training.step_weights import StepWeights, weights_of
from specdec.lab.training.teacher import SoftLabels, Teacher


class NextToken(nn.Module):
    """Cross-entropy of the text's next tokens: pre-training of a language model.

    Example:
        >>> from specdec.lab import zoo
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
    """Trains a draft LM by the target's next-token distributions along the text.

    Args:
        model: the draft LM.
        target: the teacher, of the same vocabulary; frozen.
        loss: how far the draft's distribution is from the target's; by default cross-entropy,
            KL(target || draft) and a constant.

    Example:
        >>> from specdec.lab import zoo
        >>> from specdec.lab.training.divergences import tv
        >>> target = zoo.load_target()
        >>> objective = Distillation(zoo.load_drafter("model").model, target, tv)
        >>> objective(torch.zeros(2, 17, dtype=torch.long)).shape
        torch.Size([])

    Reference: Hinton et al., arXiv:1503.02531; Zhou et al., arXiv:2310.08461 (DistillSpec).
    """

    def __init__(self, model: PreTrainedModel, target: PreTrainedModel, loss: Loss = soft_ce):
        super().__init__()
        self.model, self.loss = model, loss
        self._teacher = Teacher(target)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss per token of ids `[B, T + 1]`."""
        check_row_length(ids, 1, "next tokens")
        labels = SoftLabels.of(self._teacher(ids[:, :-1])[0])
        student = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        return self.loss(student.float().log_softmax(dim=-1), labels.log_probs()).mean()


def check_row_length(ids: Tensor, count: int, what: str) -> None:
    """Raises ValueError for ids `[B, T + 1]` of fewer tokens T than steps or depths to train."""
    if not isinstance(ids, Tensor):
        raise TypeError(
            f"this objective learns rows of ids [B, T + 1], of PackedStream, got {shown(ids)}"
        )
    check_tensor("ids", ids, (None, None), (torch.long,))
    if ids.shape[1] <= count:
        raise ValueError(
            f"rows of {ids.shape[1] - 1} tokens are too short for {count} {what}; make them longer "
            "or train fewer"
        )


CHUNK_ELEMENTS = 2**26
"""Logits that `losses_of` holds at once: 256 MB in float32."""


def losses_of(
    out: Tensor,
    to_logits: Callable[[Tensor], Tensor],
    labels: SoftLabels,
    *losses: Loss,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> list[Tensor]:
    """Losses per position, of logits that are never there all at once: each chunk of positions is
    computed, reduced and dropped, and computed again in the backward pass.

    Logits and probabilities of a large vocabulary are most of the memory of a training step.

    Args:
        out: `[B, T, H]`, the head's outputs.
        to_logits: `[n, H]` to `[n, Vd]`, the head's vocabulary part.
        labels: of the same positions.
        losses: what is computed of them.
        chunk_elements: logits held at once.

    Returns:
        `[B, T]` float32 of each loss.
    """

    def of_rows(rows: Tensor, *label: Tensor) -> tuple[Tensor, ...]:
        log_q = to_logits(rows).float().log_softmax(dim=-1)
        log_p = SoftLabels(*label).log_probs()
        return tuple(loss(log_q, log_p) for loss in losses)

    chunk = max(1, chunk_elements // labels.logits.shape[-1])
    rows = (out.flatten(0, 1), *(tensor.flatten(0, 1) for tensor in labels))
    return [each.unflatten(0, out.shape[:2]) for each in in_chunks(of_rows, rows, chunk)]


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


class HeadObjective(nn.Module):
    """An objective that trains the head of a drafter for a frozen target.

    Args:
        drafter: whose head is to be trained.
        target: the teacher, and the drafter's target; frozen.
        loss: how far the head's distribution is from the target's.
    """

    def __init__(self, drafter: HeadDrafter, target: PreTrainedModel, loss: Loss = soft_ce):
        super().__init__()
        self.drafter, self.loss = drafter, loss
        self._teacher = Teacher(target, drafter.feature_layers)
        self._table: Tensor | None = None

    def read(self, ids: Tensor, count: int, what: str) -> tuple[SoftLabels, Tensor]:
        """The target's labels at the head's ids, and its features, of ids `[B, T + 1]` that have
        more than `count` tokens T.
        """
        check_row_length(ids, count, what)
        logits, features = self._teacher(ids)
        return SoftLabels.of(logits, getattr(self.drafter.head, "target_ids", None)), features

    @torch.compiler.disable
    def angles(self, count: int) -> Tensor:
        """The head's rotary angles `[1, 1, count, 2 D]` of positions `0..count - 1`; computed once
        for the longest row.
        """
        head, table = self.drafter.head, self._table
        where = {"dtype": head.dtype, "device": head.device}
        if table is None or len(table) < count or (table.dtype, table.device) != (*where.values(),):
            table = self._table = self.drafter.config.layer.rotary_table(count, **where)
        return table[None, None, :count]


class UnrolledObjective(HeadObjective, ABC):
    """Compares the distribution of every step (depth) that drafting will take with the target's:
    step m at position t predicts token t + m + 2.

    Args:
        drafter, target, loss: as for `HeadObjective`.
        num_steps: M.
        step_weight: the weight of a step, as a multiple of that of the step before; or a
            `StepWeights`.
    """

    def __init__(
        self,
        drafter: HeadDrafter,
        target: PreTrainedModel,
        num_steps: int = 5,
        step_weight: float | StepWeights = 0.8,
        loss: Loss = soft_ce,
    ):
        super().__init__(drafter, target, loss)
        self.num_steps = check_integer("num_steps", num_steps, 1)
        self.step_weights = weights_of(step_weight, "step_weight")

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss per position of ids `[B, T + 1]`, averaged over the steps by their weights."""
        labels, features = self.read(ids, self.num_steps, "unrolled steps")
        losses = self.step_weights.beside(self.loss)
        found = [
            losses_of(out, partial(self.logits, step=m), labels.at(1 + m, out.shape[1]), *losses)
            for m, out in enumerate(self.unroll(ids, features))
        ]
        rows = torch.stack([each[0] for each in found])
        weights = self.step_weights(torch.stack([each[-1].detach() for each in found]))
        return (weights * rows).mean(dim=(1, 2)).sum()

    def logits(self, out: Tensor, step: int) -> Tensor:
        """Logits `[n, Vd]` of outputs `[n, H]` of a step."""
        return self.drafter.logits(out)

    @abstractmethod
    def unroll(self, ids: Tensor, features: Tensor) -> list[Tensor]:
        """The head's output of every step at every position.

        Args:
            ids: `[B, T + 1]`.
            features: `[B, T + 1, F]`, the target's.

        Returns:
            M times outputs `[B, R, H]`, R = T + 1 - M, for `logits`.
        """
