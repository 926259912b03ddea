"""`compare`: ways of decoding against each other, in turn on the same prompts.

Legend: n batches, r rounds, R resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.arguments import check_integer, check_number, check_type, shown
from specdec.evaluation import prompts as prompt_sets
from specdec.evaluation.evaluate import pad
from specdec.evaluation.intervals import (
    LEVEL,
    MIN_CLUSTERS,
    NUM_RESAMPLES,
    Estimate,
    between,
    counted,
    without_interval,
)
from specdec.evaluation.prompts import Prompt
from specdec.evaluation.tables import Table, Tabular
from specdec.evaluation.timing import timed
from specdec.generator import SpeculativeGenerator
from specdec.request.sampling import neutral
from specdec.results import RowStep, SpeculationStats


@dataclass(frozen=True)
class Task:
    """What every contender is given.

    Args:
        input_ids: `[B, T]`, padded on the left.
        attention_mask: `[B, T]`.
        max_new_tokens: of each row.
        temperature: 0 is greedy.
        seeds: one per row.
    """

    input_ids: Tensor
    attention_mask: Tensor
    max_new_tokens: int
    temperature: float
    seeds: list[int]


@dataclass(frozen=True)
class Answer:
    """What a contender made of a task.

    Args:
        new_tokens: of each row.
        steps: of each row; `None` where nothing was drafted or nothing is known of it.
    """

    new_tokens: list[list[int]]
    steps: list[list[RowStep]] | None = None


Contender = Callable[[Task], Answer]
"""A way of decoding."""


class HFGenerate:
    """Hugging Face's `generate`, plain or assisted, as a contender.

    Args:
        model: the target.
        assistant_model: a draft model for assisted generation; `None` decodes plainly.
        num_assistant_tokens: K of assisted generation, constant, with no confidence threshold.

    Raises:
        TypeError: a model that is none of HF's.
        ValueError: K below 1, or models of two vocabularies.

    Example:
        >>> from specdec import zoo
        >>> contender = HFGenerate(zoo.load_target())
        >>> ids = torch.tensor([[7, 8, 9]])
        >>> task = Task(ids, torch.ones_like(ids), max_new_tokens=4, temperature=0.0, seeds=[0])
        >>> len(contender(task).new_tokens[0])
        4
    """

    def __init__(
        self,
        model: PreTrainedModel,
        assistant_model: PreTrainedModel | None = None,
        *,
        num_assistant_tokens: int = 4,
    ):
        check_type("model", model, PreTrainedModel)
        check_type("assistant_model", assistant_model, PreTrainedModel | None)
        check_integer("num_assistant_tokens", num_assistant_tokens, 1)
        sizes = [m.config.get_text_config().vocab_size for m in (model, assistant_model) if m]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"assistant_model has a vocabulary of {sizes[1]} and model one of {sizes[0]}; "
                "assisted generation of one text needs one vocabulary"
            )
        self.model, self.assistant = model, assistant_model
        self._settings = {
            "num_assistant_tokens": num_assistant_tokens,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0,
        }

    def __call__(self, task: Task) -> Answer:
        """Generates; sampled text uses torch's global generator, which is put back afterwards."""
        sampling = {"do_sample": False}
        if task.temperature:
            sampling = {"do_sample": True, "temperature": task.temperature}
        if self.assistant is not None:
            sampling["assistant_model"] = self.assistant
        device = task.input_ids.device
        of_cuda = [device] if device.type == "cuda" else []
        with self._assisting(), torch.random.fork_rng(of_cuda):
            torch.manual_seed(task.seeds[0])
            sequences = neutral(self.model).generate(
                task.input_ids,
                attention_mask=task.attention_mask,
                max_new_tokens=task.max_new_tokens,
                **sampling,
            )
        rows = sequences[:, task.input_ids.shape[1] :].tolist()
        return Answer([_until_end(row, self.model) for row in rows])

    @contextmanager
    def _assisting(self) -> Iterator[None]:
        """The settings, for a while, where HF reads them: in the assistant's configuration."""
        if self.assistant is None:
            yield
            return
        config = self.assistant.generation_config
        found = {name: getattr(config, name, None) for name in self._settings}
        try:
            for name, value in self._settings.items():
                setattr(config, name, value)
            yield
        finally:
            for name, value in found.items():
                setattr(config, name, value)


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Tabular):
    """Times and texts of several contenders on the same tasks.

    Args:
        seconds: by contender, `[n, r]`.
        tokens: by contender, `[n]` new tokens of each batch.
        stats: by contender, of drafting; `None` where there are none.
        baseline: the contender that ratios are taken against.
        equal: by contender, whether its greedy texts are the baseline's; `None` when sampled.
        level: of the intervals.
    """

    seconds: Mapping[str, np.ndarray]
    tokens: Mapping[str, np.ndarray]
    stats: Mapping[str, SpeculationStats | None]
    baseline: str
    equal: Mapping[str, bool | None]
    level: float = LEVEL

    def tokens_per_second(self, name: str) -> Estimate:
        """New tokens / seconds of a contender in its median round."""
        return self._estimate(lambda speed: speed(name))

    def ratio(self, name: str, against: str | None = None) -> Estimate:
        """Tokens per second of one contender / those of another in the same round; the median over
        rounds. Batches and rounds are resampled, the same ones for both.

        Args:
            name: the contender above.
            against: below; the baseline by default.
        """
        below = self.baseline if against is None else against
        return self._estimate(lambda speed: speed(name) / speed(below))

    def notes(self) -> list[str]:
        """What the figures do not show: ratios whose interval includes 1, pairs of contenders
        whose ratios overlap, and texts that differ.
        """
        others = [name for name in self.seconds if name != self.baseline]
        ratios = {name: self.ratio(name) for name in others}
        same = [name for name, ratio in ratios.items() if ratio.covers(1.0)]
        pairs = {
            (a, b): self.ratio(a, b)
            for i, a in enumerate(others)
            for b in others[i + 1 :]
            if ratios[a].overlaps(ratios[b])
        }
        equal = [f"{a} and {b}" for (a, b), ratio in pairs.items() if ratio.covers(1.0)]
        told = [
            f"{a} / {b}: {r}" for (a, b), r in pairs.items() if r.has_interval and not r.covers(1.0)
        ]
        differ = [name for name in others if self.equal[name] is False]
        notes = {
            f"No difference from {self.baseline} is shown (the interval includes 1)": same,
            "No difference is shown between (the interval of their own ratio includes 1)": equal,
            "Intervals overlap, but the ratio within rounds differs from 1": told,
            f"Greedy text differs from that of {self.baseline}": differ,
        }
        return [f"{note}: {', '.join(names)}." for note, names in notes.items() if names]

    def table(self) -> Table:
        """One line per contender."""
        rows = []
        for name, stats in self.stats.items():
            length = "" if stats is None else f"{stats.acceptance_length:.2f}"
            speed = format(self.tokens_per_second(name), ".0f")
            rows.append([name, speed, format(self.ratio(name), ".2f"), length])
        batches, rounds = self.seconds[self.baseline].shape
        header = ["", "tokens/s", f"x {self.baseline}", "acceptance length"]
        intervals = f"{100 * self.level:g} % intervals"
        if batches < MIN_CLUSTERS:
            intervals = f"no intervals for fewer than {MIN_CLUSTERS} batches"
        size = f"{counted(batches, 'batch')}, {counted(rounds, 'round')} in turn"
        return Table(header, rows, (f"{size}; {intervals}.", *self.notes()))

    def tables(self) -> list[Table]:
        """The one table."""
        return [self.table()]

    def records(self) -> list[dict[str, Any]]:
        """One per contender, batch and round: new tokens and seconds."""
        return [
            {
                "contender": name,
                "batch": batch,
                "round": round_,
                "new_tokens": int(self.tokens[name][batch]),
                "seconds": float(taken),
            }
            for name, seconds in self.seconds.items()
            for (batch, round_), taken in np.ndenumerate(seconds)
        ]

    def __str__(self) -> str:
        return self.to_text()

    def _estimate(self, statistic) -> Estimate:
        """Of a statistic of speeds by round: its median over the rounds."""
        count, rounds = self.seconds[self.baseline].shape
        all_batches, all_rounds = np.arange(count)[None], np.arange(rounds)[None]
        value = float(self._median(statistic, all_batches, all_rounds)[0])
        if count < MIN_CLUSTERS:
            return without_interval([value], count, self.level, "batch")[0]
        generator = np.random.default_rng(0)
        batches = generator.integers(0, count, (NUM_RESAMPLES, count))
        chosen = generator.integers(0, rounds, (NUM_RESAMPLES, rounds))
        resampled = self._median(statistic, batches, chosen)
        (estimate,) = between([value], resampled[:, None], count, self.level)
        return estimate

    def _median(self, statistic, batches: np.ndarray, rounds: np.ndarray) -> np.ndarray:
        """`[R]`, over batches `[R, n]` and rounds `[R, r]`."""

        def speed(name: str) -> np.ndarray:  # [R, r]
            if name not in self.seconds:
                known = ", ".join(map(repr, self.seconds))
                raise ValueError(f"there is no contender {name!r}; expected one of {known}")
            taken = self.seconds[name][batches].sum(axis=1)
            speeds = self.tokens[name][batches].sum(axis=-1)[:, None] / taken
            return np.take_along_axis(speeds, rounds, axis=1)

        return np.median(statistic(speed), axis=-1)


