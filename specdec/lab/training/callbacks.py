"""Callbacks of Hugging Face's `Trainer`: true acceptance length, rollouts that are the policy's,
what drafters remember, a run by minutes, interrupts.
"""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from specdec import processes
from specdec.arguments import check_integer
from specdec.drafters import Drafter, SuffixDrafter
from specdec.generator import SpeculativeGenerator
from specdec.graphs.tree import modules_of
from specdec.lab.certificates import Sentinel
from specdec.lab.evaluation.evaluate import evaluate
from specdec.lab.evaluation.prompts import Prompt, as_prompts


class AcceptanceCallback(TrainerCallback):
    """Generates every so many steps with the weights as they are, and logs what was accepted.

    The generator shares the weights that the trainer changes: its drafter (or its target) is made
    over the trained model. Nothing is saved, loaded or served. Figures are logged as any others
    (`trainer.log`), so they reach the log history and every reporter.

    Args:
        trainer: whose run it is; add the callback to it.
        generator: over the trained model.
        prompts: as in `evaluate`.
        every: steps between measurements; the end of training is always measured.
        temperatures: at which is measured; 0 is greedy.
        options: of `evaluate` (tokenizer, max_new_tokens, batch_size, ...).

    Example:
        >>> from specdec.lab import zoo
        >>> target, draft = zoo.load_target(), zoo.load_drafter("model")
        >>> generator = SpeculativeGenerator(target, draft)
        >>> trainer = Trainer(model=draft.model)  # doctest: +SKIP
        >>> callback = AcceptanceCallback(trainer, generator, [[5, 6]])  # doctest: +SKIP
        >>> trainer.add_callback(callback)  # doctest: +SKIP
    """

    def __init__(
        self,
        trainer: Trainer,
        generator: SpeculativeGenerator,
        prompts: Tensor | Iterable[str | Prompt | Sequence[int]],
        *,
        every: int = 500,
        temperatures: Sequence[float] = (0.0, 1.0),
        **options: Any,
    ):
        check_integer("every", every, 1)
        self._trainer, self.generator = trainer, generator
        self._prompts = as_prompts(prompts)
        self._every, self._temperatures, self._options = every, tuple(temperatures), options
        self._measured_at = -1

    def figures(self) -> dict[str, float]:
        """What is measured, by name: acceptance lengths with their intervals."""
        figures = {}
        for temperature in self._temperatures:
            options = {"temperature": temperature, **self._options}
            found = evaluate(self.generator, self._prompts, **options).estimates
            length, name = found["acceptance_length"], f"acceptance_length (T = {temperature:g})"
            figures[name] = length.value
            if not math.isnan(length.low):
                figures |= {f"{name}, low": length.low, f"{name}, high": length.high}
        return figures

    def on_step_end(self, args, state, control, **kwargs):
        """Measures where it is due; the last step before it is saved."""
        if state.global_step % self._every == 0 or control.should_training_stop:
            self._measure(state, control)

    def on_train_end(self, args, state, control, **kwargs):
        """Measures the finished weights."""
        if self._measured_at != state.global_step:
            self._measure(state, control)

    def _measure(self, state: TrainerState, control: TrainerControl) -> None:
        target, trained = self.generator.target.model, self._trainer.model
        together = processes.is_spread(target) or processes.is_sharded(trained)
        if not state.is_world_process_zero and not together:
            return
        self._measured_at = state.global_step
        with processes.gathered(trained), in_evaluation(target, self.generator.drafter):
            if (figures := self.figures()) and state.is_world_process_zero:
                # HF takes this for the step's own log, for which all processes gather their losses.
                is_due = control.should_log
                self._trainer.log(figures)
                control.should_log = is_due


