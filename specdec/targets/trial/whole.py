"""All that is tried of a model before it is believed: what it is, its route, and users' edits."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from specdec.hf.foreign import foreign_method
from specdec.hf.forward import OFFLOADING, device_of
from specdec.targets.discovery import find_route
from specdec.targets.edits.edit import Edit
from specdec.targets.reading import decoder_of_text
from specdec.targets.route import Route
from specdec.targets.wrappers import refuse_training, refuse_unsupported


def _refuse_model(model: PreTrainedModel) -> None:
    """Raises `ValueError` for a model that cannot be decoded, as its class and modules say."""
    refuse_unsupported(model)
    if model.training:
        refuse_training(model)
    is_offloaded = any(hasattr(module, OFFLOADING) for module in model.modules())
    is_meta = model.device.type == "meta" and not is_offloaded
    if is_meta or device_of(model.get_input_embeddings()).type == "meta":
        raise ValueError(
            f"{type(model).__name__} is on the meta device and has no weights; load it, or "
            "offload it by accelerate, whose hooks bring the weights in"
        )


def try_model(
    outer: nn.Module,
    model: PreTrainedModel,
    *,
    fuse: bool | None,
    edits: Sequence[Edit],
    num_tokens: int,
) -> tuple[Route, str | None]:
    """The route of a model, and why calls of a generator's own would write other text than
    `generate` of the model's class does, `None` for no reason.

    Args:
        outer, model, edits: as the attributes of `SlotModel`.
        fuse: see `Target`.
        num_tokens: of the longest text to come.

    Raises:
        ValueError: a model that cannot be decoded.
    """
    _refuse_model(model)
    decoder = decoder_of_text(model)
    route = find_route(decoder, fuse=fuse, num_tokens=num_tokens)
    if edits:
        from specdec.targets.trial.users_code import try_edits

        try_edits(decoder, route, edits)
    inner = getattr(model, "whole", model)  # of a decoder that has an encoder
    if outer is inner and not foreign_method(inner, "generate"):
        return route, None
    from specdec.targets.trial.outer import fault_of_outer

    return route, fault_of_outer(outer, inner, route)
