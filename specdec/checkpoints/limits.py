"""What layouts have keys for and yet cannot say: (config) -> pairs (condition, what)."""

from __future__ import annotations

from collections.abc import Iterator

from specdec.checkpoints.file_parts import SCALINGS
from specdec.drafters.eagle import EagleConfig
from specdec.drafters.head.features import FeatureHeadConfig
from specdec.drafters.mask_token.correction import (
    DominoConfig,
    MarkovConfig,
    SelectorConfig,
    XPressConfig,
)
from specdec.drafters.mask_token.head import MaskTokenConfig

Pairs = Iterator[tuple[bool, str]]
_SCALING_KEYS = {"rope_type", "rope_theta", "factor"}


def one_bias(config: FeatureHeadConfig) -> Pairs:
    """One key for all of the attention's biases."""
    layer = config.layer
    yield layer.attention_bias != layer.attention_output_bias, "biases of q, k, v alone"


def safeailab(config: EagleConfig) -> Pairs:
    """Of SafeAILab's own code: three features, and few scalings of the rope."""
    count, rope = sum(b != "final" for b in config.feature_layers), config.layer.rope
    yield config.fusion == "attention" and count != 3, "other than three features"
    more, scaling = sorted(rope.keys() - _SCALING_KEYS), rope["rope_type"]
    is_more = scaling in SCALINGS and bool(more)
    yield is_more, f"{', '.join(more)} of a {scaling} rope_scaling"


def language_model(config: MaskTokenConfig) -> Pairs:
    """Of HF's Llama, Qwen2 and Qwen3."""
    layer = config.layer
    bias, output_bias = layer.attention_bias, layer.attention_output_bias
    is_qwen2 = bias and not output_bias
    yield is_qwen2 and layer.has_qk_norm, "biases of q, k, v alone beside has_qk_norm"
    yield output_bias and not bias, "a bias of o_proj alone"
    is_other = config.max_positions != layer.max_position_embeddings
    yield is_other, "max_positions other than max_position_embeddings"
    yield config.draft_vocab_size < config.vocab_size, "fewer ids than the target has"


def markov_alone(config: MaskTokenConfig) -> Pairs:
    """P-EAGLE's correction."""
    is_other = type(config.correction) not in (type(None), MarkovConfig)
    yield is_other, "a correction that is no MarkovConfig"


def block(config: MaskTokenConfig) -> Pairs:
    """Of all block heads."""
    yield config.block_size is None, "a head without block_size"
    # vLLM's DFlash norms queries and keys, whether or not the file has weights for that.
    yield not config.layer.has_qk_norm, "layers without norms of queries and keys"
    is_selector = type(config.correction) is SelectorConfig
    has_convolution = config.layer.convolution is not None
    yield is_selector != has_convolution, "a selector or convolutions without the other"


def block_of_speculators(config: MaskTokenConfig) -> Pairs:
    """Its corrections, and windows as vLLM runs them."""
    kind = type(config.correction)
    yield kind is DominoConfig, kind.__name__
    has_confidence = config.confidence is not None
    yield has_confidence and kind is not MarkovConfig, "confidence without a Markov head"
    # vLLM then makes every layer causal (transformers_utils/configs/speculators/algos.py).
    is_mixed = len(set(config.layer.windows)) == 2 and config.layer.is_window_causal
    yield is_mixed, "causal windows beside layers that see the whole block"


def block_of_z_lab(config: MaskTokenConfig) -> Pairs:
    """Its corrections, and SpecForge's, by the token that rows predict."""
    kind, is_next = type(config.correction), config.alignment == "next-token"
    is_known = kind in (MarkovConfig, DominoConfig)
    yield is_next and not is_known, "next-token rows without a Markov head or Domino's GRU"
    is_of_next = kind in (MarkovConfig, XPressConfig)
    yield not is_next and is_of_next, f"{kind.__name__} of same-position rows"
    has_confidence = config.confidence is not None
    yield not is_next and has_confidence, f"confidence={config.confidence}"
    yield config.target_hidden_size != config.hidden_size, "another width than the target's"
