"""The attention function that HF models call while they run over a `SlotCache`.

HF looks the function up by name (`transformers.AttentionInterface`) and, finding no mask function
under that name, builds no mask of its own; the window of the current forward arrives as the keyword
`slot_window`.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from specdec.cache import Window

ATTENTION_NAME = "specdec_slots"


def window_mask(window: Window, sliding_window: int | None, dtype: torch.dtype, device) -> Tensor:
    """The additive mask of one forward: token at slot s sees the slots of (s - sliding_window, s].

    Args:
        window: slots `[B, N]` of the forward.
        sliding_window: how many slots a token sees, itself included; `None` for all.
        dtype: of the mask, that of the queries.
        device: where the mask is needed.

    Returns:
        `[B, 1, N, num_slots]`, 0 where visible and -inf elsewhere; computed once per forward and
        kept in `window`.
    """
    key = (sliding_window, dtype, device)
    if key not in window.masks:
        queries = window.slots[:, None, :, None]
        slots = torch.arange(window.num_slots, device=queries.device)
        visible = slots <= queries
        if sliding_window is not None:
            # A token to forget sits beyond all slots; it must see some, or its row would be NaN.
            queries = queries.clamp(max=window.num_slots - 1)
            visible = visible & (slots > queries - sliding_window)
        zero, hidden = _mask_values(dtype, device)
        window.masks[key] = torch.where(visible.to(device), zero, hidden)
    return window.masks[key]


@lru_cache
def _mask_values(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # these outlive the mode that they were first needed in
        visible = torch.zeros((), dtype=dtype, device=device)
        return visible, visible - torch.inf


def slot_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    slot_window: Window | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention of a window of queries over the slots of its rows.

    Args:
        module: the HF attention module that calls.
        query: `[B, Hq, N, D]`.
        key: `[B, Hkv, S', D]`, the cache's slots.
        value: `[B, Hkv, S', Dv]`.
        attention_mask: must be `None`: the model builds no mask for this function.
        slot_window: the window of the current forward.
        scaling: factor of the scores; `None` is `D ** -0.5`.
        sliding_window: as in `window_mask`.
        softcap: scores become `softcap * tanh(scores / softcap)` (Gemma 2).
        s_aux: `[Hq]` attention sinks, one extra score per head that takes weight and gives no value
            (GPT-OSS).

    Returns:
        `[B, N, Hq, Dv]` and `None` (HF's place for attention weights).

    Raises:
        ValueError: the model brings a mask of its own, or drops the window on the way.
    """
    if slot_window is None or attention_mask is not None:
        _refuse(module, attention_mask)
    if slot_window.audit is not None:
        slot_window.audit[module.layer_idx] = sliding_window
    mask = window_mask(slot_window, sliding_window, query.dtype, query.device)
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


def _refuse(module: torch.nn.Module, attention_mask: Tensor | None) -> None:
    name = type(module).__name__
    if attention_mask is not None:
        raise ValueError(f"{name} built an attention mask that specdec's cache cannot honour")
    raise ValueError(
        f"{name} ran attention {ATTENTION_NAME!r} without the window that specdec passes with it"
    )


AttentionInterface.register(ATTENTION_NAME, slot_attention)
