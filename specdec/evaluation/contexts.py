"""Acceptance by length of context: heads that were trained on short rows fail on long ones.

Legend: T tokens of the text, n prompts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from specdec.arguments import check_integer, check_tensor
from specdec.evaluation.evaluate import evaluate
from specdec.generator import SpeculativeGenerator


def acceptance_by_context(
    generator: SpeculativeGenerator,
    text: Tensor,
    contexts: Iterable[int],
    *,
    num_prompts: int = 32,
    max_new_tokens: int = 64,
) -> dict[int, float]:
    """The acceptance length of greedy text after more and more of the same context.

    Args:
        generator: target, drafter and sampler to be measured.
        text: `[T]` ids. Prompts end at the same places of it, whatever their length.
        contexts: numbers of tokens of a prompt, each at most T.
        num_prompts: n of each; fewer where the text has fewer places at which they can end.
        max_new_tokens: after each prompt.

    Returns:
        Acceptance length by tokens of context.

    Example:
        >>> from specdec import PromptLookupDrafter, zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), PromptLookupDrafter(3))
        >>> text = torch.arange(1, 60)
        >>> list(acceptance_by_context(generator, text, (8, 32), num_prompts=2, max_new_tokens=4))
        [8, 32]
    """
    check_tensor("text", text, (None,))
    check_integer("num_prompts", num_prompts, 1)
    contexts = tuple(contexts)
    if not contexts or min(contexts) < 1 or max(contexts) > len(text):
        raise ValueError(
            f"contexts must have 1 to {len(text)} tokens, as many as the text, got {contexts}"
        )
    ends = torch.linspace(max(contexts), len(text), num_prompts).long().unique().tolist()
    lengths = {}
    for context in contexts:
        prompts = torch.stack([text[end - context : end] for end in ends])
        stats = evaluate(generator, prompts, max_new_tokens=max_new_tokens).stats
        lengths[context] = stats.acceptance_length
    return lengths
