"""EAGLE-1, 2 and 3 checkpoints of every public layout.

SafeAILab (yuhuili), SpecForge (lmsys), speculators (RedHatAI), NVIDIA Model-Optimizer, DeepSpec and
AngelSlim write the same few tensors under different names, keys and conventions. They use the same
keys with other meanings (`norm_output`, layer ids), so reading starts with the question who wrote
the files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from transformers import PreTrainedModel

from specdec.checkpoints.config_fields import ConfigFields
from specdec.checkpoints.family import Family, Source, Translation, refuse_unsupported
from specdec.checkpoints.files import CheckpointFolder
from specdec.checkpoints.layer_ids import CONVENTIONS, LayerIds, find_layer_ids
from specdec.checkpoints.reading import (
    HeadReading,
    canonical,
    open_head,
    unsupported_weights,
)
from specdec.heads.eagle import EagleConfig, EagleHead
from specdec.heads.layers import LayerConfig
from specdec.heads.sharing import check_target
from specdec.target.features import FeatureLayer

_NVIDIA_KEYS = {
    *("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"),
    *("use_mtp_layernorm", "next_layer_regular", "parallel_draft_step"),
}
_SPECFORGE_KEYS = {"eagle_config", "fc_norm", "norm_output", "use_aux_norm"}
_MARKS = {
    *("fc.weight", "mask_hidden"),
    *("layers.0.hidden_norm.weight", "layers.0.self_attn.q_proj.weight"),
}
"""Names, in the head's terms, that producers and designs are recognised by."""


def detect(folder: CheckpointFolder) -> Source | None:
    """The producer: `"SafeAILab"` (yuhuili), `"SpecForge"` (lmsys), `"speculators"` (RedHatAI),
    `"NVIDIA"` (Model-Optimizer), `"DeepSpec"`, or `"vLLM"`: names and keys as vLLM reads them,
    without a mark of the producer. The kind is `"EAGLE-1"` (and 2) or `"EAGLE-3"`.
    """
    # A target's own files may hold more tensors than are read at once.
    in_file = folder.tensors(lambda name: "midlayer." in name or canonical(name) in _MARKS)
    source = _producer(folder.fields, in_file)
    is_other = any(is_so for is_so, _ in _other_designs(folder.fields, in_file))
    return source and source._replace(is_sure=not is_other)


