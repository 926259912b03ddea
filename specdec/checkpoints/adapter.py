"""Low-rank adapters (LoRA) as PEFT saves them: adapter_config.json and adapter_model.safetensors.

PEFT itself is not needed: it puts adapters into the model, and a drafter's stays outside of it.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from torch import Tensor, nn

from specdec.checkpoints.files import FLOATS, CheckpointFolder, StoredTensor, names_of
from specdec.checkpoints.hub import find_folder
from specdec.checkpoints.keys import listed

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_INERT = {
    *("base_model_name_or_path", "parent_library", "task_type", "inference_mode", "revision"),
    *("init_lora_weights", "lora_dropout", "peft_version", "auto_mapping", "megatron_core"),
    "qalora_group_size",  # of use_qalora
    # The tensors say where the adapter is.
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
}
"""Keys that change nothing; of all others a value that is true would."""
_PART = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")

Pair = tuple[Tensor, Tensor]
"""`[r, in]`, and `[out, r]` with the adapter's scale: what is added to a product is `up down x`."""


def read_adapter(
    path_or_id: str | Path, model: nn.Module, *, revision: str | None = None
) -> dict[str, Pair]:
    """A LoRA adapter of some of a model's linear layers, by their names, in their data type and on
    their device.

    Args:
        path_or_id: a folder, or a Hugging Face id.
        model: that it was trained for.
        revision: branch, tag or commit on the hub.

    Raises:
        ValueError: an unsafe or damaged file, another kind of adapter than plain LoRA, or one of
            another model.
    """
    path = find_folder(path_or_id, revision=revision)
    folder = CheckpointFolder(path, files=(WEIGHTS,), config=CONFIG)
    fields = folder.fields
    kind, rank = fields.text("peft_type", "LORA"), fields.integer("r")
    if kind != "LORA":
        raise ValueError(f"{fields.origin}: not supported: peft_type {kind!r}; LORA is read")
    is_usual = fields.get("bias", "none") == "none"
    scale = fields.number("lora_alpha", 8.0)
    scale /= math.sqrt(rank) if fields.flag("use_rslora") else rank
    fields.accept(_INERT)
    unread = {key: value for key, value in fields.unread.items() if value}
    if not is_usual:
        unread["bias"] = fields.get("bias")
    if unread:
        raise ValueError(f"{fields.origin}: not supported: {listed(unread)}; plain LoRA is read")
    parts = _parts(folder)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    names, found = dict.fromkeys(name for name, _ in parts), {}
    if unknown := names_of(names.keys() - layers.keys()):
        raise ValueError(
            f"{path} adapts {unknown}, no linear layers of {type(model).__name__}; pass the model "
            "that the adapter was trained for, without adapters"
        )
    for name in names:
        weight = layers[name].weight
        shapes = {"A": (rank, weight.shape[1]), "B": (weight.shape[0], rank)}
        down, up = (_value(parts, name, part, shapes[part], path) for part in "AB")
        found[name] = down.to(weight), (scale * up.float()).to(weight)
    return found


def _parts(folder: CheckpointFolder) -> dict[tuple[str, str], StoredTensor]:
    """Tensors by the layer that they adapt, and "A" or "B"."""
    stored = folder.tensors()
    matches = {name: _PART.fullmatch(name) for name in stored}
    if others := [name for name, match in matches.items() if match is None]:
        raise ValueError(f"{folder.path} holds {names_of(others)}, which no plain LoRA has")
    return {match.groups(): stored[name] for name, match in matches.items()}


def _value(
    parts: dict[tuple[str, str], StoredTensor], name: str, part: str, shape: tuple, path: Path
) -> Tensor:
    """The values of one matrix; `ValueError` unless they are there, of that shape, and finite."""
    stored = parts.get((name, part))
    if stored is None or stored.shape != shape or stored.dtype not in FLOATS:
        has = "nothing" if stored is None else f"{stored.dtype} {list(stored.shape)}"
        raise ValueError(f"{path}: lora_{part} of {name} must be {list(shape)}, got {has}")
    value = stored.read()
    if not value.isfinite().all():
        raise ValueError(f"{path} holds NaN or infinity in lora_{part} of {name}")
    return value
