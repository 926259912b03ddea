"""Names of tensors of heads over a target's features: the head's own, and those of producers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from specdec.checkpoints.correction import CORRECTIONS, names_of_correction
from specdec.drafters.mask_token.correction import CorrectionConfig

_CORRECTED = {
    **{theirs: ours for names in CORRECTIONS for ours, theirs in names.tensors.items()},
    "confidence_head.proj.": "confidence_head.",
}
_SINKS = (".self_attn.attention_sink_bias", ".self_attn.sinks")
_ENDS = (_SINKS, ("_codebook.weight", "_codebook"))
_PREFIXES = ("model.", "speculator.")
_LATER_HIDDEN_NORM = re.compile(r"layers\.([1-9]\d*)\.hidden_norm\.weight")


def with_start(name: str, starts: Mapping[str, str]) -> str | None:
    """The name with another start, by the first entry that fits; `None` if none does."""
    for old, new in starts.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return None


def canonical(name: str, starts: Mapping[str, str]) -> str:
    """The head's name of a tensor, whoever wrote it; `starts` are theirs, and ours."""
    while name.startswith(_PREFIXES):
        name = name.partition(".")[2]
    for theirs, ours in _ENDS:
        if name.endswith(theirs):
            name = name.removesuffix(theirs) + ours
    return with_start(name, starts | _CORRECTED) or name


def canonical_names(names: Iterable[str], starts: Mapping[str, str]) -> dict[str, str]:
    """Maps the head's names to the names in the file; `ValueError` if two of them mean the same."""
    renamed = {name: canonical(name, starts) for name in names}
    taken, result = set(renamed.values()), {}
    for name, ours in renamed.items():
        later = _LATER_HIDDEN_NORM.fullmatch(ours)
        if later is not None:
            # SGLang calls the norm of layers after the first so, all others input_layernorm.
            usual = f"layers.{later[1]}.input_layernorm.weight"
            ours = ours if usual in taken else usual
        if ours in result:
            raise ValueError(f"{name} and {result[ours]} are two names for one tensor")
        result[ours] = name
    return result


def stored(name: str, starts: Mapping[str, str], correction: CorrectionConfig | None) -> str:
    """The name in a file of a tensor of the head's; `starts` are as for `canonical`."""
    names = {ours: theirs for theirs, ours in starts.items()}
    names |= {"confidence_head.": "confidence_head.proj."}
    if correction is not None:
        names |= names_of_correction(correction).tensors
    return with_start(name, names) or name.replace(*reversed(_SINKS))
