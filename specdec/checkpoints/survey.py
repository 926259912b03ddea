"""Reads checkpoints of any family into one form.

A checkpoint is surveyed first, from its configuration and the headers of its files: which family it
is of, who wrote it, how it is wired, which tensors there must be. Only if all of that fits are
values read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from specdec.arguments import check_choice, shown
from specdec.checkpoints.family import Family, Source, Translation, recognise
from specdec.checkpoints.files import FLOATS, CheckpointFolder, StoredTensor, names_of
from specdec.checkpoints.hub import find_folder
from specdec.checkpoints.keys import refusal_of, unknown_keys
from specdec.checkpoints.layout import Layout, check_own
from specdec.checkpoints.marks import Clues
from specdec.checkpoints.unread import check_read
from specdec.checkpoints.vocab_map import read_vocab_map

IDS = {"I32", "I64"}
MAP_TYPES = {"d2t": IDS, "t2d": {"BOOL", "U8", "I8", "I32", "I64"}}

HARMLESS = {
    r"(.*\.)?rotary_emb\.inv_freq": "rotary frequencies follow from the configuration",
    r"verifier_(lm_head|norm)\.weight": "a copy of the target's, used in training only",
}
"""Names (regular expressions) of tensors that may be left unread, and why."""


class UnknownCheckpointError(ValueError):
    """A checkpoint of none of the families, all of which its text names."""

    longest = 4000  # of a line of the command's, which cuts the texts of other libraries


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A head as it was read.

    Args:
        family, config: what it is, and how it is wired.
        tensors: its weights under their names in the head.
        target_ids: `[Vd]` int64 ids of the target, or `None` where draft ids are the target's.
        notes: what was decided and why, one line each.
    """

    family: Family
    config: Any
    tensors: dict[str, Tensor]
    target_ids: Tensor | None
    notes: tuple[str, ...]

    @property
    def shared(self) -> tuple[str, ...]:
        """Parts that are the target's: not in the file, or bit for bit equal to the target's."""
        own = {"embed_tokens": self.config.has_embed_tokens, "lm_head": self.config.has_lm_head}
        return tuple(name for name, is_own in own.items() if not is_own)

    def build(self) -> nn.Module:
        """The head in eval mode, its weights not copied."""
        with torch.device("meta"):  # no memory for weights that are replaced at once
            head = self.family.head(self.config, self.target_ids)
        head.load_state_dict(self.tensors, strict=True, assign=True)
        return head.eval()


@dataclass(frozen=True, eq=False)
class Survey:
    """What a checkpoint turns out to be before its values are read.

    Args:
        folder, family, source: where it is, which heads it is of, and who wrote it.
        config: how it is wired. Without a target, default hidden states are symbolic.
        stored: its tensors under their names in the head; `exact` of them keep the file's type.
        expected: names and shapes of the head's own weights.
        faults: what is wrong with its tensors, in words; empty if nothing is.
        unread: tensors that are left alone, with the reason.
        unread_keys: keys of config.json that nothing reads and that may change the computation.
            They are a fault.
        notes: what was decided and why, one line each.
        reread: (options of the family) -> the configuration, read with these as well.
    """

    folder: Path
    family: Family
    source: Source
    config: Any
    stored: dict[str, StoredTensor]
    expected: dict[str, tuple[int, ...]]
    faults: tuple[str, ...]
    unread: dict[str, str]
    unread_keys: tuple[str, ...]
    notes: tuple[str, ...]
    exact: frozenset[str]
    reread: Callable[..., Any]

    def load(self, target: PreTrainedModel | None = None) -> Checkpoint:
        """Reads the values; `ValueError` if they do not fit, are damaged or not finite.

        Args:
            target: whose data type the weights take, and whose embedding and vocabulary head are
                used where the checkpoint's are missing or equal.
        """
        if self.faults:
            raise ValueError(
                f"{self.folder} does not hold the tensors of the head that its configuration "
                f"describes, or a head that is not read: {'; '.join(self.faults)}"
            )
        config, dtype = self.config, None
        maps = [self.stored[name].read() if name in self.stored else None for name in MAP_TYPES]
        sizes = {"draft_vocab_size": config.draft_vocab_size, "vocab_size": config.vocab_size}
        target_ids, map_notes = read_vocab_map(*maps, **sizes)
        tensors = {name: self.stored[name].read() for name in self.expected}
        if target is not None:
            dtype = target.dtype
            config = _share_copies(config, tensors, target_ids, target)
        for name in tensors.keys() - self.exact:
            tensors[name] = tensors[name].to(dtype or tensors[name].dtype)
        broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        if broken:
            raise ValueError(
                f"{self.folder} holds NaN or infinity in {names_of(broken)}"
                + (f", read as {dtype}" if dtype else "")
            )
        return Checkpoint(self.family, config, tensors, target_ids, (*self.notes, *map_notes))


