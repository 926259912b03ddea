"""The attention functions that HF models call while they run over a `SlotCache`.

HF looks a function up by name (`transformers.AttentionInterface`), and builds no mask for a name
that has no mask function; the window of the current forward arrives as the keyword `slot_window`.

Which layer has which sliding window is learned once, when a model is wrapped: under the name
`PROBE` HF does build masks, and what it hands out is the description of each (`HFMask`).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from specdec.kernels import AttentionOptions, attends_raggedly, ragged_attention
from specdec.target.cache import Window
from specdec.target.masks import causal_within, slot_mask

ATTENTION = "specdec_slots"
"""The name under which models run."""
PROBE = "specdec_probe"
"""The name under which masks are probed."""


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    slot_window: Window | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of a window of queries over the slots of its rows: on a GPU, where the queries are
    few, by a kernel that reads each row's filled slots; else with a dense mask.

    Args:
        module: the HF attention module that calls; its `layer_idx` says which layer it is.
        query: `[B, Hq, N, D]`.
        key: `[B, Hkv, S', D]`, the cache's slots.
        value: `[B, Hkv, S', Dv]`.
        attention_mask: must be `None`: the model builds no mask for this function.
        slot_window: the window of the current forward, with the sliding window of each layer.
        scaling: factor of the scores; `None` is `D ** -0.5`.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2).
        s_aux: `[Hq]` attention sinks, one extra score per head that takes weight and gives no value
            (GPT-OSS).

    Returns:
        `[B, N, Hq, Dv]`, and `None` where HF expects attention weights.

    Raises:
        ValueError: the model brings a mask of its own, or drops the window on the way.
    """
    if slot_window is None or attention_mask is not None:
        _refuse(module, attention_mask)
    if attends_raggedly(query, key):
        window = slot_window.layer_windows.get(module.layer_idx)
        options = AttentionOptions(scaling, softcap, s_aux, window)
        slots = slot_window.slots_on(query.device).expand(len(query), -1)
        return ragged_attention(query, key, value, slots, options), None
    mask = window_mask(slot_window, module.layer_idx, query)
    if softcap is None and s_aux is None:
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped
        )
        return out.transpose(1, 2), None

    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    scores = (
        query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    )
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask  # [B, Hq, N, S']
    if s_aux is not None:
        sinks = s_aux.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    wide = torch.promote_types(torch.float32, query.dtype)
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(query.dtype)
    return (weights[..., : value.shape[2]] @ value).transpose(1, 2), None


def window_mask(window: Window, layer: int | None, query: Tensor) -> Tensor:
    """The additive mask `[B, 1, N, num_attended]` of a layer in one forward, made once for all
    layers that share it.

    Args:
        window: of the forward.
        layer: index of the layer; `None` for full attention.
        query: whose dtype and device the mask has.
    """
    sliding_window = window.layer_windows.get(layer)
    key = (sliding_window, query.dtype, query.device)
    if key not in window.masks:
        slots = window.slots_on(query.device)[:, None]
        visible = causal_within(sliding_window)
        window.masks[key] = slot_mask(slots, window.num_attended, visible, query.dtype)
    return window.masks[key]


def _refuse(module: torch.nn.Module, attention_mask: Tensor | None) -> None:
    name = type(module).__name__
    if attention_mask is not None:
        raise ValueError(f"{name} built an attention mask that specdec's cache cannot honour")
    raise ValueError(
        f"{name} ran attention {ATTENTION!r} without the window that specdec passes with it"
    )


class HFMask:
    """Stands for a mask that HF builds, on its way to the layers that use it.

    Args:
        sliding_window: HF's `local_size`; `None` for full attention.
        visible: HF's own predicate (row, head, query, key).
    """

    def __init__(self, sliding_window: int | None, visible: Callable):
        self.sliding_window = sliding_window
        self.visible = visible

    def __getitem__(self, index) -> "HFMask":
        """Models may cut a mask to the number of keys; it stays what it is."""
        return self

    def is_causal_within(self) -> bool:
        """Whether HF's predicate is the one that `sliding_window` stands for."""
        reach = 6 if self.sliding_window is None else 2 * self.sliding_window + 2
        # Near each end of the window, and a few positions apart from it.
        samples = {p + d for p in (0, reach // 2, reach) for d in (-1, 0, 1, 2)}
        positions = torch.tensor(sorted(p for p in samples if p >= 0))
        queries, keys = positions[:, None], positions
        theirs = torch.as_tensor(self.visible(0, 0, queries, keys)).expand(len(positions), -1)
        return bool((theirs == causal_within(self.sliding_window)(queries, keys)).all())


class LearnedLayer(NamedTuple):
    """What `probe_attention` saw of one layer."""

    mask: HFMask | None
    module: torch.nn.Module
    has_softcap: bool


def probe_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: HFMask | None,
    *,
    slot_window: dict[int, LearnedLayer] | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Notes which mask a layer attends by; its output `[B, N, Hq, Dv]` is zero.

    Args:
        module: the HF attention module that calls.
        query: `[B, Hq, N, D]`.
        key: unused.
        value: `[B, Hkv, N, Dv]`.
        attention_mask: what HF built through `_describe_mask`.
        slot_window: where to note it, by layer index.
        sliding_window: the layer's own word, which counts where HF built no mask.
        softcap: of the layer's scores.

    Raises:
        ValueError: the model drops `slot_window` on the way, or brings a mask of its own.
    """
    if slot_window is None:
        _refuse(module, None)
    if not isinstance(attention_mask, HFMask | None):
        _refuse(module, attention_mask)
    mask = attention_mask
    if mask is None and sliding_window is not None:
        own = causal_within(sliding_window)
        mask = HFMask(sliding_window, lambda row, head, query, key: own(query, key))
    slot_window[module.layer_idx] = LearnedLayer(mask, module, softcap is not None)
    rows, heads, count, _ = query.shape
    return query.new_zeros(rows, count, heads, value.shape[-1]), None


def _describe_mask(
    *args, mask_function: Callable, local_size: int | None = None, **kwargs
) -> HFMask:
    return HFMask(local_size, mask_function)


AttentionInterface.register(ATTENTION, slot_attention)
AttentionInterface.register(PROBE, probe_attention)
AttentionMaskInterface.register(PROBE, _describe_mask)
