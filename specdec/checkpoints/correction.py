"""Corrections inside a block, as public checkpoints name their keys and tensors: a table.

DeepSpec and speculators have the keys at the top of `config.json`, SpecForge and z-lab in
`dflash_config`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from specdec.checkpoints.config_fields import ConfigFields
from specdec.drafters.head.layers import Convolution
from specdec.drafters.mask_token.correction import (
    CorrectionConfig,
    DominoConfig,
    MarkovConfig,
    SelectorConfig,
    XPressConfig,
)


class Names(NamedTuple):
    """How files name the sizes of a correction (keys, by our fields) and its tensors (how names
    begin, by ours), the tensor that only it has, the kind of `Source` that has it, and a key that
    makes no difference.
    """

    config: type[CorrectionConfig]
    keys: dict[str, str]
    tensors: dict[str, str]
    mark: str
    kind: str
    inert: str = ""


CORRECTIONS = (
    Names(
        DominoConfig,
        {"rank": "emb_dim", "gru_width": "gru_hidden_dim", "first": "pure_draft_prefix_len"},
        {f"correction.{name}.": f"{name}." for name in ("prefix_gru", "embed_proj")},
        mark="correction.prefix_gru.weight_ih_l0",
        kind="Domino",
    ),
    Names(
        XPressConfig,
        {"rank": "xpress_rank", "mlp_ratio": "xpress_mlp_ratio"},
        {"correction.": "refiner_head."},
        mark="correction.mix_l",
        kind="XPress",
        inert="num_jacobi_passes",  # how engines approach what is computed here
    ),
    Names(
        SelectorConfig,
        {"rank": "selector_rank", "top_k": "selector_top_k"},
        {"correction.": "candidate_selector."},
        mark="correction.predecessor_codebook",
        kind="DFlash 2",
    ),
    Names(
        MarkovConfig,
        {"rank": "markov_rank", "kind": "markov_head_type"},
        {"correction.": "markov_head."},
        mark="correction.markov_w1.weight",
        kind="DSpark",
    ),
)
MARKOV = CORRECTIONS[-1]
_CONVOLUTION = {"taps": "conv_kernel_size", "group": "conv_group_size"}
"""Their keys, by our fields."""


def read_correction(
    fields: ConfigFields, names: Collection[str], kind: str
) -> tuple[CorrectionConfig | None, Convolution | None]:
    """What a block head's file says of corrections, and of convolutions in its layers.

    Args:
        fields: of `config.json`, with `dflash_config`.
        names: tensors, by the head's names.
        kind: of the file's `Source`.
    """
    marked = (c for c in CORRECTIONS if c.kind == kind or c.mark in names)
    found = next(marked, MARKOV)
    if found is MARKOV:
        rank = fields.get("markov_rank")
        # speculators leaves out what its class has by default.
        is_usual = kind == MARKOV.kind and fields.get("speculators_model_type") is not None
        if rank == 0 or (rank is None and not is_usual and MARKOV.mark not in names):
            fields.get("markov_head_type")
            return None, None
    if found.inert:
        fields.get(found.inert)
    usual, convolution = {name: getattr(found.config, name) for name in found.keys}, None
    if found.config is SelectorConfig:
        sizes = _given(Convolution._field_defaults, _CONVOLUTION, fields)
        convolution = Convolution(**sizes)
    return found.config(**_given(usual, found.keys, fields)), convolution


def correction_keys(
    correction: CorrectionConfig | None, convolution: Convolution | None
) -> dict[str, Any]:
    """Keys of a correction and of convolutions, for a file."""
    keys = {"markov_rank": 0}
    if correction is not None:
        keys = _written(correction, names_of_correction(correction).keys)
    return keys if convolution is None else keys | _written(convolution, _CONVOLUTION)


def names_of_correction(correction: CorrectionConfig | None) -> Names | None:
    """The entry of the table."""
    return next((names for names in CORRECTIONS if names.config is type(correction)), None)


def _written(sizes: object, keys: Mapping[str, str]) -> dict[str, Any]:
    return {name: getattr(sizes, own) for own, name in keys.items()}


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