class SentinelCallback(TrainerCallback):
    """Bets along the rollouts of a run, and stops it by a `CertificateError` where they cannot be
    the policy's.

    Each sampled rollout is read before the optimiser changes the weights that it was drawn from, at
    the price of one forward per text. A run of sound rollouts is stopped with a chance of at most
    `false_alarm`, however long it is. In a run of several processes each reads its own rollouts.

    Args:
        generator: that writes the rollouts, over the trained model. Rollouts of calls that pass
            logits processors raise ValueError: a result holds their names alone.
        texts: of each rollout that are read, the first ones; `None` for all.
        options: of `specdec.lab.certificates.Sentinel` (`false_alarm`, `with_drafts`, ...).

    Attributes:
        sentinel: `sentinel.found` is what was found so far.

    Example:
        >>> from specdec.lab import zoo
        >>> generator = SpeculativeGenerator(zoo.load_target(), "lookup")
        >>> callback = SentinelCallback(generator, texts=8)
        >>> trainer.add_callback(callback)  # doctest: +SKIP
    """

    def __init__(
        self, generator: SpeculativeGenerator, *, texts: int | None = None, **options: Any
    ):
        if texts is not None:
            check_integer("texts", texts, 1)
        self.sentinel = Sentinel(generator, **options)
        self._generator, self._texts, self._seen = generator, texts, generator.last_result

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        """Reads a new rollout, at the last moment at which the weights are those of it."""
        result, seen = self._generator.last_result, self._seen
        self._seen = result
        if result is seen or result.seeds is None:  # greedy texts are not drawn
            return
        if "adapter" in result.row_inputs:
            raise ValueError(
                "a rollout had row_inputs['adapter'], of which a result has numbers and no names; "
                "call a Sentinel with the names, or write rollouts with one active adapter"
            )
        first, options = slice(self._texts), result.sampling.options()
        if result.row_inputs:
            options["row_inputs"] = {n: each[first] for n, each in result.row_inputs.items()}
        with in_evaluation(self._generator.target.model):
            self.sentinel(result.prompts[first], result.texts[first], **options)

    on_substep_end = on_pre_optimizer_step  # between batches whose gradients are added up


class MemoryCallback(TrainerCallback):
    """Checkpoints of a run keep what its drafter remembers, each process a file of its own.

    A run that goes on from a checkpoint in its `output_dir` has the memory of that moment, and none
    where the checkpoint has no file of it: texts of later steps may not be drafted, since their
    seeds are drawn once more. HF's trainer has all seeds drawn once more where checkpoints are of
    the model only or of another number of processes, so neither brings a memory.

    Args:
        drafter: a `SuffixDrafter`, or one that joins some with others.

    Example:
        >>> callback = MemoryCallback(SuffixDrafter(8))
        >>> trainer.add_callback(callback)  # doctest: +SKIP
    """

    def __init__(self, drafter: Drafter):
        self.drafters = [part for part in modules_of(drafter) if isinstance(part, SuffixDrafter)]

    def on_train_begin(self, args, state, control, **kwargs):
        """Goes on with the checkpoint's memory; a run that begins, with what there is."""
        for drafter, file in self._files(args, state) if state.global_step else ():
            drafter.load(file) if file.is_file() else drafter.forget()

    def on_save(self, args, state, control, **kwargs):
        """Writes the files."""
        for drafter, file in () if args.save_only_model else self._files(args, state):
            file.parent.mkdir(parents=True, exist_ok=True)  # another host's folder is elsewhere
            drafter.save(file)

    def _files(self, args: Any, state: TrainerState) -> Iterator[tuple[SuffixDrafter, Path]]:
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        process = f"process-{args.process_index}-of-{args.world_size}"
        for i, drafter in enumerate(self.drafters):
            yield drafter, folder / f"memory-{i}-{process}.safetensors"


@contextmanager
def in_evaluation(*parts: nn.Module) -> Iterator[None]:
    """Modules without dropout for a while; afterwards each is as it was before, and each weight is
    trained or not as it was.
    """
    found = [(module, "training", module.training) for part in parts for module in part.modules()]
    found += [(w, "requires_grad", w.requires_grad) for part in parts for w in part.parameters()]
    for part in parts:
        part.eval()
    try:
        yield
    finally:
        for owner, name, value in found:
            setattr(owner, name, value)


