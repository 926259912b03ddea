"""Multi-token prediction modules, as targets ship them in their own checkpoints.

HF leaves these tensors unread. What differs between producers is a table of names, and a few flags
that no configuration states: which of the target's states enters, whether later depths read the
earlier ones, which state is passed on. Where engines disagree a note says so, and `specdec inspect`
measures the alternatives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from transformers import PreTrainedModel

from specdec.arguments import hints_of
from specdec.checkpoints import hf_layers, rope, sizes
from specdec.checkpoints.config_fields import ConfigFields
from specdec.checkpoints.family import (
    Family,
    Misreading,
    Source,
    Translation,
    misread,
    refuse_unsupported,
)
from specdec.checkpoints.files import CheckpointFolder, StoredTensor
from specdec.checkpoints.survey import FLOATS
from specdec.heads.config import LayerConfig
from specdec.heads.hf_layer import HFLayerConfig
from specdec.heads.mtp import MTPConfig, MTPHead, Semantics
from specdec.heads.sharing import check_target
from specdec.target.features import FeatureLayer

SECTION = "specdec_mtp"
"""Section of config.json of heads that this library wrote."""

MAX_DEPTHS = 32


class MTPOptions(TypedDict, total=False):
    """What a caller may know better than the producer's usual conventions; `None` leaves it.

    `feature_layers`: one entry, `"final"` or boundary L. The others are as in `MTPConfig`;
    `rope_theta` is for layers of the library's own.
    """

    feature_layers: tuple[FeatureLayer, ...] | None
    semantics: Semantics | None
    feedback_norm: bool | None
    hidden_first: bool | None
    zero_first_embedding: bool | None
    rope_theta: float | None


@dataclass(frozen=True)
class Layout:
    """How a producer names and wires prediction modules.

    Args:
        producer: its name.
        pattern: how the names of a depth begin, with the group `depth` where they have a number.
        names: what follows, and its name in `MTPDepth`, or in the head itself after a slash. A key
            that ends with a dot is a prefix. Names that are not listed are of the decoder layer.
        counts_from_target: depths are numbered from the target's layer count on.
        layer: (HF model) -> the decoder layer, of the target's architecture; `None` is the
            library's own layer, with these flags of `LayerConfig`.
        layer_flags: see `layer`.
        flags: of `MTPConfig`. `target_state="pre"` is boundary L.
        shares_head: vocabulary heads that are stored with several depths are copies of one.
        notes: where engines disagree.
        why: what the files were recognised by.
    """

    producer: str
    pattern: str
    names: dict[str, str]
    layer: Callable[[PreTrainedModel], HFLayerConfig] | None = hf_layers.last_layer
    layer_flags: dict[str, bool] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    counts_from_target: bool = False
    shares_head: bool = True
    notes: tuple[str, ...] = ()
    why: str = ""

    def depth_and_rest(self, name: str, num_layers: int) -> tuple[int, str] | None:
        """The depth that a tensor belongs to, and its name there; `None` for any other tensor."""
        found = re.match(self.pattern, name)
        if found is None:
            return None
        depth = int(found.groupdict().get("depth") or 0)
        depth -= num_layers if self.counts_from_target else 0
        return (depth, name[found.end() :]) if depth >= 0 else None

    def canonical(self, depth: int, rest: str, num_depths: int) -> str:
        """The head's name of a tensor."""
        for key, name in self.names.items():
            if rest == key or (key.endswith(".") and rest.startswith(key)):
                rest = name + rest[len(key) :]
                break
        else:
            rest = f"block.{rest}"
        if rest.startswith("/"):
            is_shared = self.shares_head or rest.startswith("/embed_tokens") or num_depths == 1
            return rest[1:] if is_shared and depth == 0 else f"layers.{depth}.{rest[1:]}"
        if rest.startswith("block.") and self.layer is not None:
            rest = f"block.layer.{rest.removeprefix('block.')}"
        return f"layers.{depth}.{rest}"