def survey_checkpoint(
    path_or_id: str | Path,
    target: PreTrainedModel | None = None,
    *,
    families: Sequence[Family],
    layouts: Sequence[Layout] = (),
    allow_pickle: bool = False,
    ignore_tensors: Collection[str] = (),
    ignore_keys: Collection[str] | None = None,
    revision: str | None = None,
    **options: Any,
) -> Survey:
    """Reads a checkpoint's configuration and the headers of its files.

    Args:
        path_or_id: a folder, or a Hugging Face id.
        target: the model that the head must fit; `None` leaves that unchecked.
        families: that it may be of, in any order.
        layouts: records of your own of how files are named and wired, tried before those of the
            families; see `specdec.checkpoints.layout`.
        allow_pickle: also read pickled files, with `torch.load(weights_only=True)`. A bug in
            the unpickler could let such a file run code: only for files whose origin you trust.
        ignore_tensors: names of tensors, as in the file, that may be left unread.
        ignore_keys: keys of config.json, `section.key` where they are nested, that nothing reads
            and that change nothing. All others but well-known ones are an error.
        revision: branch, tag or commit on the hub.
        options: of the family's reading (`layer_convention`, `rope_theta`, ...); `None` is the same
            as not given.

    Raises:
        TypeError: an option that the family does not have.
        ValueError: a checkpoint of none of the families, one that is unsafe or damaged, of an
            unsupported kind, in contradiction with itself, or made for another target. Tensors that
            do not fit, and keys that nothing reads, are listed in the result's `faults`.

    Example:
        >>> from specdec.lab import zoo
        >>> from specdec.checkpoints.eagle import EAGLE
        >>> survey = survey_checkpoint(zoo.WEIGHTS_DIR / "eagle3", families=(EAGLE,))
        >>> survey.source.kind, survey.expected["fc.weight"], survey.faults
        ('EAGLE-3', (128, 384), ())
    """
    check_choice("allow_pickle", allow_pickle, (True, False))  # 'no' would be true
    if isinstance(ignore_keys, str):
        raise TypeError(f"ignore_keys must be a list of keys, got {shown(ignore_keys)}")
    path = find_folder(path_or_id, allow_pickle=allow_pickle, revision=revision)
    folder = CheckpointFolder(path, allow_pickle=allow_pickle, files=_files_of(families))
    family, source = _recognise(folder, families, layouts)
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := given.keys() - family.options:
        raise TypeError(f"unknown option {names_of(unknown)}; expected {names_of(family.options)}")
    for name, value in given.items():
        if family.options[name]:
            check_choice(name, value, family.options[name])
    read = family.translate(folder, source, target, given)
    notes = [*read.fields.notes, *(f"as asked for: {n} = {value!r}" for n, value in given.items())]
    if (path / "adapter_config.json").exists():
        notes.append("an adapter lies beside the head: it may want the target with it merged in")
    expected = expected_tensors(family, read.config)
    faults, unread = _compare(expected, read, frozenset(ignore_tensors))
    if keys := unknown_keys(read.fields, ignore_keys or ()):
        faults = (refusal_of(keys), *faults)
    if folder.fields.get("producer") == "specdec":
        source = source._replace(producer="specdec", why=f"its own word; {source.why}")
    return Survey(
        folder=path,
        family=family,
        source=source,
        config=read.config,
        stored=read.tensors,
        expected=expected,
        faults=faults,
        unread=unread,
        unread_keys=tuple(sorted(keys)),
        notes=tuple(notes),
        exact=read.exact,
        reread=lambda **more: family.translate(folder, source, target, given | more).config,
    )


def family_of(
    path: str | Path, *, families: Sequence[Family], layouts: Sequence[Layout] = ()
) -> Family | None:
    """Which of the families a local folder holds a head of, if any. Its values are not read.

    Example:
        >>> from specdec.lab import zoo
        >>> from specdec.checkpoints.eagle import EAGLE
        >>> folder = zoo.WEIGHTS_DIR
        >>> [family_of(folder / n, families=(EAGLE,)) is EAGLE for n in ("eagle3", "target")]
        [True, False]
    """
    path = Path(path).expanduser()
    if not path.is_dir():
        return None
    try:
        return _recognise(CheckpointFolder(path, files=_files_of(families)), families, layouts)[0]
    except ValueError:  # also of files that cannot be read as a head's
        return None


