"""Corrections inside a block, as public checkpoints name their keys and tensors.

DeepSpec and speculators have the keys at the top of `config.json`, SpecForge and z-lab in
`dflash_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.checkpoints.config_fields import ConfigFields
from specdec.heads.correction import (
    CorrectionConfig,
    DominoConfig,
    MarkovConfig,
    SelectorConfig,
    XPressConfig,
)
from specdec.heads.layers import Convolution

_KEYS: dict[type[CorrectionConfig], dict[str, str]] = {
    MarkovConfig: {"rank": "markov_rank", "kind": "markov_head_type"},
    DominoConfig: {
        "rank": "emb_dim",
        "gru_width": "gru_hidden_dim",
        "first": "pure_draft_prefix_len",
    },
    SelectorConfig: {"rank": "selector_rank", "top_k": "selector_top_k"},
    XPressConfig: {"rank": "xpress_rank", "mlp_ratio": "xpress_mlp_ratio"},
}
_CONVOLUTION = {"taps": "conv_kernel_size", "group": "conv_group_size"}
"""Their keys, by our fields."""

TENSORS = {
    MarkovConfig: {"correction.": "markov_head."},
    DominoConfig: {
        "correction.prefix_gru.": "prefix_gru.",
        "correction.embed_proj.": "embed_proj.",
    },
    SelectorConfig: {"correction.": "candidate_selector."},
    XPressConfig: {"correction.": "refiner_head."},
}
"""How names of tensors begin, ours and theirs."""


def read_correction(
    fields: ConfigFields, names: Mapping[str, Any], *, kind: str
) -> tuple[CorrectionConfig | None, Convolution | None]:
    """What a block head's file says of corrections, and of convolutions in its layers.

    Args:
        fields: of `config.json`.
        names: tensors, by the head's names.
        kind: of the file's `Source`.
    """
    fields = fields.with_section("dflash_config")
    if kind == "Domino" or "correction.prefix_gru.weight_ih_l0" in names:
        return _read(DominoConfig, fields), None
    if kind == "XPress" or "correction.mix_l" in names:
        fields.get("num_jacobi_passes")  # how engines approach what is computed here
        return _read(XPressConfig, fields), None
    if kind == "DFlash 2" or "correction.predecessor_codebook" in names:
        sizes = _given(Convolution._field_defaults, _CONVOLUTION, fields)
        return _read(SelectorConfig, fields), Convolution(**sizes)
    rank = fields.get("markov_rank")
    is_usual = kind == "DSpark" and fields.get("speculators_model_type") is not None
    if rank == 0 or (rank is None and not is_usual and "correction.markov_w1.weight" not in names):
        fields.get("markov_head_type")
        return None, None
    return _read(MarkovConfig, fields), None


def correction_keys(
    correction: CorrectionConfig | None, convolution: Convolution | None
) -> dict[str, Any]:
    """Keys of a correction and of convolutions, for a file."""
    keys = {"markov_rank": 0}
    if correction is not None:
        keys = {name: getattr(correction, own) for own, name in _KEYS[type(correction)].items()}
    if convolution is not None:
        keys |= {name: getattr(convolution, own) for own, name in _CONVOLUTION.items()}
    return keys


def _read(sizes: type, fields: ConfigFields) -> CorrectionConfig:
    usual = {name: getattr(sizes, name) for name in _KEYS[sizes]}
    return sizes(**_given(usual, _KEYS[sizes], fields))


def _given(
    usual: Mapping[str, Any], keys: Mapping[str, str], fields: ConfigFields
) -> dict[str, Any]:
    """Values by our names: those of the file, or as usual."""
    found = {}
    for name, key in keys.items():
        if isinstance(usual[name], str):
            found[name] = fields.text(key, usual[name])
        else:
            found[name] = fields.integer(key, usual[name], low=0 if name == "first" else 1)
    return found
