"""What a layout could say and an engine would run otherwise: (config) -> pairs (condition, what).

What a layout has no word for is not listed: it does not read back equal, and is refused by itself.
At the end: what only some readers of a layout misread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from specdec.checkpoints.file_parts import SCALINGS
from specdec.drafters.eagle import EagleConfig
from specdec.drafters.mask_token.correction import MarkovConfig
from specdec.drafters.mask_token.head import MaskTokenConfig

Pairs = Iterator[tuple[bool, str]]


def only(**values: Any) -> Callable[[Any], Pairs]:
    """Fields of a head, or of its layers, whose other values an engine does not run."""

    def pairs(config: Any) -> Pairs:
        said = vars(config.layer) | vars(config)
        yield from ((said[n] != value, f"{n}={said[n]}") for n, value in values.items())

    return pairs


def corrections(*kinds: type) -> Callable[[MaskTokenConfig], Pairs]:
    """Classes of `correction` that an engine runs."""

    def pairs(config: MaskTokenConfig) -> Pairs:
        yield type(config.correction) not in kinds, f"correction={config.correction}"

    return pairs


def has_mask_id(config: MaskTokenConfig) -> Pairs:
    """Engines embed an id."""
    yield config.mask_token_id is None, "mask_token_id=None, a mask without an id"


def three_features(config: EagleConfig) -> Pairs:
    """SafeAILab's own code joins so many."""
    layers = config.feature_layers
    is_other = config.fusion == "attention" and len(layers) != 3
    yield is_other, f"feature_layers={layers}, other than three"


def norms_of_queries(config: MaskTokenConfig) -> Pairs:
    """vLLM's DFlash norms queries and keys, whether or not the file has weights for that."""
    yield not config.layer.has_qk_norm, "has_qk_norm=False"


def block_of_speculators(config: MaskTokenConfig) -> Pairs:
    """Confidence heads beside Markov heads, and windows as vLLM runs them."""
    has_markov = type(config.correction) is MarkovConfig
    is_alone = config.confidence is not None and not has_markov
    yield is_alone, f"confidence={config.confidence} without a Markov head"
    # vLLM then makes every layer causal (transformers_utils/configs/speculators/algos.py).
    is_mixed = len(set(config.layer.windows)) == 2 and config.layer.is_window_causal
    yield is_mixed, "causal windows beside layers that see the whole block"


def notes_of_safeailab(config: EagleConfig, target_layers: int | None) -> Iterator[str]:
    """What SafeAILab's own code does not read of its layout, while vLLM and SGLang do."""
    layer, rope = config.layer, config.layer.rope
    kind, base = rope["rope_type"], rope["rope_theta"]
    if kind not in ("default", *SCALINGS):
        yield f"SafeAILab's own code cannot load rope_scaling of type {kind!r}"
    if kind in SCALINGS and base != 10000:
        yield f"SafeAILab's own code takes a rope base of 10000 with scaling, not {base:g}"
    if layer.head_dim * layer.num_heads != layer.hidden_size:
        yield f"SafeAILab's older code takes hidden_size / heads for head_dim, not {layer.head_dim}"
    if not config.sees_pictures:
        yield "vLLM, SGLang and SafeAILab's own code show the head tokens of pictures all the same"
    n, layers = target_layers, list(config.feature_layers)
    if config.fusion == "attention" and n is not None and layers != [2, n // 2, n - 3]:
        yield f"SafeAILab's own code always reads hidden states {[2, n // 2, n - 3]}, not {layers}"
