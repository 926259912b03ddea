"""`compare`: ways of decoding against each other, in turn on the same prompts.

Legend: n batches, r rounds, R resamples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec.arguments import check_choice, check_integer, shown
from specdec.evaluation.evaluate import timed
from specdec.evaluation.intervals import (
    LEVEL,
    MIN_CLUSTERS,
    Estimate,
    counted,
    resampled,
    taken,
)
from specdec.evaluation.plan import Plan
from specdec.evaluation.prompts import Prompt, as_prompts, encode
from specdec.generator import SpeculativeGenerator
from specdec.request.prompts import left_padded
from specdec.request.sampling import neutral, with_config
from specdec.results import RowStep, SpeculationStats
from specdec.show.table import Table, Tabular


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
        check_integer("num_assistant_tokens", num_assistant_tokens, 1)
        self.model, self._options = model, {}
        if assistant_model is not None:  # HF reads these from the assistant's configuration
            config = copy.deepcopy(assistant_model.generation_config)
            config.num_assistant_tokens = num_assistant_tokens
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0
            self._options = {"assistant_model": with_config(assistant_model, config)}

    def __call__(self, task: Task) -> Answer:
        """Generates; sampled text uses torch's global generator, which is put back afterwards."""
        sampling = {"do_sample": False}
        if task.temperature:
            sampling = {"do_sample": True, "temperature": task.temperature, "top_k": 0}
        device = task.input_ids.device
        of_cuda = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(of_cuda):
            torch.manual_seed(task.seeds[0])
            sequences = neutral(self.model).generate(
                task.input_ids,
                attention_mask=task.attention_mask,
                max_new_tokens=task.max_new_tokens,
                **sampling,
                **self._options,
            )
        rows = sequences[:, task.input_ids.shape[1] :].tolist()
        return Answer([_until_end(row, self.model) for row in rows])


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
        for contender in (name, below):
            check_choice("a contender", contender, self.seconds)
        return self._estimate(lambda speed: speed(name) / speed(below))

    def notes(self) -> list[str]:
        """What the figures do not show: ratios whose interval includes 1, pairs of contenders
        whose ratios overlap, and texts that differ.
        """
        others = [name for name in self.seconds if name != self.baseline]
        ratios = {name: self.ratio(name) for name in others}
        same = [name for name, ratio in ratios.items() if ratio.covers(1.0)]
        equal, told = [], []
        for a, b in combinations(others, 2):
            if ratios[a].overlaps(ratios[b]) and (pair := self.ratio(a, b)).has_interval:
                if pair.covers(1.0):
                    equal.append(f"{a} and {b}")
                else:
                    told.append(f"{a} / {b}: {pair}")
        differ = [name for name in others if self.equal[name] is False]
        notes = {
            f"No difference from {self.baseline} is shown (the interval includes 1)": same,
            "No difference is shown between (the interval of their own ratio includes 1)": equal,
            "Intervals overlap, but the ratio within rounds differs from 1": told,
            f"Greedy text differs from that of {self.baseline}": differ,
        }
        return [f"{note}: {', '.join(names)}." for note, names in notes.items() if names]

    def tables(self) -> list[Table]:
        """One table with a line per contender."""
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
        return [Table(header, rows, (f"{size}; {intervals}.", *self.notes()))]

    def records(self) -> list[dict[str, Any]]:
        """One per contender, batch and round: new tokens and seconds."""
        return [
            {
                "contender": name,
                "batch": batch,
                "round": round_,
                "new_tokens": int(self.tokens[name][batch]),
                "seconds": float(ms),
            }
            for name, seconds in self.seconds.items()
            for (batch, round_), ms in np.ndenumerate(seconds)
        ]

    def _estimate(self, statistic) -> Estimate:
        """Of a statistic of speeds by round: its median over the rounds."""

        def median(batches: np.ndarray, rounds: np.ndarray) -> np.ndarray:
            def speed(name: str) -> np.ndarray:  # [R, r]
                speeds = (batches @ self.tokens[name])[:, None] / (batches @ self.seconds[name])
                return np.take_along_axis(speeds, taken(rounds), axis=1)

            return np.median(statistic(speed), axis=-1, keepdims=True)

        sizes = self.seconds[self.baseline].shape
        return resampled(median, sizes, level=self.level, unit="batch")[0]


