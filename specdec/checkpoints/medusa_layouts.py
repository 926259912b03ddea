"""How FasterDecoding and vLLM store Medusa heads."""

from __future__ import annotations

import re
from dataclasses import dataclass

from specdec.checkpoints.layout import Key, Layout, Reading, Written
from specdec.checkpoints.tensor_rules import Named, Names, Prefixed
from specdec.drafters.medusa import MedusaConfig

FIRST, MATRIX = "blocks.0.0.bias", "lm_heads.0.weight"


@dataclass(frozen=True)
class Numbered(Names):
    """FasterDecoding's names: `head.block.linear.weight`, and after the blocks `head.block.weight`
    of the vocabulary matrix.
    """

    def ours(self, name: str, reading: Reading) -> str:
        """See `Names`."""
        name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.\2.", name)
        return re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)


def _matrix(reading: Reading) -> tuple[int, int]:
    """V and H, from the first vocabulary matrix."""
    if MATRIX not in reading.tensors:
        raise ValueError(f"{reading.fields.origin}: the files hold no vocabulary matrix of head 0")
    return reading.tensors[MATRIX].shape


def _num_heads(reading: Reading) -> int:
    """Of the tensors: public configurations say 2 where the files have 5."""
    found = sum(name.startswith("lm_heads.") for name in reading.tensors)
    said = reading.fields.integer("medusa_num_heads")
    if said != found:
        reading.notes.append(f"{found} heads, by the tensors; medusa_num_heads is {said}")
    return found


def _architecture(what: Written) -> dict[str, object]:
    return {"architectures": ["MedusaModel"], "model_type": "medusa", "torch_dtype": what.dtype}


FASTER_DECODING = Layout(
    producer="FasterDecoding",
    kind="Medusa",
    config=MedusaConfig,
    mark=lambda clues: clues.key("medusa_num_heads"),
    fields={
        "num_heads": _num_heads,
        "num_blocks": Key("medusa_num_layers", 1),
        "hidden_size": lambda r: _matrix(r)[1],
        "vocab_size": lambda r: _matrix(r)[0],
        "has_bias": lambda r: FIRST in r.tensors,
    },
    tensors=(Prefixed(also=("medusa_heads.", "medusa_head.")), Numbered()),
    inert=dict.fromkeys(("base_model_name_or_path", "version"), ...),
)
VLLM = Layout(
    producer="vLLM",
    kind="Medusa",
    config=MedusaConfig,
    mark=lambda clues: clues.value("model_type", "medusa"),
    fields={
        "num_heads": Key("num_heads", int),
        "num_blocks": Key("num_hidden_layers", int),
        "hidden_size": Key("hidden_size", int),
        "vocab_size": Key("vocab_size", int),
        "has_bias": Key("medusa_fc_bias", False),
    },
    tensors=(
        Prefixed(also=("medusa_heads.",)),
        Named({"blocks.{depth}.layers.": "blocks.{depth}."}),
    ),
    inert={
        "truncated_vocab_size": lambda size, r: size == r["vocab_size"],
        "original_lm_head": (False,),  # one vocabulary matrix for all heads
        "logit_scale": (1,),
        **{"max_paths": ..., "topk": ...},  # of its trees
    },
    name="vllm",
    file=(
        _architecture,
        *("num_heads", "num_blocks", "hidden_size", "vocab_size", "has_bias"),
        lambda what: {"truncated_vocab_size": what.config.vocab_size},
    ),
)
LAYOUTS = FASTER_DECODING, VLLM
"""Medusa heads, in the order in which files are tried."""
