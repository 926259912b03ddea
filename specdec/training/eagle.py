"""Objectives of EAGLE heads: EAGLE-3's training-time test, EAGLE-1's feature and token loss.

Row t of a head's input holds (embedding of token t + 1, feature of position t) and predicts token
t + 2, as in inference.

Legend: B rows, T tokens, R places of a row that are trained, F width of all features together, M
unrolled steps, V vocabulary, Vd ids of the head, D width of an attention head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.drafters.eagle import EagleDrafter
from specdec.drafters.eagle_config import EagleConfig
from specdec.drafters.eagle_head import EagleHead
from specdec.drafters.layers import attend_causally
from specdec.drafters.rotary import rotary_table
from specdec.training.objectives import Teacher


class TrainingTimeTest(nn.Module):
    """Unrolls a head over its own outputs, as drafting will, and compares every step's law with the
    target's.

    Step 0 reads the target's features; step m reads at every place what step m - 1 gave back there,
    beside the token one further on, and attends to step 0 as a draft does to the committed rows
    and to its own place's later steps.

    Args:
        drafter: whose head is to be trained.
        target: the teacher, and the drafter's target; frozen.
        num_steps: M.
        step_weight: a step counts so many times the one before.

    Raises:
        ValueError: `num_steps` is not positive.

    Example:
        >>> from specdec import zoo
        >>> from specdec.drafters import EagleConfig, EagleDrafter, EagleHead
        >>> target = zoo.load_target()
        >>> vocab = target.config.vocab_size
        >>> config = EagleConfig("attention", 128, 256, 1, 4, 4, 32, vocab, vocab, (2, 8, 13), 128)
        >>> objective = TrainingTimeTest(EagleDrafter(EagleHead(config), target), target)
        >>> objective(torch.zeros(2, 33, dtype=torch.long)).shape
        torch.Size([])

    Reference: Li et al., arXiv:2503.01840, section 3.1 and Fig. 6.
    """

    def __init__(
        self,
        drafter: EagleDrafter,
        target: PreTrainedModel,
        num_steps: int = 5,
        step_weight: float = 0.8,
    ):
        super().__init__()
        if num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {num_steps}")
        self.drafter = drafter
        self.num_steps = num_steps
        self.step_weight = step_weight
        self._teacher = Teacher(target, drafter.feature_layers)
        self._angles = Angles(drafter.config)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean nats per place of ids `[B, T + 1]`, averaged over the steps by their weights.

        Raises:
            ValueError: rows of fewer than M tokens and one.
        """
        if ids.shape[1] <= self.num_steps:
            raise ValueError(
                f"rows of {ids.shape[1] - 1} tokens are too short for {self.num_steps} unrolled "
                "steps; make them longer or unroll less"
            )
        teacher, features = self._teacher(ids)
        law = law_over_head(self.drafter.head, teacher)
        total, total_weight = 0.0, 0.0
        for m, logits in enumerate(self.unroll(ids, features)):
            weight = self.step_weight**m
            labels = law[:, 1 + m : 1 + m + logits.shape[1]]
            total = total + weight * cross_entropy_to_law(logits, labels)
            total_weight += weight
        return total / total_weight

    def unroll(self, ids: Tensor, features: Tensor) -> list[Tensor]:
        """What every step predicts at every place.

        Args:
            ids: `[B, T + 1]`.
            features: `[B, T + 1, F]`, the target's.

        Returns:
            M times logits `[B, R, Vd]`, R = T + 1 - M. Step m at place t predicts token t + m + 2,
            having read the text up to token t + m + 1 and the target's features up to position t.
        """
        drafter, head = self.drafter, self.drafter.head
        count = ids.shape[1] - self.num_steps  # places that have a label at every step
        embeds, angles = drafter.embed(ids), self._angles(ids.shape[1], like=head)
        attention, hidden, steps = UnrolledAttention(), head.fuse(features[:, :count]), []
        for m in range(self.num_steps):
            beside = embeds[:, 1 + m : 1 + m + count]
            out = head(beside, hidden, angles[:, m : m + count], attention)
            steps.append(drafter.logits(out))
            hidden = head.feedback(out)
        return steps


