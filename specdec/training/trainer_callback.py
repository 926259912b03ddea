"""`AcceptanceCallback`: true acceptance length while Hugging Face's `Trainer` runs, in process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from specdec.arguments import check_integer, check_type
from specdec.evaluation.evaluate import evaluate
from specdec.evaluation.prompts import Prompt, as_prompts
from specdec.generator import SpeculativeGenerator
from specdec.training.loop import modes_kept


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

    Raises:
        ValueError: `every` is no positive integer.

    Example:
        >>> from specdec import zoo
        >>> target, draft = zoo.load_target(), zoo.load_drafter("model").model
        >>> from specdec import ModelDrafter
        >>> generator = SpeculativeGenerator(target, ModelDrafter(draft, 4))
        >>> trainer = Trainer(model=draft)  # doctest: +SKIP
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
        check_type("generator", generator, SpeculativeGenerator)
        self._trainer, self._generator = trainer, generator
        self._prompts = as_prompts(prompts)
        self._every, self._temperatures, self._options = every, tuple(temperatures), options
        self._measured_at = -1

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measures where it is due."""
        if state.global_step % self._every == 0:
            self._measure(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Measures the finished weights."""
        if self._measured_at != state.global_step:
            self._measure(state)

    def _measure(self, state: TrainerState) -> None:
        if not state.is_world_process_zero:
            return
        self._measured_at = state.global_step
        parts = nn.ModuleList([self._generator.target.model, self._generator.drafter])
        figures = {}
        with modes_kept(parts, is_training=False):
            for temperature in self._temperatures:
                options = {"temperature": temperature, **self._options}
                found = evaluate(self._generator, self._prompts, **options).estimates
                length, at = found["acceptance_length"], f"T = {temperature:g}"
                figures[f"acceptance_length ({at})"] = length.value
                if not math.isnan(length.low):
                    figures[f"acceptance_length ({at}), low"] = length.low
                    figures[f"acceptance_length ({at}), high"] = length.high
        self._trainer.log(figures)
