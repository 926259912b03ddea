"""The attention functions that HF models call while they run over a `SlotCache`.

HF looks a function up by name (`transformers.AttentionInterface`), and builds no mask for a name
that has no mask function; the window of the current forward arrives as the keyword `slot_window`.

Which layer has which sliding window is learned once, when a model is wrapped: under the name
`PROBE` HF does build masks, and what it hands out is the description of each (`HFMask`).

Legend: B rows, N tokens of a window, n queries (the last of the N), W slots attended over.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from specdec.kernels.types import AttentionOptions
from specdec.slots.attention import attend, sees
from specdec.slots.cache import Chunk, Window
from specdec.types import Queries

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
    current forward, and no mask but those of a prompt that sees itself both ways. Returns what
    `attend` does, and `None` for attention weights. Queries that are wanted as features are noted
    in the window.

    Raises:
        ValueError: the model brings a mask of its own, or drops the window on the way.
    """
    if slot_window is None or (attention_mask is not None and not slot_window.has_own_masks):
        _refuse(module, attention_mask)
    window = slot_window.layer_windows.get(module.layer_idx)
    if getattr(module, "tempers_queries", False):
        query = _tempered(module, query, slot_window)
    if module.layer_idx in slot_window.query_layers:
        note_queries(slot_window, Queries(module.layer_idx), query, scaling)
    options = AttentionOptions(scaling, softcap, s_aux, window)
    function = vars(module).get("attend", attend)  # what an edit has put in its place
    return function(slot_window, query, key, value, options, attention_mask), None


def note_queries(window: Window, name: Queries, query: Tensor, scaling: float | None) -> None:
    """Notes a layer's queries `[B, Hq, N, D]` down as features of a window."""
    scaled = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    window.features[name] = scaled.transpose(1, 2).flatten(2)


def _tempered(module: torch.nn.Module, query: Tensor, window: Window) -> Tensor:
    """Queries times the temperature of their positions, as Llama 4 has it; HF counts positions from
    one length of all rows, so in views it leaves the temperature out.
    """
    steps = torch.floor((window.text_positions.to(query.device).float() + 1.0) / module.floor_scale)
    scales = torch.log1p(steps) * module.attn_scale + 1.0
    return (query * scales[:, None, :, None]).to(query.dtype)


def _refuse(module: torch.nn.Module, attention_mask: Tensor | None) -> None:
    name = type(module).__name__
    if attention_mask is not None:
        raise ValueError(f"{name} built an attention mask that specdec's cache cannot honour")
    raise ValueError(
        f"{name} ran attention {ATTENTION!r} without the window that specdec passes with it"
    )


class HFMask:
    """Stands for a mask that HF builds, on its way to the layers that use it: its own predicate
    (row, head, query, key), and what HF's `local_size` (`None` for full attention) may stand for.
    """

    def __init__(self, local_size: int | None, visible: Callable):
        self.windows = (None,) if local_size is None else (local_size, Chunk(local_size))
        self.visible = visible

    def __getitem__(self, index) -> "HFMask":
        """Models may cut a mask to the number of keys; it stays what it is."""
        return self

    def is_causal_within(self, window: int | Chunk | None, device: torch.device | None) -> bool:
        """Whether HF's predicate is the one of a window; on the layer's device, since HF's holds
        tensors.
        """
        size = window.size if isinstance(window, Chunk) else window or 3
        # All of a short text; near each end of the window, and near powers of two in a long one.
        places = 0, size, 2 * size, *(2**i for i in range(8, 16))
        samples = {*range(128), *(p + d for p in places for d in (-2, -1, 0, 1, 2, 3))}
        positions = torch.tensor(sorted(p for p in samples if p >= 0), device=device)
        queries, keys = positions[:, None], positions
        theirs = torch.as_tensor(self.visible(0, 0, queries, keys), device=device)
        theirs = theirs.expand(len(positions), -1)
        return bool((theirs == sees(queries, keys, window)).all())


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
    slot_window: Callable[[int, LearnedLayer], None] | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Calls `slot_window` with the index of a layer and the mask that it attends by: what HF built
    through `_describe_mask`, or the layer's own `sliding_window` where HF built none. Its output
    `[B, N, Hq, Dv]` is zero.

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
    slot_window(module.layer_idx, LearnedLayer(mask, module, softcap is not None))
    rows, heads, count, _ = query.shape
    return query.new_zeros(rows, count, heads, value.shape[-1]), None


def _describe_mask(
    *args, mask_function: Callable, local_size: int | None = None, **kwargs
) -> HFMask:
    return HFMask(local_size, mask_function)


AttentionInterface.register(ATTENTION, slot_attention)
AttentionInterface.register(PROBE, probe_attention)
AttentionMaskInterface.register(PROBE, _describe_mask)