_NUMBERED = r"(?:model\.)?(?:language_model\.)?layers\.(?P<depth>\d+)\."
_DEEPSEEK = {
    "enorm.": "enorm.",
    "hnorm.": "hnorm.",
    "eh_proj.": "eh_proj.",
    "shared_head.norm.": "norm.",
    "shared_head.head.": "/lm_head.",
    "embed_tokens.": "/embed_tokens.",
}
_PRE = "the target's state before its final norm"

LAYOUTS = (
    Layout(
        producer="Qwen",
        why="tensors mtp.fc and mtp.layers.*",
        pattern=r"mtp\.(?:layers\.(?P<depth>\d+)\.|(?=fc\.|pre_fc_norm|norm\.))",
        names={
            "fc.": "eh_proj.",
            "pre_fc_norm_embedding.": "enorm.",
            "pre_fc_norm_hidden.": "hnorm.",
            "norm.": "norm.",
        },
        flags={"centred_norms": True},
    ),
    Layout(
        producer="MiMo",
        why="tensors model.mtp_layers.*",
        pattern=r"model\.mtp_layers\.(?P<depth>\d+)\.",
        names={
            "token_layernorm.": "enorm.",
            "hidden_layernorm.": "hnorm.",
            "input_proj.": "eh_proj.",
            "final_layernorm.": "norm.",
        },
        layer=None,
        layer_flags={"attention_bias": True},
        flags={"hidden_first": True, "target_state": "pre", "zero_first_embedding": True},
        notes=(f"the first depth reads {_PRE}, as in vLLM; SGLang hands in the normalised one",),
    ),
    Layout(
        producer="MiMo-V2",
        why="tensors model.mtp.layers.*.pre_mlp_layernorm",
        pattern=r"model\.mtp\.layers\.(?P<depth>\d+)\.",
        names={
            "enorm.": "enorm.",
            "hnorm.": "hnorm.",
            "eh_proj.": "eh_proj.",
            "final_layernorm.": "norm.",
            "pre_mlp_layernorm.": "block.post_attention_layernorm.",
            "self_attn.attention_sink_bias": "block.self_attn.sinks",
        },
        layer=hf_layers.dense_layer(layer_types="sliding_attention", mlp_layer_types="dense"),
        flags={"semantics": "target", "target_state": "pre"},
        notes=(
            f"every depth reads {_PRE}, as in SGLang; vLLM runs one depth on the normalised state",
        ),
    ),
    Layout(
        producer="Ernie",
        why="tensors model.mtp_block.*",
        pattern=r"model\.(?=mtp_)",
        names={
            "mtp_emb_norm.0.": "enorm.",
            "mtp_hidden_norm.0.": "hnorm.",
            "mtp_linear_proj.0.": "eh_proj.",
            "mtp_block.0.": "block.",
        },
        layer=hf_layers.dense_layer(moe_layer_start_index=1),
        flags={"output_norm": False, "feedback_norm": False, "zero_first_embedding": True},
        notes=(
            "the block rotates pairs of channels as its target does; vLLM runs it as a Llama layer",
        ),
    ),
    Layout(
        producer="Step",
        why="tensors model.layers.N.transformer.*",
        pattern=_NUMBERED,
        counts_from_target=True,
        names={
            "enorm.": "enorm.",
            "hnorm.": "hnorm.",
            "eh_proj.": "eh_proj.",
            "transformer.shared_head.norm.": "norm.",
            "transformer.shared_head.output.": "/lm_head.",
            "transformer.embed_tokens.": "/embed_tokens.",
            "transformer.": "block.",
            "embed_tokens.": "/embed_tokens.",
        },
        layer=hf_layers.prediction_layer,
        flags={"centred_norms": True, "target_state": "pre", "feedback_norm": False},
        shares_head=False,
    ),
    Layout(
        producer="DeepSeek",
        why="tensors model.layers.N.eh_proj, N the number of the target's layers",
        pattern=_NUMBERED,
        counts_from_target=True,
        names=_DEEPSEEK,
        notes=("the embedding at position 0 is read as it is; vLLM zeroes it",),
    ),
)


