"""`ObjectiveTrainer`: Hugging Face's `Trainer` with an objective as its model.

Legend: B rows of a batch, T tokens of a row.
"""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from accelerate.utils.constants import FSDP_MODEL_NAME
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import checkpoint
from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments

from specdec.arguments import check_integer, check_number
from specdec.hf.trainer import train_on_one_gpu
from specdec.lab.training.callbacks import BatchSizes, Clock, Interruption
from specdec.lab.training.data import PackedStream
from specdec.lab.training.optimizer import MuonAdamW

STATE = "trainer_state.json"
"""The last file of a checkpoint that is written: a folder without it is not whole."""


@dataclass
class ObjectiveArguments(TrainingArguments):
    """HF's `TrainingArguments` with the fields and defaults of training on packed text.

    `learning_rate` and `weight_decay` are those of the hidden matrices (Muon). The length of a run
    is `max_steps` or `minutes`; the schedule follows the fraction done, so both give one curve.

    Args:
        tokens_per_step: over all processes and accumulated batches together; it takes the place of
            `per_device_train_batch_size`.
        row_lengths: (until this fraction of the run, tokens per row). Attention is most of the cost
            of long rows, so most of a run can see short ones and its end teach long positions.
        lr_ratio: rate of embeddings, vocabulary heads, norms and biases (AdamW), as a multiple of
            `learning_rate`.
        minutes: of training, evaluations and checkpoints aside; `None` for a run by `max_steps`.
        checkpoint_minutes: between checkpoints, beside those of `save_strategy`; `None` for none.

    Example:
        >>> sizes = {"tokens_per_step": 4096, "row_lengths": ((0.5, 256), (1.0, 512))}
        >>> arguments = ObjectiveArguments("run", max_steps=100, use_cpu=True, **sizes)
        >>> arguments.batch_shape(0.0), arguments.batch_shape(0.9)
        ((16, 256), (8, 512))
    """

    learning_rate: float = 5e-3
    weight_decay: float = 0.1
    lr_scheduler_type: str = "cosine_warmup_with_min_lr"
    lr_scheduler_kwargs: dict | str | None = field(default_factory=lambda: {"min_lr_rate": 0.02})
    warmup_steps: float = 0.02
    logging_steps: float = 50
    save_total_limit: int | None = 1
    ignore_data_skip: bool = True  # batches find their place by themselves
    ddp_find_unused_parameters: bool | None = False
    tokens_per_step: int = 16384
    row_lengths: Any = ((1.0, 512),)
    lr_ratio: float = 0.4
    minutes: float | None = None
    checkpoint_minutes: float | None = None

    def __post_init__(self):
        if (self.minutes is None) == (self.max_steps <= 0):
            raise ValueError(
                f"expected either steps or minutes, got max_steps={self.max_steps}, "
                f"minutes={self.minutes}"
            )
        if self.minutes is not None:
            check_number("minutes", self.minutes, above=0)
            self.max_steps = sys.maxsize
        check_integer("gradient_accumulation_steps", self.gradient_accumulation_steps, 1)
        ends = [end for end, _ in self.row_lengths]
        if sorted({0, *ends}) != [0, *ends] or ends[-1] != 1:
            raise ValueError(f"row_lengths must have rising fractions to 1, got {self.row_lengths}")
        for _, length in self.row_lengths:
            check_integer("the tokens per row of row_lengths", length, 1)
        super().__post_init__()

    @property
    def device(self) -> torch.device:
        """Of this process. Of several on a CPU it is no "cpu:0", to which transformers 5.17 cannot
        load an optimiser, and fake tensors on "cpu" are elsewhere.
        """
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device

    def batch_shape(self, fraction: float) -> tuple[int, int]:
        """(B over all processes, T) of a batch at a fraction of the run."""
        lengths = (length for end, length in self.row_lengths if fraction < end)
        length = next(lengths, self.row_lengths[-1][1])
        processes, batches = self.world_size, self.gradient_accumulation_steps
        rows = self.tokens_per_step // (length * batches * processes) * processes
        if rows == 0:
            raise ValueError(
                f"tokens_per_step = {self.tokens_per_step} has not a row of {length} tokens for "
                f"each of {processes} processes and {batches} accumulated batches; raise it or "
                "shorten the rows"
            )
        return rows, length


