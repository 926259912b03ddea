"""`HeadLayout`: how the files of one producer name the parts of a head; `Key`: how they say one
field; `Reading`: one checkpoint while it is read.

The same record reads files and writes them (`specdec.checkpoints.feature_heads`,
`specdec.checkpoints.export`). The records are in `specdec.checkpoints.head_layouts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from transformers import PreTrainedModel

from specdec.checkpoints.config_fields import ConfigFields
from specdec.checkpoints.files import StoredTensor
from specdec.checkpoints.layer_ids import (
    NAME_THEM,
    Convention,
    LayerIds,
    check_layers,
    find_layer_ids,
    read_layer_ids,
)
from specdec.checkpoints.marks import Clues
from specdec.drafters.head.features import FeatureHeadConfig
from specdec.targets.features import FeatureLayer

Tensors = dict[str, StoredTensor]
Pairs = Iterable[tuple[bool, str]]
"""Is it so, and what."""


class Written(NamedTuple):
    """What a file is written of.

    Args:
        config: the head's.
        dtype: name of its data type.
        num_draft_tokens: what the file proposes to draft per step.
        verifier: id or folder of its target.
    """

    config: FeatureHeadConfig
    dtype: str
    num_draft_tokens: int
    verifier: str | None


@dataclass(frozen=True)
class Key:
    """How files say one field of a head or of its layers.

    Args:
        name: the key, `section.key` where it is nested.
        usual: what an absent key means, or `int` for a number that must be there. Its type is that
            of the key's values.
        also: other keys that are read; of flags one that is true is enough.
        is_in_either: the key may stand at the top or in `dflash_config`.
        high: the largest number.
        words: our values for true and false.
        absent, present: notes for a file without the key, or with it.
        read: (reading) -> our value, where the key alone does not say it.
        is_written: (config) -> whether the key is written at all.
        write: (config) -> keys and values, where those are not this one and the field's value.
    """

    name: str
    usual: Any = None
    also: tuple[str, ...] = ()
    is_in_either: bool = False
    high: int | None = None
    words: tuple[Any, Any] = (True, False)
    absent: str = ""
    present: str = ""
    read: Callable[[Reading], Any] | None = None
    is_written: Callable[[Any], bool] = lambda config: True
    write: Callable[[Any], dict[str, Any]] | None = None

    def value(self, reading: Reading) -> Any:
        """Our value of a file."""
        if self.read is not None:
            return self.read(reading)
        place = reading.either if self.is_in_either else reading.fields
        note = self.absent if place.get(self.name) is None else self.present
        if note:
            reading.notes.append(note)
        values = (self._value_in(place, name) for name in (self.name, *self.also))
        if type(self.usual) is not bool:
            return next(values)
        return self.words[0] if any(values) else self.words[1]

    def _value_in(self, place: ConfigFields, name: str) -> Any:
        place, name = place.at(name)
        if type(self.usual) is bool:
            return place.flag(name, default=self.usual)
        if type(self.usual) is float:
            return place.number(name, self.usual)
        usual = None if self.usual is int else self.usual
        return place.integer(name, usual, high=self.high)

    def keys(self, config: FeatureHeadConfig, value: Any) -> dict[str, Any]:
        """The keys of a file for our value, one of `config` or of its layers."""
        if not self.is_written(config):
            return {}
        if self.write is not None:
            return self.write(config)
        is_flag = type(self.usual) is bool
        return {self.name: value == self.words[0] if is_flag else value}


@dataclass(frozen=True, eq=False)
class HeadLayout:
    """How the files of a producer name the parts of heads of one kind.

    Args:
        producer, kind: as in `Source`.
        config: class of the head's configuration.
        keys: how files say each of its fields: a `Key`, (reading) -> value where no key alone says
            it, or the one value that it has. In the order of reading: what reads one field may look
            at those before it.
        of_layer: how they say the flags of `LayerConfig`.
        ids: keys of layer ids, how their usual readers take them, and the lowest id.
        marks: what files are recognised by: (clues) -> what was found, in words, each by its rank.
            Of the marks that files have, that of the least rank counts, and of equal ones that of
            the first record.
        refuse: (reading) -> pairs (condition, message): what no head of the library has.
        no_options: of the family, that such a head does not have.
        inert: keys that make no difference, at the top or in `dflash_config`.
        follows: whose convention of ids it is, if not the producer's.
        unused: tensors that are not used where a field is false: the field, and the reason.
        tensors: how names begin that are not the head's, and how the head's do.

    The others are of layouts that are written:

    Args:
        name: as a caller knows it; "" for a layout that is only read.
        designs: fusions or alignments of its heads.
        corrections: types of their `correction`.
        file: what config.json has, in order: names of our fields, keys of `ids`, keys with a value,
            or functions (what) -> keys, those of a section as `section.key`.
        prefix: of all tensors but the vocabulary head.
        copies: tables of the target that a file holds for a head without its own.
        says: fields that tensors, or functions in `file`, say.
        instead: values of fields that no key says, where they are not the usual ones.
        limits: (config) -> pairs (condition, what): what has keys and yet cannot be said.
    """

    producer: str
    kind: str
    config: type[FeatureHeadConfig]
    keys: Mapping[str, Any]
    of_layer: Mapping[str, Any]
    ids: Mapping[str, tuple[Convention, int]] = field(default_factory=dict)
    marks: Mapping[int, Callable[[Clues], object]] = field(default_factory=dict)
    refuse: Callable[[Reading], Pairs] = lambda reading: ()
    no_options: tuple[str, ...] = ()
    inert: tuple[str, ...] = ()
    follows: str = ""
    unused: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    tensors: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    designs: tuple[str, ...] = ()
    corrections: tuple[type, ...] = (type(None),)
    file: tuple[str | tuple[str, Any] | Callable[[Written], dict[str, Any]], ...] = ()
    prefix: str = ""
    copies: tuple[str, ...] = ()
    says: tuple[str, ...] = ()
    instead: Mapping[str, Any] = field(default_factory=dict)
    limits: tuple[Callable[[Any], Iterator[tuple[bool, str]]], ...] = ()

    def without_keys(self) -> dict[str, Any]:
        """What fields are in a file that has no key of theirs, as far as the record says it."""
        keys = {name: x for name, x in self.keys.items() if not callable(x)}
        simple = {name: x.usual if isinstance(x, Key) else x for name, x in keys.items()}
        is_read = {name for name, x in keys.items() if isinstance(x, Key) and x.read}
        return {name: x for name, x in simple.items() if name not in is_read} | self.instead


class Reading:
    """One configuration while it is read, from its producer's terms to those of the head. Options
    of the caller stand in the place of what the file holds.

    Args:
        layout: of the files.
        fields: of config.json.
        tensors: by the head's names; those of which the shape differs between producers are
            replaced.
        options: of the caller.
        beside: names of all files in the folder.
        target: the HF model that the head must fit, if there is one.
    """

    def __init__(
        self,
        layout: HeadLayout,
        fields: ConfigFields,
        tensors: Tensors,
        options: Mapping[str, Any],
        beside: set[str],
        target: PreTrainedModel | None,
    ):
        self.layout, self.fields, self.tensors = layout, fields, tensors
        self.options, self.beside, self.target = options, beside, target
        self.notes = fields.notes
        self.is_speculators = layout.producer == "speculators"
        self.values: dict[str, Any] = {}
        """Our fields that have been read."""

    @property
    def flash(self) -> ConfigFields:
        """DFlash's own section."""
        return self.fields.section("dflash_config")

    @property
    def either(self) -> ConfigFields:
        """Keys that producers write at the top or in DFlash's section. Both of `is_causal` hold for
        all layers: z-lab's `dflash/model.py`, vLLM 0.33's `_dflash_layer_causal`.
        """
        return self.fields.with_section("dflash_config", is_causal="causal")

    @property
    def text(self) -> Any:
        """The target's configuration, of its language model; `None` without a target."""
        return None if self.target is None else self.target.config.get_text_config()

    @property
    def num_target_layers(self) -> int | None:
        """N, where there is a target."""
        return self.text and self.text.num_hidden_layers

    @property
    def hidden_size(self) -> int:
        """H of the head."""
        return self.values["layer"].hidden_size

    @property
    def is_other_width(self) -> bool:
        """The head is not as wide as its target, so that tables of the target do not fit it."""
        return self.hidden_size != self.values["target_hidden_size"]

    @property
    def has_fewer_ids(self) -> bool:
        """The head does not propose all ids."""
        return self.values["draft_vocab_size"] < self.values["vocab_size"]

    def asked_layers(self, num_layers: int | None) -> tuple[FeatureLayer, ...] | None:
        """The boundaries that the caller names."""
        layers = self.options.get("feature_layers")
        return None if layers is None else check_layers("feature_layers", layers, num_layers)

    def value_of(self, key: Any) -> Any:
        """What an entry of `HeadLayout.keys` says."""
        if isinstance(key, Key):
            return key.value(self)
        return key(self) if callable(key) else key

    def layer_ids(self) -> list[LayerIds]:
        """Every key under which ids stand."""
        return find_layer_ids(self.fields, self.layout.ids)

    def boundaries(self, found: list[LayerIds], num_layers: int | None) -> tuple[FeatureLayer, ...]:
        """The boundaries that the file names, by the caller's convention or its producer's."""
        asked = self.options.get("layer_convention")
        producer = self.layout.follows or self.layout.producer
        return read_layer_ids(found, self.fields, num_layers, producer=producer, convention=asked)

    def check_joined(self, config: FeatureHeadConfig) -> None:
        """The number of features must be what the configuration and `fc` say."""
        if not config.joins_features:
            return
        count, width, said = len(config.feature_layers), config.target_hidden_size, {}
        fields, fc = self.fields, self.tensors.get("fc.weight")
        if fields.get("num_aux_hidden_states") is not None:
            said["num_aux_hidden_states is"] = fields.integer("num_aux_hidden_states")
        if fc is not None and len(fc.shape) == 2 and fc.shape[1] % width == 0:
            said[f"fc.weight {list(fc.shape)} joins, at width {width},"] = fc.shape[1] // width
        for what, number in said.items():
            if number != count:
                raise ValueError(
                    f"{fields.origin} leads to {count} features {list(config.feature_layers)}, but "
                    f"{what} {number}; {NAME_THEM}"
                )

    def reshape(self, name: str, shape: tuple[int, ...]) -> None:
        """Gives a vector the shape that it has in the head."""
        stored = self.tensors.get(name)
        if stored is not None and stored.shape in (shape, shape[1:], shape[2:]):
            self.tensors[name] = replace(
                stored, shape=shape, read=lambda: stored.read().reshape(shape)
            )
