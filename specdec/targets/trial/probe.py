"""The attention function under which a model is asked, once, what its layers see: HF builds masks
for it, and hands out the description of each (`HFMask`).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from specdec.slots.attention import sees
from specdec.slots.spans import Chunk
from specdec.targets.wrappers import refuse_attention

PROBE = "specdec_probe"
"""The name under which masks are probed."""


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
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Calls `slot_window` with the index of a layer and the mask that it attends by: what HF built
    through `_describe_mask`, or the layer's own `sliding_window` where HF built none. Its output
    `[B, N, Hq, Dv]` is zero.

    Raises:
        ValueError: the model drops `slot_window` on the way, or brings a mask or biases of its own.
    """
    if slot_window is None:
        refuse_attention(module, None)
    if not isinstance(attention_mask, HFMask | None):
        refuse_attention(module, attention_mask)
    if position_bias is not None:
        raise ValueError(f"{type(module).__name__} adds biases of its own to its scores")
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


AttentionInterface.register(PROBE, probe_attention)
AttentionMaskInterface.register(PROBE, _describe_mask)
