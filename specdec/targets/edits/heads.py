"""Falcon's queries, keys and values, which its modelling file cuts from one product.

It picks the shared key and value head by a list of Python's, which torch copies to the device: the
host waits, and steps could not be captured. In a view they are cut by sizes.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.hf.layers import SPLIT_HEADS


def edit(view: PreTrainedModel, attention: str | None = None) -> None:
    """Makes Falcon's attention in a private view cut heads without waiting for the device. A method
    that somebody has replaced stays.
    """
    for module in view.modules():
        if hasattr(module, "new_decoder_architecture") and SPLIT_HEADS not in vars(module):
            setattr(module, SPLIT_HEADS, partial(_split_heads, module))


def _split_heads(module: nn.Module, product: Tensor) -> tuple[Tensor, ...]:
    """`[B, N, heads, width]` of queries, keys and values. The product has groups of several query
    heads, one key head and one value head; the new architecture repeats these for each query.
    """
    groups = module.num_kv_heads
    sizes = [module.num_heads // groups, 1, 1]
    parts = product.unflatten(-1, (groups, sum(sizes), module.head_dim)).split(sizes, dim=-2)
    if module.new_decoder_architecture:
        parts = [part.expand_as(parts[0]) for part in parts]
    return tuple(part.flatten(2, 3) for part in parts)
