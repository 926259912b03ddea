"""Wrappers around HF models: which of them are taken off, and which are refused."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The HF model inside `torch.compile` and PEFT wrappers, or the model itself.

    A compiled model is decoded uncompiled: the loop runs a view of its modules, which shares its
    weights. Of a `PeftModel` the base model is decoded, into whose layers PEFT has put the adapters
    that are active (LoRA and its kin).

    Args:
        model: as the user has it.

    Raises:
        TypeError: no HF model is inside, or a wrapper of several devices is around it; says which
            line works.
        ValueError: an adapter that is not in the model's layers (prompt tuning, prefix tuning).
    """
    if hasattr(model, "_orig_mod"):
        return unwrap(model._orig_mod)
    if isinstance(model, PreTrainedModel):
        return model
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        for name, config in model.peft_config.items():
            if getattr(config, "is_prompt_learning", False):
                raise ValueError(
                    f"the adapter {name!r} ({type(config).__name__}) puts virtual tokens before "
                    "the text, which the base model does not see; use HF generate, or an adapter "
                    "inside the layers (LoRA)"
                )
        return unwrap(model.get_base_model())
    if isinstance(model, str):
        raise TypeError(
            f"expected a Hugging Face PreTrainedModel, got str; load it first: "
            f"AutoModelForCausalLM.from_pretrained({model!r})"
        )
    name = type(model).__name__
    inner = getattr(model, "module", None)
    if isinstance(inner, PreTrainedModel):
        raise TypeError(f"expected a Hugging Face PreTrainedModel, got {name}; pass model.module")
    raise TypeError(f"expected a Hugging Face PreTrainedModel, got {name}")


def adapters_of(model: nn.Module) -> list[tuple]:
    """Which adapters of PEFT are active, disabled and merged in each layer that has some: numbers
    of Python's, which a view of the model would not follow.
    """
    found = []
    for module in model.modules():
        if hasattr(module, "active_adapters") and hasattr(module, "merged_adapters"):
            names = tuple(module.active_adapters), tuple(module.merged_adapters)
            found.append((*names, bool(getattr(module, "disable_adapters", False))))
    return found
