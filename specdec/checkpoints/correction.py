"""Parts of block heads, as public checkpoints name their keys and tensors: corrections inside a
block, and convolutions in the layers.

DeepSpec and speculators have the keys at the top of `config.json`, SpecForge, z-lab and NVIDIA in
`dflash_config`. The mark of a part is (names of the head's tensors) -> whether they have it.
"""

from __future__ import annotations

from typing import Any

from specdec.checkpoints.layout import Key, Layout, Reading
from specdec.checkpoints.tensor_rules import Named
from specdec.drafters.head.layer_config import Convolution
from specdec.drafters.mask_token.correction import (
    CorrectionConfig,
    DominoConfig,
    MarkovConfig,
    SelectorConfig,
    XPressConfig,
)
from specdec.drafters.mask_token.lattice import LiLiCorrConfig


def _part(
    kind: str, config: type, keys: dict[str, str], *, must_be_there: bool = False, **others: Any
) -> Layout:
    """A record of a part's sizes, by our fields; an absent key means the usual size, if it may."""
    usual = getattr(config, "_field_defaults", vars(config))
    fields = {
        name: Key(
            key,
            type(usual[name]) if must_be_there else usual[name],
            low=0 if usual[name] == 0 else 1,
        )
        for name, key in keys.items()
    }
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
LILICORR = _part(
    "LiLiCorr",
    LiLiCorrConfig,
    {
        **{"top_k": "lilicorr_candidate_topk", "width": "lilicorr_hidden_size"},
        **{"num_layers": "lilicorr_num_layers", "num_heads": "lilicorr_num_heads"},
        **{"mlp_ratio": "lilicorr_mlp_ratio", "factor_dim": "lilicorr_factor_dim"},
        **{"vector_eps": "lilicorr_vector_eps", "scale": "lilicorr_logit_scale"},
    },
    must_be_there=True,  # engines have no defaults, and two keys show in no shape
    mark=lambda names: "correction.same_slot_bias" in names,
    tensors=(
        Named(
            {  # Model-Optimizer numbers the parts of an MLP, SGLang and TensorRT-LLM name them.
                "lilicorr.feature_mlp.0.": "correction.feature_norm.",
                "lilicorr.feature_mlp.1.": "correction.feature_mlp.up_proj.",
                "lilicorr.feature_mlp.3.": "correction.feature_mlp.down_proj.",
                "lilicorr.layers.{depth}.mlp.0.": "correction.layers.{depth}.mlp.up_proj.",
                "lilicorr.layers.{depth}.mlp.2.": "correction.layers.{depth}.mlp.down_proj.",
                "lilicorr.": "correction.",
            }
        ),
    ),
)
CONVOLUTION = _part(
    "convolutions", Convolution, {"taps": "conv_kernel_size", "group": "conv_group_size"}
)
CORRECTIONS = DOMINO, XPRESS, SELECTOR, LILICORR, MARKOV
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
    """Of the layers: heads with a selector have them, and those with a lattice that name them."""
    kind = type(reading["correction"])
    has_any = kind is SelectorConfig or (
        kind is LiLiCorrConfig and reading.either.get("conv_kernel_size")
    )
    return read_part(CONVOLUTION, reading) if has_any else None


def read_part(part: Layout, reading: Reading) -> Any:
    """The sizes of a part."""
    own = Reading(part, reading.either, reading.tensors)
    reading.fields.accept(place for key in part.inert for place in (key, f"dflash_config.{key}"))
    return part.config(**{name: own[name] for name in part.fields})


def part_of(correction: CorrectionConfig | None) -> Layout | None:
    """The record of a correction."""
    return next((part for part in CORRECTIONS if part.config is type(correction)), None)
