"""Reads EAGLE checkpoints of every public layout into one form.

SafeAILab (yuhuili), SpecForge (lmsys), speculators (RedHatAI), NVIDIA Model-Optimizer and DeepSpec
write the same few tensors under different names, keys and conventions. A checkpoint is surveyed
first, from its configuration and the headers of its files: who wrote it, how it is wired, which
tensors there must be. Only if all of that fits are values read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.drafters.checkpoints.dialects import Overrides, TargetSizes, translate
from specdec.drafters.checkpoints.fields import check_rope, fill_speculators, inert_keys
from specdec.drafters.checkpoints.hub import find_folder
from specdec.drafters.checkpoints.manifest import canonical_names, compare, expected_tensors
from specdec.drafters.checkpoints.numbers import ConfigFields
from specdec.drafters.checkpoints.producers import Source, detect, refuse_unsupported
from specdec.drafters.checkpoints.safe_files import StoredTensor, list_tensors
from specdec.drafters.checkpoints.safe_json import names_of, read_json
from specdec.drafters.checkpoints.vocab_maps import read_vocab_map
from specdec.drafters.eagle_config import EagleConfig
from specdec.drafters.eagle_head import EagleHead

FLOATS = {"BF16", "F16", "F32", "F64"}
MAP_TYPES = {"d2t": {"I32", "I64"}, "t2d": {"BOOL", "U8", "I8", "I32", "I64"}}


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A head as it was read.

    Args:
        config: how it is wired.
        tensors: its weights under their canonical names.
        target_ids: `[Vd]` int64 ids of the target, or `None` where draft ids are the target's.
        shared: parts that are the target's own: not in the file, or bit for bit equal to it.
        notes: what was decided and why, one line each.
    """

    config: EagleConfig
    tensors: dict[str, Tensor]
    target_ids: Tensor | None
    shared: tuple[str, ...]
    notes: tuple[str, ...]

    def build(self, **changes: object) -> EagleHead:
        """The head in eval mode, its weights not copied.

        Args:
            changes: fields of the config to set otherwise, which must ask for the same tensors.
        """
        with torch.device("meta"):  # no memory for weights that are replaced at once
            head = EagleHead(replace(self.config, **changes), self.target_ids)
        head.load_state_dict(self.tensors, strict=True, assign=True)
        return head.eval()


@dataclass(frozen=True, eq=False)
class Survey:
    """What a checkpoint turns out to be before its values are read.

    Args:
        folder: where it is.
        source: who wrote it.
        config: how it is wired. Without a target, default boundaries are symbolic.
        stored: its tensors by canonical name.
        faults: what is wrong with its tensors, in words; empty if nothing is.
        unread: tensors that are left alone, with the reason.
        unread_keys: keys of config.json that no part of the reading asked for, but for those that
            every HF configuration has.
        notes: what was decided and why, one line each.
    """

    folder: Path
    source: Source
    config: EagleConfig
    stored: dict[str, StoredTensor]
    faults: tuple[str, ...]
    unread: dict[str, str]
    unread_keys: tuple[str, ...]
    notes: tuple[str, ...]

    def load(self, target: PreTrainedModel | None = None) -> Checkpoint:
        """Reads the values.

        Args:
            target: whose data type the weights take, and whose embedding and vocabulary head are
                used where the checkpoint's are missing or equal.

        Raises:
            ValueError: tensors are missing, unexpected, of another shape or type, damaged or not
                finite, or the vocabulary map is none.
        """
        if self.faults:
            raise ValueError(
                f"{self.folder} does not hold the tensors of the head that its configuration "
                f"describes: {'; '.join(self.faults)}"
            )
        check_rope(self.config)
        maps = {name: self.stored[name].read() for name in MAP_TYPES if name in self.stored}
        sizes = {k: getattr(self.config, k) for k in ("draft_vocab_size", "vocab_size")}
        target_ids, map_notes = read_vocab_map(maps.get("d2t"), maps.get("t2d"), **sizes)
        tensors = {name: self.stored[name].read() for name in expected_tensors(self.config)}
        config, dtype = self.config, None
        if target is not None:
            dtype = target.dtype
            config = _share_copies(config, tensors, target_ids, target)
        tensors = {name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()}
        broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        if broken:
            raise ValueError(
                f"{self.folder} holds NaN or infinity in {names_of(broken)}"
                + (f", read as {dtype}" if dtype else "")
            )
        shared = {"embed_tokens": config.has_embed_tokens, "lm_head": config.has_lm_head}
        shared = tuple(name for name, is_own in shared.items() if not is_own)
        return Checkpoint(config, tensors, target_ids, shared, (*self.notes, *map_notes))


