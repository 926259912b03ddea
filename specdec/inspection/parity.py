"""The parity check: a head read wrongly still runs, so the likely misreadings are tried.

Each differs from the reading of the loader in one thing. All draft greedily for the same text of
the target, so the acceptance lengths differ by the reading alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch import Tensor
from transformers import PreTrainedModel

from specdec.checkpoints.survey import Checkpoint
from specdec.checkpoints.vocab_map import other_maps
from specdec.drafters.base import Drafter
from specdec.evaluation.evaluate import evaluate
from specdec.generator import SpeculativeGenerator


@dataclass(frozen=True, eq=False)
class Reading:
    """One way of taking a checkpoint.

    Args:
        name: what is different.
        checkpoint: the head so read.
        how: what to do in order to load it so; empty for the loader's own reading.
    """

    name: str
    checkpoint: Checkpoint
    how: str = ""


@dataclass(frozen=True, eq=False)
class Trial:
    """What a reading accepts.

    Args:
        reading: which.
        acceptance_length: 1 + mean accepted draft tokens per step.
        error: its standard error over the steps.
        conditional_rates: acceptance at each draft position, given that it was reached.
    """

    reading: Reading
    acceptance_length: float
    error: float
    conditional_rates: list[float]


def alternatives(checkpoint: Checkpoint, target: PreTrainedModel) -> list[Reading]:
    """The loader's reading of a head for a target, and the usual misreadings that the same tensors
    allow.
    """
    readings = [Reading("as read", checkpoint)]
    for other in checkpoint.family.misreadings(checkpoint.config, target):
        reread = replace(checkpoint, config=other.config)
        readings.append(Reading(other.name, reread, other.how))
    if checkpoint.target_ids is not None:
        for name, ids in other_maps(checkpoint.target_ids, checkpoint.config.vocab_size):
            how = "store d2t as offsets: target id - draft id"
            readings.append(Reading(name, replace(checkpoint, target_ids=ids), how))
    return readings


def try_readings(
    readings: Iterable[Reading],
    drafter_class: Callable[..., Drafter],
    target: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int = 64,
    num_draft_tokens: int = 4,
) -> list[Trial]:
    """Generates the same greedy text with each reading.

    Args:
        readings: from `alternatives`.
        drafter_class: runs such heads: (head, target, K, proposal="argmax") -> drafter.
        target: the model.
        input_ids: `[B, T]` prompts.
        attention_mask: `[B, T]`.
        max_new_tokens: of each prompt, at most.
        num_draft_tokens: K.

    Raises:
        ValueError: a head that does not fit the target, or no draft tokens to compare.
    """
    if num_draft_tokens < 1:
        raise ValueError(f"the parity check needs num_draft_tokens >= 1, got {num_draft_tokens}")
    trials, device = [], target.get_input_embeddings().weight.device
    shared = target
    for reading in readings:
        head = reading.checkpoint.build().to(device)
        drafter = drafter_class(head, target, num_draft_tokens, proposal="argmax")
        generator = SpeculativeGenerator(shared, drafter)
        shared = generator.target  # tried out once is enough
        done = evaluate(generator, input_ids, attention_mask, max_new_tokens=max_new_tokens)
        length, rates = done.stats.acceptance_length, done.stats.conditional_rates
        trials.append(Trial(reading, length, done.acceptance_error, rates))
    return trials
