"""What files of heads are recognised by: (files) -> what was found, in words, or `None`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property

from specdec.checkpoints.files import CheckpointFolder
from specdec.checkpoints.tensor_names import canonical

_NVIDIA_KEYS = {
    *("use_aux_hidden_state", "use_input_layernorm_in_first_layer", "use_last_layernorm"),
    *("use_mtp_layernorm", "next_layer_regular", "parallel_draft_step"),
}
_SPECFORGE_KEYS = {"eagle_config", "fc_norm", "norm_output", "use_aux_norm"}
_EAGLE_NAMES = {
    *("fc.weight", "mask_hidden"),
    *("layers.0.hidden_norm.weight", "layers.0.self_attn.q_proj.weight"),
}


class Clues:
    """What a checkpoint shows before it is read; `starts` of names as for `canonical`."""

    def __init__(self, folder: CheckpointFolder, starts: Mapping[str, str]):
        self.folder, self.fields, self.starts = folder, folder.fields, starts
        self.architectures = folder.fields.strings("architectures")

    def names(self, is_wanted: Callable[[str], bool]) -> list[str]:
        """Names of tensors. A target's own files may hold more than are read at once."""
        return list(self.folder.tensors(is_wanted))

    @cached_property
    def eagle(self) -> set[str]:
        """Names that EAGLE heads are recognised by, as in the file and in the head's terms."""

        def ours(name: str) -> str:
            return canonical(name, self.starts)

        found = self.names(lambda name: "midlayer." in name or ours(name) in _EAGLE_NAMES)
        return {*found, *map(ours, found)}

    @property
    def has_midlayer(self) -> bool:
        """The first layer is called so."""
        return any("midlayer." in name for name in self.eagle)


Find = Callable[[Clues], str | None]


def key(*names: str) -> Find:
    """One of some keys."""

    def find(clues: Clues) -> str | None:
        found = [name for name in names if clues.fields.get(name) is not None]
        return f"config.json has {found[0]}" if found else None

    return find


def value(key: str, wanted: str, section: str = "") -> Find:
    """A key with a value."""

    def find(clues: Clues) -> str | None:
        fields = clues.fields.section(section) if section else clues.fields
        return f"{key} {wanted!r}" if fields.get(key) == wanted else None

    return find


def architecture(pattern: str) -> Find:
    """An architecture whose name begins so."""
    return lambda clues: next(
        (f"architecture {name}" for name in clues.architectures if re.match(pattern, name)), None
    )


def tensors(why: str, *ends: str) -> Find:
    """Tensors whose names end so."""

    def find(clues: Clues) -> str | None:
        found = clues.names(lambda name: name.endswith(ends))
        return why if all(any(name.endswith(end) for name in found) for end in ends) else None

    return find


def speculators_eagle(*, is_first: bool) -> Find:
    """speculators' key with any value: of an EAGLE-1 head, or of another."""

    def find(clues: Clues) -> str | None:
        kind = clues.fields.raw.get("speculators_model_type", ...)
        is_so = kind is not ... and (kind == "eagle") == is_first
        return f"config.json has speculators_model_type {kind!r}" if is_so else None

    return find


def deepspec(clues: Clues) -> str | None:
    """DeepSpec's EAGLE-3."""
    names, has_ids = clues.architectures, "target_layer_ids" in clues.fields.raw
    is_so = has_ids and any(name.endswith("Eagle3Model") for name in names)
    return f"architectures {names} and target_layer_ids" if is_so else None


def specforge(clues: Clues) -> str | None:
    """A `midlayer`, with keys or an architecture of SpecForge."""
    found = sorted(_SPECFORGE_KEYS & clues.fields.raw.keys())
    found += [name for name in clues.architectures if name.endswith("Eagle3")]
    is_so = clues.has_midlayer and found
    return f"tensors midlayer.* with {', '.join(found)}" if is_so else None


def safeailab(clues: Clues) -> str | None:
    """A `midlayer` alone."""
    return "tensors midlayer.*, no key of another producer" if clues.has_midlayer else None


def nvidia(clues: Clues) -> str | None:
    """Keys of NVIDIA's exporter."""
    found = sorted(_NVIDIA_KEYS & clues.fields.section("eagle_config").raw.keys())
    return f"eagle_config has {found[-1]}, tensors layers.0.*" if found else None


def vllm(clues: Clues) -> str | None:
    """An EAGLE-3 head's names."""
    is_so = "layers.0.hidden_norm.weight" in clues.eagle
    return "tensors layers.0.*, no key of a producer" if is_so else None


def first(clues: Clues) -> str | None:
    """An EAGLE-1 head's names."""
    is_so = {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= clues.eagle
    return "tensors fc and layers.0.*, no hidden_norm: EAGLE-1" if is_so else None
