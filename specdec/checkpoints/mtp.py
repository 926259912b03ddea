"""Multi-token prediction modules, as targets ship them in their own checkpoints.

HF leaves these tensors unread. What differs between producers is a table of names, and a few flags
that no configuration states: which of the target's states enters, whether later depths read the
earlier ones, which state is passed on. Where engines disagree a note says so, and `specdec inspect`
measures the alternatives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specdec.arguments import check_choice, shown
from specdec.atomic import finish_replacing, replacing_files, write_text
from specdec.checkpoints import hf_layers
from specdec.checkpoints.config_fields import ConfigFields
from specdec.checkpoints.export import refuse_another_model, write_checkpoint
from specdec.checkpoints.family import Source, Translation, recognise
from specdec.checkpoints.feature_heads import family_of_layouts
from specdec.checkpoints.files import CheckpointFolder, as_stored
from specdec.checkpoints.layer_ids import check_layers
from specdec.checkpoints.layers import with_theta
from specdec.checkpoints.layout import Layout, Written
from specdec.checkpoints.mtp_layouts import (
    LAYOUTS,
    MAX_DEPTHS,
    OWN,
    SECTION,
    WRITTEN,
    ModuleReading,
)
from specdec.checkpoints.tensor_rules import is_named, read_tensors, write_tensors
from specdec.drafters.head.hf_layer import HFLayerConfig
from specdec.drafters.head.layer_config import LayerConfig
from specdec.drafters.head.sharing import check_target
from specdec.drafters.mtp.drafter import MTPDrafter
from specdec.drafters.mtp.head import MTPConfig, MTPHead, Semantics
from specdec.lab.show.text import one_line
from specdec.paths import check_path
from specdec.types import FeatureLayer

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Keys of the number of depths."""
_OTHER_KEYS = "|".join(
    {"_.*", ".*_token_id", ".*drop.*", "initializer_range", "output_.*", "vocab_size", "use_cache"}
    | {"tie_word_embeddings", "producer", *_COUNTS}
    | (PreTrainedConfig().to_dict().keys() - {"model_type"})
)
"""Names (a regular expression) of keys that shape no decoder layer, of a file or of how it is used.
The size of the vocabulary is compared by itself.
"""


_OF_MODULES = re.compile(r"text_config|.*(mtp|nextn|next_n|predict|draft).*")
"""Keys of a target that may be about its modules."""


def translate(
    folder: CheckpointFolder,
    source: Source,
    target: PreTrainedModel | None,
    options: Mapping[str, Any],
) -> Translation:
    """Reads the whole configuration; see `Family`."""
    keys, rules, given = folder.fields, source.layout.tensors, dict(options)
    if "feature_layers" in given:
        given["target_state"] = _check_state("feature_layers", given.pop("feature_layers"))
    reading = ModuleReading(source.layout, keys, target, given)
    in_file = folder.tensors(lambda name: is_named(name, rules, reading))
    reading.tensors = read_tensors(in_file, rules, reading)
    reading.check_supported()
    is_own, text = source.layout is OWN, reading.fields
    if not is_own:
        _check_count(text, reading["num_layers"])
    _check_numbers(text.raw, text.origin)
    config = reading.config()
    _check_state("target_state", (config.target_state,))
    if isinstance(config.layer, HFLayerConfig):  # whose class has read the target's keys
        known = {*hf_layers.known_keys(type(config.layer.config)), *(_COUNTS if is_own else ())}
        for fields in (keys, text):
            fields.accept(k for k in fields.raw if k in known or not _OF_MODULES.fullmatch(k))
    reading.accept_inert()
    if (theta := given.get("rope_theta")) is not None:
        config = replace(config, layer=_with_theta(config.layer, theta, keys.origin))
    if target is not None:
        check_target(target, config.hidden_size, config.vocab_size, what=keys.origin)
        if not is_own:
            _check_same_model(keys, target)
    exact = frozenset(name for name in reading.tensors if name.endswith(hf_layers.EXACT))
    return Translation(config, reading.tensors, keys, reading.unused, exact)


def _with_theta(layer: LayerConfig | HFLayerConfig, theta: float, origin: str) -> LayerConfig:
    """A layer of the library's own with another base of its rope."""
    if isinstance(layer, LayerConfig):
        return with_theta(layer, theta)
    raise ValueError(
        f"{origin}: rope_theta is for heads of the library's own layers; these are "
        f"{layer.layer_class.__name__}s, whose configuration says it"
    )