def detect(folder: CheckpointFolder) -> Source | None:
    """The producer: `"DeepSeek"` (also of GLM's and others' files under its names), `"Qwen"`,
    `"MiMo"`, `"MiMo-V2"`, `"Step"`, `"Ernie"`, or `"specdec"`.
    """
    fields = folder.fields
    if SECTION in fields.raw:
        return Source("specdec", "MTP", f"config.json has {SECTION}")
    num_layers = hf_layers.text_fields(fields).raw.get("num_hidden_layers")
    if type(num_layers) is not int:
        return None
    marks = {
        "Qwen": r"mtp\.fc\.weight",
        "MiMo": r"model\.mtp_layers\.0\.input_proj\.weight",
        "MiMo-V2": r"model\.mtp\.layers\.0\.pre_mlp_layernorm\.weight",
        "Ernie": r"model\.mtp_linear_proj\.0\.weight",
        "Step": rf"(model\.)?(language_model\.)?layers\.{num_layers}\.transformer\..*",
        "DeepSeek": rf"(model\.)?(language_model\.)?layers\.{num_layers}\.eh_proj\.weight",
    }
    found = folder.tensors(lambda name: any(re.fullmatch(p, name) for p in marks.values()))
    for layout in LAYOUTS:
        if any(re.fullmatch(marks[layout.producer], name) for name in found):
            return Source(layout.producer, "MTP", layout.why)
    return None


def translate(
    folder: CheckpointFolder, source: Source, target: PreTrainedModel | None, options: MTPOptions
) -> Translation:
    """Reads the whole configuration; see `Family`."""
    fields = folder.fields
    if source.producer == "specdec":
        config, tensors = _read_own(folder)
    else:
        layout = next(layout for layout in LAYOUTS if layout.producer == source.producer)
        config, tensors = _read_layout(folder, layout, target)
        fields.notes.extend(layout.notes)
    config = _with_options(config, options, fields)
    if target is not None:
        check_target(target, config.hidden_size, config.vocab_size, what=fields.origin)
    copies = r"layers\.\d+\.embed_tokens\.weight"
    if not config.lm_head_per_depth:
        copies = r"layers\.\d+\.(embed_tokens|lm_head)\.weight"
    why = "shared by all depths, and read from the first"
    unused = {name: why for name in tensors if re.fullmatch(copies, name)}
    exact = frozenset(name for name in tensors if name.endswith(hf_layers.EXACT))
    return Translation(config, tensors, fields, unused, exact)


def _read_layout(
    folder: CheckpointFolder, layout: Layout, target: PreTrainedModel | None
) -> tuple[MTPConfig, dict[str, StoredTensor]]:
    """Configuration and tensors in the head's terms, of a target's own checkpoint."""
    fields = folder.fields
    text = hf_layers.text_fields(fields)
    num_layers = text.integer("num_hidden_layers", high=hf_layers.MAX_LAYERS)
    in_file = folder.tensors(lambda name: layout.depth_and_rest(name, num_layers) is not None)
    placed = {name: layout.depth_and_rest(name, num_layers) for name in in_file}
    num_depths = 1 + max(depth for depth, _ in placed.values())
    refuse_unsupported(fields, _unsupported(layout, in_file, num_depths))
    _check_count(text, num_depths)
    tensors: dict[str, StoredTensor] = {}
    for name, (depth, rest) in placed.items():
        canonical = layout.canonical(depth, rest, num_depths)
        if canonical in tensors:
            raise ValueError(f"{name} and {tensors[canonical].name} are two names for one tensor")
        tensors[canonical] = in_file[name]
    if layout.layer is not None:
        tensors = hf_layers.fuse_experts(tensors)
        layer = layout.layer(target if target is not None else hf_layers.model_of_config(fields))
        for key in (*fields.raw, *text.raw):  # HF's class has read them
            fields.get(key)
            text.get(key)
    else:
        layer = sizes.read_layer(text, **layout.layer_flags)
        rope.check_rope(layer)
    flags = dict(layout.flags)
    if flags.get("target_state") == "pre":
        flags["target_state"] = num_layers
    has_per_depth = "layers.0.lm_head.weight" in tensors
    config = MTPConfig(
        layer=layer,
        vocab_size=text.integer("vocab_size"),
        num_layers=num_depths,
        projection_bias="layers.0.eh_proj.bias" in tensors,
        has_embed_tokens="embed_tokens.weight" in tensors,
        has_lm_head=has_per_depth or "lm_head.weight" in tensors,
        lm_head_per_depth=has_per_depth,
        **flags,
    )
    return config, tensors


