"""Options of a call, checked for what HF would ignore or take for something else."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    StoppingCriteriaList,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from specdec.arguments import check_choice, check_integer, plain_numbers, shown
from specdec.hf.generation import (
    BEFORE_FILTERS,
    BESIDE_FILTERS,
    FILTERS,
    UNSUPPORTED,
    UNUSED,
)
from specdec.request.keywords import OUTPUTS, GenerateOptions
from specdec.request.sampling import Sampling
from specdec.targets import Target

_LEAST = {
    "max_new_tokens": 1,
    "num_return_sequences": 1,
    "min_new_tokens": 0,
    "num_draft_tokens": 0,
}
"""The least that each of these may be."""
_FLAGS = {"do_sample", "neutral", "draft_probs", *OUTPUTS}
_SETTINGS = GenerateOptions.__annotations__.keys() & vars(GenerationConfig()).keys()
"""Options that are HF's settings: `None` turns one off, whatever the model ships."""
_NUMBERS = {*_LEAST, *_FLAGS, *FILTERS, "eos_token_id", "pad_token_id"}


def checked_options(target: Target, options: dict[str, Any]) -> dict[str, Any]:
    """`GenerateOptions` with numbers of Python's. A setting of HF's that is `None` stays, since HF
    turns it off; any other option that is `None` is left out.

    Raises:
        TypeError, ValueError: a name that is no option, or a value that cannot be right.
    """
    for name in options.keys() - GenerateOptions.__annotations__.keys():
        from specdec.request.hints import for_option

        raise TypeError(f"unknown option {name!r}: {for_option(target, name, options[name])}")
    off = {name: None for name in _SETTINGS & options.keys() if options[name] is None}
    options = {name: value for name, value in options.items() if value is not None}
    options |= {name: plain_numbers(options[name]) for name in _NUMBERS & options.keys()}
    for name in _LEAST.keys() & options.keys():
        check_integer(name, options[name], _LEAST[name])
    for name in _FLAGS & options.keys():
        check_choice(name, options[name], (True, False))
    for name in ("logits_processor", "stopping_criteria"):
        _check_functions(name, options.get(name, []))
    is_config = isinstance(options.get("generation_config"), GenerationConfig | None)
    least, most = options.get("min_new_tokens", 0), options.get("max_new_tokens")
    if not is_config or "tokenizer" in options or (most is not None and least > most):
        from specdec.request.refusals import check_beside

        check_beside(options)
    # Ids of a model's own configuration are left as they are: some name -1 for none.
    ends = options.get("eos_token_id", [])
    for value in ends if isinstance(ends, list | tuple) else [ends]:
        advice = "[] lets no token end a text"
        check_integer("eos_token_id", value, 0, target.vocab_size - 1, advice=advice)
    check_integer("pad_token_id", options.get("pad_token_id", 0), 0, target.vocab_size - 1)
    return options | off


def _check_functions(name: str, given: Any) -> None:
    """Raises TypeError unless the value is a list of functions."""
    if not isinstance(given, list | tuple):
        raise TypeError(f"{name} must be a list of functions, got {shown(given)}")
    for one in given:
        if isinstance(one, type) or not callable(one):
            raise TypeError(f"{name} must hold functions of (ids, scores), got {shown(one)}")


def ends_among(
    criteria: StoppingCriteriaList,
) -> tuple[tuple[int, ...], int, StoppingCriteriaList]:
    """Ids that end a row, the length of a row's padded prompt and its new tokens together, and the
    criteria that are of another kind.
    """
    ends = [c.eos_token_id for c in criteria if isinstance(c, EosTokenCriteria)]
    limits = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
    others = [c for c in criteria if not isinstance(c, EosTokenCriteria | MaxLengthCriteria)]
    eos = torch.cat(ends).tolist() if ends else []
    return tuple(eos), min(limits), StoppingCriteriaList(others)


def sampling_of(config: GenerationConfig, eos_token_id: Sequence[int] = ()) -> Sampling:
    """The record of a configuration that HF has filled up."""
    ends = list(eos_token_id)
    if not config.do_sample:
        return Sampling(
            temperature=0.0, eos_token_id=ends, settings=_in_use(config, BEFORE_FILTERS)
        )
    settings = _in_use(config, BEFORE_FILTERS | BESIDE_FILTERS)
    return Sampling(**_in_use(config, FILTERS), eos_token_id=ends, settings=settings)


def check_config(config: GenerationConfig) -> None:
    """Raises `ValueError` where it asks for something that specdec does not do, and warns where it
    asks for something that has no effect.
    """
    for table in (UNSUPPORTED, UNUSED):
        for name, (usual, reason) in table.items():
            value = getattr(config, name, None)
            if value is None or value in usual:
                continue
            if table is UNSUPPORTED:
                raise ValueError(f"{name}={value!r} is not supported: {reason}")
            warnings.warn(f"{name}={value!r} has no effect: {reason}", stacklevel=2)


def _in_use(config: GenerationConfig, names: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of these names that differ from the value that does nothing."""
    values = {name: getattr(config, name, None) for name in names}
    return {n: _plain(v) for n, v in values.items() if v is not None and v != names[n]}


def _plain(value: Any) -> Any:
    """A setting as JSON can hold it, in a form that HF takes as well."""
    if hasattr(value, "to_dict"):  # WatermarkingConfig
        return value.to_dict()
    if isinstance(value, Mapping):  # sequence_bias: by tuples of ids
        return [[list(key), item] for key, item in value.items()]
    return list(value) if isinstance(value, tuple) else value
