"""`Request`: inputs and options of one call, checked before anything is computed."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypedDict

from torch import Tensor, distributed
from torch.distributed.tensor import DTensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)

from specdec.arguments import check_integer, check_type, shown
from specdec.request.grammar import GrammarProcessor
from specdec.request.options import Options, is_warper, num_sequences, resolve_options
from specdec.request.processors import name_of, refuse_stateful
from specdec.request.prompts import Prompts
from specdec.request.sampling import WARPS, neutral
from specdec.samplers.warp import Warp
from specdec.target import Target


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`, `stream` and `start`, with HF's names and meanings.

    Sampling values and the seed may be a scalar or a sequence of one value per row. What is left
    out comes from `generation_config`, and then from the model's own, as in HF. Without a seed, a
    sampled row draws one at random and reports it in the result. One seed for all rows gives equal
    prompts equal samples: pass `seed=list(range(B))` for B samples of one prompt.

    `num_return_sequences=n` makes n rows of each prompt. A prompt's seed s stands for s, s + 1, ...
    s + n - 1, and every other value of a prompt for all of its rows; a sequence of B n values sets
    them one by one. `stop_strings` need the `tokenizer`, which the result shows its text with.
    Processors and criteria see each row as it would stand alone: its prompt without padding, then
    its new tokens. (Through HF's hook they see the padded batch, as HF shows it.)
    `output_logits` and `output_scores` keep the target's logits of every emitted token, as the
    model returns them and as they were sampled from.

    `draft_probs=False` keeps the probabilities of draft tokens from the sampler: they become point
    masses, which is lossless too and accepts less. It is there to measure the difference.

    Args:
        max_new_tokens: the most that each row may get, >= 1. As in HF, 20 where neither call nor
            configuration sets a length.
        min_new_tokens: no end-of-sequence token is sampled before so many.
        do_sample: whether to sample; `False` is greedy.
        temperature: logits are divided by it; 0 is greedy.
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
        generation_config: HF's, for everything that is left out.
        neutral: what is left out is at its neutral value (temperature 1, nothing truncated, no
            penalties), not the target's own or HF's (which is 50 for `top_k`); of the target's
            configuration only the ids that end and pad a text are used. `evaluate`, `compare` and
            `certify` generate like this.
        draft_probs: whether the sampler gets the probabilities of draft tokens.
        num_draft_tokens: of each step, at most the drafter's own, which is the default.
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
    generation_config: GenerationConfig
    neutral: bool
    draft_probs: bool
    num_draft_tokens: int


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of one call. `read` and `from_hook` check them.

    Args:
        prompts: the batch.
        options: HF's options, resolved.
        seeds: one per row, or `None` for a greedy generation.
        processors: which rows see which logits processors. Natively each row has its own and sees
            them alone, through the hook they see the batch.
    """

    prompts: Prompts
    options: Options
    seeds: list[int] | None
    processors: tuple[tuple[slice, LogitsProcessorList], ...] = ()

    @property
    def max_new_tokens(self) -> int:
        """Tokens that each row may get; 0 where the prompts fill the allowed length."""
        return self.options.max_length - self.prompts.padded.shape[1]

    @cached_property
    def shown_prompts(self) -> list[list[int]]:
        """Each row's prompt as processors and stopping criteria see it: natively without padding,
        through the hook as HF shows it.
        """
        is_alone = self.options.processors_alone is not None
        groups = self.prompts.alone() if is_alone else [self.prompts.padded]
        return [row for group in groups for row in group.tolist()]

    def filled_to(self, rows: int) -> Request:
        """The call with inert rows after its own, up to so many: prompts of one token, the sampling
        values of the last row, seed 0. Whoever loads it lets them commit nothing.
        """
        missing = rows - len(self.prompts.lengths)
        if missing == 0:
            return self
        warp = {name: _extended(value, missing) for name, value in self.options.warp.items()}
        seeds = None if self.seeds is None else [*self.seeds, *[0] * missing]
        options = replace(self.options, warp=warp)
        return replace(self, prompts=self.prompts.filled_to(rows), options=options, seeds=seeds)

    @classmethod
    def read(
        cls, target: Target, input_ids: Tensor, attention_mask: Tensor | None, options: dict
    ) -> Request:
        """Reads a call with `GenerateOptions`.

        Raises:
            TypeError: an unknown keyword, or `input_ids` that are no integer tensor.
            ValueError: a prompt or an option that cannot be right.
        """
        input_ids, attention_mask = _unpack(input_ids, attention_mask)
        # Ids and mask first: HF's own messages about them are obscure.
        prompts = _read_prompts(target, input_ids, attention_mask, None)
        resolved = read_options(target, input_ids, options)
        prompts = _read_prompts(target, input_ids, attention_mask, resolved.padding_id)
        prompts = prompts.repeated(resolved.num_sequences)
        return cls._checked(target, prompts, resolved, options.get("seed"))

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
        prompts = _read_prompts(target, input_ids, attention_mask, None)
        return cls._checked(target, prompts, options, seed)

    @classmethod
    def _checked(cls, target: Target, prompts: Prompts, options: Options, seed) -> Request:
        target.check_unchanged()
        rows, room = len(prompts.lengths), options.max_length - prompts.padded.shape[1]
        total, limit = max(prompts.lengths) + room, target.max_positions
        if limit is not None and total > limit:
            raise ValueError(
                f"a prompt of {max(prompts.lengths)} tokens and {room} new tokens make {total}, "
                f"but the target has {limit} positions; shorten the prompt or pass max_new_tokens "
                f"<= {max(0, limit - max(prompts.lengths))}"
            )
        is_greedy = Warp(rows, **options.warp).is_greedy
        seeds = None if is_greedy else _read_seeds(target, seed, rows, options.num_sequences)
        processors = _start_processors(prompts, options, target.vocab_size)
        return cls(prompts, options, seeds, processors)


