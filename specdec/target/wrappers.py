"""Which models are decoded: wrappers that are taken off, and what is refused."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

UNDERSTOOD_LAYERS = {
    *("full_attention", "sliding_attention", "chunked_attention", "linear_attention"),
    *("conv", "hybrid", "mlp", "moe", "sparse", "dense"),
}


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


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raises `ValueError` for a model whose layers cannot be run over slots."""
    name = type(model).__name__
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder-decoder model; specdec decodes decoder-only models. Use HF "
            "generate for it"
        )
    foreign = sorted(set(getattr(config, "layer_types", None) or ()) - UNDERSTOOD_LAYERS)
    if foreign:
        layers = ", ".join(foreign)
        raise ValueError(
            f"{name} has layers that specdec cannot run over slots: {layers}; use HF generate for "
            "this model"
        )