def _files_of(families: Iterable[Family]) -> list[str]:
    """Names of weight files that some families have."""
    return [name for family in families for name in family.files]


def _recognise(
    folder: CheckpointFolder, families: Iterable[Family], layouts: Sequence[Layout]
) -> tuple[Family, Source]:
    folder = folder.anew()  # what marks look at is not read
    if source := recognise(folder, check_own(layouts)):
        return _family_of_layout(source.layout, families), source
    check_read(Clues(folder, lambda name: name), folder.fields)
    claims = [(family, source) for family in families if (source := family.detect(folder))]
    sure = [claim for claim in claims if not claim[0].yields] or claims
    if len(sure) == 1:
        return sure[0]
    if sure:
        names = ", ".join(f"{family.name} ({source.why})" for family, source in sure)
        raise ValueError(f"{folder.fields.origin} has marks of several families: {names}")
    known = "; ".join(f"{family.name} ({family.marks})" for family in families)
    raise UnknownCheckpointError(
        f"{folder.fields.origin} and its tensors look like a head of none of the families that are "
        f"read: {known}. It has {names_of(folder.tensors()) or 'no tensors'}. A record (Layout) or "
        "a Family of your own reads such files: mine.py:NAME:PATH in commands, layouts= or "
        "families= in Python"
    )


def _family_of_layout(layout: Layout, families: Iterable[Family]) -> Family:
    """Whose heads a caller's record describes."""
    families = tuple(families)
    for family in families:
        if family.config is layout.config:
            return family
    names = ", ".join(family.name for family in families)
    raise ValueError(
        f"the layout of {layout.producer} describes a {layout.config.__name__}, which heads of "
        f"{names} do not have; ask for the family that has, or set the record's config"
    )


def expected_tensors(family: Family, config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a head's weights: those of the head itself, built without memory."""
    count, ids = config.draft_vocab_size, None
    if count < config.vocab_size:
        ids = torch.arange(count, device="cpu")  # any map will do
    with torch.device("meta"):
        head = family.head(config, ids)
    return {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}


def _compare(
    expected: dict[str, tuple[int, ...]], read: Translation, ignored: Collection[str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """What is wrong with the tensors, in words; and those to be left unread, with the reason."""
    stored, config, unread = read.tensors, read.config, {}
    maps = {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
    wanted = expected | {name: shape for name, shape in maps.items() if name in stored}
    missing, unexpected = wanted.keys() - stored.keys(), []
    for name in stored.keys() - wanted.keys():
        reasons = [why for pattern, why in HARMLESS.items() if re.fullmatch(pattern, name)]
        reasons += ["ignored on request"] * (stored[name].name in ignored)
        reasons += [read.unused[name]] if name in read.unused else []
        if reasons:
            unread[name] = reasons[-1]
        else:
            unexpected.append(name)
    faults = [f"missing {names_of(missing)}"] if missing else []
    faults += [f"unexpected {names_of(unexpected)}"] if unexpected else []
    for name in sorted(wanted.keys() & stored.keys()):
        if stored[name].shape != wanted[name]:
            shape = list(stored[name].shape)
            faults.append(f"{name} has shape {shape}, not {list(wanted[name])}")
    for name in sorted(stored.keys() - unread.keys()):
        types = MAP_TYPES.get(name, IDS if name in read.ids else FLOATS)
        if stored[name].dtype not in types:
            faults.append(f"{name} is stored as {stored[name].dtype}, not one of {names_of(types)}")
    return tuple(faults), unread


def _share_copies(
    config: Any, tensors: dict[str, Tensor], target_ids: Tensor | None, target: PreTrainedModel
) -> Any:
    """Drops from `tensors` what is bit for bit the target's own and can be used by reference."""
    if getattr(config, "ties_embeddings", False):
        return config  # its one table is also its vocabulary head
    head = target.get_output_embeddings()
    can_share_head = target_ids is None and isinstance(head, nn.Linear) and head.bias is None
    for name, module in (
        ("embed_tokens", target.get_input_embeddings()),
        ("lm_head", head if can_share_head else None),
    ):
        if _is_copy(tensors.get(f"{name}.weight"), module):
            del tensors[f"{name}.weight"]
            config = replace(config, **{f"has_{name}": False})
    return config


def _is_copy(own: Tensor | None, module: nn.Module | None) -> bool:
    weight = getattr(module, "weight", None)
    if own is None or weight is None or weight.is_meta or own.shape != weight.shape:
        return False
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight
    # A quantised target's table may be integers, or a class that has no comparison (torchao's).
    if not whole.is_floating_point() or type(whole.data) is not Tensor:
        return False
    return torch.equal(own.to(whole.device, whole.dtype), whole)
