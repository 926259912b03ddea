"""`evaluate`: true acceptance and speed, measured by generating.

Legend: B rows of a batch, T tokens of a prompt.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar, Unpack

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from specdec import processes
from specdec.arguments import check_choice, check_integer, shown
from specdec.generator import SpeculativeGenerator
from specdec.lab.certificates import Sentinel
from specdec.lab.evaluation.evaluation import Evaluation
from specdec.lab.evaluation.hf_generate import HFGenerate
from specdec.lab.evaluation.pictures import tokenizer_of
from specdec.lab.evaluation.plan import Plan, provenance, settings_of_run
from specdec.lab.evaluation.prompts import Prompt, as_prompts, check_reader, read, reply_of
from specdec.lab.evaluation.run_file import EvaluatedBatch, EvaluatedRow, RunFile
from specdec.request import GenerateOptions
from specdec.request.lists import left_padded

T = TypeVar("T")
_TURN_SEEDS = 2**32
"""Seeds of a later turn are this far from those of the one before."""


def evaluate(
    generator: SpeculativeGenerator,
    prompts: Tensor | Iterable[str | Prompt | Sequence[int] | Mapping[str, Any]],
    attention_mask: Tensor | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    batch_size: int | None = None,
    samples: int = 1,
    seed: int = 0,
    max_prompt_tokens: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    warmup: int = 0,
    share: bool = False,
    output: str | Path | None = None,
    progress: bool = False,
    certify: bool = False,
    **options: Unpack[GenerateOptions],
) -> Evaluation:
    """Generates from every prompt and counts; torch's global generator is not used.

    Rows with temperature are sampled with seeds of their own, `seed + i` for prompt i, so that the
    result does not depend on batches, processes or interruptions.

    Options that are not passed truncate and penalise nothing: of the target's `generation_config`
    only the ids that end and pad a text are used. With `neutral=False` the target's own settings
    are measured. What tokens were drawn from is in `about["run"]["sampling"]`.

    Args:
        generator: target, drafter and sampler to be measured.
        prompts: ids `[B, T]`, padded left or right; or a list of texts, ids, `Prompt` records
            (`read_prompts` reads them from a file), or of what the target's processor returns for
            one prompt that is more. A `Prompt` of several turns is answered turn by turn.
        attention_mask: `[B, T]` or `None`, for ids in a tensor.
        tokenizer: of the target; encodes texts, through its chat template where it has one. Prompts
            with pictures of files (`images`) need the target's processor in its place.
        max_new_tokens: of each turn.
        temperature: 0 is greedy, above 0 samples; `do_sample` may be passed if it says the same.
        batch_size: prompts generated together, those of one category only; `None` is all rows of a
            tensor, and 1 for lists.
        samples: texts of each prompt.
        seed: of the first prompt.
        max_prompt_tokens: longer prompts lose their first tokens, and their rows say so.
        chat_template_kwargs: variables of the chat template, `{"enable_thinking": False}` for
            instance.
        warmup: the first batch is generated so often before anything is measured.
        share: the processes that `accelerate launch` or `torchrun` started share the prompts, and
            all of them return the same; every one of them must call. The processes over which one
            target is spread all read all prompts.
        output: a file of what is measured. Until it is whole, finished batches are in a hidden
            folder beside it; a run that was interrupted goes on after them. All processes with one
            `output`, however they were started, share the prompts, and return the same.
        progress: shows a bar on standard error.
        certify: bets along the sampled texts against the claim that they have the target's
            distribution, at the cost of one more forward per text, which is not timed
            (`specdec.lab.certificates.Sentinel`). Each process judges the texts that it writes.
        options: of `generate` (top_k, top_p, eos_token_id, ...), the same for all rows.

    Returns:
        The rows, and every number with its interval.

    Raises:
        TypeError, ValueError: as `SpeculativeGenerator.generate`, for variables that the chat
            template does not read, and for a file of a run with other settings (names them); for
            `certify` with greedy texts.
        CertificateError: with `certify`, texts that a sound generator writes with a chance below
            1e-6.

    Example:
        >>> from specdec import PromptLookupDrafter, zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), PromptLookupDrafter(3))
        >>> evaluation = evaluate(generator, torch.tensor([[7, 8, 9, 7, 8]]), max_new_tokens=8)
        >>> 1 <= evaluation.stats.acceptance_length <= 4
        True
    """
    if not isinstance(generator, SpeculativeGenerator | HFGenerate):
        raise TypeError(
            f"generator must be a SpeculativeGenerator or HFGenerate, got {shown(generator)}; "
            "SpeculativeGenerator(model, None) decodes a model plainly"
        )
    check_integer("warmup", warmup, 0)
    check_choice("certify", certify, (True, False))
    if certify and temperature == 0:
        raise ValueError(
            "certify=True bets on drawn tokens, and greedy texts have none; pass a temperature > 0"
        )
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
    team = processes.team(generator.target.model, share=share)
    sentinel = Sentinel(generator) if certify else None
    run = Run(generator, as_prompts(prompts, attention_mask), plan, tokenizer, team, sentinel)
    with run.recorded(output), progress_bar(team, run.size, is_wanted=progress) as bar:
        measure([run], [run], warmup=warmup, bar=bar)
    return run.evaluation()


class Run:
    """An evaluation under way.

    Args:
        generator: what is measured.
        prompts: all of them.
        plan: how they are continued.
        tokenizer: of the target, for texts; or its processor.
        team: the processes that share the batches.
        sentinel: sees every text that is generated here.

    Attributes:
        about: the run's settings and versions.
    """

    def __init__(
        self,
        generator: SpeculativeGenerator,
        prompts: list[Prompt],
        plan: Plan,
        tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None,
        team: processes.Team,
        sentinel: Sentinel | None = None,
    ):
        check_reader(prompts, tokenizer)
        settings = settings_of_run(generator, prompts, tokenizer=tokenizer, **vars(plan))
        self.about, self.team = {"run": settings, **provenance()}, team
        self._generator: SpeculativeGenerator | HFGenerate | None = generator
        self._plan, self._tokenizer = plan, tokenizer
        self._num_draft_tokens = generator.drafter.num_draft_tokens
        self._batches = batches_of(prompts, plan)
        self._in_memory: dict[int, EvaluatedBatch] = {}
        self._sentinel = sentinel
        self._file: RunFile | None = None

    @contextmanager
    def recorded(self, path: str | Path | None) -> Iterator[None]:
        """Goes on with a file, and writes what is measured meanwhile to it."""
        if path is None:
            yield
            return
        self._file = RunFile(path, self.about, self.team)
        with self._file.joined():
            yield

    @property
    def _done(self) -> dict[int, EvaluatedBatch]:
        return self._in_memory if self._file is None else self._file.lines

    @property
    def size(self) -> int:
        """Batches in all."""
        return len(self._batches)

    @property
    def num_done(self) -> int:
        """Batches that were measured."""
        return len(self._done)

    @property
    def missing(self) -> list[int]:
        """Numbers of the batches that were not measured yet."""
        return [number for number in range(self.size) if number not in self._done]

    def batch(self, number: int) -> EvaluatedBatch:
        """Generates all turns of a batch."""
        rows = self._batches[number]
        return run_batch(self._generator, number, rows, self._plan, self._tokenizer, self._sentinel)

    def pieces(
        self, missing: Callable[[], list[int]], is_settled: Callable[[], bool], *, wait: bool
    ) -> Iterator[int]:
        """Numbers of the batches that this process is to measure, as in `measure`."""
        if self._file is not None:
            names = self._file.pieces(lambda: map(str, missing()), is_settled, wait=wait)
            yield from map(int, names)
        else:
            yield from self.team.part(missing())
            is_settled()

    def add(self, batch: EvaluatedBatch) -> None:
        """Takes in what was measured, and writes it down."""
        if self._file is None:
            self._in_memory[batch.index] = batch
        else:
            self._file.append(batch)

    def refresh(self) -> None:
        """Reads what other processes have written by now."""
        if self._file is not None and self.team.is_writer:
            self._file.refresh()

    def settle(self) -> bool:
        """Takes in what all processes have measured; whether that is all."""
        if self._file is not None:
            return self._file.settle(range(self.size))
        found = self.team.gather(list(self._in_memory.values()))
        self._in_memory = {batch.index: batch for batch in found}
        return True

    def fail(self, error: Exception) -> None:
        """Ends the processes that wait for this one's part; a file's parts are anybody's."""
        if self._file is None:
            self.team.gather([], error)

    def evaluation(self) -> Evaluation:
        """What was measured so far."""
        done = [self._done[number] for number in sorted(self._done)]
        return Evaluation(done, self._num_draft_tokens, self.about)

    def release(self) -> None:
        """Lets go of the generator: nothing more is measured here."""
        self._generator = None

    def summary(self) -> str:
        """The acceptance length so far, for a progress bar."""
        steps = [step for batch in self._done.values() for row in batch.rows for step in row.steps]
        accepted = sum(step.num_accepted for step in steps)
        return f" acceptance length {1 + accepted / max(1, len(steps)):.2f}"