def _unsupported(
    layout: Layout, tensors: dict[str, StoredTensor], num_depths: int
) -> Iterator[tuple[bool, str]]:
    """Pairs (condition, message)."""
    others = sorted({tensor.dtype for tensor in tensors.values()} - FLOATS)
    scales = [name for name in tensors if re.search(r"_scale(_inv)?$", name)]
    what = ", ".join(others + scales[:1])
    yield bool(others or scales), f"quantised weights ({what}); dequantise the modules first"
    yield num_depths > MAX_DEPTHS, f"{num_depths} depths (at most {MAX_DEPTHS})"
    is_several = layout.producer in ("Qwen", "Ernie") and num_depths > 1
    yield is_several, f"{num_depths} layers behind one projection"
    fused = any(".qkv_proj." in name for name in tensors)
    yield fused, "fused qkv_proj, stored in shards of an unknown number"
    yield any(".moe." in name for name in tensors), "tensors *.moe.*: experts under Step's names"


def _check_count(text: ConfigFields, num_depths: int) -> None:
    """The number of depths must be that of the configuration, where it holds one."""
    for key in ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"):
        if text.get(key) is None:
            continue
        count = text.integer(key, low=0, high=MAX_DEPTHS)
        if count not in (0, num_depths):
            raise ValueError(f"{text.origin}: {key} is {count}, but the files hold {num_depths}")


_FLAGS = {
    **{"hidden_first": False, "output_norm": True, "feedback_norm": True},
    **{"zero_first_embedding": False, "centred_norms": False, "projection_bias": False},
    **{"has_embed_tokens": False, "has_lm_head": False, "lm_head_per_depth": False},
}
LAYER_FLAGS = ("attention_bias", "attention_output_bias", "has_qk_norm")


def _read_own(folder: CheckpointFolder) -> tuple[MTPConfig, dict[str, StoredTensor]]:
    """What `mtp_export.save_head` wrote."""
    fields, section = folder.fields, folder.fields.section(SECTION)
    if section.get("hf_layer") is not None:
        like = section.integer("hf_layer", low=0, high=hf_layers.MAX_LAYERS)
        layer = HFLayerConfig.of(hf_layers.model_of_config(fields), like=like)
        for key in fields.raw:
            fields.get(key)
    else:
        layer = sizes.read_layer(fields, **{name: section.flag(name) for name in LAYER_FLAGS})
        rope.check_rope(layer)
    config = MTPConfig(
        layer=layer,
        vocab_size=fields.integer("vocab_size"),
        num_layers=section.integer("num_depths", high=MAX_DEPTHS),
        target_state=_check_state((section.get("target_state", "final"),)),
        semantics=section.text("semantics", "chain"),
        **{name: section.flag(name, default=default) for name, default in _FLAGS.items()},
    )
    return config, folder.tensors()


