"""`Family`: what the one reader of checkpoints needs to know of a kind of heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.checkpoints.files import CheckpointFolder, StoredTensor
from specdec.heads.config import HeadConfig


@dataclass(frozen=True)
class Source:
    """Whose conventions a checkpoint follows.

    Args:
        producer: who wrote it.
        kind: what it holds, where a family has several kinds: `"EAGLE-3"` for instance.
        why: what both were recognised by.
    """

    producer: str
    kind: str
    why: str


@dataclass(frozen=True)
class TargetSizes:
    """What a head must fit.

    Args:
        name: of the target's class, for messages.
        hidden_size: its width.
        vocab_size: its vocabulary.
        num_layers: its decoder layers.
    """

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> TargetSizes:
        """Reads them from an HF model's configuration."""
        config = model.config.get_text_config()
        return cls(
            type(model).__name__, config.hidden_size, config.vocab_size, config.num_hidden_layers
        )

    def check(self, config: HeadConfig, origin: str) -> None:
        """Raises `ValueError`, naming both sides, if a head was made for another target."""
        if config.target_hidden_size != self.hidden_size:
            raise ValueError(
                f"{origin} is of a head for a target of hidden size {config.target_hidden_size}, "
                f"but {self.name} has {self.hidden_size}"
            )
        if config.vocab_size != self.vocab_size:
            raise ValueError(
                f"{origin} is of a head for a vocabulary of {config.vocab_size}, but {self.name} "
                f"has {self.vocab_size}"
            )


@dataclass(frozen=True, eq=False)
class Translation:
    """A checkpoint in the library's terms, before any value is read.

    Args:
        config: every convention resolved.
        tensors: those in the file, under the names that the head gives them (`state_dict`), and
            the vocabulary map's `d2t` and `t2d`. One may be composed of several in the file.
        notes: what was decided and why, one line each.
        unused: names of `tensors` that such files may hold without using them, with the reason.
        unread_keys: keys of config.json that nothing asked for.
    """

    config: Any
    tensors: dict[str, StoredTensor]
    notes: list[str]
    unused: dict[str, str]
    unread_keys: set[str]


@dataclass(frozen=True, eq=False)
class Misreading:
    """A usual mistake in reading a head, that its tensors do not reveal.

    Args:
        name: what is different.
        config: of the head so read.
        how: the option that loads it so, as Python writes it: `"rope_theta=10000"`.
    """

    name: str
    config: Any
    how: str


@dataclass(frozen=True)
class Family:
    """Heads of one design: how their checkpoints are recognised, read and doubted.

    Its functions take and return the family's own configuration, a frozen dataclass that satisfies
    `HeadConfig`.

    Args:
        name: of the family.
        marks: what its files are recognised by, for the error where no family fits.
        detect: (folder) -> whose conventions its files follow, or `None` if they are of no head of
            this family.
        translate: (folder, source, sizes of the target or `None`, options that a caller set) ->
            `Translation`. Raises `ValueError` for what is not supported (by name, see
            `refuse`), for contradictions, and for a head of another target.
        head: (config, `[Vd]` ids of the target or `None`) -> the head, an `nn.Module`. It is built
            on the `meta` device: its state dict says which tensors there must be.
        describe: (config) -> lines (name, text) for `specdec inspect`.
        misreadings: (config, target) -> what the parity check should try beside the vocabulary map.
        options: names of the options that `translate` takes.
    """

    name: str
    marks: str
    detect: Callable[[CheckpointFolder], Source | None]
    translate: Callable[[CheckpointFolder, Source, TargetSizes | None, dict[str, Any]], Translation]
    head: Callable[[Any, Tensor | None], nn.Module]
    describe: Callable[[Any], list[tuple[str, str]]]
    misreadings: Callable[[Any, PreTrainedModel], Iterable[Misreading]]
    options: frozenset[str] = frozenset()


def refuse(origin: str, complaints: list[str]) -> None:
    """Raises `ValueError` with all of them, if there are any: what a checkpoint needs and the
    library does not have.
    """
    if complaints:
        raise ValueError(f"{origin}: not supported: {'; '.join(complaints)}")
