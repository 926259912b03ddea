"""`Request`: inputs and options of one call, checked before anything is computed."""

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
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from specdec.arguments import check_choice, check_integer, plain_numbers, shown
from specdec.hf import HEALING, UNSUPPORTED, WARPS
from specdec.processes import agreed
from specdec.request.grammar import GrammarProcessor
from specdec.request.options import Options, resolve_options
from specdec.request.processors import refuse_stateful
from specdec.request.prompts import Prompts, check_ids, offsets_among, read_row_inputs
from specdec.samplers.warp import Warp
from specdec.target import Target

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
            `"adapter"`: the name of the row's, `"__base__"` for none. A drafter names its own
            (`Drafter.row_inputs`).
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
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
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
_NUMBERS = {*_LEAST, *_FLAGS, *WARPS, "eos_token_id", "pad_token_id"}


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of one call. `read` and `from_hook` check them.

    Args:
        prompts: the batch.
        options: HF's options, resolved.
        seeds: one per row, or `None` for a greedy generation.
        processors: which rows see which logits processors. Natively each row has its own and sees
            them alone, through the hook they see the batch.
        row_inputs: `[B, ...]` by name, on the host, what steps read of each row.
    """

    prompts: Prompts
    options: Options
    seeds: list[int] | None
    processors: tuple[tuple[slice, LogitsProcessorList], ...] = ()
    row_inputs: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def max_new_tokens(self) -> int:
        """Tokens that each row may get; 0 where the prompts fill the allowed length."""
        return self.options.max_length - self.prompts.padded.shape[1]

    @property
    def is_alone(self) -> bool:
        """Processors and stopping criteria see each row alone, and not the batch."""
        return self.options.processors_alone is not None

    @cached_property
    def shown_prompts(self) -> list[list[int]]:
        """Each row's prompt as processors and stopping criteria see it: natively without padding,
        through the hook as HF shows it.
        """
        return self.prompts.padded.tolist() if not self.is_alone else self.prompts.rows

    def filled_to(self, rows: int) -> Request:
        """The call with inert rows after its own, up to so many: prompts of one token, the sampling
        values of the last row, seed 0. Whoever loads it lets them commit nothing.
        """
        missing = rows - len(self.prompts.lengths)
        if missing == 0:
            return self
        warp = {
            name: [*value, *value[-1:] * missing] if isinstance(value, list) else value
            for name, value in self.options.warp.items()
        }
        seeds = None if self.seeds is None else [*self.seeds, *[0] * missing]
        own = {
            name: torch.cat([value, value[-1:].expand(missing, *value.shape[1:])])
            for name, value in self.row_inputs.items()
        }
        filled = {"prompts": self.prompts.filled_to(rows), "seeds": seeds, "row_inputs": own}
        return replace(self, options=replace(self.options, warp=warp), **filled)

    @classmethod
    def read(
        cls,
        target: Target,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        options: dict,
        resolve: Callable[[Target, Tensor, dict], Options] = resolve_options,
    ) -> Request:
        """Reads a call with `GenerateOptions`, which `resolve` resolves once they are checked."""
        input_ids, attention_mask = _unpack(input_ids, attention_mask)
        check_ids(input_ids)
        resolved = read_options(target, input_ids, options, resolve)
        prompts = Prompts.read(
            input_ids,
            attention_mask,
            vocab_size=target.vocab_size,
            device=target.device,
            padding_id=resolved.padding_id,
        )
        if resolved.num_sequences > 1:
            prompts = prompts.repeated(resolved.num_sequences)
        own = options.get("row_inputs")
        # A drafter may declare an input of this name, of numbers, for a target without adapters.
        adapters = own.get("adapter") if isinstance(own, Mapping) else None
        if adapters is not None and ("adapter" in target.row_inputs or _are_names(adapters)):
            own = {**own, "adapter": target.adapter_indices(adapters)}
        own = read_row_inputs(own, len(prompts.lengths), resolved.num_sequences)
        return cls._checked(target, prompts, resolved, options.get("seed"), own)

    @classmethod
    def from_hook(
        cls,
        target: Target,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        options: Options,
        seed: int | Sequence[int] | None,
    ) -> Request:
        """Reads a call that HF has resolved already. What it passes on without a mask has no
        padding: it has looked for the padding id itself, and drops masks of ones.
        """
        vocab_size, device = target.vocab_size, target.device
        prompts = Prompts.read(input_ids, attention_mask, vocab_size=vocab_size, device=device)
        return cls._checked(target, prompts, options, seed)

    @classmethod
    def _checked(
        cls,
        target: Target,
        prompts: Prompts,
        options: Options,
        seed: Any,
        row_inputs: Mapping[str, Tensor] | None = None,
    ) -> Request:
        target.check_unchanged()
        rows, room = len(prompts.lengths), options.max_length - prompts.padded.shape[1]
        row_inputs = row_inputs or {}
        offsets = offsets_among(row_inputs)
        longest = max(n + offset for n, offset in zip(prompts.lengths, offsets, strict=False))
        total, limit = longest + room, target.max_positions
        if limit is not None and total > limit:
            shorter = f" or pass max_new_tokens <= {limit - longest}" if longest < limit else ""
            raise ValueError(
                f"a prompt of {longest} tokens and {room} new tokens make {total}, "
                f"but the target has {limit} positions; shorten the prompt{shorter}"
            )
        seeds = None
        if not Warp(rows, **options.warp).is_greedy:
            seeds = _read_seeds(target, seed, rows, options.num_sequences)
        return cls(prompts, options, seeds, _start_processors(prompts, options), row_inputs)


def read_options(
    target: Target,
    input_ids: Tensor,
    options: dict,
    resolve: Callable[[Target, Tensor, dict], Options] = resolve_options,
) -> Options:
    """Resolves some of `GenerateOptions`, checked for what HF would ignore or take for something
    else. Seed and row inputs are left out, and so is what is `None`.
    """
    for name in options.keys() - GenerateOptions.__annotations__.keys():
        near = difflib.get_close_matches(name, GenerateOptions.__annotations__, n=1)
        hint = f"known are {', '.join(GenerateOptions.__annotations__)}; other options of HF "
        hint += "generate work through model.generate(..., custom_generate=generator)"
        if name == "token_type_ids":
            hint = "decoder-only models have no such input; leave it out"
        elif name == "token_healing":
            hint = HEALING
        elif name in UNSUPPORTED:
            hint = UNSUPPORTED[name][1]
        elif near:
            hint = f"did you mean {near[0]!r}?"
        raise TypeError(f"unknown option {name!r}: {hint}")
    ours = ("seed", "row_inputs")
    options = {n: value for n, value in options.items() if value is not None and n not in ours}
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
    return resolve(target, input_ids, options)


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
    input_ids: Tensor | Mapping, attention_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Ids and mask, which a tokenizer returns as one object."""
    if not isinstance(input_ids, Mapping):
        return input_ids, attention_mask
    surplus = input_ids.keys() - {"input_ids", "attention_mask", "token_type_ids"}
    if "input_ids" not in input_ids or surplus or attention_mask is not None:
        raise TypeError(
            "expected input_ids as a tensor, or a tokenizer's output with input_ids and "
            f"attention_mask in one object; got one with {', '.join(map(str, input_ids))}"
            + (" and an attention_mask beside it" if attention_mask is not None else "")
        )
    return input_ids["input_ids"], input_ids.get("attention_mask")


def _start_processors(
    prompts: Prompts, options: Options
) -> tuple[tuple[slice, LogitsProcessorList], ...]:
    """See `Request.processors`; refuses those that may keep state."""
    if not options.processors:
        return ()
    refuse_stateful(options.processors)

    def started(processor: LogitsProcessor, ids: Tensor, first_row: int) -> LogitsProcessor:
        is_grammar = isinstance(processor, GrammarProcessor)
        return processor.start(ids, first_row) if is_grammar else processor

    groups = [(slice(0, len(prompts.padded)), prompts.padded, options.processors)]
    if options.processors_alone is not None:
        rows = enumerate(prompts.alone())
        groups = [(slice(n, n + 1), ids, options.processors_alone(ids)) for n, ids in rows]
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
