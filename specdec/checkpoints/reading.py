"""What reading heads over a target's features has in common: names, sizes, features, descriptions.

EAGLE's heads and heads over masks have the same tensors under the same names; in each family's
module stands what differs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from specdec.checkpoints.config_fields import ConfigFields
from specdec.checkpoints.correction import TENSORS
from specdec.checkpoints.family import Source
from specdec.checkpoints.files import CheckpointFolder, StoredTensor
from specdec.checkpoints.layer_ids import NAME_THEM, LayerIds, check_layers, read_layer_ids
from specdec.checkpoints.layers import (
    fill_speculators,
    read_layer,
    read_windows,
    with_layer,
    with_theta,
)
from specdec.heads.features import FeatureHeadConfig
from specdec.heads.layers import LayerConfig
from specdec.target.features import FeatureLayer

Tensors = dict[str, StoredTensor]

_PREFIXES = ("model.", "speculator.")
_AUX_NORMS = {
    f"aux_norm_{level}.weight": f"fc_norm.{i}.weight"
    for i, level in enumerate(("low", "mid", "high"))
}
_OTHER_NAMES = {
    "midlayer.": "layers.0.",
    # speculators 0.1, EAGLE-1
    "fusion_fc.": "fc.",
    "transformer.": "layers.0.",
    # Hugging Face's DFlash assistants
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    # TorchSpec's DFlash
    "context_proj.": "fc.",
    "context_norm.": "hidden_norm.",
    "final_norm.": "norm.",
    # corrections inside a block
    **{theirs: ours for names in TENSORS.values() for ours, theirs in names.items()},
    "confidence_head.proj.": "confidence_head.",
}
"""How names begin that some producers have of their own, and how the head's do."""
_OTHER_ENDS = {
    ".self_attn.attention_sink_bias": ".self_attn.sinks",
    "_codebook.weight": "_codebook",
}
_LATER_HIDDEN_NORM = re.compile(r"layers\.([1-9]\d*)\.hidden_norm\.weight")


def canonical(name: str) -> str:
    """The head's name of a tensor."""
    while name.startswith(_PREFIXES):
        name = name.partition(".")[2]
    for theirs, ours in _OTHER_ENDS.items():
        if name.endswith(theirs):
            name = name.removesuffix(theirs) + ours
    for theirs, ours in _OTHER_NAMES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return _AUX_NORMS.get(name, name)


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Maps the head's names to the names in the file; `ValueError` if two of them mean the same."""
    renamed = {name: canonical(name) for name in names}
    taken, result = set(renamed.values()), {}
    for name, ours in renamed.items():
        later = _LATER_HIDDEN_NORM.fullmatch(ours)
        if later is not None:
            # SGLang calls the norm of layers after the first so, all others input_layernorm.
            usual = f"layers.{later[1]}.input_layernorm.weight"
            ours = ours if usual in taken else usual
        if ours in result:
            raise ValueError(f"{name} and {result[ours]} are two names for one tensor")
        result[ours] = name
    return result


def open_head(folder: CheckpointFolder, source: Source) -> tuple[ConfigFields, Tensors]:
    """The configuration, of speculators with its layers filled in, and tensors by the head's
    names.
    """
    fields, in_file = folder.fields, folder.tensors()
    if source.producer == "speculators" and "transformer_layer_config" in fields.raw:
        fields = fill_speculators(fields)
    return fields, {name: in_file[other] for name, other in canonical_names(in_file).items()}


def unsupported_weights(fields: ConfigFields, names: Collection[str]) -> Iterator[tuple[bool, str]]:
    """Pairs (condition, message): layers that no head of the library has."""
    is_latent = fields.get("kv_lora_rank") is not None or any("kv_a_proj" in n for n in names)
    yield is_latent, "kv_lora_rank: a drafter with multi-head latent attention (MLA)"
    has_experts = any(".experts." in name for name in names)
    yield has_experts, "tensors *.experts.*: a mixture-of-experts drafter"
    yield fields.flag("mlp_bias"), "mlp_bias: biases in the MLP"
    is_quantised = fields.get("quantization_config") is not None
    yield is_quantised, "quantization_config: quantised weights"


