"""Which of Hugging Face's implementations runs the experts of a mixture inside a step.

A step must not wait for the device. The plain loop over experts does: it asks which ones were hit.
`grouped_mm` computes the groups on the device, where torch has a kernel for it; `batched_mm` copies
the weights of every (token, expert) pair together, which is right for the few tokens of a step and
far too much for a chunk of a prompt.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.hf.layers import EXPERTS, EXPERTS_FIELD, set_implementation
from specdec.targets.edits.edit import Faster

WAITING = "eager"


class StepExperts(Faster):
    """Experts of steps run by an implementation that does not wait for the device.

    Args:
        implementation: HF's name of it.
    """

    why_not_in_chunks = "the experts' own code waits for the device"

    def __init__(self, implementation: str):
        self._implementation = implementation
        self.given_up = f"experts are the model's own: with {implementation}, "

    @classmethod
    def of(cls, model: PreTrainedModel) -> tuple[StepExperts | None, str | None]:
        """For a model, and a note on it; `None` leaves the model's own, as for a model without
        experts, or on a CPU, where nothing is waited for.
        """
        kinds = {
            getattr(module.config, EXPERTS_FIELD, None)
            for module in model.modules()
            if _has_experts(module)
        }
        if not kinds or model.device.type != "cuda":
            return None, None
        own = sorted(map(str, kinds))[0]
        chosen = choose(own, model.dtype, torch.cuda.get_device_capability(model.device))
        if chosen == own:
            return None, f"experts: {own} (the model's own makes no host synchronisation)"
        return cls(chosen), f"experts: {chosen} inside a step, since {own} waits for the device"

    def __call__(self, view: PreTrainedModel) -> None:
        for module in view.modules():
            if _has_experts(module):
                set_implementation(module.config, EXPERTS_FIELD, self._implementation)


def choose(own: str, dtype: torch.dtype, capability: tuple[int, int]) -> str:
    """A model's own implementation, or one that does not wait, given the data type of its weights
    and the capability of its GPU.

    Example:
        >>> choose("eager", torch.bfloat16, (9, 0)), choose("grouped_mm", torch.float32, (9, 0))
        ('grouped_mm', 'batched_mm')
    """
    # torch has one kernel for all groups, in bfloat16, from Hopper on; else it loops on the host.
    is_grouped = dtype == torch.bfloat16 and capability >= (9, 0)
    if own not in (WAITING, "grouped_mm"):
        return own
    return "grouped_mm" if is_grouped else "batched_mm"


def _has_experts(module: nn.Module) -> bool:
    """Whether HF chooses the forward of a module by the configuration's word for experts."""
    return all(hasattr(module, name) for name in EXPERTS)
