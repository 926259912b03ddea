"""How producers name and wire prediction modules: a table, in the order in which files are tried.

Legend: N layers of the target, D depths. No configuration says how modules are wired, so most
fields have the one value that engines take from the names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from functools import cached_property
from typing import Any

from transformers import PreTrainedModel, __version__
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specdec.checkpoints import hf_layers
from specdec.checkpoints.config_fields import ConfigFields
from specdec.checkpoints.files import FLOATS
from specdec.checkpoints.layers import layer_keys, read_layer
from specdec.checkpoints.layout import Key, Layout, Reading, Rule, Tensors, Values, Written
from specdec.checkpoints.marks import Clues
from specdec.checkpoints.tensor_rules import Named, Prefixed, Stacked
from specdec.drafters.head.hf_layer import HFLayerConfig
from specdec.drafters.head.layer_config import LayerConfig
from specdec.drafters.mtp.head import MTPConfig

MAX_DEPTHS = 32
SECTION = "specdec_mtp"
"""Section of config.json of heads that this library wrote."""
Pairs = Iterator[tuple[bool, str]]


class ModuleReading(Reading):
    """A reading of modules in a target's own checkpoint.

    Args:
        layout: of the modules.
        keys: of the target's config.json; `fields` are those of its language model.
        target: the target, if there is one.
        options: of the caller; `num_layers` of modules that have no tensors yet.
        is_written: the modules are not in a file yet.
    """

    def __init__(
        self,
        layout: Layout,
        keys: ConfigFields,
        target: PreTrainedModel | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        is_written: bool = False,
    ):
        fields = keys if SECTION in keys.raw else hf_layers.text_fields(keys)
        super().__init__(layout, fields, {}, options, target=target)
        self.keys, self.notes, self.is_written = keys, keys.notes, is_written

    @cached_property
    def model(self) -> PreTrainedModel:
        """The target, or one of its classes without weights."""
        return self.target if self.target is not None else hf_layers.model_of_config(self.keys)


@dataclass(frozen=True)
class Shared(Rule):
    """A table of the head that files hold with every depth.

    Args:
        start: of its name.
        unless_several: the tables of several depths are not copies of one.
    """

    start: str
    unless_several: bool = False

    def read(self, tensors: Tensors, reading: Reading) -> Tensors:
        """That of the first depth."""
        if self.unless_several and num_depths(tensors) > 1:
            return tensors
        result: Tensors = {}
        for name, stored in tensors.items():
            found = re.match(rf"layers\.(\d+)\.(?={re.escape(self.start)})", name)
            if found is not None and found[1] == "0":
                name = name[found.end() :]
            elif found is not None:
                reading.unused[name] = "shared by all depths, and read from the first"
            result[name] = stored
        return result

    def write(self, tensors: Values, reading: Reading) -> Values:
        """One for every depth."""
        own = {name: x for name, x in tensors.items() if name.startswith(self.start)}
        others = {name: x for name, x in tensors.items() if name not in own}
        depths = range(num_depths(tensors))
        return others | {f"layers.{d}.{name}": x for d in depths for name, x in own.items()}


def num_depths(names: Mapping[str, Any]) -> int:
    """D, by the head's names of tensors; 0 without modules."""
    found = [re.match(r"layers\.(\d+)\.", name) for name in names]
    return max((1 + int(each[1]) for each in found if each), default=0)


def _of_modules(reading: ModuleReading) -> Pairs:
    """What no head of prediction modules has."""
    tensors, depths = reading.tensors, reading["num_layers"]
    others = sorted({tensor.dtype for tensor in tensors.values()} - FLOATS)
    scales = [t.name for t in tensors.values() if re.search(r"_scale(_inv)?$", t.name)]
    what = ", ".join(others + scales[:1])
    yield bool(others or scales), f"quantised weights ({what}); dequantise the modules first"
    yield depths > MAX_DEPTHS, f"{depths} depths (at most {MAX_DEPTHS})"
    fused = any(".qkv_proj." in name for name in tensors)
    yield fused, "fused qkv_proj, stored in shards of an unknown number"
    has_moe = any(".moe." in tensor.name for tensor in tensors.values())
    yield has_moe, "tensors *.moe.*: experts under Step's names"
    if reading.fields.get("model_type") == "mellum" and "mellum" in CONFIG_MAPPING:
        # Before, HF has no key of the modules' layers: they slide, and would be built as full.
        knows = hasattr(CONFIG_MAPPING["mellum"], "num_mtp_layers")
        yield not knows, f"Mellum's modules with transformers {__version__}; 5.23 describes them"