def compare(
    contenders: Mapping[str, SpeculativeGenerator | Contender],
    prompts: Tensor | Iterable[str | Prompt | Sequence[int]],
    attention_mask: Tensor | None = None,
    *,
    baseline: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    do_sample: bool | None = None,
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
        do_sample: as the temperature says; another value is refused.
        batch_size: prompts generated together.
        seed: prompt i is sampled with `seed + i`.
        rounds: r.
        progress: shows a bar on standard error.

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
    if len(contenders) < 2:
        raise ValueError(f"there is nothing to compare: {len(contenders)} contenders, pass two")
    ways = {name: _contender(name, way) for name, way in contenders.items()}
    baseline = check_choice("baseline", baseline or next(iter(ways)), ways)
    check_integer("rounds", rounds, 1)
    said = {} if do_sample is None else {"do_sample": do_sample}
    Plan(max_new_tokens, temperature, batch_size, seed=seed, options=said)  # checks them
    device = _device(contenders.values())
    encoded = [encode(prompt, [], tokenizer) for prompt in as_prompts(prompts, attention_mask)]
    tasks = [
        Task(
            *left_padded(encoded[start : start + batch_size], device),
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
                    given, seconds_taken = timed(partial(ways[name], task), device)
                    if round_ == 0:
                        _check_answer(name, given, task)
                        answers[name].append(given)
                    else:
                        seconds[name][index, round_ - 1] = seconds_taken
                    bar.update()
    texts = {name: [a.new_tokens for a in every] for name, every in answers.items()}
    return Comparison(
        seconds=seconds,
        tokens={n: np.array([sum(map(len, rows)) for rows in text]) for n, text in texts.items()},
        stats={name: _stats(every) for name, every in answers.items()},
        baseline=baseline,
        equal={n: None if temperature else text == texts[baseline] for n, text in texts.items()},
    )


def answer(generator: SpeculativeGenerator, task: Task, **options: Any) -> Answer:
    """A generator as a contender; `options` are further ones of `generate`."""
    options |= Plan(temperature=task.temperature).sampling(task.seeds)
    options["max_new_tokens"] = task.max_new_tokens
    result = generator.generate(task.input_ids, task.attention_mask, **options)
    texts = [[token for step in row for token in step.new_tokens] for row in result.steps]
    return Answer(texts, result.steps if generator.drafter.num_draft_tokens else None)


def _contender(name: str, way: SpeculativeGenerator | Contender) -> Contender:
    if isinstance(way, SpeculativeGenerator):
        return partial(answer, way)
    if isinstance(way, nn.Module) or not callable(way):
        raise TypeError(
            f"contender {name!r} must be a SpeculativeGenerator, HFGenerate(model) or a function "
            f"from Task to Answer, got {shown(way)}"
        )
    return way


def _check_answer(name: str, answer: Answer, task: Task) -> None:
    """Refuses an answer that is not one text of the task's length per row."""
    count, texts = len(task.seeds), answer.new_tokens
    rows = [texts, texts if answer.steps is None else answer.steps]
    longest = max(map(len, texts), default=0)
    if any(len(each) != count for each in rows) or longest > task.max_new_tokens:
        raise ValueError(
            f"the answer of contender {name!r} must have {count} rows of at most "
            f"{task.max_new_tokens} new tokens, got {len(texts)} of up to {longest}"
        )


def _device(contenders: Iterable[SpeculativeGenerator | Contender]) -> torch.device:
    """Where prompts are needed: on the target's device."""
    for way in contenders:
        if isinstance(way, SpeculativeGenerator | HFGenerate):
            return (way.model if isinstance(way, HFGenerate) else way.target).device
    return torch.device("cpu")


def _stats(answers: list[Answer]) -> SpeculationStats | None:
    """Of all batches together."""
    steps = [row for answer in answers for row in answer.steps or ()]
    if not steps:
        return None
    return SpeculationStats(steps, max(len(step.draft_tokens) for row in steps for step in row))


def _until_end(row: list[int], model: PreTrainedModel) -> list[int]:
    """A row up to and including its first end-of-sequence token; what follows is padding."""
    ends = np.atleast_1d(model.generation_config.eos_token_id)
    return row[: 1 + next((i for i, token in enumerate(row) if token in ends), len(row))]
