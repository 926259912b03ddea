"""Options of a call, checked for what HF would ignore or take for something else, and read the way
HF reads them: HF itself resolves them.

`model.generate` accepts a decoding function (`custom_generate`) and hands it everything that it has
resolved from arguments, `generation_config` and the model's defaults. A function that only
keeps its arguments receives exactly what plain `generate` would use, including every logits
processor and stopping criterion of a configuration.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from specdec.arguments import check_choice, check_integer, plain_numbers, shown
from specdec.hf.forward import takes_positions
from specdec.hf.generation import (
    BEFORE_FILTERS,
    BESIDE_FILTERS,
    FILTERS,
    HEALING,
    UNSUPPORTED,
    UNUSED,
)
from specdec.request.keywords import OUTPUTS, GenerateOptions
from specdec.request.sampling import Sampling
from specdec.samplers.logits_filter import LogitsFilter
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


def resolve(target: Target, input_ids: Tensor, given: dict[str, Any]) -> tuple[Any, ...]:
    """What `target.model.generate(input_ids, **given)` would do.

    Args:
        target: whose model.
        input_ids: `[B, T]`, padded.
        given: some of `GenerateOptions`, checked, of HF's alone; `None` turns a setting off.

    Returns:
        What HF hands to a decoding function: processors, criteria and configuration; then values of
        a filter that HF does not know, and what makes the processors of one row from its prompt
        `[1, t]` without its padding.
    """
    given = dict(given)
    is_neutral = given.pop("neutral", False)
    model = neutral(target.model) if is_neutral else target.model
    logits_filter = {name: given.pop(name) for name in FILTERS if given.get(name) is not None}
    of_config = getattr(given.get("generation_config"), "do_sample", None) is False
    is_greedy = not given["do_sample"] if "do_sample" in given else of_config
    # Set below, together with `do_sample`: HF raises an error beside do_sample=False.
    several = given.pop("num_return_sequences", 0)  # 0 where it is left out
    config, given = _merged(model.generation_config, given)
    check_config(config)
    copies = (config.num_return_sequences if several == 0 else several) or 1
    rows = copies * len(input_ids)
    target.check_room(rows, input_ids.shape[1])  # before anything is made for each row
    logits_filter = {
        name: _per_sequence(value, rows, copies) for name, value in logits_filter.items()
    }
    LogitsFilter(rows, **logits_filter)
    hot = _any_above_zero(logits_filter.get("temperature", 0))
    if hot and is_greedy:
        from specdec.request.refusals import refuse_temperature

        refuse_temperature(logits_filter["temperature"])
    config.update(do_sample=hot or config.do_sample, num_return_sequences=copies)
    if is_neutral and config.do_sample and config.top_k is None:
        config.top_k = FILTERS["top_k"]  # HF takes 50 for one that is not set
    if not config.do_sample:
        if logits_filter.keys() - {"temperature"}:
            from specdec.request.refusals import refuse_filter

            refuse_filter(logits_filter)
        logits_filter = {}
    # HF applies a value of all rows among the other processors of a configuration. Only specdec
    # knows values of single rows, and temperature 0.
    of_rows = {
        n: v
        for n, v in logits_filter.items()
        if isinstance(v, list) or (n, v) == ("temperature", 0)
    }
    uniform = {n: v for n, v in logits_filter.items() if n not in of_rows}
    config.update(**{n: int(v) if n == "top_k" else float(v) for n, v in uniform.items()})
    passed = given.get("logits_processor", ())
    *resolved, alone = _resolved(with_config(model, config), input_ids, **given)
    if of_rows:
        from specdec.request.refusals import check_values_of_rows

        others = sampling_of(resolved[2]).settings.keys() & BESIDE_FILTERS
        check_values_of_rows(of_rows, others, passed)
    return *resolved, of_rows, alone


def _merged(own: GenerationConfig, options: dict) -> tuple[GenerationConfig, dict]:
    """One configuration of a call: keywords, then its `generation_config`, then the model's own, as
    in HF; and the keywords that HF still has to see. Those that turn a setting off are among them:
    HF fills a configuration's `None` with its own defaults.
    """
    given = options.pop("generation_config", None)
    config = GenerationConfig() if given is None else copy.deepcopy(given)
    config.update(**own.to_dict(), defaults_only=True, allow_custom_entries=True)
    config.return_dict_in_generate = True  # a result holds what HF's record would
    off = {name: value for name, value in options.items() if value is None}
    return config, config.update(**options) | off


def _resolved(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    **given,
) -> tuple[Any, ...]:
    """What HF makes of a model's own configuration and of processors and criteria for a batch, and
    of the processors of one row of it.

    HF takes `None` for no end-of-sequence id. It keeps the tokenizer from decoding functions and
    then misses it, so it must not see stop strings.
    """
    config = model.generation_config
    if config.token_healing:
        raise ValueError(f"token_healing=True is not supported: {HEALING}")
    criteria = StoppingCriteriaList(stopping_criteria or ())
    if config.stop_strings is not None:
        from specdec.request.stop_strings import with_stop_strings

        criteria = with_stop_strings(criteria, config.stop_strings, tokenizer)
        config.stop_strings = None
    # Or HF would make a cache, with a layer for each of the model's.
    config.use_cache, config.cache_implementation = False, None
    if config.eos_token_id in ([], ()):
        config.eos_token_id = None
    if takes_positions(model):  # or HF may note those that it makes down in the model's modules
        given["position_ids"] = torch.zeros_like(input_ids)
    own, width = LogitsProcessorList(given.pop("logits_processor", ())), input_ids.shape[1]
    notes = []

    def take_notes(model, input_ids, logits_processor, stopping_criteria, generation_config, **_):
        def alone(ids: Tensor) -> LogitsProcessorList:
            from specdec.request.alone import processors_alone

            return processors_alone(model, generation_config, own, width, ids)

        notes.extend((logits_processor, stopping_criteria, generation_config, alone))
        return input_ids

    # An instance's own `generate`, through a generator, would be that of the model that was copied.
    type(model).generate(
        model,
        input_ids,
        attention_mask=torch.ones_like(input_ids),  # padding is ours: no warning about it
        logits_processor=own,
        stopping_criteria=criteria,
        custom_generate=take_notes,
        **given,
    )
    return tuple(notes)


def _per_sequence(value, rows: int, copies: int):
    """A value for each prompt as a list of one for each of its rows; other values as they are."""
    value = plain_numbers(value)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return value
    is_of_prompts = copies > 1 and len(value) * copies == rows
    return [item for item in value for _ in range(copies if is_of_prompts else 1)]


def _any_above_zero(temperature: float | list[float]) -> bool:
    return max(temperature if isinstance(temperature, list) else [temperature]) > 0


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


def with_config(model: PreTrainedModel, config: GenerationConfig) -> PreTrainedModel:
    """The same model, as HF resolves options with another configuration; the model is left as it
    is.
    """
    other = object.__new__(type(model))  # a class of FSDP2's raises in `copy`
    vars(other).update(vars(model))
    other.generation_config = config
    return other


def neutral(model: PreTrainedModel) -> PreTrainedModel:
    """A shallow copy of a model, over the same weights, whose `generation_config` sets nothing but
    the ids that begin, end and pad a text.
    """
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: getattr(model.generation_config, name) for name in names}
    return with_config(model, GenerationConfig(**ids))


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