class Clock(TrainerCallback, ExportableState):
    """Seconds inside training steps, as the first process counts them; a checkpoint keeps them.
    Evaluations and checkpoints do not count.

    Args:
        minutes: after which the run stops; `None` for a run by steps.
        checkpoint_minutes: between checkpoints; `None` for those of HF's arguments alone.
    """

    TICKS = 10_000
    """Steps of the learning rates' schedule of a run by minutes, which follows the clock."""

    def __init__(self, minutes: float | None = None, checkpoint_minutes: float | None = None):
        self.minutes, self.checkpoint_minutes = minutes, checkpoint_minutes
        self.wall_s = self._started_s = self._saved_s = 0.0

    @property
    def fraction(self) -> float:
        """Of a run by minutes, how much is done."""
        return min(1.0, self.wall_s / (60 * self.minutes))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"args": {}, "attributes": {"wall_s": self.wall_s}}

    def on_train_begin(self, args, state, control, **kwargs):
        """Goes on from the checkpoint's time."""
        kept = state.stateful_callbacks.get(type(self).__name__)
        self.wall_s = kept["attributes"]["wall_s"] if kept and state.global_step else 0.0
        self._saved_s = self.wall_s
        if self.minutes is not None:
            state.max_steps = math.inf  # a progress bar without an end

    def on_step_begin(self, args, state, control, **kwargs):
        """Starts the watch."""
        self._started_s = time.monotonic()

    def on_optimizer_step(self, args, state, control, lr_scheduler=None, **kwargs):
        """Stops it, and moves the schedule to the time, one tick before what is done next."""
        self.wall_s += processes.broadcast([time.monotonic() - self._started_s])[0]
        if self.minutes is not None:
            lr_scheduler.last_epoch = int(self.fraction * self.TICKS) - 1

    def on_step_end(self, args, state, control, **kwargs):
        """Stops and saves when it is time."""
        if self.minutes is not None and self.fraction >= 1:
            control.should_training_stop = control.should_save = True
        if self.checkpoint_minutes is not None:
            control.should_save |= self.wall_s - self._saved_s > 60 * self.checkpoint_minutes

    def on_save(self, args, state, control, **kwargs):
        """Counts from here to the next checkpoint."""
        self._saved_s = self.wall_s


class BatchSizes(TrainerCallback, ExportableState):
    """Checkpoints keep how many rows a step had, with the number of processes that it was made by.

    Args:
        rows: of a step, at each length of rows.
        processes: that share them.
    """

    def __init__(self, rows: Sequence[int], processes: int):
        self.rows, self.processes = list(rows), processes

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"args": {}, "attributes": {"rows": self.rows, "processes": self.processes}}

    def check(self, state: TrainerState) -> None:
        """Raises `ValueError` where a checkpoint's steps had other rows: a run that goes on from it
        would leave out a part of the text, or see it twice.
        """
        kept = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes")
        if kept is not None and kept["rows"] != self.rows:
            theirs, ours = (", ".join(map(str, rows)) for rows in (kept["rows"], self.rows))
            raise ValueError(
                f"the checkpoint's steps had {theirs} rows, over {kept['processes']} processes, "
                f"and {self.processes} would take {ours}; start {kept['processes']} processes, or "
                "another number that divides these rows, with the same accumulation"
            )


class Interruption(TrainerCallback):
    """Ctrl-C and SIGTERM wait for the end of the step, which is saved before `KeyboardInterrupt` is
    raised in every process. The second signal interrupts at once.

    Outside of the main thread Python delivers no signals, and nothing is changed.
    """

    def __init__(self):
        self.is_requested = False
        self._is_immediate = False

    @contextmanager
    def listening(self) -> Iterator[Self]:
        """Handles the signals for a while; afterwards they do what they did before."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        numbers = (signal.SIGINT, signal.SIGTERM)
        found = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield self
        finally:
            for number, handler in found.items():
                signal.signal(number, handler)

    def run(self, work: Callable[[], Any]) -> Any:
        """What `work` returns; `None` if a signal came before its end. It may break off anywhere,
        so the first signal ends it.
        """
        if self.is_requested:
            return None
        self._is_immediate = True
        try:
            return work()
        except KeyboardInterrupt:
            self.is_requested = True
            return None
        finally:
            self._is_immediate = False

    def on_step_end(self, args, state, control, **kwargs):
        """Has the step saved if any process was asked to stop."""
        self.is_requested = processes.any_of(self.is_requested, args.device)
        control.should_save |= self.is_requested

    def on_save(self, args, state, control, **kwargs):
        """Ends the run after the last step is saved."""
        if self.is_requested:
            where = f"step {state.global_step} is saved in {args.output_dir}"
            raise KeyboardInterrupt(where)

    def _on_signal(self, number: int, frame: object) -> None:
        is_second, self.is_requested = self.is_requested, True
        if self._is_immediate or is_second:
            raise KeyboardInterrupt
