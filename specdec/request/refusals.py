"""Errors of prompts and options that cannot be right."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import GenerationConfig

from specdec.arguments import check_tensor, name_of, shown
from specdec.hf.positions import cause_of_limit
from specdec.request.hints import for_prompt
from specdec.request.warpers import WARPERS


def refuse_ids(input_ids: Any, dtypes: Sequence[torch.dtype]) -> NoReturn:
    """Raises an error for what is no batch of token ids."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        expected = "input_ids must be a tensor [B, T] of token ids"
        kind = ValueError if isinstance(input_ids, Tensor) else TypeError
        raise kind(f"{expected}, got {shown(input_ids)}{for_prompt(input_ids)}")
    check_tensor("input_ids", input_ids, (None, None), dtypes)
    if input_ids.is_meta:
        raise ValueError("input_ids are on the meta device, where no tensor has values")
    raise ValueError(
        f"the prompt is empty (input_ids of shape {list(input_ids.shape)}); pass at least one "
        "token, for example the tokenizer's bos_token_id"
    )


def refuse_vocabulary(input_ids: Tensor, is_outside: Tensor, vocab_size: int) -> NoReturn:
    """Raises an error for ids `[B, T]` of which some are outside of the vocabulary."""
    row, column = is_outside.nonzero()[0].tolist()
    raise ValueError(
        f"input_ids[{row}, {column}] is {int(input_ids[row, column])}, outside the "
        f"target's vocabulary of {vocab_size}; was the prompt encoded with the target's "
        "tokenizer?"
    )


def refuse_room(config: Any, longest: int, room: int, limit: int) -> NoReturn:
    """Raises an error for texts that are longer than the target has positions for."""
    shorter = f" or pass max_new_tokens <= {limit - longest}" if longest < limit else ""
    raise ValueError(
        f"a prompt of {longest} tokens and {room} new tokens make {longest + room}, "
        f"but the target has {limit} positions{cause_of_limit(config)}; shorten the "
        f"prompt{shorter}"
    )


def refuse_seeds(seeds: int, rows: int) -> NoReturn:
    """Raises an error for so many seeds of a batch."""
    raise ValueError(
        f"seed has {seeds} values for a batch of {rows} rows; give one per row, or a single value"
    )


def refuse_temperature(temperature: float | list[float]) -> NoReturn:
    """Raises an error for a temperature above 0 of a greedy call."""
    raise ValueError(
        f"do_sample=False is greedy, and temperature={temperature!r} samples; leave one of them out"
    )


def refuse_filter(logits_filter: Mapping[str, Any]) -> NoReturn:
    """Raises an error for values of a filter in a greedy call."""
    name, value = next(item for item in logits_filter.items() if item[0] != "temperature")
    raise ValueError(
        f"{name}={value!r} has no effect without sampling; pass a temperature above 0 "
        "or do_sample=True with it, or leave it out"
    )


def check_values_of_rows(of_rows: Iterable[str], others: Iterable[str], passed: Iterable) -> None:
    """Raises `ValueError` for values of single rows beside settings that HF applies in an order of
    its own.

    Args:
        of_rows: names of the values.
        others: names of HF's settings in use.
        passed: processors of the call.
    """
    others = [*others, *(name_of(p) for p in passed if type(p) in WARPERS)]
    if others:
        raise ValueError(
            f"{', '.join(of_rows)} cannot be set per row beside {', '.join(others)}, which HF "
            "applies in an order of its own; give one value for all rows, or leave the others "
            "out"
        )


def check_beside(options: Mapping[str, Any]) -> None:
    """Raises `TypeError` or `ValueError` for a configuration or tokenizer that is none, and for
    more tokens at least than at most.
    """
    config, tokenizer = options.get("generation_config"), options.get("tokenizer")
    if not isinstance(config, GenerationConfig | None):
        raise TypeError(
            f"generation_config must be a GenerationConfig, got {shown(config)}; "
            "GenerationConfig(**options) makes one"
        )
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise TypeError(f"tokenizer must be the target's, got {shown(tokenizer)}")
    least, most = options.get("min_new_tokens", 0), options.get("max_new_tokens")
    if most is not None and least > most:
        raise ValueError(f"min_new_tokens={least} is more than max_new_tokens={most}")
