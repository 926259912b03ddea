"""The parity check: a head read wrongly still runs, so the likely misreadings are tried.

Each differs from the reading of the loader in one thing. All draft greedily for the same text of
the target, so the acceptance lengths differ by the reading alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.drafters.checkpoints.fields import DEFAULT_ROPE_THETA
from specdec.drafters.checkpoints.reading import Checkpoint
from specdec.drafters.eagle import EagleDrafter
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
    """The loader's reading, and the usual misreadings that the same tensors allow.

    Args:
        checkpoint: the head.
        target: the model that it was read for.
    """
    text = target.config.get_text_config()
    theta = (getattr(text, "rope_parameters", None) or {}).get("rope_theta")
    readings = [Reading("as read", checkpoint)]
    for name, changes, how in (
        *_other_layers(checkpoint, text.num_hidden_layers),
        *_other_norms(checkpoint),
        *_other_bases(checkpoint, theta),
    ):
        config = replace(checkpoint.config, **changes)
        readings.append(Reading(name, replace(checkpoint, config=config), how))
    for name, ids in _other_maps(checkpoint):
        how = "store d2t as offsets: target id - draft id"
        readings.append(Reading(name, replace(checkpoint, target_ids=ids), how))
    return readings


def _other_layers(checkpoint: Checkpoint, num_layers: int) -> Iterator[tuple[str, dict, str]]:
    layers = checkpoint.config.feature_layers
    shifted = {
        f"{word}: boundaries {', '.join(map(str, ids))}": ids
        for word, shift in (("one layer lower", -1), ("one layer higher", 1))
        if (ids := tuple(b if b == "final" else b + shift for b in layers)) != layers
    }
    if layers[-1] == "final":
        shifted["before the final norm"] = (*layers[:-1], num_layers)
    elif layers[-1] == num_layers:
        shifted["the last after the final norm"] = (*layers[:-1], "final")
    default = tuple(sorted({2, num_layers // 2, num_layers - 3}))
    if len(default) == len(layers) and layers != default:
        shifted[f"the default boundaries {', '.join(map(str, default))}"] = default
    for name, ids in shifted.items():
        if all(b == "final" or 0 <= b <= num_layers for b in ids):
            yield name, {"feature_layers": ids}, f"feature_layers={ids}"


def _other_norms(checkpoint: Checkpoint) -> Iterator[tuple[str, dict, str]]:
    config = checkpoint.config
    if config.fusion != "attention":
        return
    if config.output_norm:  # else there is no norm to leave out or to use
        value = not config.feedback_norm
        name = f"feedback {'after' if value else 'before'} the norm"
        yield name, {"feedback_norm": value}, f"feedback_norm={value}"
    value = not config.norm_before_residual
    name = f"residual {'after' if value else 'before'} the norm"
    yield name, {"norm_before_residual": value}, f"norm_before_residual={value}"


def _other_bases(checkpoint: Checkpoint, theirs: float | None) -> Iterator[tuple[str, dict, str]]:
    rope = checkpoint.config.rope
    for base in dict.fromkeys((DEFAULT_ROPE_THETA, theirs)):
        if base and base != rope["rope_theta"]:
            whose = ", the target's" if base == theirs else ""
            yield (
                f"rope base {base:g}{whose}",
                {"rope": {**rope, "rope_theta": float(base)}},
                f"rope_theta={base:g}",
            )


def _other_maps(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    ids, vocab_size = checkpoint.target_ids, checkpoint.config.vocab_size
    if ids is None:
        return
    own = torch.arange(len(ids))
    for name, other in (
        ("d2t as absolute ids", ids - own),
        ("draft ids in ascending order", ids.sort().values),
        ("no map: the first ids", own),
    ):
        is_map = bool(((other >= 0) & (other < vocab_size)).all())
        if is_map and len(other.unique()) == len(other) and not other.equal(ids):
            yield name, other


def try_readings(
    readings: Iterable[Reading],
    target: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int = 64,
    num_draft_tokens: int = 4,
) -> list[Trial]:
    """Generates the same greedy text with each.

    Args:
        readings: from `alternatives`.
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
        drafter = EagleDrafter(head, target, num_draft_tokens, proposal="argmax")
        generator = SpeculativeGenerator(shared, drafter)
        shared = generator.target  # tried out once is enough
        result = generator.generate(
            input_ids,
            attention_mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            trace=True,
        )
        stats = result.stats
        accepted = [float(step.num_accepted) for row in result.trace for step in row]
        spread = torch.tensor(accepted).std(correction=0).item()
        error = spread / max(len(accepted), 1) ** 0.5
        trials.append(Trial(reading, stats.acceptance_length, error, stats.conditional_rates))
    return trials
