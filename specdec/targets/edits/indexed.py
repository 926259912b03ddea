"""Layers that read only the keys which an indexer chooses (DeepSeek-V3.2, GLM 5 and others).

An indexer scores all keys that a token sees, by small keys of its own, and chooses `index_topk` of
them; some layers read what an earlier layer has chosen. The keys of indexers are in slots as all
others are (`SlotCache.update_indexer`). HF's modules hand the chosen slots to attention functions
of other packages, as `indices`. What they need for that is a mask of what each token sees, and
they get it here from the window.

Source: DeepSeek-AI, "DeepSeek-V3.2", arXiv:2512.02556, section 2.1.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from specdec.hf.layers import (
    BLOCK_COUNT,
    INDEX_COUNT,
    INDEX_KEYS,
    reads_chosen_keys,
    set_implementation,
)
from specdec.hf.lookups import ATTENTION_FIELD
from specdec.kernels import AttentionOptions
from specdec.slots.attention import attend, seen_mask
from specdec.slots.cache import Window
from specdec.slots.layout import Indexer, KeyValueShape
from specdec.targets.attention import ATTENTION, slot_attention
from specdec.targets.edits.blocks import BLOCK, choose_few_blocks, edit_blocks, reads_blocks
from specdec.targets.edits.edit import Running
from specdec.targets.edits.pooled import edit_pools, pool_size
from specdec.targets.queries import note_queries
from specdec.targets.trial.probe import HFMask
from specdec.targets.view import wrap_forward
from specdec.types import Queries

INDEXED = "specdec_indexed"
"""The name under which layers with chosen keys run."""
MASKING = "build_attention_mask_from_topk"
"""A method of attention modules that mask by themselves what was not chosen."""
FEW = 2
"""Keys that are chosen in the self-test: fewer than its shortest text has."""


def edit(view: PreTrainedModel, attention: str | None) -> None:
    """Makes layers that read chosen keys get a window's masks, and attend by `indexed_attention`.

    Args:
        view: of `private_view`.
        attention: of its `Route`; with `None` these layers run as HF has them, by a dense mask.
    """
    for module in view.modules() if attention is not None else ():
        if not reads_chosen_keys(module):
            continue
        if attention == ATTENTION and reads_blocks(module):
            edit_blocks(module, view.running)
            continue
        is_pooled = module.indexer is not None and pool_size(module.indexer) > 1
        if attention == ATTENTION and (is_pooled or hasattr(module, MASKING)):
            module.config = copy.copy(module.config)
            set_implementation(module.config, ATTENTION_FIELD, INDEXED)
            if is_pooled:
                edit_pools(module, view.running, seen_mask)
        elif attention == ATTENTION:
            module.config = copy.copy(module.config)
            set_implementation(module.config, ATTENTION_FIELD, INDEXED)
            wrap_forward(module, partial(_with_mask, view.running))
        elif hasattr(module, MASKING):
            setattr(module, MASKING, _no_mask)
        elif module.indexer is not None:
            wrap_forward(module.indexer, _probed)


def _with_mask(running: Running, forward: Callable, *args, **kwargs):
    """A layer's attention with what the tokens of a window see, `[B, 1, N, W]` bool."""
    window = running.window
    if not window.has_own_masks:
        hidden = args[0] if args else kwargs["hidden_states"]
        kwargs["attention_mask"] = seen_mask(window.on(hidden.device), hidden.shape[1])
    return forward(*args, **kwargs)


def _no_mask(**chosen: object) -> None:
    """What was chosen is no description of a layer."""


def _probed(forward: Callable, *args, **kwargs):
    """An indexer that is handed a description of its mask, over a text from its beginning."""
    hidden = args[0] if args else kwargs["hidden_states"]
    count = hidden.shape[1]

    def shown(value):
        if not isinstance(value, HFMask):
            return value
        return torch.ones(1, count, count, dtype=torch.bool, device=hidden.device).tril()

    return forward(*map(shown, args), **{name: shown(value) for name, value in kwargs.items()})


def indexed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    slot_window: Window,
    indices: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Attention of a window of queries over the slots that were chosen for each of them, as HF
    modules call it; see `slot_attention`, which it is where all slots are chosen.

    Args:
        module: of a layer, with its `layer_idx`.
        query: `[B, Hq, N, D]`.
        key: `[B, Hkv, W, D]`.
        value: `[B, Hkv, W, Dv]`.
        attention_mask: `[B, 1, N, W]`, of booleans, or additive: of what each query sees, or of
            what was chosen for it.
        slot_window: of the forward.
        indices: `[B, N, k]`, chosen slots of each query; those that it does not see do not count.
            `None` where the mask is of what was chosen.
        scaling: of the scores.
        softcap: of the scores.
        s_aux: sinks.
        others: of the module, not used.
    """
    if indices is not None and indices.shape[-1] >= key.shape[2] and not slot_window.has_own_masks:
        own = {"scaling": scaling, "softcap": softcap, "s_aux": s_aux, **others}
        return slot_attention(module, query, key, value, None, slot_window=slot_window, **own)
    if module.layer_idx in slot_window.query_layers:
        note_queries(slot_window, Queries(module.layer_idx), query, scaling)
    sees = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
    shape = len(query), 1, query.shape[2], key.shape[2]
    if indices is not None:
        sees = sees & sees.new_zeros(shape).scatter_(-1, indices[:, None].long(), True)
    mask = torch.zeros(shape, dtype=query.dtype, device=query.device)
    mask.masked_fill_(~sees, -torch.inf)
    options = AttentionOptions(scaling, softcap, s_aux)
    function = vars(module).get("attend", attend)  # what an edit has put in its place
    return function(slot_window, query, key, value, options, mask), None


def stored(view: PreTrainedModel, layers: Sequence[object]) -> dict[Indexer, KeyValueShape]:
    """What indexers store of a token, seen in the layers of HF's own cache."""
    found = (
        (i, getattr(layer, name, None)) for i, layer in enumerate(layers) for name in INDEX_KEYS
    )
    return {
        Indexer(i): KeyValueShape(1, keys.shape[-1], 0, keys.dtype, keys.device)
        for i, keys in found
        if keys is not None
    }


def choose_few(view: nn.Module) -> bool:
    """Makes indexers of a private view choose `FEW` keys or pools; whether there are any."""
    counts, has_any = (INDEX_COUNT, BLOCK_COUNT), False
    for module in view.modules():
        has_any = has_any or any(hasattr(module, name) for name in counts)
        choose_few_blocks(module)
        if hasattr(module, INDEX_COUNT):
            few = min(FEW * pool_size(module), getattr(module, INDEX_COUNT))
            setattr(module, INDEX_COUNT, few)
    return has_any


def least_tokens(model: nn.Module, route: object) -> int:
    """More than are chosen, of blocks and pools, too."""
    return (FEW + 2) * max(BLOCK, *map(pool_size, model.modules()))


AttentionInterface.register(INDEXED, indexed_attention)
