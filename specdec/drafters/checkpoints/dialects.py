"""Translates an EAGLE checkpoint's configuration from its producer's terms to `EagleConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypedDict

from transformers import PreTrainedModel

from specdec.drafters.checkpoints.fields import read_sizes
from specdec.drafters.checkpoints.layer_ids import Convention, explicit_ids, read_feature_layers
from specdec.drafters.checkpoints.numbers import ConfigFields
from specdec.drafters.checkpoints.producers import Source
from specdec.drafters.eagle_config import EagleConfig
from specdec.target.features import FeatureLayer


class Overrides(TypedDict, total=False):
    """What a caller may know better than a checkpoint's configuration says; `None` leaves it.

    `layer_convention`: explicit layer ids are `"boundary"` or `"layer_output"` numbers, whatever
    the producer usually means. `feature_layers`: the boundaries themselves (or `"final"`).
    `rope_theta`: base of the rotary embedding. `norm_before_residual` and `feedback_norm`: as in
    `EagleConfig`.
    """

    layer_convention: Convention | None
    feature_layers: tuple[FeatureLayer, ...] | None
    rope_theta: float | None
    norm_before_residual: bool | None
    feedback_norm: bool | None


@dataclass(frozen=True)
class TargetSizes:
    """What a head must fit.

    Args:
        name: of the target's class, for messages.
        hidden_size: its width.
        vocab_size: its vocabulary.
        num_layers: its decoder layers N.
    """

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> TargetSizes:
        """Reads them from an HF model's configuration."""
        config = model.config.get_text_config()
        return cls(
            type(model).__name__, config.hidden_size, config.vocab_size, config.num_hidden_layers
        )


@dataclass(frozen=True, eq=False)
class Translation:
    """A configuration in the library's terms.

    Args:
        config: every convention resolved.
        notes: what was decided and why, one line each.
        unused: tensors that this producer's files may hold without using them, with the reason.
    """

    config: EagleConfig
    notes: list[str]
    unused: dict[str, str]


def translate(
    fields: ConfigFields,
    source: Source,
    shapes: Mapping[str, tuple[int, ...]],
    target: TargetSizes | None,
    overrides: Overrides,
) -> Translation:
    """Reads the whole configuration.

    Args:
        fields: config.json; a speculators file with its layer configuration filled in.
        source: who wrote it.
        shapes: canonical names and shapes of the tensors in the file; only optional parts of a
            head are decided by them.
        target: what the head must fit; `None` leaves that unchecked.
        overrides: see `Overrides`.

    Raises:
        ValueError: a value of a wrong type or size, flags that contradict each other or the
            tensors, or a head for another target.
    """
    config, notes = read_sizes(fields, source, shapes)
    if target is not None:
        _check_target(fields, config, target)
    wiring = _eagle1 if source.fusion == "input" else _eagle3
    changes, more, unused = wiring(fields, source, shapes)
    config = replace(config, **changes)
    given = {key: value for key, value in overrides.items() if value is not None}
    convention = given.pop("layer_convention", None)
    joins_features = config.fusion == "attention" and config.has_fc
    if "feature_layers" in given:
        given["feature_layers"] = _explicit(given["feature_layers"], target, joins_features)
    elif joins_features:
        num_layers = None if target is None else target.num_layers
        layers, layer_notes = read_feature_layers(fields, source, num_layers, convention)
        config, more = replace(config, feature_layers=layers), [*layer_notes, *more]
    config, more = _override(config, given, more)
    _check_joined(fields, config, shapes)
    return Translation(config, [*more, *notes], unused)


def _eagle1(
    fields: ConfigFields, source: Source, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict, list[str], dict[str, str]]:
    """Embedding and final feature through `fc`; no norm in front of the first layer or the head."""
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        if fields.flag(name):
            raise ValueError(
                f"{fields.origin}: {name} is set, but the tensors are those of an EAGLE-1 head"
            )
    for key, ids, _ in explicit_ids(fields, source):
        raise ValueError(
            f"{fields.origin}: {key} is {str(ids)[:80]}, but the tensors are those of an EAGLE-1 "
            "head, which reads the final state"
        )
    # The reference takes an absent key for true; a file that holds none can only mean false.
    bias = fields.get("bias")
    fc_bias = "fc.bias" in shapes if bias is None else fields.flag("bias")
    notes = [f"no key bias: fc has {'a' if fc_bias else 'no'} bias, as the file"] * (bias is None)
    return {"fc_bias": fc_bias, "output_norm": False}, notes, {}


