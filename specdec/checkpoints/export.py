"""Writes heads in the layouts that other engines read.

A layout is written exactly: a head that the layout's own record would not read back equal raises
ValueError, and so does a head that an engine would run otherwise, since a file that another engine
misreads is worse than none. What only some of its readers misread is noted.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from specdec.arguments import check_choice, shown
from specdec.atomic import finish_replacing, replacing, replacing_files, write_text
from specdec.checkpoints.config_fields import ConfigFields
from specdec.checkpoints.correction import part_of
from specdec.checkpoints.feature_heads import open_reading
from specdec.checkpoints.files import as_stored, names_of
from specdec.checkpoints.head_layouts import WRITTEN
from specdec.checkpoints.layout import Layout, Reading, Written
from specdec.checkpoints.tensor_rules import write_tensors
from specdec.checkpoints.vocab_map import write_vocab_map
from specdec.drafters.head.config import HeadConfig
from specdec.drafters.head.features import FeatureHead
from specdec.drafters.head.layer_config import LayerConfig
from specdec.lab.show.text import one_line, printable
from specdec.paths import check_path

LayoutName = Literal["safeailab", "speculators", "vllm", "huggingface", "z-lab"]


Tables = Mapping[str, Tensor | None]
"""The target's, by their names in a head."""


def save_head(
    head: FeatureHead,
    folder: str | Path,
    layout: LayoutName | Layout | None = None,
    *,
    embed_tokens: Tensor,
    lm_head: Tensor,
    num_draft_tokens: int = 4,
    verifier: str | None = None,
    target_layers: int | None = None,
) -> tuple[str, ...]:
    """Writes `config.json` and `model.safetensors` of an EAGLE or a mask-token head.

    `"safeailab"` is the layout of yuhuili's heads (EAGLE-1: `layers.0.*`; EAGLE-3: `midlayer.*`),
    which SafeAILab's own code, vLLM and SGLang read (vLLM without a bias in EAGLE-1's `fc`).
    `"speculators"` is that of RedHatAI's, read by vLLM: `eagle3`, with keys for the norms that
    distinguish the newer dialects and for several layers; `peagle`, `dflash`, and by a head's
    correction `dspark` (also without one, for rows that predict the next token), `dflash2` or
    `xpress`. A `peagle` file of a head with a Markov correction has its keys and tensors under
    DSpark's names, which this library alone reads. `"vllm"` is that of amazon's P-EAGLE
    heads: EAGLE-3's with `ptd_token_id`. `"huggingface"` is a causal language model with
    `pard_token`, as AMD's PARD models. `"z-lab"` is that of the public DFlash heads. Other layouts
    are read and not written: no engine has been run with such files.
    EAGLE-3's layers of features are written for both of the conventions in use.

    speculators reads a file without embeddings into uninitialised memory, and asks the hub for
    "None" if the file names no target; so its files always have both.

    Args:
        head: the weights.
        folder: made if need be; files in it are replaced.
        layout: `None` is the first one that can express the head, in the order of `WRITTEN`. A
            record of your own is written as it says.
        embed_tokens: `[V, H]`, the target's embeddings, written for a head without its own where
            the layout has them (a speculators file, a language model).
        lm_head: `[V, H]`, the target's vocabulary head, written for a head without one of its own
            where engines expect one in the file (EAGLE-3, P-EAGLE, PARD).
        num_draft_tokens: what a speculators file proposes to draft per step. The proposal for a
            block is all of it: the rows see each other, and vLLM's blocks have 1 + K of them.
        verifier: Hugging Face id or folder of the target, for a speculators file.
        target_layers: decoder layers N of the target, from which EAGLE-3's usual features follow.

    Returns:
        What some of the layout's readers do not understand, one line each.

    Raises:
        ValueError: an unknown layout, a head that the layout cannot express (with the layouts that
            can), or a speculators file without `verifier` or embeddings. Nothing has been written
            then.
    """
    config = head.config
    num_draft_tokens = getattr(config, "max_draft_tokens", None) or num_draft_tokens
    dtype = str(head.dtype).removeprefix("torch.")
    what = Written(config, dtype, num_draft_tokens, verifier)
    tables = {"embed_tokens": embed_tokens, "lm_head": lm_head}
    records = [layout] if isinstance(layout, Layout) else _records_of(head, layout)
    record, obstacles = _best(head, records)
    if obstacles:
        raise ValueError(_refusal(head, record, obstacles))
    reading = Reading(record, ConfigFields(keys := record.keys(what), "config.json"), {})
    held = _held(head, dict(head.state_dict()), record, tables)
    tensors = _in_file(held, record, reading, config)
    write_checkpoint(folder, keys, tensors)
    return tuple(record.notes(config, target_layers))


