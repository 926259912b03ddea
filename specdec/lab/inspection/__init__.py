"""`specdec inspect`: how a drafter checkpoint is read, and whether another reading accepts more.

A head that is read wrongly still runs, so the parity check tries the likely misreadings. Each
differs from the reading of the loader in one option. All draft greedily for the same text of the
target, so the acceptance lengths differ by the reading alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from textwrap import wrap
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.checkpoints.layer_ids import other_hidden_states
from specdec.checkpoints.layers import DEFAULT_ROPE_THETA
from specdec.checkpoints.survey import Checkpoint, Survey, expected_tensors
from specdec.checkpoints.vocab_map import other_maps
from specdec.drafters.base import Drafter
from specdec.generator import SpeculativeGenerator
from specdec.hf.forward import device_of
from specdec.lab.evaluation.evaluate import evaluate
from specdec.lab.show.table import Table
from specdec.lab.show.text import draft_size, printable

NUM_ERRORS = 3
"""Standard errors by which one reading must beat another before it is believed."""


@dataclass(frozen=True, eq=False)
class Reading:
    """One way of taking a checkpoint: what is different, the head so read, and what to do in order
    to load it so, which is empty for the loader's own reading.
    """

    name: str
    checkpoint: Checkpoint
    how: str = ""


@dataclass(frozen=True, eq=False)
class Trial:
    """What a reading accepts."""

    reading: Reading
    acceptance_length: float
    error: float  # standard error over the steps
    conditional_rates: list[float]


def alternatives(survey: Survey, checkpoint: Checkpoint, target: PreTrainedModel) -> list[Reading]:
    """The loader's reading of a head for a target, and the usual misreadings that the same tensors
    allow: another value of one of the family's options, or another vocabulary map. The survey must
    have been made for the target.
    """
    readings, config, family = [Reading("as read", checkpoint)], checkpoint.config, survey.family
    tables = {name: getattr(config, name) for name in ("has_embed_tokens", "has_lm_head")}
    for name, option, value in _other_values(survey, target):
        try:
            other = survey.reread(**{option: value})
        except ValueError:  # it contradicts the rest of the configuration
            continue
        if expected_tensors(family, other) == survey.expected:
            reread = replace(checkpoint, config=replace(other, **tables))
            readings.append(Reading(name, reread, f"{option}={value!r}"))
    if checkpoint.target_ids is not None:
        for name, ids in other_maps(checkpoint.target_ids, config.vocab_size):
            how = "store d2t as offsets: target id - draft id"
            readings.append(Reading(name, replace(checkpoint, target_ids=ids), how))
    return readings


def _other_values(survey: Survey, target: PreTrainedModel) -> Iterator[tuple[str, str, Any]]:
    """What to try: its name, the option, and the value."""
    config, options, text = survey.config, survey.family.options, target.config.get_text_config()
    if "feature_layers" in options and config.feature_layers:
        for name, layers in other_hidden_states(config.feature_layers, text.num_hidden_layers):
            yield name, "feature_layers", layers
    for option, values in options.items():
        for value in values if hasattr(config, option) else ():
            if value != getattr(config, option):
                yield f"{option} {value}", option, value
    rope = getattr(getattr(config, "layer", None), "rope", None)
    if "rope_theta" in options and rope is not None:
        theirs = (getattr(text, "rope_parameters", None) or {}).get("rope_theta")
        for base in dict.fromkeys((DEFAULT_ROPE_THETA, theirs)):
            if base and base != rope["rope_theta"]:
                whose = ", the target's" if base == theirs else ""
                yield f"rope base {base:g}{whose}", "rope_theta", base
    if "layer" in options and rope is not None:
        yield from _other_layers(config, text)


def _other_layers(config: Any, target: PreTrainedConfig) -> Iterator[tuple[str, str, Any]]:
    """Rope scalings, partial rotation and sliding windows: none, and the target's."""
    layer, rope, partial = config.layer, config.layer.rope, "partial_rotary_factor"
    theirs = getattr(target, "rope_parameters", None) or {}
    if "rope_type" not in theirs:  # one for each kind of layer
        theirs = {"rope_type": "default"}
    kept = {key: rope[key] for key in ("rope_theta", partial) if key in rope}
    part = {key: theirs[key] for key in (partial,) if key in theirs}
    tried = [rope]
    for name, other in (
        ("without rope scaling", {"rope_type": "default", **kept}),
        ("the target's rope scaling", theirs | kept),
        ("whole heads turned", {key: rope[key] for key in rope if key != partial}),
        ("the target's partial_rotary_factor", rope | part),
    ):
        if other not in tried:
            tried.append(other)
            yield name, "layer", {"rope": other}
    size = getattr(target, "sliding_window", None)
    windows = () if layer.windows else (size,) * config.num_layers
    if windows != layer.windows and any(windows or layer.windows):
        name = "the target's sliding window" if windows else "without sliding windows"
        yield name, "layer", {"windows": windows}
    if layer.windows:
        both = not layer.is_window_causal
        yield f"is_window_causal {both}", "layer", {"is_window_causal": both}


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
    """Generates the same greedy text with each reading, from `alternatives`.

    Args:
        drafter_class: runs such heads: (head, target, K, proposal="argmax") -> drafter.
        input_ids, attention_mask: `[B, T]` prompts.
        num_draft_tokens: K.

    Raises:
        ValueError: a head that does not fit the target.
    """
    trials, device = [], device_of(target.get_input_embeddings())
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


