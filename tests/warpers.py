"""The oracle of `LogitsFilter`: HF's own logits warpers, row by row, in the order of `generate`.

Top-p sorts, and of equal logits at its edge it drops those that the sort puts first. HF asks torch
for any order of equals, which differs between lengths and devices; here they are sorted by id.
"""

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 0.5, 1.0, 1.7]),
        "top_k": st.integers(0, 6),
        "top_p": st.sampled_from([0.0, 0.2, 0.5, 0.8, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 0.3, 0.6, 1.0]),
    }
)
"""Values of `LogitsFilter` for one row, as keywords."""


class StableSort(TorchFunctionMode):
    """Makes `torch.sort` keep equals in their order."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.sort:
            kwargs["stable"] = True
        return func(*args, **kwargs)


def huggingface_law(logits: Tensor, options: dict) -> Tensor:
    """The law of `[..., V]` logits; greedy is the largest logit, the lowest id among equals."""
    flat = logits.flatten(0, -2)
    if options["temperature"] == 0:
        first = [row.index(max(row)) for row in flat.tolist()]
        return torch.eye(logits.shape[-1], dtype=logits.dtype)[first].view(logits.shape)
    warpers = [TemperatureLogitsWarper(options["temperature"])]
    warpers += [TopKLogitsWarper(options["top_k"])] if options["top_k"] else []
    warpers += [TopPLogitsWarper(options["top_p"])] if options["top_p"] < 1 else []
    warpers += [MinPLogitsWarper(options["min_p"])] if options["min_p"] else []
    with StableSort():
        for warper in warpers:
            flat = warper(None, flat)
    return flat.softmax(-1).view(logits.shape)


def by_row(filters: list[dict]) -> dict[str, list]:
    """Keywords of one `LogitsFilter` for a batch, from those of its rows."""
    return {name: [options[name] for options in filters] for name in filters[0]}
