"""`Layout`: how the files of one producer say what a head is; `Key`: how they say one field;
`Reading`: one checkpoint while it is read.

The same record recognises, reads and writes files. A family's records stand in the order in which
they are tried, in one tuple: `EAGLES` of `eagle_layouts.py`, `MASKS` of `mask_layouts.py`,
`LAYOUTS` of `mtp_layouts.py`, `CORRECTIONS` of `correction.py` (parts of a block head). A record of
one's own is `layouts=` of whatever reads files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from specdec.arguments import shown
from specdec.checkpoints.config_fields import ConfigFields
from specdec.checkpoints.files import StoredTensor
from specdec.checkpoints.layer_ids import (
    NAME_THEM,
    Convention,
    LayerIds,
    check_layers,
    read_layer_ids,
)
from specdec.checkpoints.marks import Clues
from specdec.types import FeatureLayer

Tensors = dict[str, StoredTensor]
Values = dict[str, Tensor]
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

    config: Any
    dtype: str = ""
    num_draft_tokens: int = 0
    verifier: str | None = None


class Rule:
    """What some tensors of a head are called in files, and how they are stored there. A direction
    that a subclass does not have changes nothing.
    """

    def read(self, tensors: Tensors, reading: Reading) -> Tensors:
        """A file's tensors, one step nearer to the head's; values are not read yet."""
        return tensors

    def write(self, tensors: Values, reading: Reading) -> Values:
        """The head's, one step nearer to the file's; `reading` is of the file's configuration."""
        return tensors


@dataclass(frozen=True)
class Key:
    """How files say one field of a head or of its layers.

    Args:
        name: the key, `section.key` where it is nested.
        usual: what an absent key means, or `int` or `float` for a number that must be there. Its
            type is that of the key's values.
        also: other keys that are read; of flags one that is true is enough.
        is_in_either: the key may stand at the top or in `dflash_config`.
        low, high: the smallest and the largest number.
        words: our values for true and false.
        absent, present: notes for a file without the key, or with it.
        read: (reading) -> our value, where the key alone does not say it.
        is_written: (config) -> whether the key is written at all.
        write: (config) -> keys and values, where those are not this one and the field's value.

    Example:
        >>> Key("num_heads", int).keys(None, 4)
        {'num_heads': 4}
        >>> Key("residual_is_normed", True, words=(False, True)).keys(None, False)
        {'residual_is_normed': True}
    """

    name: str
    usual: Any = None
    also: tuple[str, ...] = ()
    is_in_either: bool = False
    low: int = 1
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
        section, name = place.at(self.name)
        note = self.absent if section.get(name) is None else self.present
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
        if self.usual is float:
            return place.number(name, is_needed=True)
        if type(self.usual) is float:
            return place.number(name, self.usual)
        if type(self.usual) is str:
            return place.text(name, self.usual)
        usual = None if self.usual is int else self.usual
        return place.integer(name, usual, low=self.low, high=self.high)

    def keys(self, config: Any, value: Any) -> dict[str, Any]:
        """The keys of a file for our value, one of `config` or of its layers."""
        if not self.is_written(config):
            return {}
        if self.write is not None:
            return self.write(config)
        is_flag = type(self.usual) is bool
        return {self.name: value == self.words[0] if is_flag else value}


