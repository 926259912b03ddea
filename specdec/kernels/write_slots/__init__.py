"""Write slots: keys and values of a window into a cache, in one launch. See README.md."""

from functools import wraps

from torch import Tensor

from specdec.kernels.choice import suits_kernels
from specdec.kernels.write_slots import reference


@wraps(reference.write_slots)
def write_slots(
    keys: Tensor, values: Tensor, key_states: Tensor, value_states: Tensor, slots: Tensor
) -> None:
    """`reference.write_slots`, or its Triton kernels on a GPU."""
    if not (key_states.is_cuda and suits_kernels(key_states)):
        return reference.write_slots(keys, values, key_states, value_states, slots)
    from specdec.kernels.write_slots import triton

    return triton.write_slots(keys, values, key_states, value_states, slots)


def writes_slots(key_states: Tensor, keys: Tensor) -> bool:
    """Whether `write_slots` is the way to write here: it has a kernel for these dtypes. Elsewhere a
    cache has views of its storage that make index copies faster.
    """
    return key_states.is_cuda and suits_kernels(key_states) and key_states.dtype == keys.dtype
