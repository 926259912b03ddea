"""Texts that end a row."""

from __future__ import annotations

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteriaList, StopStringCriteria

from specdec.arguments import shown


def with_stop_strings(
    criteria: StoppingCriteriaList | None,
    stop_strings: str | list[str],
    tokenizer: PreTrainedTokenizerBase | None,
) -> StoppingCriteriaList:
    """Stopping criteria with HF's own for stop strings among them.

    Raises:
        ValueError: no tokenizer, or an empty stop string, which some tokenizers would meet at once.
    """
    strings = [stop_strings] if isinstance(stop_strings, str) else stop_strings
    is_list = isinstance(strings, list | tuple) and len(strings) > 0
    if not is_list or not all(isinstance(string, str) and string for string in strings):
        got = shown(strings)
        raise ValueError(f"stop_strings must hold strings that are not empty, got {got}")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(
            "stop_strings need the target's tokenizer: pass tokenizer=tokenizer, or "
            "stopping_criteria=StoppingCriteriaList([StopStringCriteria(tokenizer, stop_strings)])"
        )
    with torch.device("cpu"):  # HF makes tables without a device, and moves them later
        return StoppingCriteriaList([*(criteria or ()), StopStringCriteria(tokenizer, strings)])
