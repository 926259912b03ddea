"""What `specdec inspect` prints: the reading of a checkpoint, and the table of the parity check."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdec.checkpoints.files import names_of
from specdec.checkpoints.survey import Checkpoint, Survey
from specdec.inspection.parity import Trial
from specdec.show.text import printable

INDENT = 14

NUM_ERRORS = 3
"""Standard errors by which one reading must beat another before it is believed."""


def describe(survey: Survey, checkpoint: Checkpoint | None) -> str:
    """The resolved reading, some lines of text.

    Args:
        survey: of the checkpoint.
        checkpoint: its values, or `None` where they could not be read.
    """
    read = survey if checkpoint is None else checkpoint
    config, source = read.config, survey.source
    parts = {"embeddings": config.has_embed_tokens, "vocabulary head": config.has_lm_head}
    whose = {True: "its own", False: "the target's"}
    verdict = "not as expected" if survey.faults else "none missing, none unexpected"
    own = [name for name in survey.expected if checkpoint is None or name in checkpoint.tensors]
    lines = [
        ("checkpoint", str(survey.folder)),
        ("producer", f"{source.producer} ({source.why})"),
        *survey.family.describe(config),
        ("vocabulary", f"{config.draft_vocab_size} draft ids, {config.vocab_size} of the target"),
        ("parts", "; ".join(f"{name}: {whose[is_own]}" for name, is_own in parts.items())),
        ("tensors", f"{len(own)} make up such a head: {verdict}"),
        *(("fault", fault) for fault in survey.faults),
        *(("unread", f"{name}: {why}") for name, why in sorted(survey.unread.items())),
    ]
    if survey.unread_keys:
        lines.append(("keys unread", names_of(survey.unread_keys)))
    lines += [("note", note) for note in read.notes]
    return "\n".join(f"{name:<{INDENT}}{printable(text)}" for name, text in lines)


def table(trials: Sequence[Trial]) -> str:
    """The acceptance length of each reading, the best marked, and what follows from it.

    Args:
        trials: from `try_readings`, the loader's own reading first.
    """
    best = max(trials, key=lambda trial: trial.acceptance_length)
    width = max(len(trial.reading.name) for trial in trials)
    lines = [f"{'reading':<{width}}  acceptance length  conditional rates by position"]
    for trial in trials:
        rates = " ".join(f"{rate:.2f}" for rate in trial.conditional_rates)
        length = f"{trial.acceptance_length:.2f} ± {trial.error:.2f}"
        mark = "  <- best" if trial is best else ""
        lines.append(f"{trial.reading.name:<{width}}  {length:>17}  {rates}{mark}")
    return "\n".join([*lines, _conclusion(trials[0], best)])


def _conclusion(as_read: Trial, best: Trial) -> str:
    """What the best of the trials means for the loader's own reading."""
    gain = best.acceptance_length - as_read.acceptance_length
    if gain <= 0:
        return "no usual misreading accepts more"
    if gain <= NUM_ERRORS * math.hypot(as_read.error, best.error):
        return (
            f"'{best.reading.name}' accepts more, but within the noise of so little text; try more "
            "new tokens or prompts"
        )
    return f"'{best.reading.name}' accepts more; to load the head so: {best.reading.how}"
