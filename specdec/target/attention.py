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
from specdec.target.masks import own_visible, sees, window_mask

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
    """Attention of a window of queries over the slots of its rows, as HF modules call it: with
    their `layer_idx`, their words for `AttentionOptions` (`s_aux` are sinks), the window of the
    current forward, and no mask. Returns what `attend` does, and `None` for attention weights.

    Raises:
        ValueError: the model brings a mask of its own, or drops the window on the way.
    """
    if slot_window is None or attention_mask is not None:
        _refuse(module, attention_mask)
    window = slot_window.layer_windows.get(module.layer_idx)
    options = AttentionOptions(scaling, softcap, s_aux, window)
    return attend(slot_window, query, key, value, options), None


def attend(
    window: Window, query: Tensor, keys: Tensor, values: Tensor, options: AttentionOptions
) -> Tensor:
    """Attention of a window over slots: on a GPU, where the queries are few, by a kernel that reads
    each row's filled slots; else with a dense mask.

    Args:
        window: whose last N tokens the queries are of.
        query: `[B, Hq, N, D]`.
        keys: `[B, Hkv, S', D]`, slots of the cache.
        values: `[B, Hkv, S', Dv]`.
        options: how scores become weights, and the layer's sliding window.

    Returns:
        `[B, N, Hq, Dv]`.
    """
    num_queries = query.shape[2]
    if window.slots.device != query.device:
        window = window.on(query.device)
    if window.has_kernels and _attends_raggedly(window, query, keys, options):
        slots = window.slots[:, -num_queries:].expand(len(query), -1)
        visible = own_visible(window, num_queries, options.sliding_window)
        options = options._replace(window_visible=visible)
        return ragged_attention(query, keys, values, slots, options)
    scale, softcap, sinks, sliding_window, _ = options
    mask = window_mask(window, num_queries, query.dtype, sliding_window)
    if softcap is None and sinks is None:
        is_grouped = query.shape[1] != keys.shape[1]
        out = F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=scale, enable_gqa=is_grouped
        )
        return out.transpose(1, 2)

    groups = query.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ keys.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask  # [B, Hq, N, S']
    if sinks is not None:
        sinks = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    wide = torch.promote_types(torch.float32, query.dtype)
    weights = torch.softmax(scores, dim=-1, dtype=wide).to(query.dtype)
    return (weights[..., : values.shape[2]] @ values).transpose(1, 2)


def _attends_raggedly(
    window: Window, query: Tensor, keys: Tensor, options: AttentionOptions
) -> bool:
    has_mask = window.visible is not None or window.positions is not None
    # The kernel takes a query's slot for its position, where a sliding window begins.
    is_known = window.positions is None or options.sliding_window is None
    return is_known and attends_raggedly(query, keys, has_window_mask=has_mask)


def _refuse(module: torch.nn.Module, attention_mask: Tensor | None) -> None:
    name = type(module).__name__
    if attention_mask is not None:
        raise ValueError(f"{name} built an attention mask that specdec's cache cannot honour")
    raise ValueError(
        f"{name} ran attention {ATTENTION!r} without the window that specdec passes with it"
    )


class HFMask:
    """Stands for a mask that HF builds, on its way to the layers that use it: HF's `local_size`
    (`None` for full attention) and its own predicate (row, head, query, key).
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
        return bool((theirs == sees(queries, keys, self.sliding_window)).all())


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
    """Notes in `slot_window`, by layer index, which mask a layer attends by: what HF built through
    `_describe_mask`, or the layer's own `sliding_window` where HF built none. Its output `[B, N,
    Hq, Dv]` is zero.

    Raises:
        ValueError: the model drops `slot_window` on the way, or brings a mask of its own.
    """
    if slot_window is None:
        _refuse(module, None)
    if not isinstance(attention_mask, HFMask | None):
        _refuse(module, attention_mask)
    mask = attention_mask
    if mask is None and sliding_window is not None:
        mask = HFMask(sliding_window, lambda row, head, q, k: sees(q, k, sliding_window))
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