def _of_several(reading: ModuleReading) -> Pairs:
    """Files with one projection for all depths."""
    depths = reading["num_layers"]
    yield depths > 1, f"{depths} layers behind one projection"


def _noted(value: Any, note: str) -> Callable[[Reading], Any]:
    """A value (or a function of the reading) about which engines disagree."""

    def read(reading: Reading) -> Any:
        reading.notes.append(note)
        return value(reading) if callable(value) else value

    return read


def _before_norm(reading: Reading) -> int:
    """Hidden state N."""
    return reading.fields.integer("num_hidden_layers", high=hf_layers.MAX_LAYERS)


def _flags_of(kind: type) -> dict[str, bool]:
    """The flags of a configuration's class, with their defaults."""
    return {entry.name: entry.default for entry in fields_of(kind) if type(entry.default) is bool}


def _own_layer(reading: ModuleReading) -> LayerConfig | HFLayerConfig:
    """As `_own_keys` describes it."""
    keys, section = reading.fields, reading.fields.section(SECTION)
    if section.get("hf_layer") is None:
        return read_layer(keys, **{name: section.flag(name) for name in _flags_of(LayerConfig)})
    like = section.integer("hf_layer", low=0, high=hf_layers.MAX_LAYERS)
    return HFLayerConfig.of(hf_layers.model_of_config(keys), like=like)


def _own_keys(what: Written) -> dict[str, Any]:
    """The layer of a head in the library's own file."""
    config, layer = what.config, what.config.layer
    if isinstance(layer, HFLayerConfig):
        return layer.config.to_dict() | {f"{SECTION}.hf_layer": layer.like}
    keys = layer_keys(layer, config.num_layers, config.vocab_size)
    flags = {f"{SECTION}.{name}": getattr(layer, name) for name in _flags_of(LayerConfig)}
    return keys | {"rope_parameters": dict(layer.rope)} | flags


def _has(name: str) -> Callable[[Reading], bool]:
    return lambda r: name in r.tensors


def _of_hf(layer: Callable[[PreTrainedModel], Any]) -> dict[str, Any]:
    """A decoder layer of the target's architecture, and norms like the target's."""
    return {
        "layer": lambda r: layer(r.model),
        "centred_norms": lambda r: hf_layers.has_centred_norms(r.model),
    }


_HEAD_OF_FIRST = "layers.0.lm_head.weight"
_FIELDS = {
    **_of_hf(hf_layers.last_layer),
    "vocab_size": Key("vocab_size", int),
    "num_layers": lambda r: num_depths(r.tensors),
    "target_state": "final",
    "semantics": "chain",
    "hidden_first": False,
    "output_norm": True,
    "feedback_norm": True,
    "zero_first_embedding": False,
    "projection_bias": _has("layers.0.eh_proj.bias"),
    "has_embed_tokens": _has("embed_tokens.weight"),
    "has_lm_head": lambda r: bool({_HEAD_OF_FIRST, "lm_head.weight"} & r.tensors.keys()),
    "lm_head_per_depth": _has(_HEAD_OF_FIRST),
}
_BLOCK = "block.layer."
_EXPERTS = (
    Stacked(
        tuple(f"experts.{{depth}}.{name}_proj.weight" for name in ("gate", "up")),
        "experts.gate_up_proj",
    ),
    Stacked(("experts.{depth}.down_proj.weight",), "experts.down_proj"),
)
"""Experts are stored one by one; HF's classes hold them as one."""


def _depth(start: str, names: Mapping[str, str], rest: str = _BLOCK) -> dict[str, str]:
    """Names of a depth that begin so in files: what follows, and what it is in the head's depth;
    all others are of its decoder layer.
    """
    usual = {name: name for name in ("enorm.", "hnorm.", "eh_proj.")}
    pairs = dict(names) | usual | {"": rest}  # the first is written
    return {start + theirs: f"layers.{{depth}}.{ours}" for theirs, ours in pairs.items()}