def _check_count(text: ConfigFields, num_depths: int) -> None:
    """The number of depths must be that of the configuration, where it holds one."""
    for key in _COUNTS:
        if text.get(key) is None:
            continue
        count = text.integer(key, low=0, high=MAX_DEPTHS)
        if count not in (0, num_depths):
            raise ValueError(f"{text.origin}: {key} is {count}, but the files hold {num_depths}")


def _check_numbers(raw: Mapping[str, Any], origin: str) -> None:
    """`ValueError` for numbers that HF's configurations take, and no layer computes with."""
    for key, value in raw.items():
        if isinstance(value, dict):
            _check_numbers(value, f"{origin}: {key}")
        for number in value if isinstance(value, list) else [value]:  # Step has a base per layer
            if key.endswith(("rope_theta", "_norm_eps")):
                ConfigFields({key: number}, origin).number(key)
            elif key == "sliding_window" and number is not None:
                ConfigFields({key: number}, origin).integer(key)


def _check_same_model(keys: ConfigFields, target: PreTrainedModel) -> None:
    """`ValueError` where the file that holds the modules describes another model than the target,
    whose configuration their layers are built by. HF's class makes spellings alike.
    """
    kind, raw = keys.get("model_type"), dict(keys.raw)
    raw.pop("quantization_config", None)
    is_known = isinstance(kind, str) and kind in CONFIG_MAPPING
    try:
        of_file = (CONFIG_MAPPING[kind] if is_known else type(target.config)).from_dict(raw)
    except Exception as error:  # HF raises errors of many kinds for values it cannot take
        raise ValueError(f"{keys.origin}: {type(error).__name__}: {one_line(error)}") from error
    ours, theirs = (_shaping_keys(c.get_text_config()) for c in (of_file, target.config))
    names = sorted(ours | theirs, key=lambda key: key != "model_type")
    differing = [key for key in names if ours.get(key) != theirs.get(key)]
    if differing:
        said = (f"{k} is {shown(ours.get(k))} and {shown(theirs.get(k))}" for k in differing[:4])
        raise ValueError(
            f"{keys.origin} is of another model than {type(target).__name__}: {'; '.join(said)}; "
            "load the target from that folder, or with the same values"
        )


def _shaping_keys(config: PreTrainedConfig) -> dict[str, Any]:
    """What a configuration says of decoder layers, by HF's names."""
    return {k: v for k, v in config.to_dict().items() if not re.fullmatch(_OTHER_KEYS, k)}


def save_modules(
    head: MTPHead,
    folder: str | Path,
    layout: str | Layout | None = None,
    target: PreTrainedModel | None = None,
) -> None:
    """Writes modules alone, or a target's checkpoint that holds them.

    Engines read such modules from the target's own checkpoint only, each under the names of its
    producer, and no configuration states how they are wired: so a layout is written for heads that
    its names mean (`specdec.lab.training.mtp.new_head(target, layout=...)` makes one), and any
    other head as the library's own.

    Args:
        head: the weights.
        folder: made if need be; files in it are replaced.
        layout: `"DeepSeek"` (also GLM's), `"Qwen"` or `"MiMo"`: the target as HF saves it, and the
            modules in its data type under that producer's names. `None` is a layout of the
            library's own, without the target: `config.json` with a section `specdec_mtp`, and
            `model.safetensors` with the head's names, which load back bit for bit. A record of your
            own is written as it says.
        target: the HF causal LM that the head was trained for; with a layout.

    Raises:
        ValueError: an unknown layout, one without a target, a head that is wired otherwise, or
            another model in the folder. Nothing has been written then.
    """
    if layout is None:
        what = Written(head.config, str(head.dtype).removeprefix("torch."))
        write_checkpoint(folder, OWN.keys(what), dict(head.state_dict()))
    else:
        _save_with_target(head, folder, layout_of(layout), target)


def layout_of(layout: str | Layout) -> Layout:
    """The layout of that name, or one of your own; `ValueError` if it is none of those that can be
    written.
    """
    if isinstance(layout, Layout):
        return layout
    written = {record.name: record for record in WRITTEN}
    check_choice("layout of prediction modules", layout, tuple(written))
    return written[layout]


def config_for(target: PreTrainedModel, layout: Layout, num_depths: int) -> MTPConfig:
    """The head that a layout's names mean beside a target; `ValueError` for a target that engines
    would run as another model then.
    """
    return _reading_of(target, layout, num_layers=num_depths).config()


def _reading_of(target: PreTrainedModel, layout: Layout, **given: Any) -> ModuleReading:
    """A reading of what is to stand beside a target."""
    text, origin = target.config.get_text_config(), f"the configuration of {type(target).__name__}"
    keys = ConfigFields(text.to_dict(), origin)
    return ModuleReading(layout, keys, target, given, is_written=True)


