"""A run: the evaluation of one generator while it is measured, alone or by many processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import compress
from pathlib import Path

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from specdec import processes
from specdec.generator import SpeculativeGenerator
from specdec.lab.certificates import Sentinel
from specdec.lab.evaluation.batches import batches_of, run_batch
from specdec.lab.evaluation.evaluation import Evaluation
from specdec.lab.evaluation.hf_generate import HFGenerate
from specdec.lab.evaluation.plan import Plan, provenance, settings_of_run
from specdec.lab.evaluation.prompts import Prompt, check_reader
from specdec.lab.evaluation.run_file import EvaluatedBatch, RunFile


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
        order: numbers of the batches as they are taken. Long prompts come first: the last ones are
            then short, and all processes end together.
        file: what was measured, in memory or on a disk.
    """

    def __init__(
        self,
        generator: SpeculativeGenerator | HFGenerate,
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
        self._plan, self._tokenizer, self._sentinel = plan, tokenizer, sentinel
        self._num_draft_tokens = generator.drafter.num_draft_tokens
        self._batches = batches_of(prompts, plan)
        sizes = [sum(len(t) for r in rows for t in r.prompt.turns) for rows in self._batches]
        self.order = sorted(range(len(sizes)), key=lambda number: -sizes[number])
        self.file: RunFile | _InMemory = _InMemory(team)

    @contextmanager
    def recorded(self, path: str | Path | None) -> Iterator[None]:
        """Goes on with a file, and writes what is measured meanwhile to it."""
        if path is not None:
            self.file = RunFile(path, self.about, self.team)
        with self.file.joined():
            yield

    @property
    def num_done(self) -> int:
        """Batches that were measured."""
        return len(self.file.lines)

    @property
    def missing(self) -> list[int]:
        """Numbers of the batches that were not measured yet."""
        return [number for number in self.order if number not in self.file.lines]

    def batch(self, number: int) -> EvaluatedBatch:
        """Generates all turns of a batch."""
        rows = self._batches[number]
        return run_batch(self._generator, number, rows, self._plan, self._tokenizer, self._sentinel)

    def settle(self) -> bool:
        """Takes in what all processes have measured; whether that is all."""
        return self.file.settle(range(len(self.order)))

    def evaluation(self) -> Evaluation:
        """What was measured so far."""
        done = [self.file.lines[number] for number in sorted(self.file.lines)]
        return Evaluation(done, self._num_draft_tokens, self.about)

    def release(self) -> None:
        """Lets go of the generator: nothing more is measured here."""
        self._generator = None

    def summary(self) -> str:
        """The acceptance length so far, for a progress bar."""
        rows = [row for batch in self.file.lines.values() for row in batch.rows]
        steps = [step for row in rows for step in row.steps]
        accepted = sum(step.num_accepted for step in steps)
        return f" acceptance length {1 + accepted / max(1, len(steps)):.2f}"


class _InMemory:
    """What a `RunFile` does, without a file: the processes that were started together divide the
    batches in advance, and exchange them at the end.
    """

    def __init__(self, team: processes.Team):
        self.lines: dict[int, EvaluatedBatch] = {}
        self._team = team

    def joined(self) -> AbstractContextManager[None]:
        return nullcontext()

    def pieces(
        self, wanted: Callable[[], Iterable[str]], is_settled: Callable[[], bool], *, wait: bool
    ) -> Iterator[str]:
        yield from self._team.part(list(wanted()))
        is_settled()

    def append(self, batch: EvaluatedBatch) -> None:
        self.lines[batch.index] = batch

    def refresh(self) -> None:
        """Nothing is known of others before the end."""

    def settle(self, keys: Collection[int]) -> bool:
        self.lines = dict(self._team.gather(list(self.lines.items())))
        return True

    def fail(self, error: Exception) -> None:
        """Ends the processes that wait for this one's part."""
        self._team.gather([], error)


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

    def missing() -> list[str]:
        for run in runs:
            if run is not lead:
                run.file.refresh()
        left = {number for run in runs for number in run.missing}
        return [str(number) for number in lead.order if number in left]

    def is_settled() -> bool:
        settled = [run.settle() for run in runs]
        bar.update(sum(run.num_done for run in shown) - bar.n)
        return all(settled)

    try:
        for number in map(int, lead.file.pieces(missing, is_settled, wait=wait)):
            for run in [*runs] * warmup:
                run.batch(number)
            warmup = 0
            own = lead.team.from_first(lambda n=number: [n in run.missing for run in runs])
            measured = _measured(number, list(compress(runs, own)), rounds)
            for run, batch in sorted(measured.items(), key=lambda each: each[0] is lead):
                run.file.append(batch)  # the lead's last: who sees it does not look for the others
            bar.update(sum(run.num_done for run in shown) - bar.n)
            bar.set_postfix_str(lead.summary(), refresh=False)
    except Exception as error:
        lead.file.fail(error)
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