class HeadReading:
    """Reads one configuration, from its producer's terms to those of the head. Options of the
    caller stand in the place of what the file holds.
    """

    def __init__(
        self, fields: ConfigFields, source: Source, tensors: Tensors, options: Mapping[str, Any]
    ):
        self.fields, self.source, self.options = fields, source, options
        self.tensors, self.notes = tensors, fields.notes
        self.is_speculators = source.producer == "speculators"
        self.is_eagle1 = source.kind == "EAGLE-1"
        # Trainers of other heads copy layer_types from the target, and never look at them.
        self.reads_windows = source.producer in ("speculators", "DeepSpec")

    def layer(self, *, has_qk_norm: bool, **biases: bool) -> LayerConfig:
        """The decoder layers; a norm of queries in the file also says that there is one."""
        has_qk_norm = has_qk_norm or "layers.0.self_attn.q_norm.weight" in self.tensors
        layer = read_layer(self.fields, has_qk_norm=has_qk_norm, **biases)
        if self.reads_windows:
            layer = replace(layer, windows=read_windows(self.fields))
        theta = self.options.get("rope_theta")
        return self.asked_layer(layer if theta is None else with_theta(layer, theta))

    def asked_layer(self, layer: LayerConfig) -> LayerConfig:
        """With the fields that the caller names."""
        given = self.options.get("layer")
        return layer if given is None else with_layer(layer, given)

    def draft_vocab_size(self) -> int:
        """How many ids the head can propose; an absent key may have speculators' default."""
        fields, names = self.fields, ("draft_vocab_size", "truncated_vocab_size")
        vocab_size = size = fields.integer("vocab_size")
        sizes = {fields.integer(name) for name in names if fields.get(name) is not None}
        if len(sizes) > 1:
            raise ValueError(f"{fields.origin}: {' and '.join(names)} differ: {sorted(sizes)}")
        if sizes:
            size = sizes.pop()
        elif self.is_speculators and names[0] not in fields.raw:
            size = 32000
            self.notes.append("no draft_vocab_size: 32000, speculators' default")
        else:
            self.notes.append("no draft_vocab_size: the full vocabulary")
        if size > vocab_size:
            raise ValueError(
                f"{fields.origin}: {size} draft ids are more than the vocabulary's {vocab_size}"
            )
        return size

    def asked_layers(self, num_layers: int | None) -> tuple[FeatureLayer, ...] | None:
        """The boundaries that the caller names."""
        layers = self.options.get("feature_layers")
        return None if layers is None else check_layers("feature_layers", layers, num_layers)

    def boundaries(self, found: list[LayerIds], num_layers: int | None) -> tuple[FeatureLayer, ...]:
        """The boundaries that the file names, by the caller's convention or its producer's."""
        asked, producer = self.options.get("layer_convention"), self.source.producer
        return read_layer_ids(found, self.fields, num_layers, producer=producer, convention=asked)

    def check_joined(self, config: FeatureHeadConfig) -> None:
        """The number of features must be what the configuration and `fc` say."""
        if not config.joins_features:
            return
        count, width, said = len(config.feature_layers), config.target_hidden_size, {}
        fields, fc = self.fields, self.tensors.get("fc.weight")
        if fields.get("num_aux_hidden_states") is not None:
            said["num_aux_hidden_states is"] = fields.integer("num_aux_hidden_states")
        if fc is not None and len(fc.shape) == 2 and fc.shape[1] % width == 0:
            said[f"fc.weight {list(fc.shape)} joins, at width {width},"] = fc.shape[1] // width
        for what, number in said.items():
            if number != count:
                raise ValueError(
                    f"{fields.origin} leads to {count} features {list(config.feature_layers)}, but "
                    f"{what} {number}; {NAME_THEM}"
                )
