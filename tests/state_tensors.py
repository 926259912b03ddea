"""All tensors that an object holds, by name."""

from dataclasses import fields, is_dataclass

import torch

DERIVED = {"_views", "window", "_flat_slots", "_row_starts", "_offsets"}
"""Views, masks and constants, which follow from the tensors beside them."""


def tensors_of(owner, name: str = "") -> dict[str, torch.Tensor]:
    """The tensors of a `StepState`, or of any part of one."""
    if isinstance(owner, torch.Tensor):
        return {name: owner}
    if isinstance(owner, dict):
        parts = owner
    elif is_dataclass(owner):
        parts = {field.name: getattr(owner, field.name) for field in fields(owner)}
    elif hasattr(owner, "_fields"):
        parts = owner._asdict()
    elif hasattr(owner, "__dict__") and type(owner).__module__.startswith("specdec"):
        parts = vars(owner)
    else:
        parts = {}
    found = {}
    for part, value in parts.items():
        if part not in DERIVED:
            found |= tensors_of(value, f"{name}.{part}")
    return found


def addresses(owner) -> dict[str, int]:
    """Where they are."""
    return {name: tensor.data_ptr() for name, tensor in tensors_of(owner).items()}
