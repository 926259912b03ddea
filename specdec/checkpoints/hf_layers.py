"""Heads that are decoder layers of an HF architecture: the classes, found from a configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from inspect import signature

import torch
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specdec.checkpoints.config_fields import ConfigFields
from specdec.drafters.head.hf_layer import HFLayerConfig
from specdec.hf.layers import decoder_layers
from specdec.lab.show.text import one_line

MAX_LAYERS = 512
"""Most decoder layers of a target that is built, without memory, to find its classes."""


def model_of_config(fields: ConfigFields) -> PreTrainedModel:
    """The HF language model of a configuration, without a vocabulary head, on the `meta` device: it
    has classes and shapes, no weights. Of a model of texts and images it is the text half; a
    `quantization_config` is ignored.

    Raises:
        ValueError: a `model_type` that transformers does not have, or values that it rejects.
    """
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise ValueError(
            f"{fields.origin}: the head consists of decoder layers of its target, and transformers "
            f"has no model_type {kind!r}; pass the target"
        )
    text_fields(fields).integer("num_hidden_layers", high=MAX_LAYERS)
    raw = {name: value for name, value in fields.raw.items() if name != "quantization_config"}
    try:
        config = CONFIG_MAPPING[kind].from_dict(raw).get_text_config()
        with torch.device("meta"):
            return _language_model_class(config)(config)
    except Exception as error:  # HF raises errors of many kinds for values it cannot take
        raise ValueError(f"{fields.origin}: {type(error).__name__}: {one_line(error)}") from error


def _language_model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    if type(config) in MODEL_MAPPING:
        return MODEL_MAPPING[type(config)]
    # The text half of a model of texts and images has a class, and no entry.
    modeling = type(config).__module__.replace(".configuration_", ".modeling_")
    for found in vars(import_module(modeling)).values():
        is_model = isinstance(found, type) and issubclass(found, PreTrainedModel)
        if is_model and found.config_class is type(config) and hasattr(found, "input_modalities"):
            return found
    raise ValueError(f"transformers has no language model of {type(config).__name__}")


def known_keys(kind: type[PreTrainedConfig]) -> set[str]:
    """Keys that a configuration's class reads; it keeps all others as they are."""
    found = {"rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor"}
    found |= {"per_layer_config"}  # how HF writes what differs between layers
    said = (getattr(each, "__annotations__", {}) for each in kind.__mro__)
    return found.union(kind.attribute_map, signature(kind).parameters, *said)


def text_fields(fields: ConfigFields) -> ConfigFields:
    """The part of a target's configuration that its language model is described by."""
    is_nested = isinstance(fields.raw.get("text_config"), dict)
    return fields.section("text_config") if is_nested else fields


def last_layer(model: PreTrainedModel) -> HFLayerConfig:
    """As the target's last layer that attends to everything: of its mixtures of experts, where only
    the first layers are dense. As `prediction_layer`, where the configuration has such keys.
    """
    config = model.config.get_text_config()
    if getattr(config, "mtp_layer_types", None):
        return prediction_layer(model)
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    full = [index for index, kind in enumerate(types) if kind == "full_attention"]
    if not full:
        raise ValueError(
            f"{type(model).__name__} has no layer of full attention to build a head of"
        )
    return HFLayerConfig.of(model, like=full[-1])


def dense_layer(**changes: object) -> Callable[[PreTrainedModel], HFLayerConfig]:
    """As a layer of the target's class with a plain MLP, whichever of its layers have one; fields
    of the configuration are changed, those that are lists for all layers alike.
    """

    def layer_of(model: PreTrainedModel) -> HFLayerConfig:
        layer = HFLayerConfig.of(model, like=0)
        config = type(layer.config).from_dict(layer.config.to_dict())
        for name, value in changes.items():
            old = getattr(config, name, None)
            if old is not None:
                setattr(config, name, [value] * len(old) if isinstance(old, list) else value)
        return replace(layer, config=config)

    return layer_of


def prediction_layer(model: PreTrainedModel) -> HFLayerConfig:
    """As the configuration's own keys describe the layers of prediction modules."""
    config = model.config.get_text_config()
    kinds = [
        getattr(config, name, None) or [] for name in ("mtp_layer_types", "mtp_mlp_layer_types")
    ]
    if any(len(set(kind)) > 1 for kind in kinds):
        raise ValueError(f"{type(model).__name__}: prediction modules of different kinds: {kinds}")
    layer = HFLayerConfig.of(model, like=0)
    return replace(layer, config=model.config.get_mtp_config(), like=0)


def has_centred_norms(model: PreTrainedModel) -> bool:
    """Whether the target's norms multiply by 1 + weight: a weight of zero leaves something."""
    backbone, _ = decoder_layers(model)
    if not hasattr(backbone, "norm"):  # such a model is not supported as a target
        return False
    norm = type(backbone.norm)(1, eps=1.0)
    torch.nn.init.zeros_(norm.weight)
    return bool(norm(torch.ones(1, 1, device="cpu")).any())


EXACT = "e_score_correction_bias"
"""Ending of the names of tensors that stay float32: a bias that steers the choice of experts."""