def read_options(target: Target, input_ids: Tensor, options: dict) -> Options:
    """Checks and resolves the options of a call; its seed is left out.

    Args:
        target: of the generator.
        input_ids: `[B, T]` the padded prompts.
        options: some of `GenerateOptions`.

    Raises:
        TypeError, ValueError: an unknown keyword, or an option that cannot be right.
    """
    options = {name: value for name, value in options.items() if name != "seed"}
    _check_names_and_types(options)
    _check_ids(options, target.vocab_size)
    own = {n: options.pop(n) for n in ("draft_probs", "num_draft_tokens") if n in options}
    model = neutral(target.model) if options.pop("neutral", False) else target.model
    copies = num_sequences(model, options)
    rows = copies * len(input_ids)
    target.check_room(rows, input_ids.shape[1])  # before anything is made for each row
    warp = {name: options.pop(name, None) for name in WARPS}
    warp = {n: _per_sequence(v, rows, copies) for n, v in warp.items() if v is not None}
    Warp(rows, **warp)
    per_row, uniform = _split_warp(warp)
    passed = options.get("logits_processor") or ()
    names = [name_of(p) for p in passed]
    resolved = resolve_options(model, input_ids, **options, **uniform)
    resolved.check_sampling(uniform)
    own_warpers = [n for n, p in zip(names, passed, strict=True) if is_warper(p)]
    resolved = resolved.with_warp(own_warpers, **per_row)
    sampling = replace(resolved.sampling, processors=names)
    return replace(resolved, sampling=sampling, **own)


def _check_names_and_types(options: dict) -> None:
    """Raises `TypeError` for a keyword that `generate` does not have, and for values that HF would
    take for something else.
    """
    for name in options.keys() - GenerateOptions.__annotations__.keys():
        near = difflib.get_close_matches(name, GenerateOptions.__annotations__, n=1)
        hint = f"known are {', '.join(GenerateOptions.__annotations__)}"
        hint += "; other options of HF generate work through model.generate(..., "
        hint += "custom_generate=generator)"
        if name == "token_type_ids":
            hint = "decoder-only models have no such input; leave it out"
        elif near:
            hint = f"did you mean {near[0]!r}?"
        raise TypeError(f"unknown option {name!r}: {hint}")
    counts = {"max_new_tokens": 1, "min_new_tokens": 0, "num_return_sequences": 1}
    for name, least in {**counts, "num_draft_tokens": 0}.items():
        if options.get(name) is not None:
            check_integer(name, options[name], least)
    least, most = options.get("min_new_tokens"), options.get("max_new_tokens")
    if least is not None and most is not None and least > most:
        raise ValueError(f"min_new_tokens={least} is more than max_new_tokens={most}")
    tokenizer = options.get("tokenizer")
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise TypeError(f"tokenizer must be the target's, got {type(tokenizer).__name__}")
    check_type("draft_probs", options.get("draft_probs", True), bool)
    for name in ("do_sample", "output_scores", "output_logits", "neutral"):
        if options.get(name) is not None:
            check_type(name, options[name], bool)
    config = options.get("generation_config")
    if isinstance(config, dict):
        raise TypeError(
            "generation_config must be a GenerationConfig, got a dictionary; pass "
            "GenerationConfig(**config), or its entries as keywords"
        )
    if config is not None:
        check_type("generation_config", config, GenerationConfig)
    _check_callables("logits_processor", options.get("logits_processor"), "LogitsProcessorList")
    _check_callables("stopping_criteria", options.get("stopping_criteria"), "StoppingCriteriaList")


def _check_callables(name: str, given: object, wrapper: str) -> None:
    """Raises `TypeError` unless an option is `None` or a list of instances that can be called."""
    if given is None:
        return
    if not isinstance(given, list | tuple):
        raise TypeError(f"{name} must be a list, got {shown(given)}; pass {wrapper}([...])")
    for item in given:
        if not callable(item) or isinstance(item, type):
            raise TypeError(f"{name} must hold functions of (ids, scores), got {shown(item)}")


