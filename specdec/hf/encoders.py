"""What HF's encoder-decoders call their parts: the cross attention of a decoder layer and its
projections, and what a decoder counts positions by.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel

from specdec.hf.reached import ReachedError, reached_by

NUM_RETURNED = {"encoder_attn": 2, "EncDecAttention": 3}
"""The cross attention of BART and its kin, Whisper among them, and of T5 and its kin; and how many
values it returns: its output, and others that nobody reads here.
"""
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj"), ("q", "k", "v", "o")
NUM_HEADS = "num_heads", "n_heads"
POSITIONS, BIAS = "embed_positions", "compute_bias"
"""A decoder's table of positions, and T5's method that makes biases by relative positions."""


class CrossAttention(NamedTuple):
    """The cross attention of one decoder layer.

    Args:
        module: of HF's.
        num_heads: of its queries, keys and values.
        num_returned: values that its forward returns.
        query, key, value, out: projections, `[..., H]` each.
    """

    module: nn.Module
    num_heads: int
    num_returned: int
    query: Callable[[Tensor], Tensor]
    key: Callable[[Tensor], Tensor]
    value: Callable[[Tensor], Tensor]
    out: Callable[[Tensor], Tensor]


def cross_attentions(decoder: nn.Module) -> list[CrossAttention]:
    """Those of a decoder's layers, in order; empty where they have other names."""
    found = []
    for path, module in decoder.named_modules():
        name = path.rpartition(".")[2]
        names = next((own for own in PROJECTIONS if hasattr(module, own[0])), None)
        heads = next((getattr(module, n) for n in NUM_HEADS if hasattr(module, n)), None)
        if name in NUM_RETURNED and names and heads and hasattr(module, "scaling"):
            parts = (getattr(module, own) for own in names)
            found.append(CrossAttention(module, heads, NUM_RETURNED[name], *parts))
    return found


def position_tables(decoder: nn.Module) -> list[tuple[nn.Module, str, int]]:
    """What a decoder looks positions up in: modules, the name of the table `[n, H]` in each, and
    the row of position 0.
    """
    modules = [m for path, m in decoder.named_modules() if path.rpartition(".")[2] == POSITIONS]
    found = [(m, "weight", getattr(m, "offset", 0)) for m in modules if hasattr(m, "weight")]
    made = [m for m in modules if hasattr(m, "weights")]  # M2M-100 and NLLB, from ids
    return [*found, *((module, "weights", module.padding_idx + 1) for module in made)]


def hands_biases_on(model: nn.Module) -> bool:
    """Whether a layer makes biases for others, as T5's first one does."""
    return any(getattr(m, "has_relative_attention_bias", False) for m in model.modules())


def relative_bias(attention: nn.Module, distances: Tensor) -> Tensor:
    """`[B, heads, N, W]`: T5's biases for keys at distances `[B, N, W]` from queries, which are
    below 0 for keys before them.
    """
    buckets = attention._relative_position_bucket(
        distances,
        bidirectional=False,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    return attention.relative_attention_bias(buckets).permute(0, 3, 1, 2)


def is_composite(model: PreTrainedModel) -> bool:
    """Whether a model is made of two, and hands to its decoder what begins with `decoder_`."""
    return hasattr(model.config, "decoder")


def prepared(
    model: PreTrainedModel, given: dict[str, Any], *, is_whole: bool = True
) -> tuple[Tensor, dict[str, Any]]:
    """What a model's own `generate` makes of inputs before it decodes: the ids that its decoder
    begins with, and what every step reads beside them. The encoder runs once, hooks and all.
    Whisper's own asks for languages and windows besides; without `is_whole` nobody does.
    """

    def reached(model, input_ids, logits_processor, stopping_criteria, generation_config, **own):
        raise ReachedError(input_ids, own)

    one = {"num_beams": 1, "num_return_sequences": 1, "max_new_tokens": 1, "use_cache": False}
    generate = type(model).generate if is_whole else GenerationMixin.generate
    return reached_by(generate, model, custom_generate=reached, **one, **given)