def _save_with_target(
    head: MTPHead, folder: str | Path, layout: Layout, target: PreTrainedModel | None
) -> None:
    if target is None:
        raise ValueError(
            f"{layout.producer}'s modules lie in their target's checkpoint: pass target="
        )
    tables = {
        "embed_tokens.weight": target.get_input_embeddings().weight,
        "lm_head.weight": target.get_output_embeddings().weight,
    }
    tables = {name: tables[name] for name in tables if name.partition(".")[0] in layout.copies}
    reading, own = _reading_of(target, layout), tables | head.state_dict()
    tensors = write_tensors(own, layout.tensors, reading)
    _check_wiring(head.config, tensors, reading)
    folder = check_path("folder", folder, what="a folder")
    finish_replacing(folder)
    if not _is_earlier(folder, layout):
        refuse_another_model(folder)
    # Copies, since HF takes tensors that share memory for tied ones and raises an error.
    tensors = {name: _copied(name, x, target) for name, x in tensors.items()}
    # An earlier call may have had other parts.
    with replacing_files(folder, instead_of="*.safetensors*") as new:
        target.save_pretrained(new, state_dict=target.state_dict() | tensors)
        path = new / "config.json"
        keys = json.loads(path.read_text(encoding="utf-8"))
        keys.get("text_config", keys)[_COUNTS[0]] = len(head.layers)
        keys |= layout.keys(Written(head.config)) | {"producer": "specdec"}
        write_text(path, json.dumps(keys, indent=2) + "\n")


def _is_earlier(folder: Path, layout: Layout) -> bool:
    """Whether a folder holds what an earlier call wrote."""
    if not (folder / "config.json").exists():
        return False
    found = CheckpointFolder(folder)
    is_ours = found.fields.raw.get("producer") == "specdec"
    return is_ours and recognise(found, (layout,)) is not None


def _copied(name: str, tensor: Tensor, target: PreTrainedModel) -> Tensor:
    """In the target's data type, but for what must stay exact."""
    dtype = tensor.dtype if name.endswith(hf_layers.EXACT) else target.dtype
    return tensor.detach().to(dtype, copy=True)


def _check_wiring(config: MTPConfig, tensors: Mapping[str, Tensor], reading: ModuleReading) -> None:
    """`ValueError` for a head that is not what a reader of the layout makes of its files."""
    layout, target = reading.layout, reading.target
    check_target(target, config.hidden_size, config.vocab_size, what="the head")
    stored = {name: as_stored(name, x.to("meta")) for name, x in tensors.items()}
    of_modules = {n: x for n, x in stored.items() if is_named(n, layout.tensors, reading)}
    reading.tensors = read_tensors(of_modules, layout.tensors, reading)
    meant, copied = reading.config(), {f"has_{name}": True for name in layout.copies}
    wrong = layout.run_otherwise(config)
    ours, theirs = vars(config) | copied, vars(meant)
    names = sorted(entry.name for entry in fields(config) if entry.name != "layer")
    wrong += [f"{n}={ours[n]!r}" for n in names if ours[n] != theirs[n]]
    if _terms(config.layer) != _terms(meant.layer):
        wrong.append("decoder layers other than " + _terms(meant.layer)[0])
    if wrong:
        raise ValueError(
            f"modules in {layout.producer}'s layout cannot have {', '.join(wrong)}; train a head "
            f"made by new_head(target, layout={layout.name!r}), or leave the layout out"
        )


def _terms(layer: LayerConfig | HFLayerConfig) -> tuple[str, object]:
    """What two descriptions of a decoder layer agree in if they build the same one."""
    if isinstance(layer, LayerConfig):
        return "the target's as LayerConfig", layer
    return layer.layer_class.__name__, (layer.like, _shaping_keys(layer.config))


def _check_state(name: str, layers: Any) -> FeatureLayer:
    """The one feature; `ValueError` if there is another number of them, or it is none."""
    if len(check_layers(name, layers)) == 1:
        return layers[0]
    raise ValueError(
        f"{name}: prediction modules read one feature, 'final' or a hidden state; got {layers!r}"
    )


MTP = family_of_layouts(
    "MTP",
    LAYOUTS,
    MTPDrafter,
    MTPHead,
    marks=f"prediction modules in a target's own checkpoint, or key {SECTION}",
    translate=translate,
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
`feature_layers`: one entry, `"final"` or hidden state L. `rope_theta` is for layers of the
library's own. The others are as in `MTPConfig`.
"""