def _tensor(pattern: str) -> Callable[[Clues], str]:
    """A name (a regular expression) that only such files have; N is the target's layers."""

    def mark(clues: Clues) -> str:
        count = hf_layers.text_fields(clues.fields).raw.get("num_hidden_layers")
        return clues.tensor(pattern.replace("N", str(count))) if type(count) is int else ""

    return mark


def _layer_of_qwen2(reading: ModuleReading) -> LayerConfig:
    """The library's own layer, with biases of queries, keys and values; engines would run another
    target as one of such layers.
    """
    kind = reading.fields.get("model_type")
    if reading.is_written and kind not in ("qwen2", "mimo"):
        raise ValueError(
            f"MiMo's layout is of targets of model_type qwen2 or mimo, got {kind}; use 'DeepSeek' "
            "or no layout"
        )
    return read_layer(reading.fields, attention_bias=True)


_PRE = "the target's state before its final norm"
_NUMBERED = "layers.{N+depth}."
_OF_MODEL = Prefixed("model.", also=("language_model.",))


def _modules(
    producer: str, pattern: str, names: Mapping[str, str], *rules: Rule, **others: Any
) -> Layout:
    """A layout of modules.

    Args:
        producer: of the target.
        pattern: as for `_tensor`.
        names: how names begin, in files and in the head.
        rules: further ones; a prefix of all names comes first.
        others: of the record; `fields` are added to the usual ones.
    """
    fields = _FIELDS | others.pop("fields", {})
    tensors = (*rules, Named(names, is_all=True), *_EXPERTS)
    others = {"tensors": tensors, "refuse": (_of_modules,)} | others
    return Layout(producer, "MTP", MTPConfig, _tensor(pattern), fields, **others)


