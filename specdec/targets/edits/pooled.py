"""Indexers that score pools of keys in place of single ones (GLM-5-next).

HF's module pools all keys anew in every call, from what it has stored of each token, so that slots
of rejected tokens are overwritten as others are. Three of its methods count tokens from one length
of all rows, or from how many pools are complete in some row: they are replaced here by what the
window shows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from specdec.slots.cache import SlotCache
from specdec.targets.edits.convolutions import with_cache
from specdec.targets.edits.edit import Running
from specdec.targets.view import wrap_forward


def pool_size(module: nn.Module) -> int:
    """Keys of a pool of an indexer; 1 where it scores single ones."""
    return getattr(module, "index_kpool", 1)


def edit_pools(module: nn.Module, running: Running, seen: Callable[..., Tensor]) -> None:
    """Makes the indexer of an attention module pool slots.

    Args:
        module: attention of a private view.
        running: of the view.
        seen: gives the mask `[B, 1, N, W]` of a window's last tokens.
    """
    indexer = module.indexer
    indexer.get_visible_tokens = partial(_visible, running, seen, indexer.get_visible_tokens)
    indexer.get_pooled_states = partial(_pooled, running, indexer, indexer.get_pooled_states)
    wrap_forward(indexer, partial(_over_slots, indexer.layer_idx))


def _visible(running: Running, seen: Callable, own: Callable, *, valid_keys: Tensor, **lengths):
    """`[B, N, W]` bool, what each token sees."""
    window = running.window
    if window is None:
        return own(valid_keys=valid_keys, **lengths)
    return seen(window.on(valid_keys.device), lengths["q_length"])[:, 0]


def _pooled(running: Running, indexer: nn.Module, own: Callable, packed_states: Tensor):
    """Keys of all pools `[B, P, D]`, slots of their tokens `[B, P, k]`, and that they are whole
    `[B, P]`: those that a token does not see, garbage among them, are left out by its mask.
    """
    if running.window is None:
        return own(packed_states=packed_states)
    size, width = pool_size(indexer), indexer.head_dim
    count = packed_states.shape[1] // size
    states = packed_states[:, : count * size].unflatten(1, (count, size))
    keys, gates = states[..., :width], states[..., width : 2 * width]
    weights = (gates.float() + indexer.index_kpool_compress_ape.float()).softmax(dim=2)
    slots = torch.arange(count * size, device=keys.device).view(1, count, size)
    is_whole = torch.ones(len(keys), count, dtype=torch.bool, device=keys.device)
    return (weights.to(keys.dtype) * keys).sum(dim=2), slots.expand(len(keys), -1, -1), is_whole


def _over_slots(layer: int, forward: Callable, *args, **kwargs):
    """The indexer asks HF's layer of a cache for the number of keys."""

    def shown(cache: SlotCache) -> SimpleNamespace:
        keys = cache.keys[layer].transpose(1, 2).narrow(2, 0, cache.window.num_attended)
        own = SimpleNamespace(keys=keys, get_seq_length=cache.get_seq_length)
        return SimpleNamespace(layers={layer: own}, update_indexer=cache.update_indexer)

    return with_cache(shown, forward, args, kwargs)
