"""Multi-token prediction modules, as targets ship them in their own checkpoints.

HF leaves these tensors unread. What differs between producers is a table of names, and a few flags
that no configuration states: which of the target's states enters, whether later depths read the
earlier ones, which state is passed on. Where engines disagree a note says so, and `specdec inspect`
measures the alternatives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args

from transformers import PreTrainedModel

from specdec.checkpoints import hf_layers
from specdec.checkpoints.config_fields import ConfigFields
from specdec.checkpoints.export import layer_keys, write_checkpoint
from specdec.checkpoints.family import Family, Source, Translation, refuse_unsupported
from specdec.checkpoints.files import FLOATS, CheckpointFolder, StoredTensor
from specdec.checkpoints.layer_ids import check_layers
from specdec.checkpoints.layers import read_layer, with_theta
from specdec.heads.hf_layer import HFLayerConfig
from specdec.heads.layers import LayerConfig
from specdec.heads.mtp import MTPConfig, MTPHead, Semantics
from specdec.heads.sharing import check_target
from specdec.target.features import FeatureLayer

SECTION = "specdec_mtp"
"""Section of config.json of heads that this library wrote."""

MAX_DEPTHS = 32
_USUAL = {name: name for name in ("enorm.", "hnorm.", "eh_proj.")}


@dataclass(frozen=True, eq=False)
class Layout:
    """How a producer names and wires prediction modules.

    Args:
        mark: regular expression of a name that only such files have; N is the number of the
            target's layers.
        pattern: how the names of a depth begin, with the group `depth` where they have a number.
        names: what follows, and its name in `MTPDepth`, or in the head itself after a slash, where
            that differs. A key that ends with a dot is a prefix. Names that are neither listed nor
            those of `MTPDepth` are of the decoder layer.
        layer: (HF model) -> the decoder layer, of the target's architecture; `None` is the
            library's own layer, with biases of queries, keys and values.
        flags: of `MTPConfig`. `target_state="pre"` is boundary L.
        counts_from_target: depths are numbered from the target's layer count on.
        shares_head: vocabulary heads that are stored with several depths are copies of one.
        notes: where engines disagree.
    """

    producer: str
    mark: str
    pattern: str
    names: dict[str, str]
    layer: Callable[[PreTrainedModel], HFLayerConfig] | None = hf_layers.last_layer
    flags: dict[str, Any] = field(default_factory=dict)
    counts_from_target: bool = False
    shares_head: bool = True
    notes: tuple[str, ...] = ()

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
        for key, name in (_USUAL | self.names).items():
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
_PRE = "the target's state before its final norm"

LAYOUTS = (
    Layout(
        producer="Qwen",
        mark=r"mtp\.fc\.weight",
        pattern=r"mtp\.(?:layers\.(?P<depth>\d+)\.)?",
        names={
            "fc.": "eh_proj.",
            "pre_fc_norm_embedding.": "enorm.",
            "pre_fc_norm_hidden.": "hnorm.",
            "norm.": "norm.",
            "embed_tokens.": "/embed_tokens.",
            "lm_head.": "/lm_head.",
        },
    ),
    Layout(
        producer="MiMo",
        mark=r"model\.mtp_layers\.0\.input_proj\.weight",
        pattern=r"model\.mtp_layers\.(?P<depth>\d+)\.",
        names={
            "token_layernorm.": "enorm.",
            "hidden_layernorm.": "hnorm.",
            "input_proj.": "eh_proj.",
            "final_layernorm.": "norm.",
        },
        layer=None,
        flags={"hidden_first": True, "target_state": "pre", "zero_first_embedding": True},
        notes=(f"the first depth reads {_PRE}, as in vLLM; SGLang hands in the normalised one",),
    ),
    Layout(
        producer="MiMo-V2",
        mark=r"model\.mtp\.layers\.0\.pre_mlp_layernorm\.weight",
        pattern=r"model\.mtp\.layers\.(?P<depth>\d+)\.",
        names={
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
        mark=r"model\.mtp_linear_proj\.0\.weight",
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
        mark=r"(model\.)?(language_model\.)?layers\.N\.transformer\..*",
        pattern=_NUMBERED,
        counts_from_target=True,
        names={
            "transformer.shared_head.norm.": "norm.",
            "transformer.shared_head.output.": "/lm_head.",
            "transformer.embed_tokens.": "/embed_tokens.",
            "transformer.": "block.",
            "embed_tokens.": "/embed_tokens.",
        },
        layer=hf_layers.prediction_layer,
        flags={"target_state": "pre", "feedback_norm": False},
        shares_head=False,
    ),
    Layout(
        producer="DeepSeek",
        mark=r"(model\.)?(language_model\.)?layers\.N\.eh_proj\.weight",
        pattern=_NUMBERED,
        counts_from_target=True,
        names={
            "shared_head.norm.": "norm.",
            "shared_head.head.": "/lm_head.",
            "embed_tokens.": "/embed_tokens.",
        },
        notes=("the embedding at position 0 is read as it is; vLLM zeroes it",),
    ),
)


def detect(folder: CheckpointFolder) -> Source | None:
    """The producer: `"DeepSeek"` and `"Qwen"` (also of others' files under their names), `"MiMo"`,
    `"MiMo-V2"`, `"Step"`, `"Ernie"`, or `"specdec"`.
    """
    if SECTION in folder.fields.raw:
        return Source("specdec", "MTP", f"config.json has {SECTION}")
    num_layers = hf_layers.text_fields(folder.fields).raw.get("num_hidden_layers")
    if type(num_layers) is not int:
        return None
    marks = {layout: layout.mark.replace("N", str(num_layers)) for layout in LAYOUTS}
    found = folder.tensors(lambda name: any(re.fullmatch(mark, name) for mark in marks.values()))
    for layout, mark in marks.items():
        for name in found:
            if re.fullmatch(mark, name):
                return Source(layout.producer, "MTP", f"tensor {name}")
    return None


def translate(
    folder: CheckpointFolder,
    source: Source,
    target: PreTrainedModel | None,
    options: Mapping[str, Any],
) -> Translation:
    """Reads the whole configuration; see `Family`."""
    keys = folder.fields
    if source.producer == "specdec":
        config, tensors = _read_own(folder)
    else:
        layout = next(layout for layout in LAYOUTS if layout.producer == source.producer)
        config, tensors = _read_layout(folder, layout, target)
        keys.notes.extend(layout.notes)
    config = _with_options(config, options, keys.origin)
    if target is not None:
        check_target(target, config.hidden_size, config.vocab_size, what=keys.origin)
    copies = r"layers\.\d+\.embed_tokens\.weight"
    if not config.lm_head_per_depth:
        copies = r"layers\.\d+\.(embed_tokens|lm_head)\.weight"
    why = "shared by all depths, and read from the first"
    unused = {name: why for name in tensors if re.fullmatch(copies, name)}
    exact = frozenset(name for name in tensors if name.endswith(hf_layers.EXACT))
    return Translation(config, tensors, keys, unused, exact)


def _read_layout(
    folder: CheckpointFolder, layout: Layout, target: PreTrainedModel | None
) -> tuple[MTPConfig, dict[str, StoredTensor]]:
    """Configuration and tensors in the head's terms, of a target's own checkpoint."""
    keys, text = folder.fields, hf_layers.text_fields(folder.fields)
    num_layers = text.integer("num_hidden_layers", high=hf_layers.MAX_LAYERS)
    in_file = folder.tensors(lambda name: layout.depth_and_rest(name, num_layers) is not None)
    placed = {name: layout.depth_and_rest(name, num_layers) for name in in_file}
    num_depths = 1 + max(depth for depth, _ in placed.values())
    refuse_unsupported(keys, _unsupported(layout, in_file, num_depths))
    _check_count(text, num_depths)
    tensors: dict[str, StoredTensor] = {}
    for name, (depth, rest) in placed.items():
        canonical = layout.canonical(depth, rest, num_depths)
        if canonical in tensors:
            raise ValueError(f"{name} and {tensors[canonical].name} are two names for one tensor")
        tensors[canonical] = in_file[name]
    if layout.layer is not None:
        tensors = hf_layers.fuse_experts(tensors)
        model = target if target is not None else hf_layers.model_of_config(keys)
        layer, is_centred = layout.layer(model), hf_layers.has_centred_norms(model)
        for key in (*keys.raw, *text.raw):  # HF's class has read them
            keys.get(key)
            text.get(key)
    else:
        layer, is_centred = read_layer(text, attention_bias=True), False
    flags = dict(layout.flags)
    if flags.get("target_state") == "pre":
        flags["target_state"] = num_layers
    has_per_depth = "layers.0.lm_head.weight" in tensors
    config = MTPConfig(
        layer=layer,
        vocab_size=text.integer("vocab_size"),
        num_layers=num_depths,
        centred_norms=is_centred,
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


def _flags_of(kind: type) -> dict[str, bool]:
    """The flags of a configuration's class, with their defaults."""
    return {entry.name: entry.default for entry in fields(kind) if type(entry.default) is bool}


def save_modules(head: MTPHead, folder: str | Path) -> None:
    """Writes `config.json` and `model.safetensors`, which load back bit for bit: tensors under the
    names that the head gives them, and a section `specdec_mtp` in config.json.

    Engines read such modules from the target's own checkpoint only, each under the names of one
    target, so there is no layout that all of them read.

    Args:
        head: the weights.
        folder: made if need be; files in it are replaced.
    """
    config, layer = head.config, head.config.layer
    names = ("semantics", "target_state", *_flags_of(MTPConfig))
    section = {"num_depths": config.num_layers} | {name: getattr(config, name) for name in names}
    if isinstance(layer, LayerConfig):
        keys = layer_keys(layer, config.num_layers, config.vocab_size)
        keys |= {"rope_parameters": dict(layer.rope)}
        section |= {name: getattr(layer, name) for name in _flags_of(LayerConfig)}
    else:
        keys = layer.config.to_dict()
        section["hf_layer"] = layer.like
    keys |= {"torch_dtype": str(head.dtype).removeprefix("torch."), SECTION: section}
    write_checkpoint(folder, keys, dict(head.state_dict()))


def _read_own(folder: CheckpointFolder) -> tuple[MTPConfig, dict[str, StoredTensor]]:
    """What `save_modules` wrote."""
    keys, section = folder.fields, folder.fields.section(SECTION)
    if section.get("hf_layer") is not None:
        like = section.integer("hf_layer", low=0, high=hf_layers.MAX_LAYERS)
        layer = HFLayerConfig.of(hf_layers.model_of_config(keys), like=like)
        for key in keys.raw:
            keys.get(key)
    else:
        layer = read_layer(keys, **{name: section.flag(name) for name in _flags_of(LayerConfig)})
    flags = {n: section.flag(n, default=value) for n, value in _flags_of(MTPConfig).items()}
    config = MTPConfig(
        layer=layer,
        vocab_size=keys.integer("vocab_size"),
        num_layers=section.integer("num_depths", high=MAX_DEPTHS),
        target_state=_check_state("target_state", (section.get("target_state", "final"),)),
        semantics=section.text("semantics", "chain"),
        **flags,
    )
    return config, folder.tensors()


def _with_options(config: MTPConfig, options: Mapping[str, Any], origin: str) -> MTPConfig:
    given = dict(options)
    if "feature_layers" in given:
        given["target_state"] = _check_state("feature_layers", given.pop("feature_layers"))
    theta = given.pop("rope_theta", None)
    if theta is not None and not isinstance(config.layer, LayerConfig):
        raise ValueError(
            f"{origin}: rope_theta is for heads of the library's own layers; these are "
            f"{config.layer.layer_class.__name__}s, whose configuration says it"
        )
    if theta is not None:
        given["layer"] = with_theta(config.layer, theta)
    return replace(config, **given)


def _check_state(name: str, layers: Any) -> FeatureLayer:
    """The one feature; `ValueError` if there is another number of them, or it is none."""
    if len(check_layers(name, layers)) == 1:
        return layers[0]
    raise ValueError(
        f"{name}: prediction modules read one feature, 'final' or a boundary; got {layers!r}"
    )


MTP = Family(
    name="MTP",
    marks=f"prediction modules in a target's own checkpoint, or key {SECTION}",
    detect=detect,
    translate=translate,
    head=MTPHead,
    options={
        "feature_layers": (),
        "semantics": get_args(Semantics),
        "feedback_norm": (True, False),
        "hidden_first": (True, False),
        "zero_first_embedding": (True, False),
        "rope_theta": (),
    },
)
"""Prediction modules of DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5, Mellum, MiMo, Step and Ernie.

The options are what a caller may know better than the producer's usual conventions.
`feature_layers`: one entry, `"final"` or boundary L. `rope_theta` is for layers of the library's
own. The others are as in `MTPConfig`.
"""