def compare(
    contenders: Mapping[str, SpeculativeGenerator | Contender],
    prompts: Tensor | Iterable[str | Prompt | Sequence[int]],
    attention_mask: Tensor | None = None,
    *,
    baseline: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    batch_size: int = 1,
    seed: int = 0,
    rounds: int = 5,
    progress: bool = False,
) -> Comparison:
    """Runs every contender on every batch in every round, in turn, so that a drift of the machine
    meets all of them. Who begins changes from round to round. A first round is not kept.

    As in `evaluate`, sampling is neutral but for its temperature: of the target's
    `generation_config` only the ids that end and pad a text are used.

    Args:
        contenders: by name: generators, `HFGenerate`, or any callable from `Task` to `Answer`.
        prompts: as in `evaluate`; first turns only.
        attention_mask: `[B, T]` or `None`, for ids in a tensor.
        baseline: name of the contender that ratios are taken against; the first by default.
        tokenizer: of the target, for texts.
        max_new_tokens: of each prompt.
        temperature: 0 is greedy; greedy texts are compared with the baseline's.
        batch_size: prompts generated together.
        seed: prompt i is sampled with `seed + i`.
        rounds: r.
        progress: shows a bar on standard error.

    Raises:
        TypeError: contenders that are no ways of decoding, or answer something else.
        ValueError: fewer than two contenders, no contender of the baseline's name, a number out of
            range, or an answer of another size.

    Example:
        >>> from specdec import PromptLookupDrafter, zoo
        >>> target = zoo.load_target()
        >>> contenders = {
        ...     "HF generate": HFGenerate(target),
        ...     "lookup": SpeculativeGenerator(target, PromptLookupDrafter(3)),
        ... }
        >>> ids = [[7, 8, 9, 7, 8], [9, 9, 9]]
        >>> comparison = compare(contenders, ids, max_new_tokens=4, rounds=1)
        >>> comparison.equal["lookup"]
        True
    """
    check_type("contenders", contenders, Mapping, advice="pass contenders by name")
    for name, way in contenders.items():
        check_type("the name of a contender", name, str)
        _check_contender(name, way)
    if len(contenders) < 2:
        raise ValueError(f"there is nothing to compare: {len(contenders)} contenders, pass two")
    baseline = next(iter(contenders)) if baseline is None else baseline
    if baseline not in contenders:
        raise ValueError(f"baseline {baseline!r} is none of {', '.join(contenders)}")
    check_integer("rounds", rounds, 1)
    check_integer("batch_size", batch_size, 1)
    check_integer("max_new_tokens", max_new_tokens, 1)
    check_integer("seed", seed, 0, 2**64 - 1)
    check_number("temperature", temperature, 0)
    check_type("progress", progress, bool)
    ways = {name: _contender(way) for name, way in contenders.items()}
    device = _device(contenders)
    records = prompt_sets.as_prompts(prompts, attention_mask)
    encoded = [prompt_sets.encode(prompt, [], tokenizer) for prompt in records]
    tasks = [
        Task(
            *pad(encoded[start : start + batch_size], device),
            max_new_tokens,
            temperature,
            [seed + i for i in range(start, min(start + batch_size, len(encoded)))],
        )
        for start in range(0, len(encoded), batch_size)
    ]
    seconds = {name: np.zeros((len(tasks), rounds)) for name in ways}
    answers: dict[str, list[Answer]] = {name: [] for name in ways}
    names = list(ways)
    with tqdm(total=(rounds + 1) * len(tasks) * len(ways), disable=not progress) as bar:
        for round_ in range(rounds + 1):
            for index, task in enumerate(tasks):
                first = round_ % len(names)
                for name in names[first:] + names[:first]:
                    answer, taken = timed(lambda n=name, t=task: ways[n](t), device)
                    if round_ == 0:
                        _check_answer(name, answer, task)
                        answers[name].append(answer)
                    else:
                        seconds[name][index, round_ - 1] = taken
                    bar.update()
    texts = {name: [a.new_tokens for a in given] for name, given in answers.items()}
    return Comparison(
        seconds=seconds,
        tokens={n: np.array([sum(map(len, rows)) for rows in text]) for n, text in texts.items()},
        stats={name: _stats(given) for name, given in answers.items()},
        baseline=baseline,
        equal={n: None if temperature else text == texts[baseline] for n, text in texts.items()},
    )


