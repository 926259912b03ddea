"""Parts of block heads, as public checkpoints name their keys and tensors: corrections inside a
block, and convolutions in the layers.

DeepSpec and speculators have the keys at the top of `config.json`, SpecForge and z-lab in
`dflash_config`. The mark of a part is (names of the head's tensors) -> whether they have it.
"""

from __future__ import annotations

from typing import Any

from specdec.checkpoints.layout import Key, Layout, Reading, Written
from specdec.checkpoints.tensor_rules import Named
from specdec.drafters.head.layer_config import Convolution
from specdec.drafters.mask_token.correction import (
    CorrectionConfig,
    DominoConfig,
    MarkovConfig,
    SelectorConfig,
    XPressConfig,
)


def _part(kind: str, config: type, keys: dict[str, str], **others: Any) -> Layout:
    """A record of a part's sizes, by our fields; an absent key means the usual size."""
    if issubclass(config, Convolution):
        usual = Convolution._field_defaults
    else:
        usual = {name: getattr(config, name) for name in keys}
    # Only the rows before the first corrected one may be none.
    fields = {n: Key(key, usual[n], low=0 if n == "first" else 1) for n, key in keys.items()}
    return Layout("", kind, config, fields=fields, file=tuple(keys), **others)


DOMINO = _part(
    "Domino",
    DominoConfig,
    {"rank": "emb_dim", "gru_width": "gru_hidden_dim", "first": "pure_draft_prefix_len"},
    mark=lambda names: "correction.prefix_gru.weight_ih_l0" in names,
    tensors=(
        Named({"prefix_gru.": "correction.prefix_gru.", "embed_proj.": "correction.embed_proj."}),
    ),
)
XPRESS = _part(
    "XPress",
    XPressConfig,
    {"rank": "xpress_rank", "mlp_ratio": "xpress_mlp_ratio"},
    mark=lambda names: "correction.mix_l" in names,
    tensors=(Named({"refiner_head.": "correction."}),),
    inert={"num_jacobi_passes": ...},  # how engines approach what is computed here
)
SELECTOR = _part(
    "DFlash 2",
    SelectorConfig,
    {"rank": "selector_rank", "top_k": "selector_top_k"},
    mark=lambda names: "correction.predecessor_codebook" in names,
    tensors=(Named({"candidate_selector.": "correction."}),),
)
MARKOV = _part(
    "DSpark",
    MarkovConfig,
    {"rank": "markov_rank", "kind": "markov_head_type"},
    mark=lambda names: "correction.markov_w1.weight" in names,
    tensors=(Named({"markov_head.": "correction."}),),
)
CONVOLUTION = _part(
    "convolutions", Convolution, {"taps": "conv_kernel_size", "group": "conv_group_size"}
)
CORRECTIONS = DOMINO, XPRESS, SELECTOR, MARKOV
"""In the order in which they are tried."""


def correction(
    reading: Reading, own: Layout | None = None, *, is_usual: bool = False
) -> CorrectionConfig | None:
    """What a block head's file says of a correction.

    Args:
        reading: of the file.
        own: the kind that heads of its layout have, whatever their tensors are called.
        is_usual: an absent rank means a Markov head of the usual one.
    """
    names, fields = reading.tensors, reading.either
    found = next((part for part in CORRECTIONS if part is own or part.mark(names)), MARKOV)
    if found is MARKOV:
        rank = fields.get("markov_rank")
        has_none = rank is None and not is_usual and not MARKOV.mark(names)
        if rank == 0 or has_none:
            fields.get("markov_head_type")
            return None
    return read_part(found, reading)


def convolution(reading: Reading) -> Convolution | None:
    """Of the layers: heads with a selector have them."""
    has_selector = isinstance(reading["correction"], SelectorConfig)
    return read_part(CONVOLUTION, reading) if has_selector else None


def read_part(part: Layout, reading: Reading) -> Any:
    """The sizes of a part."""
    own = Reading(part, reading.either, reading.tensors)
    reading.fields.accept(place for key in part.inert for place in (key, f"dflash_config.{key}"))
    return part.config(**{name: own[name] for name in part.fields})


def correction_keys(
    correction: CorrectionConfig | None, convolution: Convolution | None
) -> dict[str, Any]:
    """Keys of a correction and of convolutions, for a file."""
    keys = {"markov_rank": 0}
    if correction is not None:
        keys = part_of(correction).keys(Written(correction))
    return keys if convolution is None else keys | CONVOLUTION.keys(Written(convolution))


def part_of(correction: CorrectionConfig | None) -> Layout | None:
    """The record of a correction."""
    return next((part for part in CORRECTIONS if part.config is type(correction)), None)