def survey_checkpoint(
    path_or_id: str | Path,
    target: PreTrainedModel | None = None,
    *,
    allow_pickle: bool = False,
    ignore_tensors: Collection[str] = (),
    revision: str | None = None,
    **overrides: Unpack[Overrides],
) -> Survey:
    """Reads a checkpoint's configuration and the headers of its files.

    Args:
        path_or_id: a folder, or a Hugging Face id.
        target: the model that the head must fit; `None` leaves that unchecked.
        allow_pickle: also read pickled `.bin` files, with `torch.load(weights_only=True)`. A bug in
            the unpickler could let such a file run code: only for files whose origin you trust.
        ignore_tensors: names of tensors, as in the file, that may be left unread.
        revision: branch, tag or commit on the hub.
        overrides: see `Overrides`.

    Raises:
        TypeError: an unknown option.
        ValueError: not an EAGLE checkpoint, one that is unsafe or damaged, of an unsupported kind,
            in contradiction with itself, or made for another target. Tensors that do not fit are
            listed in the result's `faults`.
    """
    unknown = overrides.keys() - Overrides.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"unknown option {names_of(unknown)}; expected {names_of(Overrides.__annotations__)}"
        )
    if overrides.get("layer_convention") not in (None, "boundary", "layer_output"):
        raise ValueError(
            "layer_convention must be 'boundary' or 'layer_output', got "
            f"{overrides['layer_convention']!r}"
        )
    folder = find_folder(path_or_id, allow_pickle=allow_pickle, revision=revision)
    fields = ConfigFields(read_json(folder / "config.json"), str(folder / "config.json"))
    in_file = list_tensors(folder, allow_pickle=allow_pickle)
    names = canonical_names(in_file)
    stored = {name: in_file[file_name] for name, file_name in names.items()}
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    source = detect(fields, in_file, names)
    if source.producer == "speculators" and "transformer_layer_config" in fields.raw:
        fields = fill_speculators(fields)
    refuse_unsupported(fields, source, names)
    sizes = None if target is None else TargetSizes.of(target)
    translation = translate(fields, source, shapes, sizes, overrides)
    ignored = {n: "ignored on request" for n, f in names.items() if f in ignore_tensors}
    faults, unread = compare(translation.config, shapes, translation.unused | ignored)
    faults += _wrong_types({n: t for n, t in stored.items() if n not in unread})
    notes = list(translation.notes)
    if (folder / "adapter_config.json").exists():
        notes.append("an adapter lies beside the head: it may want the target with it merged in")
    return Survey(
        folder,
        source,
        translation.config,
        stored,
        tuple(faults),
        unread,
        tuple(sorted(fields.unread - inert_keys())),
        tuple(notes),
    )


class ReadingOptions(Overrides, total=False):
    """Keyword arguments of `survey_checkpoint`, which explains them."""

    allow_pickle: bool
    ignore_tensors: Collection[str]
    revision: str | None


def read_checkpoint(
    path_or_id: str | Path,
    target: PreTrainedModel | None = None,
    **options: Unpack[ReadingOptions],
) -> Checkpoint:
    """Reads a whole checkpoint: `survey_checkpoint(...).load(target)`; Args and Raises as there."""
    return survey_checkpoint(path_or_id, target, **options).load(target)


def _wrong_types(stored: dict[str, StoredTensor]) -> list[str]:
    return [
        f"{name} is stored as {tensor.dtype}, not one of {names_of(MAP_TYPES.get(name, FLOATS))}"
        for name, tensor in sorted(stored.items())
        if tensor.dtype not in MAP_TYPES.get(name, FLOATS)
    ]


def _share_copies(
    config: EagleConfig,
    tensors: dict[str, Tensor],
    target_ids: Tensor | None,
    target: PreTrainedModel,
) -> EagleConfig:
    """Drops from `tensors` what is bit for bit the target's own and can be used by reference."""
    head = target.get_output_embeddings()
    can_share_head = target_ids is None and isinstance(head, nn.Linear) and head.bias is None
    if _is_copy(tensors.get("embed_tokens.weight"), target.get_input_embeddings()):
        del tensors["embed_tokens.weight"]
        config = replace(config, has_embed_tokens=False)
    if can_share_head and _is_copy(tensors.get("lm_head.weight"), head):
        del tensors["lm_head.weight"]
        config = replace(config, has_lm_head=False)
    return config


def _is_copy(own: Tensor | None, module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    if own is None or weight is None or own.shape != weight.shape:
        return False
    if not weight.is_floating_point():  # a quantised target
        return False
    return torch.equal(own.to(weight.device, weight.dtype), weight)
