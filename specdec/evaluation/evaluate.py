"""`evaluate`: true acceptance and speed, measured by generating.

Legend: B rows of a batch, T tokens of a prompt.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, Unpack

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from specdec.arguments import check_integer
from specdec.evaluation.evaluation import Evaluation
from specdec.evaluation.plan import Plan, provenance, settings_of_run
from specdec.evaluation.prompts import Prompt, as_prompts, encode
from specdec.evaluation.run_file import EvaluatedBatch, EvaluatedRow, RunFile
from specdec.generator import SpeculativeGenerator
from specdec.request import GenerateOptions
from specdec.request.prompts import left_padded

T = TypeVar("T")
_TURN_SEEDS = 2**32
"""Seeds of a later turn are this far from those of the one before."""


def evaluate(
    generator: SpeculativeGenerator,
    prompts: Tensor | Iterable[str | Prompt | Sequence[int]],
    attention_mask: Tensor | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    batch_size: int | None = None,
    samples: int = 1,
    seed: int = 0,
    max_prompt_tokens: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    warmup: int = 0,
    shard: tuple[int, int] = (0, 1),
    output: str | Path | None = None,
    progress: bool = False,
    **options: Unpack[GenerateOptions],
) -> Evaluation:
    """Generates from every prompt and counts; torch's global generator is not used.

    Rows with temperature are sampled with seeds of their own, `seed + i` for prompt i, so that the
    result does not depend on batches, processes or interruptions.

    Sampling starts from neutral values, not from the target's `generation_config`, of which only
    the ids that end and pad a text are used: what is not passed here truncates and penalises
    nothing. With `neutral=False` the target's own settings are measured. What tokens were drawn
    from is in `about["run"]["sampling"]`.

    Args:
        generator: target, drafter and sampler to be measured.
        prompts: ids `[B, T]`, padded left or right; or a list of texts, ids or `Prompt` records
            (`read_prompts` reads them from a file). A `Prompt` of several turns is answered turn
            by turn.
        attention_mask: `[B, T]` or `None`, for ids in a tensor.
        tokenizer: of the target; encodes texts, through its chat template where it has one.
        max_new_tokens: of each turn.
        temperature: 0 is greedy, above 0 samples; `do_sample` may be passed if it says the same.
        batch_size: prompts generated together, those of one category only; `None` is all rows of a
            tensor, and 1 for lists.
        samples: texts of each prompt.
        seed: of the first prompt.
        max_prompt_tokens: longer prompts lose their first tokens, and their rows say so.
        chat_template_kwargs: variables of the chat template, `{"enable_thinking": False}` for
            instance.
        warmup: so many batches are generated once before anything is measured.
        shard: (index, count): takes part number `index` of `count` of the batches, for one process
            of several.
        output: a file that holds what is measured, batch by batch. Where it exists, the run goes on
            after its last batch.
        progress: shows a bar on standard error.
        options: of `generate` (top_k, top_p, eos_token_id, ...), the same for all rows.

    Returns:
        The rows, and every number with its interval.

    Raises:
        TypeError, ValueError: as `SpeculativeGenerator.generate`, for variables that the chat
            template does not read, and for a file of a run with other settings (names them).

    Example:
        >>> from specdec import PromptLookupDrafter, zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), PromptLookupDrafter(3))
        >>> evaluation = evaluate(generator, torch.tensor([[7, 8, 9, 7, 8]]), max_new_tokens=8)
        >>> 1 <= evaluation.stats.acceptance_length <= 4
        True
    """
    check_integer("warmup", warmup, 0)
    index, count = shard
    check_integer("the count of shard", count, 1)
    check_integer("the index of shard", index, 0, count - 1)
    plan = Plan(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        batch_size=1 if batch_size is None and not isinstance(prompts, Tensor) else batch_size,
        samples=samples,
        seed=seed,
        max_prompt_tokens=max_prompt_tokens,
        chat_template_kwargs=dict(chat_template_kwargs or {}),
        options=options,
    )
    records = as_prompts(prompts, attention_mask)
    run = settings_of_run(generator, records, tokenizer=tokenizer, **vars(plan))
    about = {"run": {**run, "shard": [index, count]}, **provenance()}
    batches = dict(list(enumerate(_batches(records, plan)))[index::count])
    file = None if output is None else RunFile(output)
    with nullcontext() if file is None else file.held():
        done = [] if file is None else file.resume(about)
        missing = sorted(batches.keys() - {batch.index for batch in done})
        for number in missing[:warmup]:
            _run(generator, number, batches[number], plan, tokenizer)
        with tqdm(total=len(batches), initial=len(done), disable=not progress, unit="batch") as bar:
            for number in missing:
                batch = _run(generator, number, batches[number], plan, tokenizer)
                if file is not None:
                    file.append(batch, about)
                done.append(batch)
                bar.update()
                bar.set_postfix_str(_postfix(done), refresh=False)
    done.sort(key=lambda batch: batch.index)
    return Evaluation(done, generator.drafter.num_draft_tokens, about)


@dataclass(frozen=True)
class _Row:
    """A prompt to be answered, and the seed of its first turn."""

    prompt: Prompt
    sample: int
    seed: int


def _batches(prompts: list[Prompt], plan: Plan) -> list[list[_Row]]:
    """Batches of consecutive prompts, each of one category and one number of turns."""
    rows = [
        _Row(prompt, sample, plan.seed + index + sample * len(prompts))
        for index, prompt in enumerate(prompts)
        for sample in range(plan.samples)
    ]
    batches = []
    for _, alike in groupby(rows, lambda row: (row.prompt.category, len(row.prompt.turns))):
        group = list(alike)
        size = plan.batch_size or len(group)
        batches += [group[start : start + size] for start in range(0, len(group), size)]
    return batches


def _run(
    generator: SpeculativeGenerator,
    index: int,
    rows: list[_Row],
    plan: Plan,
    tokenizer: PreTrainedTokenizerBase | None,
) -> EvaluatedBatch:
    """All turns of a batch."""
    replies: list[list[str]] = [[] for _ in rows]
    seconds, done = [], []
    for turn in range(len(rows[0].prompt.turns)):
        encoded = [
            encode(row.prompt, said, tokenizer, plan.chat_template_kwargs)
            for row, said in zip(rows, replies, strict=True)
        ]
        kept = [ids[-(plan.max_prompt_tokens or len(ids)) :] for ids in encoded]
        inputs = left_padded(kept, generator.target.device)
        options = plan.sampling([row.seed + turn * _TURN_SEEDS for row in rows], tokenizer)
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
                reply = tokenizer.decode(evaluated.new_tokens, skip_special_tokens=True)
                replies[b].append(reply)
    return EvaluatedBatch(index, seconds, done)


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


def _postfix(done: list[EvaluatedBatch]) -> str:
    steps = [step for batch in done for row in batch.rows for step in row.steps]
    length = 1 + sum(step.num_accepted for step in steps) / max(1, len(steps))
    return f" acceptance length {length:.2f}"