def table(trials: Sequence[Trial]) -> str:
    """The acceptance length of each reading, the best marked, and what follows from it. The
    loader's own reading comes first.
    """
    best = max(trials, key=lambda trial: trial.acceptance_length)
    rows = []
    for trial in trials:
        rates = " ".join(f"{rate:.2f}" for rate in trial.conditional_rates)
        length = f"{trial.acceptance_length:.2f} ± {trial.error:.2f}"
        rows.append([trial.reading.name, length, rates, "<- best" if trial is best else ""])
    header = ["reading", "acceptance length", "conditional rates by position", ""]
    return f"{Table(header, rows)}\n{_conclusion(trials[0], best)}"


def _conclusion(as_read: Trial, best: Trial) -> str:
    gain = best.acceptance_length - as_read.acceptance_length
    if gain <= 0:
        return "no usual misreading accepts more"
    if gain <= NUM_ERRORS * math.hypot(as_read.error, best.error):
        return (
            f"'{best.reading.name}' accepts more, but within the noise of so little text; try more "
            "new tokens or prompts"
        )
    return f"'{best.reading.name}' accepts more; to load the head so: {best.reading.how}"


def describe(survey: Survey, checkpoint: Checkpoint | None) -> str:
    """The resolved reading, some lines of text; `None` where the values could not be read."""
    read = survey if checkpoint is None else checkpoint
    config, source = read.config, survey.source
    parts = {"embeddings": config.has_embed_tokens, "vocabulary head": config.has_lm_head}
    whose = {True: "its own", False: "the target's"}
    verdict = "not as expected" if survey.faults else "none missing, none unexpected"
    own = [name for name in survey.expected if checkpoint is None or name in checkpoint.tensors]
    lines = [
        ("checkpoint", str(survey.folder)),
        ("producer", f"{source.producer} ({source.why})"),
        *_describe_head(source.kind, config),
        ("vocabulary", f"{config.draft_vocab_size} draft ids, {config.vocab_size} of the target"),
        ("parts", "; ".join(f"{name}: {whose[is_own]}" for name, is_own in parts.items())),
        ("tensors", f"{len(own)} make up such a head: {verdict}"),
        *(("fault", fault) for fault in survey.faults),
        *(("unread", f"{name}: {why}") for name, why in sorted(survey.unread.items())),
    ]
    lines += [("note", note) for note in read.notes]
    return "\n".join(f"{name:<14}{printable(text)}" for name, text in lines)


def describe_part(drafter: Drafter) -> str:
    """What a drafter is: its class, how much it drafts, what it reads, and its settings.

    Args:
        drafter: of any class.

    Example:
        >>> from specdec import SuffixDrafter
        >>> describe_part(SuffixDrafter(4)).split()[:5]
        ['drafter', 'SuffixDrafter', 'draft', 'K', '=']
    """
    settings = drafter.settings()
    lines = {"drafter": settings.pop("class")}
    lines["draft"] = draft_size(drafter.num_draft_tokens, drafter.tree_depth)
    lines["features"] = _features(drafter.feature_layers) or "none"
    said = ("num_draft_tokens", "tree_depth", "feature_layers")
    lines |= {name: str(value) for name, value in settings.items() if name not in said}
    return "\n".join(f"{name:<20}{printable(text)}" for name, text in lines.items())


def _features(layers: Iterable[int | str]) -> str:
    names = {"final": "the state after the final norm"}
    return ", ".join(names.get(layer, f"hidden state {layer}") for layer in layers)


_SAID = {
    *("layer", "num_layers", "vocab_size", "draft_vocab_size", "feature_layers", "target_state"),
    *("target_hidden_size", "has_embed_tokens", "has_lm_head"),
}
"""Fields of configurations that have a line of their own."""


def _describe_head(kind: str, config: Any) -> Iterator[tuple[str, str]]:
    """Lines (name, text): sizes, features, and every other field of the configuration."""
    layer = getattr(config, "layer", None)
    is_own = layer is not None and not hasattr(layer, "layer_class")
    yield "head", f"{kind}, {_sizes(config, layer, is_own=is_own)}"
    features = _features(config.feature_layers)
    yield "features", f"{features}; {config.target_hidden_size} wide" if features else "none"
    flags = {f.name: getattr(config, f.name) for f in fields(config) if f.name not in _SAID}
    wiring = wrap(", ".join(f"{name} {value}" for name, value in flags.items()), 86)
    yield from zip_longest(["wiring"], wiring, fillvalue="")
    if is_own:
        names = ("attention_bias", "attention_output_bias", "has_qk_norm", "rms_norm_eps")
        if layer.windows:
            names += ("windows", "is_window_causal")
        names += tuple(name for name in ("has_sinks", "convolution") if getattr(layer, name))
        yield "layers", ", ".join(f"{name} {getattr(layer, name)}" for name in names)
        yield "rope", ", ".join(f"{key} {value}" for key, value in sorted(layer.rope.items()))


def _sizes(config: Any, layer: Any, *, is_own: bool) -> str:
    """Decoder layers and their widths."""
    if layer is None:
        return f"no decoder layers, width {config.hidden_size}"
    sizes = f"{config.num_layers} layer{'s' if config.num_layers > 1 else ''}"
    if not is_own:  # of HF's own
        return f"{sizes} of {layer.layer_class.__name__}, width {layer.hidden_size}"
    heads = f"{layer.num_heads} heads of {layer.head_dim} ({layer.num_kv_heads} for keys and "
    mlp = f"MLP {layer.intermediate_size} ({layer.hidden_act}), {heads}values)"
    return f"{sizes}, width {layer.hidden_size}, {mlp}"
