"""Batches of prompts: which rows are generated together, with what seeds, and how.

Legend: B rows of a batch, T tokens of a prompt.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from specdec.generator import SpeculativeGenerator
from specdec.lab.certificates import Sentinel
from specdec.lab.evaluation.pictures import tokenizer_of
from specdec.lab.evaluation.plan import Plan
from specdec.lab.evaluation.prompts import Prompt, read, reply_of
from specdec.lab.evaluation.run_file import EvaluatedBatch, EvaluatedRow
from specdec.request.lists import left_padded

T = TypeVar("T")
_TURN_SEEDS = 2**32
"""Seeds of a later turn are this far from those of the one before."""


@dataclass(frozen=True)
class Row:
    """A prompt to be answered, and the seed of its first turn."""

    prompt: Prompt
    sample: int
    seed: int


def rows_of(prompts: list[Prompt], plan: Plan) -> list[Row]:
    """Every sample of every prompt, each with its seed."""
    return [
        Row(prompt, sample, plan.seed + index + sample * len(prompts))
        for index, prompt in enumerate(prompts)
        for sample in range(plan.samples)
    ]


def batches_of(prompts: list[Prompt], plan: Plan) -> list[list[Row]]:
    """Batches of consecutive prompts, each of one category and one number of turns."""
    batches = []
    rows = rows_of(prompts, plan)
    for _, alike in groupby(rows, lambda row: (row.prompt.category, len(row.prompt.turns))):
        group = list(alike)
        size = plan.batch_size or len(group)
        batches += [group[start : start + size] for start in range(0, len(group), size)]
    return batches


def run_batch(
    generator: SpeculativeGenerator,
    index: int,
    rows: list[Row],
    plan: Plan,
    reader: PreTrainedTokenizerBase | ProcessorMixin | None,
    sentinel: Sentinel | None,
) -> EvaluatedBatch:
    """All turns of a batch."""
    tokenizer = tokenizer_of(reader)
    replies: list[list[str]] = [[] for _ in rows]
    seconds, done = [], []
    for turn in range(len(rows[0].prompt.turns)):
        both = [
            read(row.prompt, said, reader, plan.chat_template_kwargs, generator.target.dtype)
            for row, said in zip(rows, replies, strict=True)
        ]
        encoded, more = zip(*both, strict=True)
        kept = [ids[-(plan.max_prompt_tokens or len(ids)) :] for ids in encoded]
        inputs = left_padded(kept, generator.target.device)
        options = plan.sampling([row.seed + turn * _TURN_SEEDS for row in rows], tokenizer)
        if any(inputs is not None for inputs in more):
            options["row_inputs"] = _with_inputs(rows, kept, encoded, more, options)
        generate = partial(
            generator.generate, *inputs, **options, max_new_tokens=plan.max_new_tokens
        )
        try:
            result, taken = timed(generate, generator.target.device)
        except ValueError as error:
            names = ", ".join(repr(row.prompt.id) for row in rows[:4])
            is_long = "positions" in str(error) and plan.max_prompt_tokens is None
            hint = "; max_prompt_tokens= shortens long prompts" if is_long else ""
            raise ValueError(f"prompt {names}: {error}{hint}") from error
        seconds.append(taken)
        if sentinel is not None:
            sentinel(kept, result.texts, steps=result.steps, **options)
        for b, row in enumerate(rows):
            evaluated = EvaluatedRow(
                prompt=row.prompt.id,
                category=row.prompt.category,
                turn=turn,
                sample=row.sample,
                num_prompt_tokens=len(kept[b]),
                was_cut=len(kept[b]) < len(encoded[b]),
                finish_reason=result.finish_reasons[b],
                seed=result.seeds[b] if result.seeds else None,
                steps=result.steps[b],
            )
            done.append(evaluated)
            if turn + 1 < len(row.prompt.turns):
                is_ended = evaluated.finish_reason == "eos"
                replies[b].append(reply_of(evaluated.new_tokens, tokenizer, is_ended=is_ended))
    return EvaluatedBatch(index, seconds, done)


def _with_inputs(
    rows: list[Row],
    kept: Sequence[list[int]],
    encoded: Sequence[list[int]],
    more: Sequence[Mapping[str, Any] | None],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Row inputs of prompts of which some are more than ids."""
    for row, own, ids, inputs in zip(rows, kept, encoded, more, strict=True):
        if inputs is not None and len(own) < len(ids):
            raise ValueError(
                f"prompt {row.prompt.id!r} is more than ids and longer than max_prompt_tokens, "
                "which would cut it; leave max_prompt_tokens out"
            )
    return {**(options.get("row_inputs") or {}), "prompt": list(more)}


def timed(run: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """What a call returns, and the seconds until the device had done it, which is waited for before
    the call and after it.

    Example:
        >>> timed(lambda: 3, torch.device("cpu"))[0]
        3
    """
    synchronize(device)
    started = time.perf_counter()
    result = run()
    synchronize(device)
    return result, time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    """Waits for a device; nothing to wait for on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_id(device: torch.device) -> str:
    """What all processes on one device call it."""
    if device.type == "cuda":
        return f"cuda-{torch.cuda.get_device_properties(device).uuid}"
    return f"{device.type}-{platform.node()}"
