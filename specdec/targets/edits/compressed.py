"""Layers that read one entry for several tokens, beside the nearest tokens (DeepSeek-V4).

Entry j of a compressor of rate m is made of what it reads of tokens j m to j m + m - 1, and of the
m tokens before them where it overlaps. A query at position p sees the entries whose last token is
at p or before, or those among them that an indexer chooses.

HF's cache has the entries of the text so far and a buffer of tokens that have not made one yet, so
nothing can be taken back. Here both are functions of slots: what a compressor reads of a token is
in the token's slot, and an entry in the slot of its last token. A window makes those entries anew
whose last tokens it has; all others are made of tokens before it. Entries of rejected tokens
are therefore hidden and overwritten as keys are, and rows have any lengths.

Source: transformers, `models/deepseek_v4/modeling_deepseek_v4.py`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from specdec.hf.layers import ROTATE, has_compressor, set_implementation
from specdec.hf.lookups import ATTENTION_FIELD
from specdec.slots.attention import sees
from specdec.slots.cache import SlotCache, Window
from specdec.slots.layout import Compressor, KeyValueShape
from specdec.targets.attention import ATTENTION
from specdec.targets.edits.convolutions import with_cache
from specdec.targets.edits.edit import Running
from specdec.targets.edits.indexed import FEW, choose_few
from specdec.targets.view import wrap_forward

__all__ = ["choose_few", "edit", "least_tokens", "stored"]
"""Of a family; an indexer of entries chooses few of them as one of keys does."""

COMPRESSED = "specdec_compressed"
"""The name under which layers with entries run."""


def edit(view: PreTrainedModel, attention: str | None) -> None:
    """Makes layers with compressors keep tokens and entries in slots.

    Args:
        view: of `private_view`.
        attention: of its `Route`; with another name than `ATTENTION` these layers run as HF has
            them, over HF's own cache.
    """
    for module in view.modules() if attention == ATTENTION else ():
        if not has_compressor(module):
            continue
        module.config = copy.copy(module.config)
        set_implementation(module.config, ATTENTION_FIELD, COMPRESSED)
        wrap_forward(module.compressor, partial(_with_bias, module.compressor.compress_rate))
        wrap_forward(module, partial(_over_slots, view.running, module))


def _over_slots(running: Running, module: nn.Module, forward: Callable, *args, **kwargs):
    """A layer's attention over what is near in slots, and over entries."""
    hidden = args[0] if args else kwargs["hidden_states"]
    window = running.window.on(hidden.device)
    if window.visible is not None or window.positions is not None:
        raise ValueError(
            f"{type(module).__name__} reads chains only: an entry is made of consecutive tokens, "
            "and nodes of a tree are none; draft chains (tree=None)"
        )
    if "position_offset" in window.row_inputs:
        raise ValueError(
            f"{type(module).__name__} counts entries from the first token of a text, which stands "
            "at position 0, and cannot read prompts whose positions are not those of their tokens: "
            "pass input_ids of text"
        )
    slots, mask = _near(window, hidden, module.sliding_window)
    kwargs["attention_mask"] = mask
    return with_cache(lambda cache: LayerSlots(cache, module, slots), forward, args, kwargs)