@dataclass(frozen=True, eq=False)
class Layout:
    """How the files of a producer say what a head of one kind is, or a part of one.

    Args:
        producer, kind: who writes them, and the design by its name in papers.
        config: class of the configuration; it decides which family's heads they are.
        mark: (clues) -> what files are recognised by, in words; "" for all other files. Of a part
            of a head: (names of the head's tensors) -> whether they have it.
        fields: how files say each field of `config`, and of its layers as `layer.name`: a `Key`,
            (reading) -> value where no key alone says it, or the one value that it has. A function
            looks other fields up in the reading by name, in any order.
        ids: keys of layer ids, how their usual readers take them, and the lowest id.
        tensors: what tensors are called and how they are stored, in the order of reading (rules of
            `specdec.checkpoints.tensor_rules`; those of names come first).
        refuse: (reading) -> pairs (condition, message): what no head of the library has.
        inert: keys that nothing reads, `section.key` where they are nested, and values that change
            nothing: `...` for any value, a tuple of values, or (value, reading) -> whether it is
            one. Every other key that nothing reads is an error; see `specdec.checkpoints.keys`.

    The others are of layouts that are written:

    Args:
        name: as a caller knows it; "" for a layout that is only read.
        file: what config.json has, in order: names of our fields, keys of `ids`, keys with a value,
            or functions (what) -> keys, those of a section as `section.key`.
        copies: tables of the target that a file holds for a head without its own.
        only: fields of a head, or of its layers, of which engines run some values only: a tuple of
            these values, or of their classes.
        limits: (config) -> pairs (condition, what): what else engines run otherwise. A head that
            would not read back equal raises ValueError without an entry here.
        notes: (config, N of the target) -> what only some of the layout's readers misread.

    Example:
        >>> from specdec.drafters.medusa import MedusaConfig
        >>> fields, file = {"num_heads": Key("heads", int)}, ("num_heads", ("acme.version", 1))
        >>> layout = Layout("Acme", "Medusa", MedusaConfig, fields=fields, file=file)
        >>> layout.keys(Written(MedusaConfig(4, 1, 64, 2048)))
        {'heads': 4, 'acme': {'version': 1}}
    """

    producer: str
    kind: str
    config: type
    mark: Callable[[Clues], object] = lambda clues: ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    ids: Mapping[str, tuple[Convention, int]] = field(default_factory=dict)
    tensors: tuple[Rule, ...] = ()
    refuse: tuple[Callable[[Reading], Pairs], ...] = ()
    inert: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    file: tuple[str | tuple[str, Any] | Callable[[Written], dict[str, Any]], ...] = ()
    copies: tuple[str, ...] = ()
    only: Mapping[str, tuple] = field(default_factory=dict)
    limits: tuple[Callable[[Any], Iterator[tuple[bool, str]]], ...] = ()
    notes: Callable[[Any, int | None], Iterable[str]] = lambda config, num_layers: ()

    def keys(self, what: Written) -> dict[str, Any]:
        """What config.json has, in the layout's order."""
        keys: dict[str, Any] = {}
        for entry in self.file:
            for key, value in self._keys_of(entry, what).items():
                section, _, key = key.rpartition(".")
                place = keys.setdefault(section, {}) if section else keys
                place[key] = value
        return keys

    def run_otherwise(self, config: Any) -> list[str]:
        """What engines would run otherwise than the head, in words."""
        said = vars(config.layer) | vars(config) if self.only else {}
        found = [
            f"{name}={said[name]}"
            for name, values in self.only.items()
            if said[name] not in values and type(said[name]) not in values
        ]
        return found + [text for limit in self.limits for is_so, text in limit(config) if is_so]

    def _keys_of(self, entry: Any, what: Written) -> dict[str, Any]:
        if isinstance(entry, tuple):
            return dict([entry])
        if callable(entry):
            return entry(what)
        config = what.config
        if entry in self.ids:
            shift = self.ids[entry][0] == "layer_output"
            layers = config.feature_layers
            return {entry: [b if b == "final" else b - shift for b in layers]}
        if not isinstance(key := self.fields.get(entry), Key):
            raise ValueError(
                f"the layout of {self.producer} writes {entry!r}, which must be a Key of its "
                f"fields, one of its ids, or a pair of key and value; got {shown(key)}"
            )
        if entry.startswith("layer."):
            value = getattr(config.layer, entry.removeprefix("layer."))
        else:
            value = getattr(config, entry)
        return key.keys(config, value)


