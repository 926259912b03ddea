"""Reads Hugging Face generation options the way HF reads them: HF itself resolves them.

`model.generate` accepts a decoding function (`custom_generate`) and hands it everything that it has
resolved from arguments, `generation_config` and the model's defaults. A function that only
keeps its arguments receives exactly what plain `generate` would use, including every logits
processor and stopping criterion of a configuration.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
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

from specdec.arguments import plain_numbers, shown
from specdec.hf import BESIDE_WARPS, HEALING, UNSUPPORTED, WARPS
from specdec.request.processors import name_of
from specdec.request.sampling import Sampling, neutral, with_config
from specdec.samplers.warp import Warp
from specdec.target import Target

WARPERS = {  # in HF's order, with the attribute that holds the value
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


@dataclass(frozen=True, eq=False)
class Options:
    """What a generation was asked to do."""

    sampling: Sampling = field(default_factory=Sampling)
    warp: dict = field(default_factory=dict)  # of `Warp`; every value a scalar or one per row
    # Logits processors that need the tokens so far, as HF builds them for the padded batch; and a
    # function that returns those for one row's prompt [1, t] without its padding, or `None` where
    # processors see the padded batch.
    processors: LogitsProcessorList = field(default_factory=LogitsProcessorList)
    processors_alone: Callable[[Tensor], LogitsProcessorList] | None = None
    # Stopping criteria other than length and end of sequence, asked by the host.
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    eos: tuple[int, ...] = ()
    pad: int = 0  # fills a row after its end
    max_length: int = 0  # of a row's padded prompt and its new tokens together
    padding_id: int | None = None  # stands for padding in prompts passed without a mask, as in HF
    draft_probs: bool = True
    num_draft_tokens: int | None = None  # of each step; `None` for the drafter's own K
    num_sequences: int = 1  # rows of each prompt
    output_scores: bool = False
    output_logits: bool = False
    output_logprobs: bool = False
    tokenizer: PreTrainedTokenizerBase | None = None

    @classmethod
    def from_resolved(
        cls,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> Options:
        """Takes what HF hands to a decoding function; raises `ValueError` where it asks for
        something that specdec does not do.
        """
        for name, (usual, reason) in UNSUPPORTED.items():
            value = getattr(config, name, None)
            if value is not None and value not in usual:
                raise ValueError(f"{name}={value!r} is not supported: {reason}")
        ends = [c.eos_token_id for c in criteria if isinstance(c, EosTokenCriteria)]
        eos = torch.cat(ends).tolist() if ends else []
        limits = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
        others = [c for c in criteria if not isinstance(c, EosTokenCriteria | MaxLengthCriteria)]
        padding_id = config.pad_token_id
        history, warp = _split_warpers(processors, config)
        return cls(
            sampling=Sampling.resolved(config, eos),
            warp={"temperature": 1.0 if config.do_sample else 0.0} | warp,
            processors=LogitsProcessorList(history),
            criteria=StoppingCriteriaList(others),
            eos=tuple(eos),
            pad=padding_id if padding_id is not None else next(iter(eos), 0),
            max_length=min(limits),
            padding_id=None if padding_id in eos else padding_id,
            num_sequences=config.num_return_sequences or 1,
            output_scores=bool(config.return_dict_in_generate and config.output_scores),
            output_logits=bool(config.return_dict_in_generate and config.output_logits),
            tokenizer=tokenizer,
        )


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


def resolve_options(target: Target, input_ids: Tensor, given: dict) -> Options:
    """What `target.model.generate(input_ids, **given)` would do, and specdec's own options: some of
    `GenerateOptions`, checked, none of which is `None`.
    """
    given = dict(given)
    names = "draft_probs", "num_draft_tokens", "output_logprobs"
    own = {name: given.pop(name) for name in names if name in given}
    is_neutral = given.pop("neutral", False)
    model = neutral(target.model) if is_neutral else target.model
    warp = {name: given.pop(name) for name in WARPS if name in given}
    said = given.get("do_sample", getattr(given.get("generation_config"), "do_sample", None))
    # Set below, together with `do_sample`: HF refuses it beside do_sample=False.
    several = given.pop("num_return_sequences", None)
    config, given = _merged(model.generation_config, given)
    copies = several or config.num_return_sequences or 1
    rows = copies * len(input_ids)
    target.check_room(rows, input_ids.shape[1])  # before anything is made for each row
    warp = {name: _per_sequence(value, rows, copies) for name, value in warp.items()}
    Warp(rows, **warp)
    hot = _any_above_zero(warp.get("temperature", 0))
    if hot and said is False:
        raise ValueError(
            f"do_sample=False is greedy, and temperature={warp['temperature']!r} samples; leave "
            "one of them out"
        )
    config.update(do_sample=hot or config.do_sample, num_return_sequences=copies)
    if is_neutral and config.do_sample and config.top_k is None:
        config.top_k = WARPS["top_k"]  # HF takes 50 for one that is not set
    if not config.do_sample:
        for name, value in warp.items():
            if name != "temperature":
                raise ValueError(
                    f"{name}={value!r} has no effect without sampling; pass a temperature above 0 "
                    "or do_sample=True with it, or leave it out"
                )
        warp = {}
    # HF applies a value of all rows among the other processors of a configuration. Only specdec
    # knows values of single rows, and temperature 0.
    of_rows = {n: v for n, v in warp.items() if isinstance(v, list) or (n, v) == ("temperature", 0)}
    uniform = {n: v for n, v in warp.items() if n not in of_rows}
    config.update(**{n: int(v) if n == "top_k" else float(v) for n, v in uniform.items()})
    resolved = _resolved(with_config(model, config), input_ids, **given)
    passed = given.get("logits_processor", ())
    sampling = replace(resolved.sampling, **of_rows, processors=[name_of(p) for p in passed])
    if of_rows:
        others = [name for name in sampling.settings if name in BESIDE_WARPS]
        others += [name_of(p) for p in passed if type(p) in WARPERS]
        if others:
            raise ValueError(
                f"{', '.join(of_rows)} cannot be set per row beside {', '.join(others)}, which HF "
                "applies in an order of its own; give one value for all rows, or leave the others "
                "out"
            )
    return replace(resolved, warp=resolved.warp | of_rows, sampling=sampling, **own)


class LastOptions:
    """`resolve_options`, which takes HF a millisecond, for a generator's calls: one that differs
    from the call before in nothing but the length and the tokens of its prompts gets its result.

    So it is where that depends on plain values alone, whose texts are compared: the options, the
    configurations, the number of rows. Where there are processors, criteria, tokenizers, other
    settings than a warp's (a `min_length` counts the prompt) or a `max_length`, HF is asked anew. A
    copied or pickled one remembers nothing.
    """

    def __init__(self):
        self._last: tuple[str, Options] | None = None  # replaced as a whole, for other threads

    def __reduce__(self) -> tuple:
        return LastOptions, ()

    def __call__(self, target: Target, input_ids: Tensor, given: dict) -> Options:
        """As `resolve_options`."""
        rows, width, last = *input_ids.shape, self._last
        own, config = target.model.generation_config, given.get("generation_config")
        values = [given, vars(own), _plain_values(vars(target.model.config))]
        if config is not None:
            values = [given | {"generation_config": vars(config)}, *values[1:]]
        key = repr((rows, values)) if _is_plain(values) else None
        if last is not None and key == last[0]:
            target.check_room(last[1].num_sequences * rows, width)
            return replace(last[1], max_length=width + given["max_new_tokens"])
        options = resolve_options(target, input_ids, given)
        lengths = {own.max_length, getattr(config, "max_length", None)}
        is_by_room = "max_new_tokens" in given and lengths == {None}
        others = options.processors, options.criteria, options.tokenizer, options.sampling.settings
        if key is not None and is_by_room and not any(others):
            self._last = key, options
        return options


def _is_plain(value: object) -> bool:
    """Numbers, texts and `None`, also in lists, tuples and dictionaries: what its text shows."""
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _plain_values(values: dict) -> dict:
    return {name: value for name, value in values.items() if _is_plain(value)}


def _merged(own: GenerationConfig, options: dict) -> tuple[GenerationConfig, dict]:
    """One configuration of a call: keywords, then its `generation_config`, then the model's own, as
    in HF; and the keywords that are no settings.
    """
    given = options.pop("generation_config", None)
    config = GenerationConfig() if given is None else copy.deepcopy(given)
    config.update(**own.to_dict(), defaults_only=True, allow_custom_entries=True)
    config.return_dict_in_generate = True  # a result holds what HF's record would
    return config, config.update(**options)


def _resolved(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    **given,
) -> Options:
    """What HF makes of a model's own configuration and of processors and criteria for a batch.

    HF takes `None` for no end-of-sequence id. It keeps the tokenizer from decoding functions and
    then misses it, so it must not see stop strings.
    """
    config = model.generation_config
    if config.token_healing:
        raise ValueError(f"token_healing=True is not supported: {HEALING}")
    criteria = with_stop_strings(stopping_criteria, config.stop_strings, tokenizer)
    config.stop_strings = None
    if config.cache_implementation is None:
        config.use_cache = False  # or HF would make one, with a layer for each of the model's
    if config.eos_token_id in ([], ()):
        config.eos_token_id = None
    own, width = LogitsProcessorList(given.pop("logits_processor", ())), input_ids.shape[1]
    notes = []

    def take_notes(model, input_ids, logits_processor, stopping_criteria, generation_config, **_):
        resolved = logits_processor, stopping_criteria, generation_config
        taken = Options.from_resolved(*resolved, tokenizer)

        def alone(ids: Tensor) -> LogitsProcessorList:
            return _processors_alone(model, generation_config, own, ids, width)

        notes.append(replace(taken, processors_alone=alone))
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
    return notes[0]


def _processors_alone(
    model: PreTrainedModel,
    config: GenerationConfig,
    own: LogitsProcessorList,
    ids: Tensor,
    width: int,
) -> LogitsProcessorList:
    """What HF makes of a configuration for a prompt `[1, t]` of a batch of this width: its row gets
    as many new tokens, and all that is counted from the prompt is counted from its own.
    """
    config, missing = copy.copy(config), width - ids.shape[1]
    config.max_length -= missing
    if config.min_new_tokens is not None:  # HF has made a min_length of it
        config.min_length -= missing
    processors = model._get_logits_processor(
        config,
        input_ids_seq_length=ids.shape[1],
        encoder_input_ids=ids,
        logits_processor=own,
        device=ids.device,
        model_kwargs={"attention_mask": torch.ones_like(ids)},
    )
    return LogitsProcessorList(_split_warpers(processors, config)[0])


def _per_sequence(value, rows: int, copies: int):
    """A value for each prompt as a list of one for each of its rows; other values as they are."""
    value = plain_numbers(value)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return value
    is_of_prompts = copies > 1 and len(value) * copies == rows
    return [item for item in value for _ in range(copies if is_of_prompts else 1)]


def _any_above_zero(temperature: float | list[float]) -> bool:
    return max(temperature if isinstance(temperature, list) else [temperature]) > 0


def _split_warpers(
    processors: LogitsProcessorList, config: GenerationConfig
) -> tuple[list[LogitsProcessor], dict]:
    """History-dependent processors, and the values of the four warpers if these close the list in
    HF's order and the configuration samples.

    Another order, or another warper after them, gives other probabilities: then the whole list is
    applied as it stands.
    """
    if not config.do_sample:
        return list(processors), {}
    split = len(processors)
    while split and type(processors[split - 1]) in WARPERS:
        split -= 1
    tail = processors[split:]
    ranks = [list(WARPERS).index(type(warper)) for warper in tail]
    if ranks != sorted(set(ranks)):
        return list(processors), {}
    values = {WARPERS[type(warper)]: getattr(warper, WARPERS[type(warper)]) for warper in tail}
    return list(processors[:split]), values
