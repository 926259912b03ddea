"""The one training loop: of the zoo's models and of every drafter, on one process or many.

Legend: B rows of a batch, T tokens of a row.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from specdec.arguments import check_type, make_folder
from specdec.training.data import PackedStream
from specdec.training.interruption import Interruption
from specdec.training.plan import TrainingPlan, TrainingProgress
from specdec.training.run_checkpoint import RunCheckpoint
from specdec.training.run_settings import run_settings
from specdec.training.teacher import Teacher

Evaluate = Callable[[], dict[str, float]]
Schedule = list[tuple[torch.optim.Optimizer, float]]
"""Optimisers, each with its peak learning rate."""


def train(
    objective: nn.Module,
    stream: PackedStream,
    *,
    plan: TrainingPlan,
    work_dir: str | Path,
    evaluate: Evaluate | None = None,
) -> TrainingProgress:
    """Trains what an objective holds, in place, or goes on from the checkpoint in `work_dir`.

    Under `accelerate launch` every process takes its rows of the same batches, so that the number
    of processes changes the speed and not the run (but for random numbers that an objective draws).
    Such numbers depend on `plan.seed` alone, and the caller's generators are left as they were.

    Args:
        objective: maps ids `[B, T + 1]` to the mean loss; its trainable parameters are trained, in
            training mode. It is moved to the process's device.
        stream: the text.
        plan: length, schedule and optimiser settings.
        work_dir: scratch folder of this run's checkpoints.
        evaluate: measures on the way and at the end, in eval mode; runs on the first process, and
            its figures are kept in the progress.

    Returns:
        What the run did, all of it if it went on from a checkpoint.

    Raises:
        TypeError: an argument of another type.
        ValueError: the text is too short for the plan; or the checkpoint is damaged, or of a run
            with other settings (names them; `steps`, `minutes`, `accumulation` and what changes
            neither the rows of a step nor their order may differ).
        FloatingPointError: the loss or a weight is not finite any more; such weights are not saved.
        KeyboardInterrupt: SIGINT or SIGTERM came. The step under way was completed and saved.

    Example:
        >>> import tempfile
        >>> from specdec import zoo
        >>> from specdec.training import NextToken, PackedStream, TrainingPlan, encode_texts
        >>> documents = encode_texts(["def f(x):\\n    return x\\n"] * 9, zoo.load_tokenizer())
        >>> plan = TrainingPlan(
        ...     steps=1, tokens_per_step=32, lengths=((1.0, 16),), precision="no", compiled=False
        ... )
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     stream = PackedStream(documents, seed=0)
        ...     progress = train(NextToken(zoo.load_target()), stream, plan=plan, work_dir=folder)
        >>> progress.num_steps, progress.num_tokens
        (1, 32)
    """
    check_type("objective", objective, nn.Module)
    check_type("stream", stream, PackedStream)
    check_type("plan", plan, TrainingPlan)
    work_dir = make_folder("work_dir", work_dir)
    if any(parameter.is_meta for parameter in objective.parameters()):
        raise ValueError("the objective has weights on the meta device, which holds no numbers")
    if evaluate is not None and not callable(evaluate):
        raise TypeError(f"evaluate must be a function that returns figures, got {evaluate!r}")
    _check_ids(objective, stream)
    # The precision is the plan's, not the launcher's: see `_descend`.
    accelerator = Accelerator(
        mixed_precision="no",
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=plan.accumulation),
    )
    progress, is_first = TrainingProgress(), accelerator.is_main_process
    schedule = [(accelerator.prepare(o), peak) for o, peak in build_optimizers(objective, plan)]
    model = accelerator.prepare(objective)
    # One program per row length: with symbolic sizes each would be slower.
    loss_of = torch.compile(model, dynamic=False) if plan.compiled else model
    settings = run_settings(objective, stream, plan, accelerator.num_processes)
    checkpoint = RunCheckpoint(work_dir, accelerator, progress, stream, settings)
    interruption = Interruption()
    with (
        _own_generators(plan.seed, accelerator),
        modes_kept(objective, is_training=True),
        interruption.listening(),
    ):
        checkpoint.load()
        saved_at_s = progress.wall_s
        with tqdm(total=100, mininterval=5, bar_format=_BAR, disable=not is_first) as bar:
            while (fraction := progress.fraction(plan)) < 1:
                started_s, losses, num_tokens = time.monotonic(), [], 0
                for _ in range(plan.accumulation):
                    ids = _own_rows(stream, plan, fraction, accelerator)
                    num_tokens += ids[:, 1:].numel() * accelerator.num_processes
                    with accelerator.accumulate(model):
                        losses.append(_descend(loss_of, ids, schedule, plan, fraction, accelerator))
                loss = _agreed(losses, progress, accelerator)
                progress.record(loss, num_tokens, _elapsed(started_s, accelerator))
                _show(bar, progress, plan, fraction)
                is_last = progress.fraction(plan) >= 1
                is_due = plan.evaluate_every and progress.num_steps % plan.evaluate_every == 0
                is_evaluated = evaluate is not None and bool(is_due or is_last)
                is_old = progress.wall_s - saved_at_s > 60 * plan.checkpoint_minutes
                if is_evaluated:
                    _check_weights(schedule, progress)
                    _evaluate(objective, evaluate, progress, accelerator, interruption)
                is_interrupted = interruption.is_agreed(accelerator)
                if is_last or is_evaluated or is_old or is_interrupted:
                    _check_weights(schedule, progress)
                    checkpoint.save()
                    saved_at_s = progress.wall_s
                if is_interrupted:
                    raise KeyboardInterrupt(f"step {progress.num_steps} is saved in {work_dir}")
    return progress


def build_optimizers(module: nn.Module, plan: TrainingPlan) -> Schedule:
    """Muon for the hidden matrices, AdamW for embeddings, vocabulary heads, norms and biases, each
    with its peak rate.

    Raises:
        ValueError: there is nothing to train.
    """
    tables = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    hidden, others = [], []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            is_table = id(parameter) in tables or "lm_head" in name
            (hidden if parameter.ndim == 2 and not is_table else others).append(parameter)
    schedule: Schedule = []
    if hidden:
        # Updates as large as AdamW's, whatever the matrix's shape (arXiv:2502.16982).
        options = {"weight_decay": plan.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
        schedule.append((torch.optim.Muon(hidden, **options), plan.lr_matrices))
    if others:
        adamw = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)
        schedule.append((adamw, plan.lr_others))
    if not schedule:
        raise ValueError("nothing to train: no parameter of the objective requires a gradient")
    return schedule


def _check_ids(objective: nn.Module, stream: PackedStream) -> None:
    """Raises `ValueError` for text of another vocabulary, which a GPU would report as its own."""
    models = [part for part in objective.modules() if isinstance(part, PreTrainedModel)]
    models += [part.target for part in vars(objective).values() if isinstance(part, Teacher)]
    for model in models:
        size = model.get_input_embeddings().weight.shape[0]
        if stream.largest_id >= size:
            raise ValueError(
                f"the text holds the id {stream.largest_id}, and {type(model).__name__} has {size} "
                "embeddings; encode the text with the model's own tokenizer"
            )


_BAR = "{l_bar}{bar}| first step"


def _own_rows(
    stream: PackedStream, plan: TrainingPlan, fraction: float, accelerator: Accelerator
) -> Tensor:
    """The next batch's rows of this process, ids `[B, T + 1]`."""
    count = accelerator.num_processes
    ids = stream.take(plan.rows_at(fraction, count), plan.length_at(fraction))
    return ids[accelerator.process_index :: count].to(accelerator.device)


