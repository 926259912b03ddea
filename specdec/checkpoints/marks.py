"""`Clues`: what files of heads are recognised by. Its methods return what was found, in words."""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    """What a checkpoint shows before it is read; `starts` of names are as for `canonical`."""

    def __init__(self, folder: CheckpointFolder, starts: Mapping[str, str]):
        self.folder, self.fields, self.starts = folder, folder.fields, starts
        self.architectures = folder.fields.strings("architectures")

    @cached_property
    def eagle(self) -> set[str]:
        """Names that EAGLE heads are recognised by, as in the file and in the head's terms. A
        target's own files may hold more tensors than are read at once.
        """
        found = self.folder.tensors(
            lambda name: "midlayer." in name or canonical(name, self.starts) in _EAGLE_NAMES
        )
        return {*found, *(canonical(name, self.starts) for name in found)}

    @property
    def has_midlayer(self) -> bool:
        """The first layer is called so."""
        return any("midlayer." in name for name in self.eagle)

    def key(self, *names: str) -> str:
        """One of some keys."""
        found = [name for name in names if self.fields.get(name) is not None]
        return f"config.json has {found[0]}" if found else ""

    def value(self, key: str, wanted: str, section: str = "") -> str:
        """A key with a value."""
        fields = self.fields.section(section) if section else self.fields
        return f"{key} {wanted!r}" if fields.get(key) == wanted else ""

    def architecture(self, pattern: str) -> str:
        """An architecture whose name begins so."""
        found = [name for name in self.architectures if re.match(pattern, name)]
        return f"architecture {found[0]}" if found else ""

    def has_tensors(self, *ends: str) -> bool:
        """Tensors whose names end in each of these ways."""
        found = self.folder.tensors(lambda name: name.endswith(ends))
        return all(any(name.endswith(end) for name in found) for end in ends)

    def speculators(self, *, is_first: bool) -> str:
        """speculators' key with any value: of an EAGLE-1 head, or of another."""
        kind = self.fields.raw.get("speculators_model_type", ...)
        is_so = kind is not ... and (kind == "eagle") == is_first
        return f"config.json has speculators_model_type {kind!r}" if is_so else ""

    def deepspec(self) -> str:
        """Architecture and ids of DeepSpec's EAGLE-3."""
        is_so = any(name.endswith("Eagle3Model") for name in self.architectures)
        is_so = is_so and "target_layer_ids" in self.fields.raw
        return f"architectures {self.architectures} and target_layer_ids" if is_so else ""

    def specforge(self) -> str:
        """A `midlayer`, with keys or an architecture of SpecForge."""
        found = sorted(_SPECFORGE_KEYS & self.fields.raw.keys())
        found += [name for name in self.architectures if name.endswith("Eagle3")]
        is_so = found and self.has_midlayer
        return f"tensors midlayer.* with {', '.join(found)}" if is_so else ""

    def nvidia(self) -> str:
        """Keys of NVIDIA's exporter."""
        found = sorted(_NVIDIA_KEYS & self.fields.section("eagle_config").raw.keys())
        return f"eagle_config has {found[-1]}, tensors layers.0.*" if found else ""
