"""Which models are decoded: wrappers that are taken off, models that raise ValueError, once or by
call, and what is compared to notice that a model was changed.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from specdec.arguments import shown
from specdec.hf.foreign import foreign_method
from specdec.hf.forward import cache_argument
from specdec.hf.generation import SAMPLE
from specdec.hf.layers import UNDERSTOOD_LAYERS
from specdec.hf.refusals import cause_of_refusal
from specdec.torch_names import HOOKS_OF_ALL_MODULES, compiled_from, hooks_of


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The HF model inside `torch.compile` and PEFT wrappers, or the model itself.

    A compiled model is decoded uncompiled: the loop runs a view of its modules, which shares its
    weights. Of a wrapper of PEFT's the base model is decoded, into whose layers PEFT has put the
    adapters that are active (LoRA and its kin). Whether that is all of it shows in the self-test.

    Args:
        model: as the user has it.

    Raises:
        TypeError: no HF model is inside, or a wrapper of several devices is around it; says which
            line works.
        ValueError: an adapter that is not in the model's layers (prompt tuning, prefix tuning).
    """
    if (inner := compiled_from(model)) is not None:
        return unwrap(inner)
    if isinstance(model, PreTrainedModel):
        return _causal(model)
    has_adapters = isinstance(model, nn.Module) and hasattr(model, "peft_config")
    inside = (m for m in model.modules() if isinstance(m, PreTrainedModel)) if has_adapters else ()
    for own in inside:
        for name, config in model.peft_config.items():
            if getattr(config, "is_prompt_learning", False):
                raise ValueError(
                    f"the adapter {name!r} ({type(config).__name__}) puts virtual tokens before "
                    "the text, which the base model does not see; use HF generate, or an adapter "
                    "inside the layers (LoRA)"
                )
        return _causal(own)
    if isinstance(model, str):
        raise TypeError(
            f"expected a Hugging Face PreTrainedModel, got {model!r}; load it first: "
            f"AutoModelForCausalLM.from_pretrained({model!r})"
        )
    name = shown(model)
    inner = None if isinstance(model, type) else getattr(model, "module", None)
    if isinstance(inner, PreTrainedModel):
        raise TypeError(f"expected a Hugging Face PreTrainedModel, got {name}; pass model.module")
    raise TypeError(
        f"expected a Hugging Face PreTrainedModel, got {name}; pass what "
        "AutoModelForCausalLM.from_pretrained(path_or_id) returns"
    )