class Reading:
    """One configuration while it is read, from its producer's terms to those of the head. Options
    of the caller stand in the place of what the file holds. `reading[name]` is our value of a
    field; it is read when it is first asked for.

    Args:
        layout: of the files.
        fields: of config.json.
        tensors: by the head's names.
        options: of the caller.
        beside: names of all files in the folder.
        target: the HF model that the head must fit, if there is one.
    """

    def __init__(
        self,
        layout: Layout,
        fields: ConfigFields,
        tensors: Tensors,
        options: Mapping[str, Any] | None = None,
        beside: set[str] = frozenset(),
        target: PreTrainedModel | None = None,
    ):
        self.layout, self.fields, self.tensors = layout, fields, tensors
        self.options, self.beside, self.target = options or {}, beside, target
        self.notes = fields.notes
        self.unused: dict[str, str] = {}
        """Names of tensors that such files may hold without using them, with the reason."""
        self._values: dict[str, Any] = {}
        self._open: list[str] = []

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            if name in self._open:
                circle = " -> ".join([*self._open, name])
                raise ValueError(
                    f"the layout of {self.layout.producer} reads in a circle: {circle}"
                )
            self._open.append(name)
            try:
                value = self._value_of(self.layout.fields[name])
            finally:
                self._open.pop()
            is_asked = name in self.options and name not in ("feature_layers", "layer")
            self._values[name] = self.options[name] if is_asked else value
        return self._values[name]

    def _value_of(self, entry: Any) -> Any:
        if isinstance(entry, Key):
            return entry.value(self)
        return entry(self) if callable(entry) else entry

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
        return self["layer"].hidden_size

    @property
    def is_other_width(self) -> bool:
        """The head is not as wide as its target, so that tables of the target do not fit it."""
        return self.hidden_size != self["target_hidden_size"]

    @property
    def has_fewer_ids(self) -> bool:
        """The head does not propose all ids."""
        return self["draft_vocab_size"] < self["vocab_size"]

    def asked_layers(self, num_layers: int | None) -> tuple[FeatureLayer, ...] | None:
        """The hidden states that the caller names."""
        layers = self.options.get("feature_layers")
        if layers is not None:  # whatever the file says
            self.fields.accept(self.layout.ids)
        return None if layers is None else check_layers("feature_layers", layers, num_layers)

    def layer_ids(self) -> list[LayerIds]:
        """Every key under which ids stand."""
        places = ((key, *self.fields.at(key), taken) for key, taken in self.layout.ids.items())
        found = (LayerIds(key, place.get(name), *taken) for key, place, name, taken in places)
        return [entry for entry in found if entry.ids is not None]

    def hidden_states(
        self, found: list[LayerIds], num_layers: int | None, convention_of: str = ""
    ) -> tuple[FeatureLayer, ...]:
        """The hidden states that the file names, by the caller's convention or its producer's."""
        asked = self.options.get("layer_convention")
        producer = convention_of or self.layout.producer
        return read_layer_ids(found, self.fields, num_layers, producer=producer, convention=asked)

    def check_supported(self) -> None:
        """`ValueError` with all that no head of the library has."""
        pairs = (pair for refuse in self.layout.refuse for pair in refuse(self))
        if found := [text for is_so, text in pairs if is_so]:
            raise ValueError(f"{self.fields.origin}: not supported: {'; '.join(found)}")

    def config(self) -> Any:
        """Every convention resolved, for a target if there is one; where the caller does not know
        better, as the layout says.
        """
        layout, options = self.layout, self.options.keys()
        own = {entry.name for entry in fields_of(layout.config)}
        unmeant = (options & own) - layout.fields.keys()
        if layout.fields.get("feature_layers") == ():
            unmeant |= options & {"feature_layers", "layer_convention"}
        if unmeant:
            raise ValueError(
                f"{', '.join(sorted(unmeant))}: {layout.kind} heads have none; drop it"
            )
        values = {name: self[name] for name in layout.fields if not name.startswith("layer.")}
        return layout.config(**{name: value for name, value in values.items() if name in own})

    def accept_inert(self) -> None:
        """Keys that change nothing count as read, as those do that files are written with."""
        written = {entry[0]: entry[1:] for entry in self.layout.file if isinstance(entry, tuple)}
        for key, values in (written | self.layout.inert).items():
            place, name = self.fields.at(key)
            value = place.raw.get(name)
            if values is ... or (values(value, self) if callable(values) else value in values):
                self.fields.accept([key])

    def check_joined(self, config: Any) -> None:
        """The number of features must be what the configuration and `fc` say."""
        if not getattr(config, "joins_features", False):
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


def check_own(layouts: Sequence[Layout]) -> tuple[Layout, ...]:
    """A caller's records; `TypeError` if one is none."""
    if isinstance(layouts, Layout) or not isinstance(layouts, list | tuple):
        raise TypeError(
            f"layouts must be a tuple of specdec.checkpoints.Layout, (MINE,) for instance, got "
            f"{shown(layouts)}"
        )
    for layout in layouts:
        if not isinstance(layout, Layout):
            raise TypeError(
                f"layouts must be specdec.checkpoints.Layout records, got {shown(layout)}"
            )
    return tuple(layouts)