def measure(
    runs: Sequence[Run],
    shown: Collection[Run],
    *,
    wait: bool = True,
    warmup: int = 0,
    rounds: int = 1,
    bar: tqdm,
) -> None:
    """Measures what is missing of runs over the same batches, which take turns on each of them, so
    that a drift of the machine meets all; who begins changes from batch to batch.

    Args:
        runs: of the same processes.
        shown: runs whose batches the progress bar counts.
        wait: until other processes have measured what they took.
        warmup: the first batch of each is generated so often before anything is measured.
        rounds: how often each batch is generated; the times of the median one are kept.
        bar: of the batches of `shown`.
    """
    lead = max(runs, key=lambda run: len(run.missing))  # whose markers are those of all

    def missing() -> list[int]:
        for run in runs:
            if run is not lead:
                run.refresh()
        return sorted({number for run in runs for number in run.missing})

    def is_settled() -> bool:
        settled = [run.settle() for run in runs]
        bar.update(sum(run.num_done for run in shown) - bar.n)
        return all(settled)

    try:
        for number in lead.pieces(missing, is_settled, wait=wait):
            for run in [*runs] * warmup:
                run.batch(number)
            warmup = 0
            measured = _measured(number, [run for run in runs if number in run.missing], rounds)
            for run, batch in sorted(measured.items(), key=lambda each: each[0] is lead):
                run.add(batch)  # the lead's last: who sees it does not look for the others
            bar.update(sum(run.num_done for run in shown) - bar.n)
            bar.set_postfix_str(lead.summary(), refresh=False)
    except Exception as error:
        lead.fail(error)
        raise


def _measured(number: int, runs: list[Run], rounds: int) -> dict[Run, EvaluatedBatch]:
    """A batch of each run, of so many that take turns the one of the median time."""
    turns: dict[Run, list[EvaluatedBatch]] = {run: [] for run in runs}
    for turn in range(rounds):
        first = (number + turn) % len(runs)
        for run in runs[first:] + runs[:first]:
            turns[run].append(run.batch(number))
    middle = (rounds - 1) // 2
    return {r: sorted(own, key=lambda b: sum(b.seconds))[middle] for r, own in turns.items()}


def progress_bar(team: processes.Team, total: int, *, is_wanted: bool) -> tqdm:
    """Of so many batches, on standard error; one for all processes."""
    is_shown = is_wanted and team.is_first
    if is_shown and team.count > 1:
        print(f"{team.count} processes share the prompts", file=sys.stderr)
    return tqdm(total=total, disable=not is_shown, unit="batch", smoothing=0)


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