def _descend(
    loss_of: Callable[[Tensor], Tensor],
    ids: Tensor,
    schedule: Schedule,
    plan: TrainingPlan,
    fraction: float,
    accelerator: Accelerator,
) -> Tensor:
    """Adds a batch's gradients, and after the step's last one updates the parameters.

    Returns:
        The loss of the batch.

    Raises:
        TypeError: it is no loss that depends on what is trained.
    """
    # Not accelerate's own mixed precision: it is set once per process, and rewrites the module.
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=plan.precision == "bf16"):
        loss = loss_of(ids)
    if not isinstance(loss, Tensor) or loss.dim() or not loss.requires_grad:
        got = f"{list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise TypeError(
            "an objective must return its mean loss, a tensor of no dimensions that depends on "
            f"trainable parameters, got {got}"
            + (", without a gradient" if isinstance(loss, Tensor) and not loss.dim() else "")
        )
    accelerator.backward(loss)
    if accelerator.sync_gradients:
        trained = [p for o, _ in schedule for group in o.param_groups for p in group["params"]]
        accelerator.clip_grad_norm_(trained, plan.clip_norm)
    for optimizer, peak_lr in schedule:  # both calls wait for the last batch of a step
        for group in optimizer.param_groups:
            group["lr"] = peak_lr * plan.lr_factor_at(fraction)
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach()


