"""`Family`: what the one reader of checkpoints needs of each kind of heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.checkpoints.config_fields import ConfigFields
from specdec.checkpoints.files import CheckpointFolder, StoredTensor
from specdec.checkpoints.layout import Layout
from specdec.checkpoints.marks import Clues
from specdec.drafters.head.drafter import HeadDrafter


class Source(NamedTuple):
    """Whose conventions a checkpoint follows, which kind of its family's heads it holds
    (`"EAGLE-3"` for instance), and what both were recognised by. `layout` is the record that the
    files follow, of a family that has records.

    Example:
        >>> from specdec.lab import zoo
        >>> from specdec.checkpoints.eagle import EAGLE
        >>> source = EAGLE.detect(CheckpointFolder(zoo.WEIGHTS_DIR / "eagle3"))
        >>> source.producer, source.kind
        ('SpecForge', 'EAGLE-3')
    """

    producer: str
    kind: str
    why: str
    layout: Layout | None = None


@dataclass(frozen=True, eq=False)
class Translation:
    """A checkpoint in the library's terms, before any value is read.

    Args:
        config: every convention resolved.
        tensors: those in the file, under the names that the head gives them (`state_dict`), and
            the vocabulary map's `d2t` and `t2d`. One may be composed of several in the file.
        fields: the configuration that was read, with the notes of its readers.
        unused: names of `tensors` that such files may hold without using them, with the reason.
        exact: names of `tensors` that keep the data type of the file, whatever the target's is.
        ids: names of `tensors` that hold ids of tokens and are stored as integers.

    Example:
        >>> from specdec.lab import zoo
        >>> from specdec.checkpoints.eagle import EAGLE
        >>> folder = CheckpointFolder(zoo.WEIGHTS_DIR / "eagle3")
        >>> read = EAGLE.translate(folder, EAGLE.detect(folder), None, {})
        >>> read.config.vocab_size, read.tensors["fc.weight"].shape
        (2048, (128, 384))
    """

    config: Any
    tensors: dict[str, StoredTensor]
    fields: ConfigFields
    unused: dict[str, str] = field(default_factory=dict)
    exact: frozenset[str] = frozenset()
    ids: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Family:
    """Heads of one design: how their checkpoints are recognised and read.

    Its functions take and return the family's own configuration, a frozen dataclass that satisfies
    `specdec.drafters.head.config.HeadConfig`.

    Args:
        name: of the family.
        marks: what its files are recognised by, for the error where no family fits.
        detect: (folder) -> whose conventions its files follow, or `None` if they are of no head of
            this family.
        translate: (folder, source, target or `None`, options that a caller set) -> `Translation`;
            `ValueError` for what is not supported, for contradictions and for another target.
        drafter: drafts with these heads.
        head: (config, `[Vd]` ids of the target or `None`) -> the head. It is built on the `meta`
            device: its state dict names the tensors that must be there.
        options: what a caller may know better than a checkpoint's configuration: the options that
            `translate` takes, each with the values that it may have, empty where `translate` checks
            them. The parity check tries the other values of an option that is a field of the
            configuration too.
        config: class of its configurations, of a family whose files are read by records: a record
            of a caller's own that has this class is one of its files.
        layouts: records of its files; heads of your own are saved by the first one with a name.
        files: names of weight files, beside `model.safetensors` and `pytorch_model.bin`.
        yields: other families' heads have its marks, too: the claim of another family counts.

    Example:
        >>> from specdec.lab import zoo
        >>> from specdec.checkpoints.families import FAMILIES
        >>> folder = CheckpointFolder(zoo.WEIGHTS_DIR / "eagle3")
        >>> [name for name, family in FAMILIES.items() if family.detect(folder)]
        ['eagle']
    """

    name: str
    marks: str
    detect: Callable[[CheckpointFolder], Source | None]
    translate: Callable[[CheckpointFolder, Source, PreTrainedModel | None, dict], Translation]
    drafter: type[HeadDrafter]
    head: Callable[[Any, Tensor | None], nn.Module]
    options: Mapping[str, tuple] = field(default_factory=dict, hash=False)
    config: type | None = None
    layouts: tuple[Layout, ...] = ()
    files: tuple[str, ...] = ()
    yields: bool = False


def recognise(
    folder: CheckpointFolder,
    layouts: Sequence[Layout],
    canonical: Callable[[str], str] = lambda name: name,
) -> Source | None:
    """Whose conventions the files follow: the first layout whose mark they have.

    Args:
        folder: the files.
        layouts: in the order in which they are tried.
        canonical: for `Clues`.
    """
    clues = Clues(folder, canonical)
    for layout in layouts:
        if why := layout.mark(clues):
            return Source(layout.producer, layout.kind, str(why), layout=layout)
    return None