def _eagle3(
    fields: ConfigFields, source: Source, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict, list[str], dict[str, str]]:
    """Flags of the dialects."""
    eagle, notes, unused = fields.section("eagle_config"), [], {}
    changes = {
        "has_fc": eagle.flag("use_aux_hidden_state", default=True),
        "norm_before_fc": fields.flag("norm_before_fc") or eagle.flag("norm_before_fc"),
        "fc_norm": fields.flag("fc_norm") or fields.flag("use_aux_norm"),
        "norm_before_residual": fields.flag("norm_before_residual"),
        "fc_bias": fields.flag("bias") and "fc.bias" in shapes,
    }
    if changes["norm_before_fc"] and changes["fc_norm"]:
        raise ValueError(f"{fields.origin}: norm_before_fc and fc_norm exclude each other")
    if not changes["has_fc"]:
        if changes["norm_before_fc"] or changes["fc_norm"]:
            raise ValueError(
                f"{fields.origin}: norms before fc, but eagle_config.use_aux_hidden_state is false"
            )
        notes.append("use_aux_hidden_state is false: the final state is the feature, without fc")
        unmeant = [f"{key} {str(ids)[:80]}" for key, ids, _ in explicit_ids(fields, source) if ids]
        notes += [f"so {key} has no meaning" for key in unmeant]
    if source.producer == "speculators" and fields.get("norm_before_residual") is None:
        notes.append(
            "no norm_before_residual: false, speculators' default (vLLM would take it for true)"
        )
    if source.producer == "SpecForge":
        # Its trainer reads the key, true by default, as "a norm stands before the vocabulary
        # head", and always feeds the raw output back.
        changes["output_norm"] = fields.flag("norm_output", default=True)
        if fields.get("norm_output") is not None:
            notes.append(
                "norm_output is taken as SpecForge's: the norm before the vocabulary head; raw "
                "feedback (vLLM and SGLang would take it for normalised feedback)"
            )
        if not changes["output_norm"]:
            unused["norm.weight"] = "norm_output is false: no norm before the vocabulary head"
    else:
        changes["feedback_norm"] = fields.flag("norm_output")
        changes["output_norm"] = eagle.flag("use_last_layernorm", default=True)
    return changes, notes, unused


def _explicit(
    layers: object, target: TargetSizes | None, joins_features: bool
) -> tuple[FeatureLayer, ...]:
    """Checks the boundaries that a caller asks for."""
    layers = tuple(layers)
    if not joins_features and len(layers) != 1:
        raise ValueError(f"the head reads one feature, got feature_layers {list(layers)}")
    limit = None if target is None else target.num_layers
    for layer in layers:
        is_boundary = type(layer) is int and layer >= 0 and (limit is None or layer <= limit)
        if layer != "final" and not is_boundary:
            raise ValueError(
                f"feature_layers {list(layers)} must be boundaries 0..{limit or 'N'} or 'final'"
            )
    if not layers or len(set(layers)) < len(layers):
        raise ValueError(f"feature_layers {list(layers)} must name at least one, and none twice")
    return layers


def _override(config: EagleConfig, given: dict, notes: list[str]) -> tuple[EagleConfig, list[str]]:
    """Applies what the caller asks for."""
    theta = given.pop("rope_theta", None)
    if config.fusion == "input" and ("norm_before_residual" in given or "feedback_norm" in given):
        raise ValueError("norm_before_residual and feedback_norm are of EAGLE-3; drop them")
    if theta is not None:
        if not isinstance(theta, int | float) or not theta > 0:
            raise ValueError(f"rope_theta must be a positive number, got {theta!r}")
        config = replace(config, rope={**config.rope, "rope_theta": float(theta)})
        notes = [*notes, f"as asked for: rope_theta = {theta:g}"]
    notes = [*notes, *(f"as asked for: {key} = {value}" for key, value in given.items())]
    return replace(config, **given), notes


def _check_target(fields: ConfigFields, config: EagleConfig, target: TargetSizes) -> None:
    if config.target_hidden_size != target.hidden_size:
        raise ValueError(
            f"{fields.origin} is of a head for a target of hidden size "
            f"{config.target_hidden_size}, but {target.name} has {target.hidden_size}"
        )
    if config.vocab_size != target.vocab_size:
        raise ValueError(
            f"{fields.origin} is of a head for a vocabulary of {config.vocab_size}, but "
            f"{target.name} has {target.vocab_size}"
        )


def _check_joined(
    fields: ConfigFields, config: EagleConfig, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """The number of features must be that which the configuration and `fc` tell."""
    if config.fusion == "input" or not config.has_fc:
        return
    count, width = len(config.feature_layers), config.target_hidden_size
    told = {}
    if fields.get("num_aux_hidden_states") is not None:
        told["num_aux_hidden_states is"] = fields.integer("num_aux_hidden_states")
    joined = shapes.get("fc.weight", ())
    if len(joined) == 2 and joined[1] % width == 0:
        told[f"fc.weight {list(joined)} joins, at width {width},"] = joined[1] // width
    for what, number in told.items():
        if number != count:
            raise ValueError(
                f"{fields.origin} leads to {count} features {list(config.feature_layers)}, but "
                f"{what} {number}; pass feature_layers=(...) with the boundaries that are meant"
            )