def _agreed(losses: list[Tensor], progress: TrainingProgress, accelerator: Accelerator) -> float:
    """The loss over a step's batches and all processes."""
    loss = accelerator.reduce(torch.stack(losses).mean(), reduction="mean").item()
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the loss of step {progress.num_steps + 1} is {loss}; go on from the last checkpoint "
            "with lower learning rates"
        )
    return loss


def _check_weights(schedule: Schedule, progress: TrainingProgress) -> None:
    """Raises `FloatingPointError` for weights that the last update broke, which no loss shows."""
    groups = [group["params"] for optimizer, _ in schedule for group in optimizer.param_groups]
    weights = [weight.detach() for group in groups for weight in group]
    if not torch.stack([weight.isfinite().all() for weight in weights]).all():
        raise FloatingPointError(
            f"step {progress.num_steps} has made weights NaN or infinite, they are not saved; go "
            "on from the last checkpoint with lower learning rates"
        )


def _elapsed(started_s: float, accelerator: Accelerator) -> float:
    """Seconds since then by the first process's clock, so that all agree on a run by minutes."""
    seconds = torch.tensor(time.monotonic() - started_s, device=accelerator.device)
    if accelerator.num_processes > 1:
        torch.distributed.broadcast(seconds, src=0)
    return seconds.item()


def _evaluate(
    objective: nn.Module,
    evaluate: Evaluate,
    progress: TrainingProgress,
    accelerator: Accelerator,
    interruption: Interruption,
) -> None:
    figures = None
    if accelerator.is_main_process:
        with modes_kept(objective, is_training=False):
            figures = interruption.run(evaluate)
    if figures is not None:
        _check_figures(figures)
        progress.evaluations.append({"step": progress.num_steps, **figures})
        text = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        tqdm.write(f"step {progress.num_steps}: {text}")
    accelerator.wait_for_everyone()


def _check_figures(figures: dict[str, float]) -> None:
    check_type("what evaluate returns", figures, dict, advice="return figures by name")
    for name, value in figures.items():
        check_type(f"the figure {name!r} of evaluate", value, float)


@contextmanager
def modes_kept(objective: nn.Module, *, is_training: bool) -> Iterator[None]:
    """Training or eval mode for a while; afterwards every module is in the mode it was found in."""
    found = [(module, module.training) for module in objective.modules()]
    objective.train(is_training)
    try:
        yield
    finally:
        for module, was_training in found:
            module.training = was_training


@contextmanager
def _own_generators(seed: int, accelerator: Accelerator) -> Iterator[None]:
    """Random numbers of the run's own: of its seed, or of its checkpoint, which sets them all."""
    of_python, of_numpy, device = random.getstate(), np.random.get_state(), accelerator.device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed + accelerator.process_index)
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def _show(bar: tqdm, progress: TrainingProgress, plan: TrainingPlan, fraction: float) -> None:
    """Moves the progress bar to the fraction done."""
    # Not a postfix, before which tqdm puts a comma.
    bar.bar_format = (
        f"{{l_bar}}{{bar}}| step {progress.num_steps}, loss {progress.loss:.3f}, rows of "
        f"{plan.length_at(fraction)} tokens, {progress.num_tokens / progress.wall_s:.0f} tokens/s"
    )
    bar.update(min(100.0, 100 * progress.fraction(plan)) - bar.n)