class FeatureAndToken(nn.Module):
    """EAGLE-1's objective: the next feature by a smooth L1 loss, and the target's law behind it.

    Args:
        drafter: whose head is to be trained.
        target: the teacher, and the drafter's target; frozen.
        token_weight: of the cross-entropy beside the feature loss.
        noise: in training mode features are moved by up to this much, uniformly, so that the head
            learns to go on from its own errors. It comes from torch's global generator.

    Raises:
        ValueError: the head's output has not the width of what it reads, so it cannot predict it.

    Example:
        >>> from specdec import zoo
        >>> from specdec.drafters import EagleConfig, EagleDrafter, EagleHead
        >>> target = zoo.load_target()
        >>> vocab, flags = target.config.vocab_size, {"output_norm": False, "has_lm_head": False}
        >>> sizes = 128, 256, 1, 4, 4, 32, vocab, vocab, ("final",), 128
        >>> head = EagleHead(EagleConfig("input", *sizes, **flags))
        >>> objective = FeatureAndToken(EagleDrafter(head, target), target)
        >>> objective(torch.zeros(2, 33, dtype=torch.long)).shape
        torch.Size([])

    Reference: Li et al., arXiv:2401.15077, section 3.2.
    """

    def __init__(
        self,
        drafter: EagleDrafter,
        target: PreTrainedModel,
        token_weight: float = 0.1,
        noise: float = 0.1,
    ):
        super().__init__()
        config = drafter.config
        if config.feature_width != config.hidden_size:
            raise ValueError(
                f"the head reads features of width {config.feature_width} and gives back "
                f"{config.hidden_size}; it cannot learn to predict them. Train it with "
                "TrainingTimeTest"
            )
        self.drafter = drafter
        self.token_weight = token_weight
        self.noise = noise
        self._teacher = Teacher(target, drafter.feature_layers)
        self._angles = Angles(config)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean loss over ids `[B, T + 1]`."""
        head = self.drafter.head
        teacher, features = self._teacher(ids)
        read = features[:, :-1]
        if self.training and self.noise:
            read = read + self.noise * (2 * torch.rand_like(read) - 1)
        embeds, angles = self.drafter.embed(ids[:, 1:]), self._angles(read.shape[1], like=head)
        out = head(embeds, head.fuse(read), angles, attend_causally)
        feature_loss = F.smooth_l1_loss(head.feedback(out).float(), features[:, 1:].float())
        law = law_over_head(head, teacher[:, 1:])
        return feature_loss + self.token_weight * cross_entropy_to_law(
            self.drafter.logits(out), law
        )


class Angles:
    """Rotary angles of positions 0, 1, ... of a head, made once for the longest row so far.

    Args:
        config: of the head.
    """

    def __init__(self, config: EagleConfig):
        self.config = config
        self._table: Tensor | None = None

    @torch.compiler.disable
    def __call__(self, count: int, *, like: EagleHead) -> Tensor:
        """Angles `[1, count, 1, 2 D]`, of the head's data type and on its device."""
        table, dtype, device = self._table, like.dtype, like.device
        if table is None or len(table) < count or (table.dtype, table.device) != (dtype, device):
            self._table = rotary_table(self.config, count, dtype=dtype, device=device)
        return self._table[None, :count, None]


class UnrolledAttention:
    """Attention of the unrolled steps: causal over step 0, and each place over its own later steps.

    An `Attend` function that keeps the keys and values of every step; make a new one for every
    forward.
    """

    def __init__(self):
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """`[B, R, Hq, D]`, of the step after those seen so far."""
        groups = query.shape[1] // key.shape[1]
        keys = self._keys.setdefault(layer, [])
        values = self._values.setdefault(layer, [])
        keys.append(key.repeat_interleave(groups, dim=1))
        values.append(value.repeat_interleave(groups, dim=1))
        count = query.shape[2]
        query = query * query.shape[-1] ** -0.5
        is_later = torch.ones(count, count, dtype=torch.bool, device=query.device).triu(1)
        scores = (query @ keys[0].transpose(-1, -2)).masked_fill(is_later, -torch.inf)
        own = [(query * k).sum(dim=-1, keepdim=True) for k in keys[1:]]  # [B, heads, R, 1]
        weights = torch.cat([scores, *own], dim=-1).float().softmax(dim=-1).to(query.dtype)
        out = weights[..., :count] @ values[0]
        for m, v in enumerate(values[1:]):
            out = out + weights[..., count + m : count + m + 1] * v
        return out.transpose(1, 2)


def law_over_head(head: EagleHead, teacher: Tensor) -> Tensor:
    """The target's law at the ids that the head can propose, `[B, T, Vd]`, from logits `[B, T, V]`.

    It sums to less than 1 where the head's ids miss some: such places count for less.
    """
    law = teacher.float().softmax(dim=-1)
    return law if head.target_ids is None else law[..., head.target_ids]


def cross_entropy_to_law(logits: Tensor, law: Tensor) -> Tensor:
    """Mean over places of `-sum_v law_v log softmax(logits)_v`."""
    return -(law * logits.float().log_softmax(dim=-1)).sum(dim=-1).mean()