def _near(window: Window, hidden: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Slots `[B, L]` that hold all of the last `size` tokens before each of a window's, and the
    additive mask `[B, 1, N, L]` of what each sees there; made once for all layers.
    """
    rows, count, _ = hidden.shape
    key = count, hidden.dtype, size, "near"
    if key not in window.masks:
        queries = window.slots.clamp(max=window.num_attended - 1).expand(rows, -1)
        order = torch.arange(1 - size, count, device=hidden.device)
        slots = queries.amin(dim=1, keepdim=True) + order
        seen = sees(queries[..., None], slots[:, None], size) & (slots >= 0)[:, None]
        mask = torch.full(seen.shape, -torch.inf, dtype=hidden.dtype, device=hidden.device)
        window.masks[key] = mask.masked_fill_(seen, 0)[:, None]
        window.masks[*key, "slots"] = slots.clamp(0, window.num_attended - 1)
    return window.masks[*key, "slots"], window.masks[key]


def _with_bias(rate: int, forward: Callable, *args, **kwargs) -> tuple[Tensor, Tensor]:
    """A compressor's entries and what each query sees of them, which HF leaves out for one token:
    in HF's cache a single token sees all entries that there are.
    """
    entries, bias = forward(*args, **kwargs)
    if bias is None:
        positions = args[2] if len(args) > 2 else kwargs["position_ids"]  # [B, N]
        order = torch.arange(entries.shape[2], device=entries.device)
        hidden = order >= ((positions + 1) // rate)[..., None]
        bias = torch.zeros(hidden.shape, dtype=entries.dtype, device=entries.device)
        bias = bias.masked_fill_(hidden, -torch.inf)[:, None]
    return entries, bias


class LayerSlots:
    """What an attention module with a compressor takes for HF's cache, and the compressor for this
    layer of it.

    Args:
        cache: with the window of the forward.
        module: the attention module.
        near: `[B, L]` slots of the tokens that queries of the window see by themselves.
    """

    def __init__(self, cache: SlotCache, module: nn.Module, near: Tensor):
        self._cache, self._module, self._near = cache, module, near
        self.layers = {module.layer_idx: self}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, **options: object):
        """HF's entry: writes keys `[B, 1, N, D]`, which are the values, too; returns those that are
        near, `[B, 1, L, D]`, as both.
        """
        near = _rows_of(self._cache.write(layer_idx, keys[:, 0]), self._near)[:, None]
        return near, near

    def store_compression_weights(
        self, name: str, kv: Tensor, gate: Tensor
    ) -> tuple[Tensor, Tensor, int]:
        """HF's entry: writes what a compressor reads of the window `[B, N, F]`, and the entries
        that end in it. Returns no tokens that HF would have to make entries of.
        """
        module, place = self._place(name)
        read = self._cache.write(place, torch.cat([kv, gate], dim=-1))
        slots = self._cache.window.on(kv.device).slots.expand(len(kv), -1)
        entries, ends = entries_of(module, read, slots, self._cache.padding_slot)
        self._cache.write(place._replace(is_entries=True), entries, ends)
        return kv[:, :0], gate[:, :0], 0

    def update_compressor_states(self, name: str, compressed: Tensor) -> Tensor:
        """HF's entry: all entries of the slots in use, `[B, P, D]`, garbage among them, which
        queries do not see.
        """
        place = self._place(name)[1]._replace(is_entries=True)
        entries = self._cache.keys[place][:, : self._cache.window.num_attended, 0]
        return entries[:, place.rate - 1 :: place.rate]

    def _place(self, name: str) -> tuple[nn.Module, Compressor]:
        """The compressor that HF calls so, and its place in the cache."""
        module = self._module.compressor
        module = module if name == "compressor" else getattr(module, name)
        return module, Compressor(self._module.layer_idx, name, module.compress_rate)


def entries_of(
    module: nn.Module, read: Tensor, slots: Tensor, padding_slot: int
) -> tuple[Tensor, Tensor]:
    """The entries whose last tokens are in a window, as HF's compressor makes them.

    Args:
        module: the compressor, or its indexer.
        read: `[B, W, 2 F]`, what it reads of the token in each slot: values and gates. F is the
            width D of an entry, or 2 D: then entries overlap.
        slots: `[B, N]` int64, consecutive ones, and the padding slot after them.
        padding_slot: of tokens to forget.

    Returns:
        Entries `[B, M, D]`, M = ceil(N / rate), and the slots of their last tokens `[B, M]`; the
        padding slot for an entry that does not end in the window.
    """
    rate, width, device = module.compress_rate, module.head_dim, slots.device
    num_parts = read.shape[2] // (2 * width)  # 2 where entries overlap
    order = torch.arange(-(-slots.shape[1] // rate), device=device)
    begins = (slots.amin(dim=1, keepdim=True) // rate + order) * rate  # [B, M]
    ends = begins + rate - 1
    last = slots.where(slots < padding_slot, -1).amax(dim=1, keepdim=True)
    ends = torch.where(ends <= last, ends, padding_slot)

    order = torch.arange((1 - num_parts) * rate, rate, device=device)
    tokens = begins[..., None] + order  # [B, M, parts * rate]
    found = _rows_of(read, tokens.flatten(1).clamp(0, read.shape[1] - 1))
    kv, gate = found.unflatten(1, tokens.shape[1:]).chunk(2, dim=-1)
    gate = gate + module.position_bias.repeat(num_parts, 1)
    if num_parts == 2:  # the first half of the channels is for the next entry, the other for this
        kv, gate = (
            torch.cat([x[:, :, :rate, :width], x[:, :, rate:, width:]], dim=2) for x in (kv, gate)
        )
        gate = gate.masked_fill((tokens < 0)[..., None], -torch.inf)
        kv = kv.masked_fill((tokens < 0)[..., None], 0)
    weights = gate.softmax(dim=2, dtype=torch.float32).to(kv.dtype)
    entries = module.kv_norm((kv * weights).sum(dim=2))
    rotate = getattr(sys.modules[type(module).__module__], ROTATE)
    turns = module.rotary_emb(entries, position_ids=begins, layer_type=module.rope_layer_type)
    return rotate(entries[:, None], *turns)[:, 0], ends


def _rows_of(table: Tensor, slots: Tensor) -> Tensor:
    """`[B, L, F]`, what a table `[B, W, F]` has at slots `[B, L]`."""
    return table.gather(1, slots[..., None].expand(-1, -1, table.shape[2]))


def compressed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    slot_window: Window,
    scaling: float,
    s_aux: Tensor,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention of a window over what is near and over entries, side by side, as HF modules call
    it; see `slot_attention`. All heads of queries read one head of keys, which is not copied.

    Args:
        module: of a layer.
        query: `[B, Hq, N, D]`.
        key: `[B, 1, L + P, D]`.
        value: the same.
        attention_mask: additive, `[B, 1, N, L + P]`.
        slot_window: of the forward, not used.
        scaling: of the scores.
        s_aux: sinks.
        options: of the module, not used.
    """
    rows, *sizes, _ = query.shape  # heads, and queries
    scores = query.flatten(1, 2) @ key[:, 0].transpose(1, 2) * scaling
    scores = scores.unflatten(1, sizes) + attention_mask
    sinks = s_aux.to(scores.dtype).view(1, -1, 1, 1).expand(rows, *sizes, 1)
    weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1, dtype=torch.float32)
    weights = weights[..., :-1].to(value.dtype).flatten(1, 2)
    return (weights @ value[:, 0]).unflatten(1, sizes).transpose(1, 2), None


