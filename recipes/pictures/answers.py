"""Training on prompts with pictures or sound, and their answers: data, teacher and objective.

Legend: B rows, T tokens of the longest row, F width of all features together, V vocabulary, R
channels that a head turns, M unrolled steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from specdec.arguments import check_integer, shown
from specdec.drafters.eagle import EagleDrafter
from specdec.drafters.head.pictures import of_three_axes
from specdec.drafters.head.rotary import angles_at
from specdec.hf.forward import is_prefix_lm
from specdec.hf.layers import decoder_layers
from specdec.lab.training.divergences import Loss, soft_ce
from specdec.lab.training.eagle import TrainingTimeTest
from specdec.lab.training.losses import losses_of
from specdec.lab.training.step_weights import StepWeights
from specdec.lab.training.teacher import SoftLabels, Teacher
from specdec.targets.reading import is_not_of_id, reading_view, refuse_prompts
from specdec.targets.view import wrap_forward
from specdec.types import FeatureLayer


@dataclass(frozen=True, eq=False)
class Answered:
    """A prompt with its answer.

    Args:
        inputs: what the target's processor returns for both as one text: `input_ids` `[1, T]` and
            the tensors of its pictures, by the names that the target's forward takes.
        num_prompt: tokens of the prompt, which are read and not learned.

    Raises:
        ValueError: not one text, or a prompt without an answer.

    Example:
        >>> one = Answered({"input_ids": torch.tensor([[5, 6, 7, 8]])}, num_prompt=2)
        >>> one.ids[one.num_prompt :]
        tensor([7, 8])
    """

    inputs: Mapping[str, Any]
    num_prompt: int

    def __post_init__(self):
        ids = self.inputs.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) != 1:
            raise ValueError(
                "an answered prompt is what a processor returns for one text, with input_ids "
                f"[1, T], got {shown(ids)}"
            )
        check_integer("num_prompt", self.num_prompt, 2, ids.shape[1] - 1)

    @property
    def ids(self) -> Tensor:
        """`[T]`."""
        return self.inputs["input_ids"][0]


class AnsweredStream:
    """Endless batches of answered prompts: each epoch shuffles them. A row is one of them, never
    cut and never packed with others; of a batch's shape the number of rows counts, and its tokens
    are the most that a row may have.

    Args:
        examples: of them, which may be made when they are asked for.
        seed: of the order.

    Example:
        >>> import torch
        >>> one = Answered({"input_ids": torch.tensor([[5, 6, 7, 8]])}, num_prompt=2)
        >>> stream = AnsweredStream([one] * 3, seed=0)
        >>> [len(rows) for rows in stream.batches([(2, 8)] * 2)]
        [2, 2]
    """

    def __init__(self, examples: Sequence[Answered], *, seed: int):
        check_integer("seed", seed, 0)
        if not len(examples):
            raise ValueError("there is nothing to train on: expected at least one answered prompt")
        self.examples, self.seed = examples, seed

    def batches(
        self, shapes: Iterable[tuple[int, int]], *, skip: int = 0
    ) -> Iterator[list[Answered]]:
        """B examples of each batch, the same in every run.

        Args:
            shapes: (B, T) of each batch.
            skip: how many batches to leave out at the beginning; their shapes are counted.

        Raises:
            ValueError: an example of more than T tokens.
        """
        taken, order, epoch = 0, [], -1
        for index, (batch_size, length) in enumerate(shapes):
            rows = []
            for number in range(taken, taken + batch_size):
                now, place = divmod(number, len(self.examples))
                if index < skip:
                    continue
                if now != epoch:
                    epoch = now
                    order = np.random.default_rng([self.seed, now]).permutation(len(self.examples))
                example = self.examples[int(order[place])]
                if len(example.ids) > length:
                    raise ValueError(
                        f"an answered prompt of {len(example.ids)} tokens is longer than a row of "
                        f"{length}; pictures are never cut: raise row_lengths, or leave it out"
                    )
                rows.append(example)
            taken += batch_size
            if index >= skip:
                yield rows


class _Read(NamedTuple):
    """One text as a head learns it: its rows in order, one for each token that the head sees.

    Args:
        ids: `[n]`, the first token and those that are seen.
        features: `[n, F]`; row t is the target's at the token before `ids[t + 1]`.
        positions: `[n]`, or `[n, 3]` of three axes: of the same tokens.
        logits: `[n, V]`, the target's after each of `ids`.
        is_learned: `[n]` bool: these logits are followed by a token of the answer.
    """

    ids: Tensor
    features: Tensor
    positions: Tensor
    logits: Tensor
    is_learned: Tensor


class AnswerTeacher(Teacher):
    """The frozen target reads answered prompts by its own forward, one by one.

    Args:
        target, feature_layers: as for `Teacher`.

    Raises:
        ValueError: a target of which prompts with pictures cannot be read, or whose answers would
            see themselves both ways.
    """

    def __init__(self, target: PreTrainedModel, feature_layers: tuple[FeatureLayer, ...]):
        refuse_prompts(target)
        if is_prefix_lm(target):
            raise ValueError(
                f"{type(target).__name__} reads a whole text both ways in one forward, so its "
                "answers cannot be learned with their prompts; train on a causal target"
            )
        super().__init__(target, feature_layers)
        self._given: dict[str, Tensor | None] = {}
        wrap_forward(decoder_layers(self._view)[0], self._note)

    def open_view(self, target: PreTrainedModel) -> PreTrainedModel:
        """One whose tower may run."""
        return reading_view(target)

    def _note(self, forward: Callable, *args: Any, **kwargs: Any) -> Any:
        self._given.update({name: kwargs.get(name) for name in ("inputs_embeds", "position_ids")})
        return forward(*args, **kwargs)

    @torch.compiler.disable
    @torch.no_grad()
    def read(self, example: Answered, *, sees_pictures: bool, has_axes: bool) -> _Read:
        """One text, on the target's device.

        Args:
            example: the prompt and its answer.
            sees_pictures: as of `EagleConfig`.
            has_axes: positions have three axes where the target's have.
        """
        target = self.target
        device = target.device
        inputs = {
            n: v.to(device) if isinstance(v, Tensor) else v for n, v in example.inputs.items()
        }
        ids = inputs["input_ids"]
        logits = self._view(**inputs, use_cache=False).logits[0]
        features = torch.cat([self._features[layer][0] for layer in self.feature_layers], dim=-1)
        order = torch.arange(ids.shape[1], device=device)
        embeds, positions = self._given["inputs_embeds"], order
        if has_axes and self._given["position_ids"] is not None:
            positions = of_three_axes(self._given["position_ids"])[..., 0, :].movedim(-1, 0)
        if has_axes and positions.dim() == 1:  # of text all three are one
            positions = positions[:, None].expand(-1, 3)
        is_seen = torch.ones_like(order, dtype=torch.bool)
        if not sees_pictures and embeds is not None:
            is_seen = ~is_not_of_id(self._view, ids, embeds)[0]
            is_seen[0] = True  # no row is beside it
        seen = order[is_seen]
        before = torch.cat([seen[1:] - 1, seen[-1:]])
        is_learned = (seen >= example.num_prompt - 1) & (seen < len(order) - 1)
        known = ids[0].masked_fill(ids[0] >= logits.shape[-1], 0)  # placeholders, as in generation
        return _Read(known[seen], features[before], positions[before], logits[seen], is_learned)


class AnswerTimeTest(TrainingTimeTest):
    """`TrainingTimeTest` on the answers of prompts with pictures: prompts are read and not learned.

    What the head sees at tokens of pictures, and at which positions, is what it will see while it
    drafts: its `EagleConfig.sees_pictures` and the axes of its rope say it.

    Args:
        drafter, target, num_steps, step_weight, loss: as for `TrainingTimeTest`.

    Raises:
        ValueError: see `AnswerTeacher`.

    Example:
        >>> from specdec.lab import zoo
        >>> from specdec.lab.training import new_head
        >>> target = zoo.load_target()
        >>> drafter = EagleDrafter(new_head(target, "eagle3"), target)
        >>> one = Answered({"input_ids": torch.arange(20)[None]}, num_prompt=4)
        >>> AnswerTimeTest(drafter, target)([one, one]).shape
        torch.Size([])
    """

    def __init__(
        self,
        drafter: EagleDrafter,
        target: PreTrainedModel,
        num_steps: int = 5,
        step_weight: float | StepWeights = 0.8,
        loss: Loss = soft_ce,
    ):
        super().__init__(drafter, target, num_steps, step_weight, loss)
        self._teacher = AnswerTeacher(target, drafter.feature_layers)

    accepts_loss_kwargs = True  # HF's trainers pass num_items_in_batch

    def num_items(self, ids: Sequence[Answered]) -> int:
        """Tokens of the answers."""
        return sum(len(each.ids) - each.num_prompt for each in _answered(ids))

    def forward(
        self, ids: Sequence[Answered], num_items_in_batch: int | Tensor | None = None
    ) -> Tensor:
        """Mean loss per token of the answers, averaged over the steps by their weights.

        Args:
            ids: answered prompts.
            num_items_in_batch: tokens of the answers of all batches and processes that one step of
                the optimiser adds up; `None` for those of this batch.

        Raises:
            ValueError: rows of ids, or texts that end before the last step.
        """
        texts = self.texts(ids)
        count = self.num_items(ids) if num_items_in_batch is None else num_items_in_batch
        labels = SoftLabels.of(self._padded(texts, "logits"), self.drafter.head.target_ids)
        is_learned = self._padded(texts, "is_learned")
        losses, places, found = self.step_weights.beside(self.loss), [], []
        for m, out in enumerate(self.unroll_texts(texts)):
            here = is_learned[:, 1 + m : 1 + m + out.shape[1]]
            if not bool(here.any()):
                raise ValueError(
                    f"no text is long enough for step {m + 1} of {self.num_steps}; make texts "
                    "longer or train fewer steps"
                )
            due = SoftLabels(*(each[here][None] for each in labels.at(1 + m, out.shape[1])))
            places.append(here)
            found.append(losses_of(out[here][None], self.drafter.logits, due, *losses))
        measured = torch.zeros(
            (len(places), *places[0].shape), dtype=torch.float32, device=places[0].device
        )
        for step, here, each in zip(measured, places, found, strict=True):
            step[here] = each[-1][0].detach()
        weights = self.step_weights(measured)
        pairs = zip(weights, places, found, strict=True)
        sums = [(step[here] * each[0][0]).sum() for step, here, each in pairs]
        return torch.stack(sums).sum() / count

    def texts(self, examples: Sequence[Answered]) -> list[_Read]:
        """What the target reads of each."""
        config = self.drafter.config
        own = {"sees_pictures": config.sees_pictures, "has_axes": config.layer.axes is not None}
        return [self._teacher.read(example, **own) for example in _answered(examples)]

    def unroll_texts(self, texts: Sequence[_Read]) -> list[Tensor]:
        """As `unroll`, over rows of `texts`; what follows a row's end is garbage."""
        positions = self._padded(texts, "positions")  # [B, T], or [B, T, 3]
        axes = self.drafter.config.layer.axes
        if positions.dim() == 3:
            positions = positions.movedim(-1, 0)
        table = self.angles(int(positions.max()) + 1)[0, 0]
        angles = angles_at(table, positions, None if axes is None else axes.to(table.device))
        ids, features = self._padded(texts, "ids"), self._padded(texts, "features")
        return self.unroll(ids, features, angles[:, None])

    def _padded(self, texts: Sequence[_Read], name: str) -> Tensor:
        """`[B, T + M, ...]`, zeros after a row's end. With M of them every step is learned at all
        tokens of every answer, whatever the length of the rows beside it.
        """
        rows = [getattr(text, name) for text in texts]
        longer = [torch.cat([row, row.new_zeros(self.num_steps, *row.shape[1:])]) for row in rows]
        return pad_sequence(longer, batch_first=True)


def _answered(examples: Sequence[Answered]) -> Sequence[Answered]:
    """The examples; any other value raises TypeError."""
    if isinstance(examples, Tensor) or not all(isinstance(e, Answered) for e in examples):
        raise TypeError(
            "AnswerTimeTest trains on answered prompts, of AnsweredStream; rows of ids are for "
            f"TrainingTimeTest, got {shown(examples)}"
        )
    return examples
