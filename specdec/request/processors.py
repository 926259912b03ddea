"""Refuses logits processors that keep state between calls.

In plain decoding HF calls a processor once per token. Here it is called for every position of a
step, those of rejected tokens included. A processor whose answer depends on the tokens that it is
given cannot tell the difference; one that counts its calls, or carries a cache from one to the
next, can.
"""

import copy

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase


def refuse_stateful(processors: LogitsProcessorList, padded: Tensor, vocab_size: int) -> None:
    """Raises `ValueError` for a processor that changes from call to call.

    A copy of each is called three times, over growing texts as in decoding, and its state before
    and after the last call is compared: whatever a processor prepares when it first sees a prompt
    is there by then. The processor itself is not called. What it keeps outside its own attributes
    (in a closure, or a global) cannot be seen.

    Args:
        processors: of the call.
        padded: `[B, T]` the prompts.
        vocab_size: V.
    """
    for processor in processors:
        if isinstance(processor, nn.Module) or not _is_stateless(processor, padded, vocab_size):
            raise ValueError(
                f"{type(processor).__name__} keeps state from call to call, and specdec calls "
                "processors for every drafted position, rejected ones included; use a processor "
                "that depends on its arguments only, or HF generate"
            )


def _is_stateless(processor: LogitsProcessor, padded: Tensor, vocab_size: int) -> bool:
    if not hasattr(processor, "__dict__"):
        return True  # a plain function
    memo: dict = {}
    _share(vars(processor), memo)
    try:
        trial = copy.deepcopy(processor, memo)
    except Exception:  # holds something that cannot be copied: nothing to try it on
        return True
    ids, states = padded, []
    for _ in range(3):
        try:
            trial(ids.clone(), torch.zeros(len(ids), vocab_size, device=ids.device))
        except Exception:  # the real call will raise it where the user can see it
            return True
        states.append(_state(trial))
        ids = torch.cat([ids, ids[:, -1:]], dim=1)
    return states[1] == states[2]


def _share(value, memo: dict) -> None:
    """Keeps models and tokenizers from being copied with the processors that hold them."""
    if isinstance(value, nn.Module | PreTrainedTokenizerBase):
        memo[id(value)] = value
    elif isinstance(value, dict):
        for item in value.values():
            _share(item, memo)
    elif isinstance(value, list | tuple | set):
        for item in value:
            _share(item, memo)


def _state(value, depth: int = 0) -> object:
    """What can be compared of an object: numbers, strings, tensors, and what holds them."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.flatten().tolist()
    if isinstance(value, bool | int | float | str | bytes | None):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        return [_state(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return [(str(key), _state(item, depth + 1)) for key, item in value.items()]
    if isinstance(value, nn.Module | torch.Generator) or depth > 6:
        return None  # models are not state; a generator may be seeded anew in every call
    return _state(vars(value), depth + 1) if hasattr(value, "__dict__") else None
