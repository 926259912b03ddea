"""True acceptance: what drafting with a head yields, measured by doing it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from transformers import PreTrainedModel

from specdec.drafters import Drafter
from specdec.generator import SpeculativeGenerator
from specdec.results import SpeculationStats
from specdec.target import Target


def measure_acceptance(
    target: PreTrainedModel | Target,
    drafter: Drafter,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int = 64,
    temperatures: Sequence[float] = (0.0, 1.0),
) -> dict[float, SpeculationStats]:
    """Generates and counts; draws from no generator but its own.

    Args:
        target: of the drafter, in eval mode.
        drafter: to be measured.
        input_ids: `[B, T]` prompts, padded left or right.
        attention_mask: `[B, T]` or `None`.
        max_new_tokens: of each prompt.
        temperatures: 0 is greedy; sampled rows have seeds 0, 1, ....

    Returns:
        Statistics per temperature; `acceptance_length` is the usual figure.

    Raises:
        TypeError, ValueError: as `SpeculativeGenerator`.

    Example:
        >>> import torch
        >>> from specdec import PromptLookupDrafter, zoo
        >>> prompts = torch.tensor([[7, 8, 9, 7, 8]])
        >>> stats = measure_acceptance(
        ...     zoo.load_target(), PromptLookupDrafter(3), prompts, max_new_tokens=8
        ... )
        >>> 1 <= stats[0.0].acceptance_length <= 4
        True
    """
    generator = SpeculativeGenerator(target, drafter)
    device = generator.target.device
    ids = input_ids.to(device)
    mask = None if attention_mask is None else attention_mask.to(device)
    measured = {}
    for temperature in temperatures:
        options = {"do_sample": False}
        if temperature > 0:
            seeds = list(range(len(ids)))
            options = {"do_sample": True, "temperature": temperature, "seed": seeds}
        result = generator.generate(ids, mask, max_new_tokens=max_new_tokens, **options)
        measured[temperature] = result.stats
    return measured
