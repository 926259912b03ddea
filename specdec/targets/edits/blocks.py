"""Indexers that choose blocks of keys in place of single ones (MiniMax-M3).

A block is of keys in consecutive slots, from slot 0 on, where all rows' texts begin. HF's modules
keep an indexer's keys in a layer of HF's cache, and hand the chosen blocks of each head to
attention functions of other packages. They are given slots in the place of positions here: in a
tree nodes of one depth have several, so that a model of this kind takes chains only.

Source: modeling_minimax_m3_vl.py of transformers 5.24.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

from torch import Tensor, nn
from transformers import AttentionInterface

from specdec.hf.layers import BLOCK_COUNT, set_implementation
from specdec.hf.lookups import ATTENTION_FIELD
from specdec.kernels import AttentionOptions
from specdec.slots.attention import attend, seen_mask
from specdec.slots.cache import SlotCache, Window
from specdec.targets.attention import slot_attention
from specdec.targets.edits.edit import Running
from specdec.targets.queries import note_queries
from specdec.targets.view import wrap_forward
from specdec.types import Queries

BLOCKS = "specdec_blocks"
"""The name under which these layers run."""
BLOCK = 3
"""Keys of a block in the self-test: fewer than the shortest text has."""


def reads_blocks(module: nn.Module) -> bool:
    """Whether the indexer of an attention module chooses blocks."""
    return hasattr(module.indexer, BLOCK_COUNT)


def choose_few_blocks(indexer: nn.Module) -> None:
    """Makes an indexer of a view choose one block more than those that it always takes, of `BLOCK`
    keys each; other modules stay as they are.
    """
    if hasattr(indexer, BLOCK_COUNT):
        indexer.block_size = min(BLOCK, indexer.block_size)
        few = min(indexer.local_blocks + 1, getattr(indexer, BLOCK_COUNT))
        setattr(indexer, BLOCK_COUNT, few)


def edit_blocks(module: nn.Module, running: Running) -> None:
    """Makes an attention module of a private view read blocks of slots.

    Args:
        module: with an indexer that chooses blocks.
        running: of the view.
    """
    module.config = copy.copy(module.config)
    set_implementation(module.config, ATTENTION_FIELD, BLOCKS)
    wrap_forward(module.indexer, partial(_choose, running, module.layer_idx))


def _choose(
    running: Running,
    layer: int,
    forward: Callable,
    hidden: Tensor,
    rotations: tuple[Tensor, Tensor],
    cache: SlotCache,
    positions: Tensor,
) -> Tensor:
    """`[B, heads, N, k]`, the chosen blocks of each query, -1 for none."""
    window = running.window.on(hidden.device)
    # A token to forget chooses what the last slot does.
    slots = window.slots[:, -hidden.shape[1] :].clamp(max=window.num_attended - 1)

    def update(keys: Tensor) -> Tensor:
        return cache.update_indexer(keys[:, 0], layer)[:, None]

    shown = SimpleNamespace(layers={layer: SimpleNamespace(update_index=update)})
    return forward(hidden, rotations, shown, slots.expand(len(hidden), -1))


def block_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    slot_window: Window,
    block_indices: Tensor,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention of a window of queries over the blocks that were chosen for each of them, as HF
    modules call it; see `slot_attention`, which it is where all blocks are chosen.

    Args:
        module: of a layer, with its `layer_idx` and `indexer`.
        query: `[B, Hq, N, D]`.
        key: `[B, Hkv, W, D]`.
        value: `[B, Hkv, W, Dv]`.
        attention_mask: of a prompt that brings its own; else that of the window is taken.
        slot_window: of the forward.
        block_indices: `[B, H, N, k]`, -1 for none; heads of an indexer are for Hq / H queries each.
        scaling: of the scores.
        options: of the module, not used.
    """
    indexer, count, width = module.indexer, query.shape[2], key.shape[2]
    is_own = slot_window.has_own_masks
    if getattr(indexer, BLOCK_COUNT) * indexer.block_size >= width and not is_own:
        own = {"slot_window": slot_window, "scaling": scaling}
        return slot_attention(module, query, key, value, None, **own)
    if module.layer_idx in slot_window.query_layers:
        note_queries(slot_window, Queries(module.layer_idx), query, scaling)
    seen = attention_mask if is_own else seen_mask(slot_window.on(query.device), count)
    places = query.dtype, query.device, None
    mask = indexer.build_block_mask(block_indices, seen, width, *places)
    return attend(slot_window, query, key, value, AttentionOptions(scaling), mask), None


AttentionInterface.register(BLOCKS, block_attention)
