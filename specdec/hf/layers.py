"""What the layers of a model and their configurations call themselves and their parts."""

from __future__ import annotations

from itertools import chain
from typing import NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

EXPERTS_FIELD = "_experts_implementation_internal"
"""Field of a configuration with the implementation that its experts run."""


def is_stateful(model: PreTrainedModel) -> bool:
    """Whether HF says of a model that its layers keep a recurrent state. Without the name, kinds of
    layers say so, and what stays unknown does not pass the self-test.
    """
    return getattr(model, "_is_stateful", False)


OWN_ATTENTION, SPLIT_HEADS, SPARSE = "_attn", "_split_heads", "_gaussian_topk"
"""Methods that are replaced in views of GPT-Neo, of Falcon and of Gemma 3n. Under other names the
first and the last are not recognised, and such models do not pass the self-test.
"""


def set_implementation(config: object, field: str, implementation: str) -> None:
    """Changes such a field, or `ATTENTION_FIELD`, without HF's checks; configurations without it
    stay as they are.
    """
    if field in vars(config):
        vars(config)[field] = implementation


IGNORED_ATTRIBUTES = {"training", "rope_deltas"}
"""Attributes of modules that decide nothing: views are in evaluation mode and are given positions.
"""

ROTATE = "apply_rotary_pos_emb"
"""In every modelling file, the function that rotates queries and keys."""

QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
"""Linear layers that read one input."""

JOINED_GATE_UP, ACTIVATIONS = "gate_up_proj", ("act_fn", "activation_fn")
"""A layer that is both of the latter, and what a gated MLP calls its activation."""

EXPERTS = "is_transposed", "has_gate"
"""Attributes of the experts whose forward HF chooses by the configuration."""

INDEXED_LAYERS = {"indexed_attention", "deepseek_sparse_attention", "minimax_m3_sparse"}
"""What layers are called that read the keys which an indexer chooses; the second in 5.17."""
INDEX_COUNT, BLOCK_COUNT = "index_topk", "topk_blocks"
"""An indexer's attribute: so many keys it chooses, or blocks of them."""
INDEX_KEYS = "indexer_keys", "idx_keys"
"""What a layer of HF's cache calls the keys of its indexer."""


def reads_chosen_keys(module: nn.Module) -> bool:
    """Whether an attention module reads the keys which an indexer of its own chooses, or one of an
    earlier layer.
    """
    if hasattr(module, COMPRESS_RATE):  # whose indexer chooses entries
        return False
    indexer = getattr(module, "indexer", None)
    has_own = any(hasattr(indexer, name) for name in (INDEX_COUNT, BLOCK_COUNT))
    return has_own or (hasattr(module, "indexer") and getattr(module, "skip_topk", False))


COMPRESS_RATE = "compress_rate"
"""A compressor's attribute: of so many tokens it makes an entry."""


def has_compressor(module: nn.Module) -> bool:
    """Whether an attention module reads entries of several tokens, beside the nearest tokens."""
    return hasattr(getattr(module, "compressor", None), COMPRESS_RATE)


WINDOWED_LAYERS = {
    **{"sliding_attention": "sliding window", "chunked_attention": "chunks"},
    "compressed_sparse_attention": "sliding window beside its entries",
    "heavily_compressed_attention": "sliding window beside its entries",
}
"""Kinds of layers that must be seen to have a window, and what the window is called."""

UNDERSTOOD_LAYERS = {
    *("full_attention", "linear_attention", "conv", "hybrid", "mlp", "moe", "sparse", "dense"),
    *(*INDEXED_LAYERS, *WINDOWED_LAYERS),
}
"""Kinds of `config.layer_types` that run over slots."""


def decoder_layers(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """The module that runs the decoder layers and the final norm, and its list of layers.

    It need not be `base_model`: the LM head of OPT calls `model.decoder` itself. HRM's two stacks
    are one list.

    Raises:
        ValueError: the model has no list of as many layers as its configuration says.
    """
    config = model.config.get_text_config()
    # Towers of images may have as many layers as the language model beside them.
    base = model.base_model
    backbone = getattr(base, "language_model", None) or getattr(base, "text_model", None) or base
    # In LongCat-Flash layers have two attentions each, and the first number is that of these.
    for count in (config.num_hidden_layers, getattr(config, "num_layers", None)):
        for module in backbone.modules():
            for child in module.children():
                if isinstance(child, nn.ModuleList) and len(child) == count:
                    return module, child
    if hasattr(config, "num_layers_per_stack"):  # of HRM's, run in turns
        stacks = [child.layers for child in backbone.children() if hasattr(child, "layers")]
        return backbone, nn.ModuleList(chain(*stacks))
    raise ValueError(
        f"{type(model).__name__} has no list of {config.num_hidden_layers} decoder layers to take "
        "features from"
    )


class Streams(NamedTuple):
    """Several hidden states of a token that layers hand on, stacked before the rows (Gemma 3n).

    Args:
        count: how many there are.
        read: index of the one that attention reads.
    """

    count: int
    read: int

    @classmethod
    def of(cls, model: nn.Module) -> Streams | None:
        """`None` for a model whose layers hand on one hidden state `[B, N, H]`."""
        config = model.config.get_text_config()
        count = getattr(config, "altup_num_inputs", None)
        return None if count is None else cls(count, config.altup_active_idx)

    def rows_first(self, states: Tensor) -> Tensor:
        """`[B, N, count H]` of what a layer gets or returns."""
        return states.permute(1, 2, 0, 3).flatten(2)

    def as_layers_have_them(self, states: Tensor) -> Tensor:
        """`[count, B, N, H]`: `rows_first` taken back."""
        return states.unflatten(2, (self.count, -1)).permute(2, 0, 1, 3)

    def feature(self, states: Tensor) -> Tensor:
        """`[B, N, H]`, the hidden state by its index: that which attention reads."""
        return states[self.read]