QWEN = _modules(
    "Qwen",
    r"mtp\.fc\.weight",
    {
        "mtp.fc.": "layers.0.eh_proj.",
        "mtp.pre_fc_norm_embedding.": "layers.0.enorm.",
        "mtp.pre_fc_norm_hidden.": "layers.0.hnorm.",
        "mtp.norm.": "layers.0.norm.",
        "mtp.embed_tokens.": "embed_tokens.",
        "mtp.lm_head.": "lm_head.",
        "mtp.layers.{depth}.": f"layers.{{depth}}.{_BLOCK}",
        "mtp.": f"layers.0.{_BLOCK}",
    },
    refuse=(_of_modules, _of_several),
    name="Qwen",
    file=(("mtp_num_hidden_layers", 1),),
    inert={"mtp_use_dedicated_embeddings": ...},  # the tensors say so
    only={"num_layers": (1,)},
)
MIMO = _modules(
    "MiMo",
    r"model\.mtp_layers\.0\.input_proj\.weight",
    _depth(
        "model.mtp_layers.{depth}.",
        {
            "token_layernorm.": "enorm.",
            "hidden_layernorm.": "hnorm.",
            "input_proj.": "eh_proj.",
            "final_layernorm.": "norm.",
        },
        "block.",
    ),
    fields={
        "layer": _layer_of_qwen2,
        "centred_norms": False,
        "hidden_first": True,
        "target_state": _noted(
            _before_norm,
            f"the first depth reads {_PRE}, as in vLLM; SGLang hands in the normalised one",
        ),
        "zero_first_embedding": True,
    },
    inert={
        "attention_bias": (True,),
        "layer_types": lambda kinds, r: {*kinds} == {"full_attention"},
        "use_sliding_window": (False,),
        **{"sliding_window": ..., "max_window_layers": ...},  # of no layer then
    },
    name="MiMo",
    file=(("architectures", ["MiMoForCausalLM"]),),
)
MIMO_V2 = _modules(
    "MiMo-V2",
    r"model\.mtp\.layers\.0\.pre_mlp_layernorm\.weight",
    _depth(
        "model.mtp.layers.{depth}.",
        {
            "final_layernorm.": "norm.",
            "pre_mlp_layernorm.": f"{_BLOCK}post_attention_layernorm.",
            "self_attn.attention_sink_bias": f"{_BLOCK}self_attn.sinks",
        },
    ),
    fields={
        **_of_hf(hf_layers.dense_layer(layer_types="sliding_attention", mlp_layer_types="dense")),
        "semantics": "target",
        "target_state": _noted(
            _before_norm,
            f"every depth reads {_PRE}, as in SGLang; vLLM runs one depth on the normalised state",
        ),
    },
)
ERNIE = _modules(
    "Ernie",
    r"model\.mtp_linear_proj\.0\.weight",
    {
        "model.mtp_emb_norm.0.": "layers.0.enorm.",
        "model.mtp_hidden_norm.0.": "layers.0.hnorm.",
        "model.mtp_linear_proj.0.": "layers.0.eh_proj.",
        "model.mtp_block.0.": f"layers.0.{_BLOCK}",
        "model.mtp_": f"layers.0.{_BLOCK}mtp_",
    },
    fields={
        **_of_hf(hf_layers.dense_layer(moe_layer_start_index=1)),
        "output_norm": _noted(
            False,
            "the block rotates pairs of channels as its target does; vLLM runs it as a Llama layer",
        ),
        "feedback_norm": False,
        "zero_first_embedding": True,
    },
)
STEP = _modules(
    "Step",
    r"(model\.)?(language_model\.)?layers\.N\.transformer\..*",
    _depth(
        _NUMBERED,
        {
            "transformer.shared_head.norm.": "norm.",
            "transformer.shared_head.output.": "lm_head.",
            "transformer.embed_tokens.": "embed_tokens.",
            "transformer.": _BLOCK,
            "embed_tokens.": "embed_tokens.",
        },
    ),
    *(_OF_MODEL, Shared("embed_tokens."), Shared("lm_head.", unless_several=True)),
    fields={
        **_of_hf(hf_layers.prediction_layer),
        "target_state": _before_norm,
        "feedback_norm": False,
    },
)
DEEPSEEK = _modules(
    "DeepSeek",
    r"(model\.)?(language_model\.)?layers\.N\.eh_proj\.weight",
    _depth(
        _NUMBERED,
        {
            "shared_head.norm.": "norm.",
            "shared_head.head.": "lm_head.",
            "embed_tokens.": "embed_tokens.",
        },
    ),
    *(_OF_MODEL, Shared("embed_tokens."), Shared("lm_head.")),
    fields={
        "zero_first_embedding": _noted(
            False, "the embedding at position 0 is read as it is; vLLM zeroes it"
        )
    },
    name="DeepSeek",
    copies=("embed_tokens", "lm_head"),
)

_OWN_FLAGS = _flags_of(MTPConfig)
OWN = Layout(
    "specdec",
    "MTP",
    MTPConfig,
    lambda clues: clues.key(SECTION),
    fields={
        "layer": _own_layer,
        "vocab_size": Key("vocab_size", int),
        "num_layers": Key(f"{SECTION}.num_depths", int, high=MAX_DEPTHS),
        "target_state": Key(
            f"{SECTION}.target_state",
            read=lambda r: r.fields.section(SECTION).get("target_state", "final"),
        ),
        "semantics": Key(f"{SECTION}.semantics", "chain"),
        **{name: Key(f"{SECTION}.{name}", usual) for name, usual in _OWN_FLAGS.items()},
    },
    inert={"num_hidden_layers": lambda count, r: count == r["num_layers"]},
    file=(
        *(_own_keys, lambda what: {"torch_dtype": what.dtype}),
        *("num_layers", "target_state", "semantics", *_OWN_FLAGS),
    ),
)
"""Heads without their target, which load back bit for bit."""

LAYOUTS = (OWN, QWEN, MIMO, MIMO_V2, ERNIE, STEP, DEEPSEEK)
WRITTEN = (
    QWEN,  # transformers, of Mellum: tests/drafters/test_mtp_hf.py
    MIMO,  # vLLM: tests/foreign/test_vllm.py
    DEEPSEEK,  # both
)
"""Layouts that are written, with the engine that a test of this repository reads them with."""