def _producer(fields: ConfigFields, in_file: Collection[str]) -> Source | None:
    names, architectures = set(map(canonical, in_file)), fields.strings("architectures")
    nvidia_keys = _NVIDIA_KEYS & fields.section("eagle_config").raw.keys()
    if (kind := fields.raw.get("speculators_model_type", ...)) is not ...:
        design = "EAGLE-1" if kind == "eagle" else "EAGLE-3"
        return Source("speculators", design, f"config.json has speculators_model_type {kind!r}")
    if "target_layer_ids" in fields.raw and any(a.endswith("Eagle3Model") for a in architectures):
        return Source("DeepSpec", "EAGLE-3", f"architectures {architectures} and target_layer_ids")
    if any("midlayer." in name for name in in_file):
        keys = sorted(_SPECFORGE_KEYS & fields.raw.keys())
        keys += [a for a in architectures if a.endswith("Eagle3")]
        if keys:
            return Source("SpecForge", "EAGLE-3", f"tensors midlayer.* with {', '.join(keys)}")
        return Source("SafeAILab", "EAGLE-3", "tensors midlayer.*, no key of another producer")
    if nvidia_keys:
        why = f"eagle_config has {sorted(nvidia_keys)[-1]}, tensors layers.0.*"
        return Source("NVIDIA", "EAGLE-3", why)
    if "layers.0.hidden_norm.weight" in names:
        return Source("vLLM", "EAGLE-3", "tensors layers.0.*, no key of a producer")
    is_first = {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names
    why = "tensors fc and layers.0.*, no hidden_norm: EAGLE-1"
    return Source("SafeAILab", "EAGLE-1", why) if is_first else None


def _unsupported(
    fields: ConfigFields, source: Source, names: Collection[str]
) -> Iterator[tuple[bool, str]]:
    """Pairs (condition, message): what cannot be run as a sequential EAGLE head."""
    yield from _other_designs(fields, names)
    if fields.get("speculators_model_type") == "eagle":
        yield fields.flag("layernorms"), "layernorms: norms of the embedding and before the head"
        layer = fields.text("transformer_layer_architecture", "auto")
        is_other = layer not in ("auto", "LlamaDecoderLayer", "Qwen3DecoderLayer")
        yield is_other, f"transformer_layer_architecture {layer!r}"
    yield from unsupported_wiring(fields, source, names)


def _other_designs(fields: ConfigFields, names: Collection[str]) -> Iterator[tuple[bool, str]]:
    """Pairs (condition, message): marks of heads that are not EAGLE's."""
    kind = fields.get("speculators_model_type", "eagle3")
    is_other = kind not in ("eagle", "eagle3")
    yield is_other, f"speculators_model_type {kind!r} (expected 'eagle' or 'eagle3')"
    for key in ("ptd_token_id", "mask_token_id", "pard_token"):
        yield fields.get(key) is not None, f"{key}: a parallel (mask-token) head"
    for key in ("dflash_config", "block_size", "markov_rank", "medusa_num_heads"):
        yield fields.get(key) is not None, f"{key}: a block or Medusa drafter"
    has_hidden = any(name.endswith("mask_hidden") for name in names)
    yield has_hidden, "tensor mask_hidden: a parallel (mask-token) head"


def unsupported_wiring(
    fields: ConfigFields, source: Source, names: Collection[str]
) -> Iterator[tuple[bool, str]]:
    """Pairs (condition, message): layers and weights that no head of EAGLE's wiring can have."""
    eagle = fields.section("eagle_config")
    steps = eagle.integer("parallel_draft_step", 1)
    yield steps > 1, "eagle_config.parallel_draft_step > 1: parallel draft heads"
    has_parallel = any(name.startswith("parallel_draft_heads.") for name in names)
    yield has_parallel and steps == 1, "tensors parallel_draft_heads.*: parallel draft heads"
    yield from unsupported_weights(fields, names)
    is_mtp = eagle.flag("use_mtp_layernorm")
    yield is_mtp, "eagle_config.use_mtp_layernorm: norms of an MTP module"
    for key in ("use_input_layernorm_in_first_layer", "next_layer_regular"):
        yield not eagle.flag(key, default=True), f"eagle_config.{key}: false"
    if source.producer == "DeepSpec":
        unknown = [a for a in fields.strings("architectures") if a != "Qwen3Eagle3Model"]
        yield bool(unknown), f"architectures {unknown} (of DeepSpec, Qwen3Eagle3Model is read)"
        is_deep = fields.integer("num_hidden_layers", 1) > 1
        yield is_deep, "num_hidden_layers > 1 (DeepSpec's layers all read the embedding)"


def translate(
    folder: CheckpointFolder,
    source: Source,
    target: PreTrainedModel | None,
    options: Mapping[str, Any],
) -> Translation:
    """Reads the whole configuration; see `Family`."""
    fields, tensors = open_head(folder, source)
    refuse_unsupported(fields, _unsupported(fields, source, tensors))
    reading = EagleReading(fields, source, tensors, options)
    config = reading.config(target)
    reading.check_joined(config)
    fields.section("eagle_config").get("parallel_draft_heads_num_layers")  # is of no such head
    unused = {}
    if source.producer == "SpecForge" and not config.output_norm:
        unused["norm.weight"] = "norm_output is false: no norm before the vocabulary head"
    return Translation(config, tensors, fields, unused)


class EagleReading(HeadReading):
    """Reads one configuration, to `EagleConfig`."""

    def config(self, target: PreTrainedModel | None) -> EagleConfig:
        """Every convention resolved, for a target if there is one."""
        fields, names, num_layers = self.fields, self.tensors, None
        layer, vocab_size = self._layer(), fields.integer("vocab_size")
        draft_size = vocab_size if self.is_eagle1 else self.draft_vocab_size()
        target_hidden_size = fields.integer("target_hidden_size", layer.hidden_size)
        if target is not None:
            num_layers = target.config.get_text_config().num_hidden_layers
            check_target(target, target_hidden_size, vocab_size, what=fields.origin)
        flags = self._eagle1() if self.is_eagle1 else self._eagle3(fields.section("eagle_config"))
        # The head's own modules are of its width; the target's serve only where that is the same.
        is_other_width = layer.hidden_size != target_hidden_size
        return EagleConfig(
            fusion="input" if self.is_eagle1 else "attention",
            layer=layer,
            vocab_size=vocab_size,
            draft_vocab_size=draft_size,
            feature_layers=self._features(flags.get("has_fc", False), num_layers),
            target_hidden_size=target_hidden_size,
            num_layers=self._num_layers(),
            has_embed_tokens=is_other_width or "embed_tokens.weight" in names,
            has_lm_head=is_other_width or "lm_head.weight" in names or draft_size < vocab_size,
            logit_scale=fields.number("logit_scale", 1.0),
            **flags,
        )

    def _num_layers(self) -> int:
        """Layers of the head; some configurations have the target's number instead."""
        has_one = not any(name.startswith("layers.1.") for name in self.tensors)
        is_midlayer = any("midlayer." in stored.name for stored in self.tensors.values())
        # speculators' EAGLE-1 always has one.
        if has_one and (is_midlayer or (self.is_speculators and self.is_eagle1)):
            said = self.fields.integer("num_hidden_layers", 1, high=4096)
            if said > 1:
                self.notes.append(f"num_hidden_layers {said} is the target's: the file has one")
            return 1
        return self.fields.integer("num_hidden_layers", 1)

    def _layer(self) -> LayerConfig:
        fields, producer = self.fields, self.source.producer
        follows_hf = producer in ("speculators", "NVIDIA", "DeepSpec")
        is_qwen3 = self.is_speculators and fields.get("model_type") == "qwen3"
        has_bias = fields.flag("attention_bias")
        return self.layer(
            has_qk_norm=producer == "DeepSpec" or is_qwen3,
            attention_bias=has_bias or fields.flag("qkv_bias"),
            attention_output_bias=has_bias
            and (follows_hf or "layers.0.self_attn.o_proj.bias" in self.tensors),
        )

    def _eagle1(self) -> dict[str, bool]:
        """Embedding and final feature through `fc`; no norm before the first layer or the head."""
        fields = self.fields
        if {"norm_before_residual", "feedback_norm"} & self.options.keys():
            raise ValueError("norm_before_residual and feedback_norm are of EAGLE-3; drop them")
        norms = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        said = [f"{name} is set" for name in norms if fields.flag(name)]
        said += [f"{entry.key} is {str(entry.ids)[:80]}" for entry in self._explicit_ids()]
        if said:
            raise ValueError(
                f"{fields.origin}: {said[0]}, but the tensors are those of an EAGLE-1 head, which "
                "reads the final state"
            )
        if self.is_speculators:
            return {"fc_bias": fields.flag("fusion_bias"), "output_norm": False}
        # The reference takes an absent key for true; a file that holds none can only mean false.
        fc_bias = fields.flag("bias", default="fc.bias" in self.tensors)
        if fields.get("bias") is None:
            word = "a" if fc_bias else "no"
            self.notes.append(f"no key bias: fc has {word} bias, as the file")
        return {"fc_bias": fc_bias, "output_norm": False}

    def _eagle3(self, eagle: ConfigFields) -> dict[str, bool]:
        """Flags of the dialects."""
        fields, notes = self.fields, self.notes
        flags = {
            "has_fc": eagle.flag("use_aux_hidden_state", default=True),
            "norm_before_fc": fields.flag("norm_before_fc") or eagle.flag("norm_before_fc"),
            "fc_norm": fields.flag("fc_norm") or fields.flag("use_aux_norm"),
            "norm_before_residual": fields.flag("norm_before_residual"),
            "fc_bias": fields.flag("bias") and "fc.bias" in self.tensors,
        }
        if not flags["has_fc"]:
            notes.append("use_aux_hidden_state is false: the final state is the feature, no fc")
            unmeant = [entry for entry in self._explicit_ids() if entry.ids]
            notes += [f"so {entry.key} {str(entry.ids)[:80]} has no meaning" for entry in unmeant]
        if self.is_speculators and fields.get("norm_before_residual") is None:
            notes.append(
                "no norm_before_residual: false, speculators' default (vLLM would take it for true)"
            )
        if self.source.producer == "SpecForge":
            # Its trainer reads the key, true by default, as "a norm stands before the vocabulary
            # head", and always feeds the raw output back.
            flags["output_norm"] = fields.flag("norm_output", default=True)
            if fields.get("norm_output") is not None:
                notes.append(
                    "norm_output is taken as SpecForge's: the norm before the vocabulary head; raw "
                    "feedback (vLLM and SGLang would take it for normalised feedback)"
                )
        else:
            flags["feedback_norm"] = fields.flag("norm_output")
            flags["output_norm"] = eagle.flag("use_last_layernorm", default=True)
        asked = {"norm_before_residual", "feedback_norm"} & self.options.keys()
        return flags | {name: self.options[name] for name in asked}

    def _features(self, joins: bool, num_layers: int | None) -> tuple[FeatureLayer, ...]:
        """The boundaries that the head reads; one, the final state, if it does not join several."""
        producer, asked = self.source.producer, self.asked_layers(num_layers)
        if asked and not joins and len(asked) != 1:
            raise ValueError(f"the head reads one feature, got feature_layers {list(asked)}")
        if asked or not joins:
            return asked or ("final",)
        found = self._explicit_ids()
        layers = self.boundaries(found, num_layers)
        if producer == "NVIDIA" and not found:
            self.notes.append(
                "NVIDIA's exporter writes the ids, so the defaults are a guess here "
                "(vllm-project/vllm#50170 measured 1 % acceptance on such a head)"
            )
        elif producer == "NVIDIA" and "layer_convention" not in self.options:
            self.notes.append(
                "NVIDIA's training routes differ: compare with layer_convention='layer_output'"
            )
        if producer == "DeepSpec" and layers[-1] == num_layers:
            self.notes.append(
                f"DeepSpec's trainer sees {num_layers} after the final norm: compare with 'final'"
            )
        return layers

    def _explicit_ids(self) -> list[LayerIds]:
        """Every key under which ids stand."""
        # SpecForge's trainer hooks the outputs of layers. NVIDIA's heads are read as boundaries by
        # vLLM and, after measurement, by SGLang (sgl-project/sglang#32334).
        is_output = self.source.producer in ("SpecForge", "SafeAILab")
        nested = {f"eagle_config.{_IDS}": ("layer_output" if is_output else "boundary", 0)}
        return find_layer_ids(self.fields, _ID_KEYS | nested)


_IDS = "eagle_aux_hidden_state_layer_ids"
_ID_KEYS = {
    _IDS: ("boundary", 0),
    "aux_hidden_state_layer_ids": ("boundary", 0),
    "target_layer_ids": ("layer_output", -1),  # DeepSpec's -1 are the embeddings
    "eagle3_layers_to_capture": ("layer_output", 0),
    "aux_hidden_states_layer_ids": ("layer_output", 0),  # AngelSlim's
    "eagle_config.layer_ids": ("boundary", 0),
}
"""Keys of ids, how their usual readers take them, and the lowest id."""


EAGLE = Family(
    name="EAGLE",
    marks="tensors midlayer.*, layers.0.hidden_norm, or fc beside layers.0.*",
    detect=detect,
    translate=translate,
    head=EagleHead,
    options={
        "layer_convention": CONVENTIONS,
        "feature_layers": (),
        "rope_theta": (),
        "layer": (),
        "norm_before_residual": (True, False),
        "feedback_norm": (True, False),
    },
)
"""EAGLE-1, EAGLE-2 and EAGLE-3.

The options are what a caller may know better than a checkpoint's configuration says.
`layer_convention`: explicit layer ids are `"boundary"` or `"layer_output"` numbers, whatever the
producer usually means. `feature_layers`: the boundaries themselves (or `"final"`). `rope_theta`:
base of the rotary embedding. `layer`: a dict of fields of `LayerConfig` (`rope`, `windows`, ...).
`norm_before_residual` and `feedback_norm`: as in `EagleConfig`.
"""
