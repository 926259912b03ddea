"""`resolve`: options of a call as HF reads them; HF itself resolves them.

`model.generate` accepts a decoding function (`custom_generate`) and hands it everything that it has
resolved from arguments, `generation_config` and the model's defaults. A function that only
keeps its arguments receives exactly what plain `generate` would use, including every logits
processor and stopping criterion of a configuration.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
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

from specdec.arguments import plain_numbers
from specdec.hf.forward import takes_positions
from specdec.hf.generation import BESIDE_FILTERS, FILTERS, HEALING
from specdec.request.options import check_config, sampling_of
from specdec.samplers.logits_filter import LogitsFilter
from specdec.targets import Target


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