def _check_ids(options: dict, vocab_size: int) -> None:
    """Raises `TypeError` or `ValueError` for ids that a call names and the target does not have.
    Those of a model's own configuration are left as they are: some name -1 for none.
    """
    for name in ("eos_token_id", "pad_token_id"):
        advice = "it must be an id of the target's vocabulary"
        advice += "; [] lets no token end a text" if name == "eos_token_id" else ""
        ids = options.get(name)
        if ids is None:
            continue
        if isinstance(ids, Tensor):
            ids = options[name] = ids.tolist()
        is_list = isinstance(ids, list | tuple) and name == "eos_token_id"
        for value in ids if is_list else [ids]:
            check_integer(name, value, 0, vocab_size - 1, advice=advice)


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


def _read_prompts(
    target: Target, input_ids: Tensor, attention_mask: Tensor | None, padding_id: int | None
) -> Prompts:
    """The batch. Without a mask, padding ids before a row's first other token are padding and all
    others are tokens, as in batches that are padded for HF's `generate`.

    Raises:
        ValueError: a batch without a mask in which a row ends in the padding id: either right
            padding, or a token.
    """
    if attention_mask is None and padding_id is not None:
        attention_mask = (input_ids != padding_id).cumsum(dim=1).clamp(max=1)
        ends_in_padding = (input_ids[:, -1] == padding_id).tolist()
        if len(input_ids) > 1 and any(ends_in_padding):
            raise ValueError(
                f"row {ends_in_padding.index(True)} of the batch ends in the padding id "
                f"{padding_id}, which may be padding or a token; pass the attention_mask"
            )
    return Prompts.read(
        input_ids, attention_mask, vocab_size=target.vocab_size, device=target.device
    )


def _start_processors(
    prompts: Prompts, options: Options, vocab_size: int
) -> tuple[tuple[slice, LogitsProcessorList], ...]:
    """See `Request.processors`; refuses those that may keep state."""
    if not options.processors:
        return ()
    if options.processors_alone is None:
        groups = [(slice(0, len(prompts.padded)), prompts.padded, options.processors)]
    else:
        rows = enumerate(prompts.alone())
        groups = [(slice(n, n + 1), ids, options.processors_alone(ids)) for n, ids in rows]
    started = [
        (rows, LogitsProcessorList(_started(p, ids, rows.start) for p in processors))
        for rows, ids, processors in groups
    ]
    refuse_stateful(started[0][1], groups[0][1], vocab_size)
    return tuple(started)


def _started(processor: LogitsProcessor, ids: Tensor, first_row: int) -> LogitsProcessor:
    is_grammar = isinstance(processor, GrammarProcessor)
    return processor.start(ids, first_row) if is_grammar else processor


def _split_warp(values: dict) -> tuple[dict, dict]:
    """Values that only specdec knows (one per row, and temperature 0), and those that HF can apply
    in its own order, among the other processors of a configuration.
    """
    per_row, uniform = {}, {}
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, int | float) and not (name == "temperature" and value == 0):
            uniform[name] = int(value) if name == "top_k" else float(value)
        else:
            per_row[name] = value
    return per_row, uniform


def _per_sequence(value, rows: int, copies: int):
    """A value for each prompt as one for each of its rows; other values as they are."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if copies > 1 and isinstance(value, list | tuple) and len(value) * copies == rows:
        return [item for item in value for _ in range(copies)]
    return value


def _extended(value, missing: int):
    """A sampling value for so many rows more: a scalar holds for all."""
    values = value.tolist() if isinstance(value, Tensor) else value
    if not isinstance(values, Sequence):
        return value
    return [*values, *[values[-1]] * missing]


def _read_seeds(
    target: Target, seed: int | Sequence[int] | Tensor | None, rows: int, copies: int
) -> list[int]:
    if seed is None:
        return _random_seeds(target, rows)
    if isinstance(seed, Tensor):
        seed = seed.tolist()
    if copies > 1 and isinstance(seed, Sequence) and len(seed) * copies == rows:
        seeds = [_following(value, copy) for value in seed for copy in range(copies)]
    elif isinstance(seed, Sequence):
        seeds = list(seed)
    else:
        seeds = [_following(seed, copy) for copy in range(copies)] * (rows // copies)
    if len(seeds) != rows:
        raise ValueError(
            f"seed has {len(seeds)} values for a batch of {rows} rows; give one per row, or a "
            "single value"
        )
    for value in seeds:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"seed must be an integer or one integer per row, got {value!r}")
    return seeds


def _random_seeds(target: Target, rows: int) -> list[int]:
    """A seed per row; the same in all processes over which a target is spread, since each of them
    computes a part of one text.
    """
    seeds = [secrets.randbits(64) for _ in range(rows)]
    spread = next((p for p in target.model.parameters() if isinstance(p, DTensor)), None)
    for group in [] if spread is None else spread.device_mesh.get_all_groups():
        distributed.broadcast_object_list(seeds, group=group, group_src=0)
    return seeds


def _following(seed: int, copy: int) -> int:
    """The seed of a prompt's rows; what is no seed is left for the check of all."""
    is_seed = type(seed) is int and 0 <= seed < 2**64
    return (seed + copy) % 2**64 if is_seed else seed