def stored(
    view: PreTrainedModel, layers: Sequence[object]
) -> dict[int | Compressor, KeyValueShape]:
    """What layers with compressors store of a token, seen in the layers of HF's own cache: keys
    that are the values, too, what each compressor reads, and an entry.
    """
    shapes: dict[int | Compressor, KeyValueShape] = {}
    for module in filter(has_compressor, view.modules()):
        index, rate = module.layer_idx, module.compressor.compress_rate
        layer = layers[index]
        keys = layer.keys
        shapes[index] = KeyValueShape(1, keys.shape[3], 0, keys.dtype, keys.device)
        for name, kv in layer.buffer_kv.items():
            gate, entry = layer.buffer_gate[name], layer.compressed_kv[name]
            place, dtype = Compressor(index, name, rate), torch.promote_types(kv.dtype, gate.dtype)
            width, of_entries = kv.shape[2] + gate.shape[2], place._replace(is_entries=True)
            shapes[place] = KeyValueShape(1, width, 0, dtype, kv.device)
            shapes[of_entries] = KeyValueShape(1, entry.shape[2], 0, entry.dtype, kv.device)
    return shapes


def least_tokens(model: nn.Module, route: Any) -> int:
    """Entries end in each half of a text, more than indexers choose."""
    counts = (one.rate * (FEW if one.name == "indexer" else 1) for one in route.compressors)
    return 2 * max(counts, default=0)


AttentionInterface.register(COMPRESSED, compressed_attention)