@dataclass(frozen=True, eq=False)
class _Generator:
    """A generator as a contender."""

    generator: SpeculativeGenerator

    def __call__(self, task: Task) -> Answer:
        sampling = {"do_sample": False}
        if task.temperature:
            sampling = {"do_sample": True, "temperature": task.temperature, "seed": task.seeds}
        options = {"max_new_tokens": task.max_new_tokens, "neutral": True, **sampling}
        result = self.generator.generate(task.input_ids, task.attention_mask, **options)
        rows = zip(result.new_tokens.tolist(), result.lengths, strict=True)
        steps = result.steps if self.generator.drafter.num_draft_tokens else None
        return Answer([row[:length] for row, length in rows], steps)


def _check_contender(name: str, way: object) -> None:
    """Refuses what is no way of decoding."""
    if isinstance(way, nn.Module):
        raise TypeError(f"contender {name!r} is a {type(way).__name__}; pass HFGenerate(model)")
    if not isinstance(way, SpeculativeGenerator) and not callable(way):
        raise TypeError(
            f"contender {name!r} must be a SpeculativeGenerator, HFGenerate or a function from "
            f"Task to Answer, got {shown(way)}"
        )


def _check_answer(name: str, answer: object, task: Task) -> None:
    """Refuses an answer that is not one text of the task's length per row."""
    what, count = f"the answer of contender {name!r}", len(task.seeds)
    check_type(what, answer, Answer)
    check_type(f"new_tokens in {what}", answer.new_tokens, list[list[int]])
    rows = [answer.new_tokens, *([answer.steps] if answer.steps is not None else [])]
    longest = max(map(len, answer.new_tokens), default=0)
    if any(len(each) != count for each in rows) or longest > task.max_new_tokens:
        raise ValueError(
            f"{what} must have {count} rows of at most {task.max_new_tokens} new tokens, got "
            f"{len(answer.new_tokens)} of up to {longest}"
        )


def _contender(way: SpeculativeGenerator | Contender) -> Contender:
    return _Generator(way) if isinstance(way, SpeculativeGenerator) else way


def _device(contenders: Mapping[str, SpeculativeGenerator | Contender]) -> torch.device:
    """Where prompts are needed: on the target's device."""
    for way in contenders.values():
        if isinstance(way, SpeculativeGenerator):
            return way.target.device
        if isinstance(way, HFGenerate):
            return way.model.device
    return torch.device("cpu")


def _stats(answers: list[Answer]) -> SpeculationStats | None:
    """Of all batches together."""
    steps = [row for answer in answers for row in answer.steps or ()]
    if not steps:
        return None
    return SpeculationStats(steps, max(len(step.draft_tokens) for row in steps for step in row))


def _until_end(row: list[int], model: PreTrainedModel) -> list[int]:
    """A row up to and including its first end-of-sequence token; what follows is padding."""
    ends = model.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list | tuple) else [ends])
    first = next((i for i, token in enumerate(row) if token in ends), len(row))
    return row[: first + 1]