def _causal(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, or the causal LM that the decoder of an encoder-decoder is."""
    if not model.config.is_encoder_decoder:
        return model
    from specdec.targets.source import CausalDecoder

    return CausalDecoder(model)


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raises `ValueError` for a model whose layers cannot be run over slots, or without a cache."""
    name = type(model).__name__
    config = model.config.get_text_config()
    if not model.can_generate():
        raise ValueError(
            f"{name} writes no text, since it has no vocabulary head; load the whole model, by "
            "AutoModelForCausalLM.from_pretrained(path_or_id)"
        )
    if foreign_method(model, SAMPLE):
        raise ValueError(
            f"{name} has a _sample of its own, by which its generate chooses tokens, and specdec "
            "chooses them by a sampler; use its own generate"
        )
    foreign = sorted(set(getattr(config, "layer_types", None) or ()) - UNDERSTOOD_LAYERS)
    if foreign:
        layers = ", ".join(foreign)
        raise ValueError(
            f"{name} has layers that specdec cannot run over slots: {layers}"
            f"{cause_of_refusal(model)}; use HF generate for this model"
        )
    cache_argument(model)


def refuse_training(model: PreTrainedModel) -> None:
    """Raises `ValueError` for a model in training mode with a module that draws at random (dropout,
    jitter); all else computes what it does in evaluation mode, which views are in.
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            is_dropout = isinstance(module, _DROPOUT)
            is_rate = is_dropout or "drop" in name or "jitter" in name
            if is_rate and type(value) is float and value > 0:
                raise ValueError(
                    f"{type(model).__name__} is in training mode, where dropout changes its output "
                    f"({path}.{name}={value}); call model.eval() first"
                )


def refuse_autocast() -> NoReturn:
    """Raises `ValueError` for calls under autocast."""
    raise ValueError(
        "generation does not run under torch.autocast, which changes data types inside the "
        "model; load it in the data type that you want and leave the autocast block"
    )


_DROPOUT = (
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
    *(nn.AlphaDropout, nn.FeatureAlphaDropout),
)


@torch.inference_mode()
def refuse_joint_quantisation(model: PreTrainedModel) -> None:
    """Raises `ValueError` for quantised layers that cannot verify a draft: where activations are
    quantised over the whole pass, the logits of a token depend on the tokens that are read with it.

    Every quantised linear layer reads one token twice, beside another one and beside a hundred
    times that one. Both calls have one shape, so a layer that reads each token alone returns the
    same for it, up to the order of sums.
    """
    generator, host = torch.Generator().manual_seed(0), {"dtype": torch.float32, "device": "cpu"}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear) or _is_plain(layer):
            continue
        device = next(layer.parameters()).device
        kind = type(layer if type(layer) is not nn.Linear else layer.weight).__name__
        what = f"{type(model).__name__} cannot be decoded: {name} ({kind})"
        x = torch.randn(1, 2, layer.in_features, generator=generator, **host)
        x = x.to(device, model.dtype)
        try:
            own, beside = (layer(x * x.new_tensor([[[1.0], [by]]]))[:, 0] for by in (1.0, 100.0))
        except RuntimeError as error:
            raise ValueError(
                f"{what} fails under torch.inference_mode, in which generation runs ({error}); use "
                "another format, or HF generate"
            ) from error
        if not float((own - beside).norm()) <= 8 * torch.finfo(own.dtype).eps * float(own.norm()):
            raise ValueError(
                f"{what}: activations are quantised over the whole pass, so that logits of a token "
                "depend on the tokens that are read with it; quantise them per token (torchao: "
                "granularity=PerRow(), bitsandbytes: llm_int8_threshold=0), or weights alone"
            )


def _is_plain(layer: nn.Linear) -> bool:
    """Not quantised, as far as can be seen; or not here as a whole: offloaded to the host, or
    spread over processes, so that it takes a part of its inputs.
    """
    weight = getattr(layer, "weight", None)
    if weight is None or weight.is_meta or type(weight) is DTensor:
        return weight is not None
    is_known = type(weight) in (nn.Parameter, Tensor) and weight.dtype.itemsize > 1
    return is_known and "forward" not in vars(layer)


def replaced_forwards(model: PreTrainedModel) -> list[str]:
    """Names of modules that run something in the place of the forward of their class."""
    return [name for name, module in model.named_modules() if "forward" in vars(module)]


def remark_on_hooks(model: PreTrainedModel) -> str:
    """What to do about hooks, where there are some, for messages."""
    hooked = (
        name or type(model).__name__
        for name, module in model.named_modules()
        if any(hooks_of(module))
    )
    names = ", ".join([*dict.fromkeys([*hooked, *replaced_forwards(model)])][:3])
    everywhere = " of all modules" if any(HOOKS_OF_ALL_MODULES) else ""
    if not names and not everywhere:
        return ""
    return (
        f"; a hook or replaced forward of {names}{everywhere} has to act alike on every position, "
        "not on hidden[:, -1] or on calls of one token, and on every row, in batches of any size, "
        "of which 1 to 8 rows are tried; what acts on new tokens alone is an edit, Target(model, "
        "edits=(steer,)): see docs/interventions.md"
    )


def refuse_attention(module: torch.nn.Module, attention_mask: Tensor | None) -> None:
    """Raises `ValueError` for attention that is called otherwise than windows are."""
    name = type(module).__name__
    if attention_mask is not None:
        raise ValueError(f"{name} built an attention mask that specdec's cache cannot honour")
    raise ValueError(
        f"{name} ran attention 'specdec_slots' without the window that specdec passes with it"
    )
