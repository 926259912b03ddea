"""`Request`: prompts and options of one call, checked before anything is computed."""

from __future__ import annotations

import difflib
import inspect
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypedDict, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from specdec.arguments import check_choice, check_integer, name_of, plain_numbers, shown
from specdec.hf.forward import is_prefix_lm
from specdec.hf.generation import FILTERS, HEALING, UNSUPPORTED
from specdec.hf.positions import cause_of_limit
from specdec.hf.prompts import PROMPT_INPUTS, prompt_inputs
from specdec.processes import agreed
from specdec.request.given import Given, GivenRows, by_rows, native
from specdec.request.grammar import GrammarProcessor
from specdec.request.options import (
    check_config,
    ends_among,
    resolve,
    sampling_of,
    split_warpers,
)
from specdec.request.processors import refuse_stateful
from specdec.request.prompts import check_ids, offsets_among, read_batch, read_row_inputs
from specdec.request.sampling import Sampling
from specdec.samplers.logits_filter import LogitsFilter
from specdec.targets import Target
from specdec.targets.prompt_inputs import PromptInputs
from specdec.targets.reading import refuse_text

Method = TypeVar("Method", bound=Callable)


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`, `stream` and `start`, with HF's names and meanings.

    Sampling values and the seed may be a scalar or a sequence of one value per row. What is left
    out comes from `generation_config`, and then from the model's own, as in HF. A temperature above
    0 samples and 0 is greedy, with `do_sample` or without it (HF ignores a temperature that is
    passed alone). Without a seed, a sampled row draws one at random and reports it in the result.
    One seed for all rows gives equal prompts equal samples: pass `seed=list(range(B))` for B
    samples of one prompt.

    `num_return_sequences=n` makes n rows of each prompt. A prompt's seed s stands for s, s + 1, ...
    s + n - 1, and every other value of a prompt for all of its rows; a sequence of B n values sets
    them one by one. `stop_strings` need the `tokenizer`, which the result shows its text with.
    Processors and criteria see each row as it would stand alone: its prompt without padding, then
    its new tokens. (Through HF's hook they see the padded batch, as HF shows it.) As in HF, a stop
    string may begin in the prompt.
    `output_logits` and `output_scores` keep the target's logits of every emitted token, as the
    model returns them and as they were sampled from; `output_logprobs` keeps two numbers of each
    instead, its log-probability in both.

    `draft_probs=False` keeps the probabilities of draft tokens from the sampler: they become point
    masses, which is lossless too and accepts less. It is there to measure the difference.

    Args:
        max_new_tokens: the most that each row may get, >= 1. As in HF, 20 where neither call nor
            configuration sets a length.
        min_new_tokens: no end-of-sequence token is sampled before so many.
        do_sample: whether to sample, where no temperature says so; `False` is greedy, and refused
            beside a temperature above 0.
        temperature: logits are divided by it; above 0 it samples, 0 is greedy.
        top_k: only so many of the most likely tokens are sampled from; 0 for all.
        top_p: only the most likely tokens whose probabilities sum to this; 1 for all.
        min_p: only tokens at least this times as likely as the most likely one; 0 for all.
        seed: of each row, in 0..2**64 - 1. `torch.manual_seed` has no effect on samples.
        eos_token_id: ids that end a row; `[]` for none.
        pad_token_id: fills rows that have ended; without a mask it also marks padding, in front of
            a row's first other token.
        logits_processor: functions of `(ids [1, t], scores [1, V])`, called at every position of a
            draft: HF's own, plain functions, `GrammarProcessor`, and those whose author vouches by
            an attribute `is_stateless = True` that the result depends on the arguments alone.
        stopping_criteria: functions of `(ids [1, t], None)`, called after every token of every row.
        stop_strings: texts that end a row.
        tokenizer: of the target.
        num_return_sequences: n rows for each prompt.
        output_scores: keep the logits that were sampled from.
        output_logits: keep the logits as the model returns them.
        output_logprobs: keep the log-probabilities of the new tokens.
        generation_config: HF's, for everything that is left out.
        neutral: what is left out is at its neutral value (temperature 1, nothing truncated, no
            penalties), not the target's own or HF's (which is 50 for `top_k`); of the target's
            configuration only the ids that end and pad a text are used. `evaluate`, `compare` and
            `certify` generate like this.
        draft_probs: whether the sampler gets the probabilities of draft tokens.
        num_draft_tokens: of each step, at most the drafter's own, which is the default.
        row_inputs: what target and drafter read of each row, by name: tensors or sequences with a
            value for each prompt or row. Every target knows `"position_offset"`, an integer >= 0:
            the row's first token stands at this position. A target with LoRA layers of PEFT's knows
            `"adapter"`: the name of the row's, `"__base__"` for none. A target that reads pictures
            or sound knows `"prompt"`: what its processor returns for each prompt alone, `None` for
            text. A drafter names its own (`Drafter.row_inputs`), an edit of the target likewise.
    """

    max_new_tokens: int
    min_new_tokens: int
    do_sample: bool
    temperature: float | list[float]
    top_k: int | list[int]
    top_p: float | list[float]
    min_p: float | list[float]
    seed: int | list[int]
    eos_token_id: int | list[int]
    pad_token_id: int
    logits_processor: LogitsProcessorList | Sequence[LogitsProcessor]
    stopping_criteria: StoppingCriteriaList | Sequence[StoppingCriteria]
    stop_strings: str | list[str]
    tokenizer: PreTrainedTokenizerBase
    num_return_sequences: int
    output_scores: bool
    output_logits: bool
    output_logprobs: bool
    generation_config: GenerationConfig
    neutral: bool
    draft_probs: bool
    num_draft_tokens: int
    row_inputs: Mapping[str, Tensor | Sequence]


def with_options(method: Method) -> Method:
    """Lists the options one by one in a method's signature, in place of `**options`, so that help
    and completion show them; `None` is the same as left out.
    """
    signature, kind = inspect.signature(method), inspect.Parameter.KEYWORD_ONLY
    *own, _ = signature.parameters.values()
    own += [
        inspect.Parameter(name, kind, default=None, annotation=f"{one.__forward_arg__} | None")
        for name, one in GenerateOptions.__annotations__.items()
    ]
    method.__signature__ = signature.replace(parameters=own)
    return method


_LEAST = {
    "max_new_tokens": 1,
    "num_return_sequences": 1,
    "min_new_tokens": 0,
    "num_draft_tokens": 0,
}
OUTPUTS = {"output_scores", "output_logits", "output_logprobs"}
_FLAGS = {"do_sample", "neutral", "draft_probs"} | OUTPUTS
_OURS = {"seed", "row_inputs", "draft_probs", "num_draft_tokens", "output_logprobs"}
_NUMBERS = {*_LEAST, *_FLAGS, *FILTERS, "eos_token_id", "pad_token_id"}


@dataclass(frozen=True, eq=False)
class Request:
    """One call: prompts and all that was asked for, checked. `read_request` and `request_of` make
    it.

    Args:
        padded: `[B, T]` int64 on the target's device, exactly as it was passed.
        tokens: `[B, T']` int64 on the host, real tokens from column 0; then anything.
        lengths: real tokens of each row.
        max_new_tokens: that each row may get; 0 where the prompts fill the allowed length.
        sampling: the record of what tokens are drawn from.
        logits_filter: arguments of `LogitsFilter`; every value a scalar or one per row.
        seeds: one per row, or `None` for a greedy generation.
        eos: ids that end a row.
        pad: fills a row after its end.
        processors: which rows see which logits processors.
        criteria: stopping criteria other than length and end of sequence, asked by the host.
        is_alone: processors and criteria see each row alone, as natively, and not the batch, as
            through HF's hook.
        draft_probs: whether the sampler gets the probabilities of draft tokens.
        num_draft_tokens: of each step; `None` for the drafter's own K.
        output_scores, output_logits, output_logprobs: what is kept of every new token.
        tokenizer: of the target.
        row_inputs: `[B, ...]` by name, on the host, what steps read of each row.
        prompt_inputs: what the target reads of the prompts where they are more than ids.
        read_prompts: reads the prompts by another target; `None` where they are ids, or where HF
            has read them for this one.
        is_embedded: the prompts are embeddings and have no ids; those of `tokens` stand for them.
    """

    padded: Tensor
    tokens: Tensor
    lengths: list[int]
    max_new_tokens: int
    sampling: Sampling
    logits_filter: dict[str, Any]
    seeds: list[int] | None
    eos: tuple[int, ...] = ()
    pad: int = 0
    processors: tuple[tuple[slice, LogitsProcessorList], ...] = ()
    criteria: StoppingCriteriaList = field(default_factory=StoppingCriteriaList)
    is_alone: bool = True
    draft_probs: bool = True
    num_draft_tokens: int | None = None
    output_scores: bool = False
    output_logits: bool = False
    output_logprobs: bool = False
    tokenizer: PreTrainedTokenizerBase | None = None
    row_inputs: Mapping[str, Tensor] = field(default_factory=dict)
    prompt_inputs: PromptInputs | None = None
    read_prompts: Callable[[Target], PromptInputs] | None = None
    is_embedded: bool = False

    @property
    def step_inputs(self) -> dict[str, Tensor]:
        """All that steps read of each row: what the call brought, and what its prompts are."""
        own = {} if self.prompt_inputs is None else self.prompt_inputs.row_inputs
        return {**self.row_inputs, **{name: value.cpu() for name, value in own.items()}}

    @property
    def prompts(self) -> list[list[int]]:
        """The ids of each row, without padding."""
        rows = zip(self.tokens.tolist(), self.lengths, strict=True)
        return [row[:length] for row, length in rows]

    @cached_property
    def shown_prompts(self) -> list[list[int]]:
        """Each row's prompt as processors and stopping criteria see it: natively without padding,
        through the hook as HF shows it. Embeddings are shown nobody.
        """
        if self.is_embedded:
            return [[] for _ in self.lengths]
        return self.prompts if self.is_alone else self.padded.tolist()

    def filled_to(self, rows: int) -> Request:
        """The call with inert rows after its own, up to so many: prompts of the one token 0, the
        sampling values of the last row, seed 0. Whoever loads it lets them commit nothing.
        """
        missing = rows - len(self.lengths)
        if missing == 0:
            return self
        logits_filter = {
            name: [*value, *value[-1:] * missing] if isinstance(value, list) else value
            for name, value in self.logits_filter.items()
        }
        own = {
            name: torch.cat([value, value[-1:].expand(missing, *value.shape[1:])])
            for name, value in self.row_inputs.items()
        }
        return replace(
            self,
            padded=pad(self.padded, (0, 0, 0, missing)),
            tokens=pad(self.tokens, (0, 0, 0, missing)),
            lengths=[*self.lengths, *[1] * missing],
            logits_filter=logits_filter,
            seeds=None if self.seeds is None else [*self.seeds, *[0] * missing],
            row_inputs=own,
            prompt_inputs=self.prompt_inputs and self.prompt_inputs.filled_to(rows),
        )


def read_request(
    target: Target, input_ids: Tensor | None, attention_mask: Tensor | None, options: dict[str, Any]
) -> Request:
    """A call with `GenerateOptions`, resolved by HF once they are checked for what HF would ignore
    or take for something else.
    """
    input_ids, attention_mask, options = _unpack(target, input_ids, attention_mask, options)
    has_more = not options.keys() <= GenerateOptions.__annotations__.keys()
    beside = native(target, options) if has_more else None
    if beside is None or not beside.is_embedded(input_ids):
        check_ids(input_ids)
    given = _checked(target, options)
    own = {name: given.pop(name) for name in _OURS & given.keys()}
    rows = None
    if isinstance(own.get("row_inputs"), Mapping) and "prompt" in own["row_inputs"]:
        own["row_inputs"], rows = by_rows(own["row_inputs"])
    if rows is not None and beside is not None:
        raise TypeError(
            f"row_inputs['prompt'] says what prompts are, and so do {', '.join(beside.values)}; "
            "leave one of them out"
        )
    beside = beside or rows
    ids = input_ids if beside is None else beside.ids(target, input_ids)
    *asked, of_rows, alone = resolve(target, ids, given)
    passed = [name_of(processor) for processor in given.get("logits_processor", ())]
    return request_of(
        *(target, input_ids, attention_mask, *asked),
        **{"tokenizer": given.get("tokenizer"), "of_rows": of_rows, "alone": alone},
        **{"passed": passed, "beside": beside, **own},
    )


def request_of(
    target: Target,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    of_rows: dict[str, Any] | None = None,
    alone: Callable[[Tensor], LogitsProcessorList] | None = None,
    passed: Sequence[str] = (),
    seed: int | Sequence[int] | None = None,
    row_inputs: Mapping[str, Any] | None = None,
    beside: Given | GivenRows | None = None,
    **own: Any,
) -> Request:
    """The call that HF has resolved. What prompts bring beside ids is read last, when all else is
    known to be right.

    Args:
        target: of the generator.
        input_ids: `[B, T]`.
        attention_mask: as in `generate`. Through HF's hook what comes without one has no padding:
            HF has looked for the padding id itself, and drops masks of ones.
        processors, criteria, config: what HF hands to a decoding function.
        tokenizer: of the target.
        of_rows: values of a filter that only specdec knows.
        alone: makes the processors of one row from its prompt `[1, t]`; `None` where they see the
            padded batch.
        passed: names of the processors that the call itself passed.
        seed: as in `generate`.
        row_inputs: as in `generate`.
        beside: what the prompts are beside ids.
        own: fields of `Request`.

    Raises:
        TypeError, ValueError: a prompt or an option that cannot be right, or what specdec does not
            do; nothing has been computed then.
    """
    check_config(config)
    eos, max_length, others = ends_among(criteria)
    padding_id, copies = config.pad_token_id, config.num_return_sequences or 1
    ids = input_ids if beside is None else beside.ids(target, input_ids)
    if attention_mask is None and beside is not None and beside.is_embedded(input_ids):
        attention_mask = torch.ones_like(ids)
    padded, tokens, lengths = read_batch(
        *(ids, attention_mask),
        **{"vocab_size": target.vocab_size, "device": target.device},
        padding_id=None if alone is None or padding_id in eos else padding_id,
    )
    # One token sees itself only.
    if beside is None and max(lengths) > 1 and is_prefix_lm(target.model):
        refuse_text(target.model)
    if alone is not None and copies > 1:  # through the hook HF has done so
        padded, tokens = (x.repeat_interleave(copies, dim=0) for x in (padded, tokens))
        lengths = [length for length in lengths for _ in range(copies)]
    if beside is not None and alone is None and beside.is_embedded(input_ids):
        max_length += padded.shape[1]  # through the hook HF counts ids
    rows, room = len(lengths), max_length - padded.shape[1]
    inputs = _row_inputs(target, row_inputs, rows, copies if alone is not None else 1)
    _check_room(target, lengths, room, inputs)
    history, logits_filter = split_warpers(processors, config)
    logits_filter = {
        "temperature": 1.0 if config.do_sample else 0.0,
        **logits_filter,
        **(of_rows or {}),
    }
    is_greedy = LogitsFilter(rows, **logits_filter).is_greedy
    request = Request(
        *(padded, tokens, lengths, room),
        sampling=replace(sampling_of(config, eos), **(of_rows or {}), processors=list(passed)),
        logits_filter=logits_filter,
        seeds=None if is_greedy else _read_seeds(target, seed, rows, copies),
        eos=eos,
        pad=padding_id if padding_id is not None else next(iter(eos), 0),
        criteria=others,
        is_alone=alone is not None,
        output_scores=bool(config.return_dict_in_generate and config.output_scores),
        output_logits=bool(config.return_dict_in_generate and config.output_logits),
        tokenizer=tokenizer,
        row_inputs=inputs,
        **own,
    )
    if beside is not None:
        request = _as_passed(request, beside, input_ids)
    request = replace(request, processors=_start_processors(request, history, alone))
    if beside is None:
        return request
    own = copies if alone is not None else 1
    parts = input_ids, attention_mask, lengths[::own], padded.shape[1]

    def read(by: Target) -> PromptInputs:
        prompts = beside.read(by, *parts)
        return prompts.repeated(own) if own > 1 else prompts

    prompts = read(target)
    _check_room(target, lengths, room, prompts.row_inputs)
    is_open = alone is not None and not request.is_embedded
    return replace(request, prompt_inputs=prompts, read_prompts=read if is_open else None)


def _as_passed(request: Request, beside: Given | GivenRows, input_ids: Tensor | None) -> Request:
    """The call with ids as they were passed: those of pictures may lie beyond the vocabulary, and
    embeddings have none.
    """
    if "position_offset" in request.row_inputs:
        raise ValueError(
            "row_inputs['position_offset'] has no effect in a call that brings more than ids: the "
            "model's own generate() prepares its positions; leave it out"
        )
    if beside.is_embedded(input_ids):
        return replace(request, padded=request.padded[:, :0], is_embedded=True)
    rows, own = len(request.padded), input_ids.to(request.padded.device).long()
    return replace(request, padded=own.repeat_interleave(rows // len(own), dim=0))


def _row_inputs(
    target: Target, given: Mapping[str, Any] | None, rows: int, copies: int
) -> dict[str, Tensor]:
    # A drafter may declare an input of this name, of numbers, for a target without adapters.
    adapters = given.get("adapter") if isinstance(given, Mapping) else None
    if adapters is not None and ("adapter" in target.row_inputs or _are_names(adapters)):
        given = {**given, "adapter": target.adapter_indices(adapters)}
    return read_row_inputs(given, rows, copies)


def _check_room(
    target: Target, lengths: list[int], room: int, row_inputs: Mapping[str, Tensor]
) -> None:
    """Raises `ValueError` for texts that are longer than the target has positions for, and where
    the target was changed so that it cannot be decoded.
    """
    offsets = offsets_among(row_inputs)
    longest = max(n + offset for n, offset in zip(lengths, offsets, strict=False))
    total, limit = longest + room, target.max_positions
    if limit is not None and total > limit:
        shorter = f" or pass max_new_tokens <= {limit - longest}" if longest < limit else ""
        raise ValueError(
            f"a prompt of {longest} tokens and {room} new tokens make {total}, "
            f"but the target has {limit} positions{cause_of_limit(target.config)}; shorten the "
            f"prompt{shorter}"
        )
    target.check_unchanged(num_tokens=total)


def _checked(target: Target, options: dict[str, Any]) -> dict[str, Any]:
    """`GenerateOptions` but for those that are `None`, with numbers of Python's."""
    for name in options.keys() - GenerateOptions.__annotations__.keys():
        near = difflib.get_close_matches(name, GenerateOptions.__annotations__, n=1)
        hint = f"known are {', '.join(GenerateOptions.__annotations__)}; other options of HF "
        hint += "generate work through model.generate(..., custom_generate=generator)"
        if name in PROMPT_INPUTS:
            hint = f"{type(target.model).__name__} has no such input; leave it out"
        elif name == "token_type_ids":
            hint = "decoder-only models have no such input; leave it out"
        elif name == "token_healing":
            hint = HEALING
        elif name in UNSUPPORTED:
            hint = UNSUPPORTED[name][1]
        elif near:
            hint = f"did you mean {near[0]!r}?"
        raise TypeError(f"unknown option {name!r}: {hint}")
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
    return options


def _check_functions(name: str, given: Any) -> None:
    """Refuses what is no list of functions."""
    if not isinstance(given, list | tuple):
        raise TypeError(f"{name} must be a list of functions, got {shown(given)}")
    for one in given:
        if isinstance(one, type) or not callable(one):
            raise TypeError(f"{name} must hold functions of (ids, scores), got {shown(one)}")


def _are_names(given: Any) -> bool:
    """A text, or a sequence with texts in it."""
    is_list = isinstance(given, Sequence)
    return isinstance(given, str) or (is_list and any(isinstance(one, str) for one in given))


def _unpack(
    target: Target,
    input_ids: Tensor | Mapping | None,
    attention_mask: Tensor | None,
    options: dict[str, Any],
) -> tuple[Tensor | None, Tensor | None, dict[str, Any]]:
    """Ids and mask, which a tokenizer returns as one object, and a processor with all that its
    model reads of a prompt; that is among the options returned.
    """
    if not isinstance(input_ids, Mapping):
        return input_ids, attention_mask, dict(options)
    own = prompt_inputs(target.model)
    read = {name: value for name, value in input_ids.items() if name in own}
    surplus = input_ids.keys() - {"input_ids", "attention_mask", "token_type_ids"} - own
    twice = read.keys() & options.keys()
    if (
        not input_ids.keys() & {"input_ids", "inputs_embeds"}
        or surplus
        or twice
        or (attention_mask is not None)
    ):
        raise TypeError(
            "expected input_ids as a tensor, or a tokenizer's output with input_ids and "
            f"attention_mask in one object; got one with {', '.join(map(str, input_ids))}"
            + (" and an attention_mask beside it" if attention_mask is not None else "")
        )
    return input_ids.get("input_ids"), input_ids.get("attention_mask"), {**options, **read}


def _start_processors(
    request: Request,
    processors: LogitsProcessorList,
    alone: Callable[[Tensor], LogitsProcessorList] | None,
) -> tuple[tuple[slice, LogitsProcessorList], ...]:
    """See `Request.processors`; refuses those that may keep state."""
    if not processors:
        return ()
    refuse_stateful(processors)

    def started(processor: LogitsProcessor, ids: Tensor, first_row: int) -> LogitsProcessor:
        is_grammar = isinstance(processor, GrammarProcessor)
        return processor.start(ids, first_row) if is_grammar else processor

    groups = [(slice(0, len(request.lengths)), request.padded, processors)]
    if alone is not None:
        split = request.tokens.to(request.padded.device).split(1)
        shown = [0] * len(split) if request.is_embedded else request.lengths
        rows = [row[:, :length] for row, length in zip(split, shown, strict=True)]
        groups = [(slice(n, n + 1), ids, alone(ids)) for n, ids in enumerate(rows)]
    return tuple(
        (rows, LogitsProcessorList(started(p, ids, rows.start) for p in processors))
        for rows, ids, processors in groups
    )


def _read_seeds(
    target: Target, seed: int | Sequence[int] | Tensor | None, rows: int, copies: int
) -> list[int]:
    if seed is None:
        return _random_seeds(target, rows)
    seed = plain_numbers(seed)
    seeds = list(seed) if isinstance(seed, Sequence) else [seed] * (rows // copies)
    for value in seeds:
        check_integer("seed", value, 0, 2**64 - 1)
    if len(seeds) * copies == rows:
        seeds = [(value + copy) % 2**64 for value in seeds for copy in range(copies)]
    if len(seeds) != rows:
        raise ValueError(
            f"seed has {len(seeds)} values for a batch of {rows} rows; give one per row, or a "
            "single value"
        )
    return seeds


def _random_seeds(target: Target, rows: int) -> list[int]:
    """A seed per row; the same in all processes over which a target is spread."""
    return agreed([secrets.randbits(64) for _ in range(rows)], target.model)