def _with_options(config: MTPConfig, options: MTPOptions, fields: ConfigFields) -> MTPConfig:
    given = dict(options)
    if "feature_layers" in given:
        given["target_state"] = _check_state(given.pop("feature_layers"))
    if "rope_theta" in given:
        if not isinstance(config.layer, LayerConfig):
            raise ValueError(
                f"{fields.origin}: rope_theta is for heads of the library's own layers; these are "
                f"{config.layer.layer_class.__name__}s, whose configuration says it"
            )
        turned = rope.with_theta(config.layer, given.pop("rope_theta"))
        config = replace(config, layer=turned)
    for name, value in given.items():
        fields.notes.append(f"as asked for: {name} = {value!r}")
    return replace(config, **given)


def _check_state(layers: tuple[FeatureLayer, ...]) -> FeatureLayer:
    """The one feature; `ValueError` if it is none."""
    is_one = len(layers) == 1
    if is_one and (layers[0] == "final" or (type(layers[0]) is int and layers[0] >= 0)):
        return layers[0]
    raise ValueError(f"prediction modules read one feature, 'final' or a boundary; got {layers!r}")


def describe(config: MTPConfig) -> list[tuple[str, str]]:
    """Lines (name, text)."""
    plural = "s" if config.num_layers > 1 else ""
    head = f"MTP, {config.num_layers} depth{plural}"
    order = "[hidden, embedding]" if config.hidden_first else "[embedding, hidden]"
    state = "after the final norm" if config.target_state == "final" else "before the final norm"
    later = "the output of the one before" if config.semantics == "chain" else "the target's state"
    norm = "after the norm" if config.feedback_norm else "before any norm"
    zero = "; zero beside position 0" if config.zero_first_embedding else ""
    lines = [
        ("wiring", f"{order}{zero}; later depths read {later}; passed on {norm}"),
        ("features", f"the target's state {state}"),
    ]
    if isinstance(config.layer, LayerConfig):
        layer = sizes.describe_layer(config.layer, config.num_layers)
        return [
            ("head", f"{head}, {layer['sizes']}"),
            *lines,
            ("attention", layer["attention"]),
            ("rope", layer["rope"]),
        ]
    name = config.layer.layer_class.__name__
    return [("head", f"{head} of {name}, width {config.hidden_size}"), *lines]


def misreadings(config: MTPConfig, target: PreTrainedModel) -> Iterator[Misreading]:
    """The target's state, what is passed on, the semantics, the order of inputs, position 0."""
    text = target.config.get_text_config()
    states = {"final": text.num_hidden_layers}
    other = states.get(config.target_state, "final")
    name = f"features {'before' if other != 'final' else 'after'} the target's final norm"
    yield Misreading(name, replace(config, target_state=other), f"feature_layers=({other!r},)")
    if config.output_norm:
        value = not config.feedback_norm
        name = f"feedback {'after' if value else 'before'} the norm"
        yield misread(config, name, feedback_norm=value)
    if config.num_layers > 1:
        value = "target" if config.semantics == "chain" else "chain"
        name = {"chain": "depths chained", "target": "depths read the target's state"}[value]
        yield misread(config, name, semantics=value)
    value = not config.hidden_first
    name = f"projection of {'[hidden, embedding]' if value else '[embedding, hidden]'}"
    yield misread(config, name, hidden_first=value)
    value = not config.zero_first_embedding
    name = f"embedding beside position 0 {'zero' if value else 'read'}"
    yield misread(config, name, zero_first_embedding=value)
    if isinstance(config.layer, LayerConfig):
        yield from rope.misread_bases(config, target)


MTP = Family(
    name="MTP",
    marks=f"prediction modules in a target's own checkpoint, or key {SECTION}",
    detect=detect,
    translate=translate,
    head=MTPHead,
    describe=describe,
    misreadings=misreadings,
    options=hints_of(MTPOptions),
)
"""Prediction modules of DeepSeek-V3, GLM-4.5, Qwen3-Next and Qwen3.5, MiMo, Step and Ernie."""