def layouts_of(head: FeatureHead) -> tuple[LayoutName, ...]:
    """Layouts that can express a head, the usual one first.

    Example:
        >>> from specdec.lab import zoo
        >>> layouts_of(zoo.load_drafter("eagle3", zoo.load_target()).head)
        ('safeailab', 'speculators')
    """
    return _names(record for record in _records_of(head) if not _obstacles(head, record))


def _records_of(head: FeatureHead, name: str | None = None) -> list[Layout]:
    """Those of heads of this class; of one name, if there is one."""
    kind, records = type(head.config), _written(head)
    if not records:
        raise ValueError(
            f"no layout of {kind.__name__} heads is known; pass a specdec.checkpoints.Layout of "
            "your own"
        )
    if name is None:
        return records
    check_choice(f"layout of {kind.__name__} heads", name, _names(records))
    return [record for record in records if record.name == name]


def _written(head: FeatureHead) -> list[Layout]:
    """The package's own layouts of heads of this class; none for a class of somebody else's."""
    return [record for record in WRITTEN if record.config is type(head.config)]


def _names(records: Iterable[Layout]) -> tuple[LayoutName, ...]:
    return tuple(dict.fromkeys(record.name for record in records))


def _best(head: FeatureHead, records: Sequence[Layout]) -> tuple[Layout, list[str]]:
    """The first record that can express a head; else the one that lacks least, and what."""
    lacking = []
    for record in records:
        if not (obstacles := _obstacles(head, record)):
            return record, []
        lacking.append((record, obstacles))
    return min(lacking, key=lambda each: len(each[1]))


def _refusal(head: FeatureHead, record: Layout, obstacles: Sequence[str]) -> str:
    """What a layout lacks, and which ones do not."""
    written = _written(head)
    others = _names(other for other in written if not _obstacles(head, other))
    advice = f"as {' or '.join(map(repr, others))} it can be written"
    if not written:
        advice = "mend the record: what it writes must be read back equal"
    elif not others:
        advice = f"none of the layouts that are written can: {', '.join(_names(written))}"
    name = record.name or record.producer
    return f"the {name} layout cannot express {', '.join(obstacles)}; {advice}"


def _obstacles(head: FeatureHead, record: Layout) -> list[str]:
    """What a layout cannot express: what engines run otherwise, and fields that its own record does
    not read back equal. Looks at names and shapes of tensors alone.
    """
    config = head.config
    found = dict.fromkeys(record.run_otherwise(config))
    try:
        keys = record.keys(Written(config, "float32", verifier="any/target"))
    except Exception as error:  # HF's classes raise errors of many kinds for what they cannot say
        return sorted(found) or [one_line(error)]
    fields = ConfigFields(keys, "config.json")
    table = torch.empty(config.vocab_size, config.hidden_size, device="meta")
    own = {name: tensor.to("meta") for name, tensor in head.state_dict().items()}
    held = _held(head, own, record, {"embed_tokens": table, "lm_head": table})
    tensors = _in_file(held, record, Reading(record, fields, {}), config)
    stored = {name: as_stored(name, tensor) for name, tensor in tensors.items()}
    copied = {f"has_{name}": True for name in record.copies}
    reading = open_reading(record, fields, stored)
    found |= dict.fromkeys(_unequal(reading, replace(config, **copied)))
    again = {name: tensor.shape for name, tensor in reading.tensors.items()}
    lost = [name for name, tensor in held.items() if again.get(name) != tensor.shape]
    return sorted(found | ({f"tensors {names_of(lost)}": None} if lost else {}))


def _unequal(reading: Reading, config: Any) -> Iterator[str]:
    """Fields that a reading of written files has other values of."""
    try:
        reading.check_supported()
    except ValueError as error:
        yield str(error)
    for name, value in vars(config).items():
        if name == "target_hidden_size" and not config.feature_layers:
            continue  # of no feature
        try:
            is_equal = _read_back(reading, name, config) == value
        except ValueError:
            is_equal = False
        if not is_equal and name != "layer":
            yield f"{name}={value}"
        elif not is_equal:
            yield from _unequal_layer(reading, value)


def _read_back(reading: Reading, name: str, config: Any) -> Any:
    if name in reading.layout.fields:
        return reading[name]
    return next(entry.default for entry in fields(config) if entry.name == name)


