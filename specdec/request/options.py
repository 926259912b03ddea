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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria

from specdec.arguments import check_choice, check_integer, name_of, plain_numbers, shown
from specdec.hf.forward import takes_positions
from specdec.hf.generation import (
    BEFORE_FILTERS,
    BESIDE_FILTERS,
    FILTERS,
    HEALING,
    UNSUPPORTED,
    UNUSED,
    processors_of,
)
from specdec.request.keywords import OUTPUTS, GenerateOptions
from specdec.request.sampling import Sampling
from specdec.samplers.logits_filter import LogitsFilter
from specdec.targets import Target

WARPERS = {  # in HF's order, with the attribute that holds the value
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}

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
    config = options.get("generation_config")
    if not isinstance(config, GenerationConfig | None):
        raise TypeError(
            f"generation_config must be a GenerationConfig, got {shown(config)}; "
            "GenerationConfig(**options) makes one"
        )
    tokenizer = options.get("tokenizer")
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise TypeError(f"tokenizer must be the target's, got {shown(tokenizer)}")
    least, most = options.get("min_new_tokens", 0), options.get("max_new_tokens")
    if most is not None and least > most:
        raise ValueError(f"min_new_tokens={least} is more than max_new_tokens={most}")
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


def with_stop_strings(
    criteria: StoppingCriteriaList | None,
    stop_strings: str | list[str] | None,
    tokenizer: PreTrainedTokenizerBase | None,
) -> StoppingCriteriaList:
    """Stopping criteria with HF's own for stop strings among them.

    Raises:
        ValueError: no tokenizer, or an empty stop string, which some tokenizers would meet at once.
    """
    criteria = StoppingCriteriaList(criteria or ())
    if stop_strings is None:
        return criteria
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
        return StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, strings)])


Resolved = tuple[
    LogitsProcessorList,
    StoppingCriteriaList,
    GenerationConfig,
    dict[str, Any],
    Callable[[Tensor], LogitsProcessorList],
]


def resolve(target: Target, input_ids: Tensor, given: dict[str, Any]) -> Resolved:
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
        raise ValueError(
            f"do_sample=False is greedy, and temperature={logits_filter['temperature']!r} samples; "
            "leave one of them out"
        )
    config.update(do_sample=hot or config.do_sample, num_return_sequences=copies)
    if is_neutral and config.do_sample and config.top_k is None:
        config.top_k = FILTERS["top_k"]  # HF takes 50 for one that is not set
    if not config.do_sample:
        for name, value in logits_filter.items():
            if name != "temperature":
                raise ValueError(
                    f"{name}={value!r} has no effect without sampling; pass a temperature above 0 "
                    "or do_sample=True with it, or leave it out"
                )
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
        others = sampling_of(resolved[2]).settings.keys() & BESIDE_FILTERS
        others = [*others, *(name_of(p) for p in passed if type(p) in WARPERS)]
        if others:
            raise ValueError(
                f"{', '.join(of_rows)} cannot be set per row beside {', '.join(others)}, which HF "
                "applies in an order of its own; give one value for all rows, or leave the others "
                "out"
            )
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
    criteria = with_stop_strings(stopping_criteria, config.stop_strings, tokenizer)
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
        alone = partial(_processors_alone, model, generation_config, own, width)
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


def _processors_alone(
    model: PreTrainedModel,
    config: GenerationConfig,
    own: LogitsProcessorList,
    width: int,
    ids: Tensor,
) -> LogitsProcessorList:
    """What HF makes of a configuration for a prompt `[1, t]` of a batch of this width: its row gets
    as many new tokens, and all that is counted from the prompt is counted from its own.
    """
    config, missing = copy.copy(config), width - ids.shape[1]
    config.max_length -= missing
    if config.min_new_tokens is not None:  # HF has made a min_length of it
        config.min_length -= missing
    processors = processors_of(
        model,
        config,
        input_ids_seq_length=ids.shape[1],
        encoder_input_ids=ids,
        logits_processor=own,
        device=ids.device,
        model_kwargs={"attention_mask": torch.ones_like(ids) if ids.numel() else None},
    )
    return split_warpers(processors, config)[0]


def _per_sequence(value, rows: int, copies: int):
    """A value for each prompt as a list of one for each of its rows; other values as they are."""
    value = plain_numbers(value)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return value
    is_of_prompts = copies > 1 and len(value) * copies == rows
    return [item for item in value for _ in range(copies if is_of_prompts else 1)]


def _any_above_zero(temperature: float | list[float]) -> bool:
    return max(temperature if isinstance(temperature, list) else [temperature]) > 0


def split_warpers(
    processors: LogitsProcessorList, config: GenerationConfig
) -> tuple[LogitsProcessorList, dict[str, Any]]:
    """History-dependent processors, and the values of the four warpers if these close the list in
    HF's order and the configuration samples.

    Another order, or another warper after them, gives other probabilities: then the whole list is
    applied as it stands.
    """
    if not config.do_sample:
        return processors, {}
    split = len(processors)
    while split and type(processors[split - 1]) in WARPERS:
        split -= 1
    tail = processors[split:]
    ranks = [list(WARPERS).index(type(warper)) for warper in tail]
    if ranks != sorted(set(ranks)):
        return processors, {}
    values = {WARPERS[type(warper)]: getattr(warper, WARPERS[type(warper)]) for warper in tail}
    return LogitsProcessorList(processors[:split]), values


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
