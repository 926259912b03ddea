"""Losses of every family, the objectives of language models, and what those of heads share.

An objective is a module that maps ids `[B, T + 1]` to a mean loss; its trainable parameters are
what `ObjectiveTrainer` trains. A target is run on the fly by a `Teacher`, outside the objective's
parameters.

Legend: B rows of a batch, T tokens of a row, H width of a head, V vocabulary, Vd ids that a head
can propose.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from specdec.arguments import check_integer, check_number, check_tensor, shown
from specdec.drafters.head.drafter import HeadDrafter
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
        labels = SoftLabels.of(self._teacher(ids[:, :-1])[0])
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
    if not isinstance(ids, Tensor):
        raise TypeError(
            "this objective learns rows of ids [B, T + 1], of PackedStream; answered prompts are "
            f"for AnswerTimeTest, got {shown(ids)}"
        )
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


class HeadObjective(nn.Module):
    """An objective that trains the head of a drafter for a frozen target.

    Args:
        drafter: whose head is to be trained.
        target: the teacher, and the drafter's target; frozen.
    """

    def __init__(self, drafter: HeadDrafter, target: PreTrainedModel):
        super().__init__()
        self.drafter = drafter
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
        drafter, target: as for `HeadObjective`.
        num_steps: M.
        step_weight: the weight of a step, as a multiple of that of the step before.
    """

    def __init__(
        self,
        drafter: HeadDrafter,
        target: PreTrainedModel,
        num_steps: int = 5,
        step_weight: float = 0.8,
    ):
        super().__init__(drafter, target)
        self.num_steps = check_integer("num_steps", num_steps, 1)
        self.step_weight = check_number("step_weight", step_weight, 0)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean nats per position of ids `[B, T + 1]`, averaged over the steps by their weights."""
        labels, features = self.read(ids, self.num_steps, "unrolled steps")
        losses = (
            soft_cross_entropy_of(out, partial(self.logits, step=m), labels.at(1 + m, out.shape[1]))
            for m, out in enumerate(self.unroll(ids, features))
        )
        return decayed_mean(losses, self.step_weight)

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