def _unequal_layer(reading: Reading, layer: LayerConfig) -> Iterator[str]:
    try:
        found = reading["layer"]
    except ValueError as error:
        yield f"its layers ({error})"
        return
    if not any(layer.windows):
        layer = replace(layer, is_window_causal=True)  # means nothing without windows
    # HF writes out this default of a rope.
    filled = {"original_max_position_embeddings": layer.max_position_embeddings} | layer.rope
    layer = replace(layer, rope=filled) if found.rope == filled else layer
    for name, value in vars(layer).items():
        if getattr(found, name) != value:
            yield f"{name}={value}"


def _held(
    head: FeatureHead, tensors: dict[str, Tensor], record: Layout, tables: Tables
) -> dict[str, Tensor]:
    """A head's tensors, with tables of its target and the map of its ids, by the head's names."""
    config = head.config
    if "lm_head" in record.copies and not config.has_lm_head:
        tensors = tensors | {"lm_head.weight": tables["lm_head"].to(head.dtype)}
    if "embed_tokens" in record.copies and not config.has_embed_tokens:
        table = _plain_table(tables["embed_tokens"], config)
        is_masked_text = getattr(config, "alignment", "") in ("shifted", "unshifted")
        table = table.to(head.dtype) if is_masked_text else table
        tensors = tensors | {"embed_tokens.weight": table}
    if head.target_ids is not None:
        tensors = _with_vocab_map(tensors, head.target_ids, config.vocab_size)
    return tensors


def _in_file(
    tensors: dict[str, Tensor], record: Layout, reading: Reading, config: Any
) -> dict[str, Tensor]:
    """A head's tensors as a layout names and stores them."""
    part = part_of(getattr(config, "correction", None))
    return write_tensors(tensors, (*record.tensors, *(part.tensors if part else ())), reading)


def write_checkpoint(folder: str | Path, keys: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Writes `config.json` and `model.safetensors` into a folder, which is made if need be. A head
    of the same tensors in it is replaced; another model in it, a target perhaps, is a `ValueError`.
    """
    folder = check_path("folder", folder, what="a folder")
    finish_replacing(folder)
    refuse_another_model(folder, tensors.keys())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"folder {folder} cannot be made: {error.strerror}") from error
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps(keys | {"producer": "specdec"}, indent=2)
    with replacing_files(folder) as new:
        with replacing(new / "model.safetensors") as file:
            file.write(save(tensors, metadata={"format": "pt"}))
        write_text(new / "config.json", f"{text}\n")


def refuse_another_model(folder: Path, names: Collection[str] = ()) -> None:
    """`ValueError` if a folder holds a model, other than one of tensors of these names."""
    file, found = folder / "model.safetensors", None
    if file.exists():
        try:
            with safe_open(file, framework="pt") as stored:
                found = set(stored.keys())
        except Exception:  # no safetensors file, or a damaged one
            found = {"a file that cannot be read"}
    elif any(any(folder.glob(kind)) for kind in ("*.safetensors*", "pytorch_model*")):
        found = {"a model in other files"}
    if found is not None and found != set(names):
        others = ", ".join(sorted(map(printable, found - set(names)))[:3]) or "fewer tensors"
        raise ValueError(
            f"{folder} holds another model ({others}), which would be lost; choose a new folder, "
            "or delete it first"
        )


def _plain_table(embeddings: Tensor | None, config: HeadConfig) -> Tensor:
    """The target's embeddings in their own type; `ValueError` if they cannot be copied."""
    shape = [config.vocab_size, config.hidden_size]
    if embeddings is None or not embeddings.is_floating_point() or list(embeddings.shape) != shape:
        raise ValueError(
            f"the head uses the target's embeddings, and such a file holds them: pass them as "
            f"embed_tokens, {shape} floats, got {shown(embeddings)}"
        )
    return embeddings


def _with_vocab_map(
    tensors: dict[str, Tensor], target_ids: Tensor, vocab_size: int
) -> dict[str, Tensor]:
    """A head's tensors with `d2t` and `t2d`, and its draft ids in ascending order: engines that
    read `t2d` take them so.
    """
    if len(target_ids) == vocab_size:
        raise ValueError("no layout can express a permuted full vocabulary")
    order = target_ids.argsort()
    d2t, t2d = write_vocab_map(target_ids[order], vocab_size)
    ours = ("markov_w2", "embed_proj.2", "readout")  # what corrections have of the draft ids
    names = tensors.keys() & {"lm_head.weight", *(f"correction.{name}.weight" for name in ours)}
    ordered = {name: tensors[name][order.to(tensors[name].device)] for name in names}
    return {**tensors, **ordered, "d2t": d2t, "t2d": t2d}
