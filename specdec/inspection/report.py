"""What `specdec inspect` prints: the reading of a checkpoint, and the table of the parity check."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdec.drafters.checkpoints.manifest import expected_tensors
from specdec.drafters.checkpoints.reading import Checkpoint, Survey
from specdec.drafters.checkpoints.safe_json import names_of
from specdec.drafters.eagle_config import EagleConfig
from specdec.inspection.parity import Trial

INDENT = 14

NUM_ERRORS = 3
"""Standard errors by which one reading must beat another before it is believed."""


def describe(survey: Survey, checkpoint: Checkpoint | None) -> str:
    """The resolved reading, some lines of text.

    Args:
        survey: of the checkpoint.
        checkpoint: its values, or `None` where they could not be read.
    """
    config, source = (survey if checkpoint is None else checkpoint).config, survey.source
    kind = "EAGLE-3" if config.fusion == "attention" else "EAGLE-1 / EAGLE-2"
    lines = [
        ("checkpoint", str(survey.folder)),
        ("producer", f"{source.producer} ({source.why})"),
        ("head", f"{kind}, {_sizes(config)}"),
        ("features", _features(config)),
        ("norms", _norms(config)),
        ("attention", _attention(config)),
        ("rope", ", ".join(f"{key} {value}" for key, value in sorted(config.rope.items()))),
        ("vocabulary", f"{config.draft_vocab_size} draft ids, {config.vocab_size} of the target"),
        ("parts", _parts(config)),
    ]
    if config.logit_scale != 1:
        lines.append(("logits", f"times {config.logit_scale:g}"))
    verdict = "not as expected" if survey.faults else "none missing, none unexpected"
    lines.append(("tensors", f"{len(expected_tensors(config))} make up such a head: {verdict}"))
    lines += [("fault", fault) for fault in survey.faults]
    lines += [("unread", f"{name}: {why}") for name, why in sorted(survey.unread.items())]
    if survey.unread_keys:
        lines.append(("keys unread", names_of(survey.unread_keys)))
    lines += [("note", note) for note in (survey if checkpoint is None else checkpoint).notes]
    return "\n".join(f"{name:<{INDENT}}{text}" for name, text in lines)


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


def _sizes(config: EagleConfig) -> str:
    layers = f"{config.num_layers} layer{'s' if config.num_layers > 1 else ''}"
    return (
        f"{layers}, width {config.hidden_size}, MLP {config.intermediate_size} "
        f"({config.hidden_act}), {config.num_heads} heads of {config.head_dim} "
        f"({config.num_kv_heads} for keys and values)"
    )


def _features(config: EagleConfig) -> str:
    names = ", ".join(map(str, config.feature_layers))
    if config.feature_layers == ("final",):
        names = "the state after the final norm"
    else:
        names = f"boundaries {names}"
    if config.fusion == "input":
        joined = "with the embedding through fc" + (" (with bias)" if config.fc_bias else "")
    elif config.has_fc:
        joined = "joined by fc" + (" (with bias)" if config.fc_bias else "")
    else:
        joined = "taken as it is, without fc"
    return f"{names}, {config.target_hidden_size} wide, {joined}"


def _norms(config: EagleConfig) -> str:
    parts = ["before the vocabulary head" if config.output_norm else "none before the head"]
    if config.norm_before_fc:
        parts.append("one over all features before fc")
    if config.fc_norm:
        parts.append("one per feature before fc")
    if config.fusion == "attention":
        residual = "normed" if config.norm_before_residual else "raw"
        parts.append(f"residual {residual} (norm_before_residual {config.norm_before_residual})")
    parts.append(f"feedback {'after' if config.feedback_norm else 'before'} the norm")
    return f"{'; '.join(parts)}; eps {config.rms_norm_eps:g}"


def _attention(config: EagleConfig) -> str:
    biases = "queries, keys, values" if config.attention_bias else "none"
    biases += ", output" if config.attention_output_bias else ""
    return f"biases: {biases}; queries and keys {'' if config.has_qk_norm else 'not '}normed"


def _parts(config: EagleConfig) -> str:
    owns = {"embeddings": config.has_embed_tokens, "vocabulary head": config.has_lm_head}
    whose = {True: "its own", False: "the target's"}
    return "; ".join(f"{name}: {whose[is_own]}" for name, is_own in owns.items())