class ObjectiveTrainer(Trainer):
    """Trains what an objective holds, in place, as HF's `Trainer` trains models.

    An objective is a module that maps ids `[B, T + 1]` to its mean loss. An objective whose batches
    hold unequal numbers of items has `num_items` and takes `num_items_in_batch`. Under a launcher
    every process takes its rows of the same batches, so that the number of processes changes the
    speed and not the run (but for random numbers that an objective draws).

    Args:
        model: the objective.
        args: of the run.
        train_dataset: the text.
        callbacks, options: as `Trainer`.

    Example:
        >>> import tempfile
        >>> from specdec.lab import zoo
        >>> from specdec.lab.training import NextToken, encode_texts
        >>> documents = encode_texts(["def f(x):\\n    return x\\n"] * 9, zoo.load_tokenizer())
        >>> sizes = {"max_steps": 1, "tokens_per_step": 32, "row_lengths": ((1.0, 16),)}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     args = ObjectiveArguments(folder, **sizes, use_cpu=True, disable_tqdm=True)
        ...     stream = PackedStream(documents, seed=0)
        ...     trainer = ObjectiveTrainer(NextToken(zoo.load_target()), args, stream)
        ...     state = trainer.train_or_resume()  # doctest: +ELLIPSIS
        {'train_runtime': ...}
        >>> state.global_step
        1
    """

    def __init__(
        self,
        model: nn.Module,
        args: ObjectiveArguments,
        train_dataset: PackedStream,
        callbacks: list[TrainerCallback] | None = None,
        **options: Any,
    ):
        self.clock = Clock(args.minutes, args.checkpoint_minutes)
        self.interruption = Interruption()
        batches, ends = args.gradient_accumulation_steps, [end for end, _ in args.row_lengths]
        rows = [args.batch_shape(end - 1e-9)[0] * batches for end in ends]
        self.batch_sizes = BatchSizes(rows, args.world_size)
        callbacks = [self.clock, self.batch_sizes, self.interruption, *(callbacks or ())]
        super().__init__(model, args, train_dataset=train_dataset, callbacks=callbacks, **options)
        train_on_one_gpu(args)
        if args.torch_compile:  # one program per row length: symbolic sizes would make each slower
            self.accelerator.state.dynamo_plugin.dynamic = False

    def train_or_resume(self) -> TrainerState:
        """Trains, or goes on from the last whole checkpoint in `args.output_dir`; the weights of a
        run that is finished there are loaded. Ctrl-C and SIGTERM leave a checkpoint.

        Returns:
            What the run did, all of it if it went on from a checkpoint.

        Raises:
            FloatingPointError: the loss or a weight is not finite; such weights are not saved.
            KeyboardInterrupt: a signal came. The step under way was completed and saved.
            ValueError: the checkpoint is of a run whose steps had other rows (because of another
                number of processes), or was written under FSDP and this is none, or the reverse.
        """
        folder = last_checkpoint(self.args.output_dir)
        state = folder and TrainerState.load_from_json(str(folder / STATE))
        if state and is_finished(state, self.args):
            self._load_weights(folder)
            self.state = state
            return state
        if state:
            self._check_layout(folder)
            self.batch_sizes.check(state)
        # The last one, so that it sees a signal that came while another measured.
        self.add_callback(self.pop_callback(Interruption))
        with self.interruption.listening():
            self.train(resume_from_checkpoint=folder and str(folder))
        return self.state

    def _load_weights(self, folder: Path) -> None:
        """Those of a finished run, whatever its processes were."""
        if (file := folder / "model.safetensors").exists():
            self.model.load_state_dict(load_file(file))
            return
        kept = {"model": self.model.state_dict()}
        checkpoint.load(kept, checkpoint_id=folder / f"{FSDP_MODEL_NAME}_0")
        self.model.load_state_dict(kept["model"])

    def _check_layout(self, folder: Path) -> None:
        """Raises ValueError for a checkpoint in parts without FSDP, and a whole one under FSDP."""
        is_in_parts = any(folder.glob(f"{FSDP_MODEL_NAME}*"))
        if self.is_fsdp_enabled and not is_in_parts:
            raise ValueError(
                f"{folder} is whole, and FSDP reads parts; go on without --use_fsdp, in any number "
                "of processes"
            )
        if is_in_parts and not self.is_fsdp_enabled:
            raise ValueError(
                f"{folder} is in the parts that FSDP writes; go on under accelerate launch "
                "--use_fsdp --fsdp_version 2, in two processes or more"
            )

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The objective's own loss. A loss that is divided by the items of all processes is
        multiplied by the number of processes, since their gradients are averaged.
        """
        if num_items_in_batch is not None:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        loss = model(**inputs)
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.args.world_size
        return (loss, None) if return_outputs else loss

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        """The batches of a step, and the number of items that the step averages over: the sum of
        the objective's `num_items`, or `None` for an objective without it.
        """
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        if (num_items := getattr(self.model, "num_items", None)) is None:
            return batches, None
        count = torch.tensor(sum(num_items(**batch) for batch in batches), device=device)
        if self.args.average_tokens_across_devices:
            count = self.accelerator.gather(count).sum()
        return batches, count

    def training_step(self, *args, **kwargs) -> Tensor:
        """As `Trainer`'s; HF would leave a loss that is NaN out of its logs, and go on."""
        loss = super().training_step(*args, **kwargs)
        if not loss.isfinite():
            raise FloatingPointError(
                f"the loss of step {self.state.global_step + 1} is {loss.item()}; go on from the "
                "last checkpoint with lower learning rates"
            )
        return loss

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Muon and AdamW."""
        if self.optimizer is None:
            lr, decay = self.args.learning_rate, self.args.weight_decay
            rates = {"lr": lr, "lr_others": self.args.lr_ratio * lr, "weight_decay": decay}
            self.optimizer = MuonAdamW(self.model if model is None else model, **rates)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer=None):
        """HF's, over the ticks of the clock in a run by minutes."""
        steps = num_training_steps if self.args.minutes is None else Clock.TICKS
        return super().create_scheduler(steps, optimizer)

    def get_train_dataloader(self) -> Iterator[dict[str, Tensor]]:
        """This process's rows of the batches, from the step on that the run has reached."""
        rank, processes = self.args.process_index, self.args.world_size
        batches = self.args.gradient_accumulation_steps
        done = self.state.global_step  # of the checkpoint, which is loaded before the first batch
        shapes = (self.args.batch_shape(self._fraction(i // batches, done)) for i in count())
        for rows in self.train_dataset.batches(shapes, skip=done * batches):
            yield {"ids": rows[rank::processes]}

    def _fraction(self, step: int, resumed: int) -> float:
        """How much of the run is done before a step; of a run by minutes, as if the steps before
        the one where it was resumed had taken equally long.
        """
        if self.args.minutes is None:
            return step / self.args.max_steps
        return self.clock.fraction * (step / resumed if step < resumed else 1.0)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """As `Trainer`'s, but for weights that the last update broke, which no loss shows, and for
        tied ones, which safetensors does not take.
        """
        state_dict = self.model.state_dict() if state_dict is None else state_dict
        if not all(tensor.isfinite().all() for tensor in state_dict.values()):
            raise FloatingPointError(
                f"step {self.state.global_step} has made weights NaN or infinite, they are not "
                "saved; go on from the last checkpoint with lower learning rates"
            )
        seen: set[int] = set()
        for name, tensor in state_dict.items():
            is_tied = tensor.data_ptr() in seen
            seen.add(tensor.data_ptr())
            state_dict[name] = tensor.clone() if is_tied else tensor
        super()._save(output_dir, state_dict)


def last_checkpoint(folder: str | os.PathLike) -> Path | None:
    """The last whole checkpoint of a run; `None` without one. HF writes its state last."""
    states = Path(folder).glob(f"checkpoint-*/{STATE}")
    whole = [path.parent for path in states if _is_whole(path)]
    return max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)


def is_finished(state: TrainerState, args: ObjectiveArguments) -> bool:
    """Whether the run of a checkpoint is as long as these arguments say."""
    if args.minutes is None:
        return state.global_step >= args.max_steps
    return state.stateful_callbacks["Clock"]["attributes"]["wall_s"] >= 60 * args.minutes


def _is_whole(path: Path) -> bool:
    """Whether a file of JSON was written to its end."""
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return True
