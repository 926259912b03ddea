"""Write slots: keys and values of a window into a cache, in one launch. See README.md.

Legend: B rows, N tokens per row, S slots, H heads of keys and values, D and Dv widths.
"""

import torch
from torch import Tensor

from specdec.kernels.types import suits_kernels


def write_slots(
    keys: Tensor, values: Tensor, key_states: Tensor, value_states: Tensor, slots: Tensor
) -> None:
    """Writes the keys and values of a window into its slots. Where several tokens of a row have one
    slot (the padding slot) any of them may stay.

    Args:
        keys: `[B, S, H, D]`, written in place.
        values: `[B, S, H, Dv]`, written in place.
        key_states: `[B, H, N, D]`, as models compute them.
        value_states: `[B, H, N, Dv]`.
        slots: `[B, N]` int64 in `0..S - 1`.

    Example:
        >>> keys, values = torch.zeros(1, 3, 1, 1), torch.zeros(1, 3, 1, 1)
        >>> states = torch.tensor([5.0, 6.0]).view(1, 1, 2, 1)
        >>> write_slots(keys, values, states, -states, torch.tensor([[2, 0]]))
        >>> keys.flatten().tolist(), values.flatten().tolist()
        ([6.0, 0.0, 5.0], [-6.0, 0.0, -5.0])
    """
    if key_states.is_cuda and suits_kernels(key_states):
        from specdec.kernels.slots import triton

        return triton.write_slots(keys, values, key_states, value_states, slots)
    rows = torch.arange(len(slots), device=slots.device)[:, None]
    keys[rows, slots] = key_states.transpose(1, 2)
    values[rows, slots] = value_states.transpose(1, 2)


def writes_slots(key_states: Tensor, keys: Tensor) -> bool:
    """Whether `write_slots` is the way to write here: it has a kernel for these dtypes. Elsewhere a
    cache has views of its storage that make index copies faster.
    """
    return key_states.is_cuda and suits_kernels(key_states) and key_states.dtype == keys.dtype
