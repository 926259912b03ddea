"""The training loop shared by the zoo's models.

Legend: B rows of a batch, T tokens of a row, V vocabulary.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm

from specdec.zoo.packing import PackedStream

LossFn = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TrainingPlan:
    """How one model is trained; written into its card.

    Either `steps` or `minutes` of wall-clock sets the length; the schedule follows the fraction
    done, so that both give the same curve.
    """

    minutes: float | None = None
    steps: int | None = None
    tokens_per_step: int = 6144
    # (until this fraction of the run, tokens per row): attention is 60% of the cost at 512, so
    # most of the run sees short rows and the end teaches long positions.
    lengths: tuple[tuple[float, int], ...] = ((0.6, 256), (0.88, 512), (1.0, 1024))
    lr_matrices: float = 8e-3
    lr_others: float = 3e-3
    weight_decay: float = 0.1
    warmup_fraction: float = 0.02
    final_lr_ratio: float = 0.02
    clip_norm: float = 1.0
    seed: int = 0
    precision: str = "bf16"
    checkpoint_minutes: float = 4.0

    def length_at(self, fraction: float) -> int:
        """Return the tokens per row at a fraction of the run."""
        return next((length for end, length in self.lengths if fraction < end), self.lengths[-1][1])

    def lr_factor_at(self, fraction: float) -> float:
        """Return the learning rate's factor: linear warm-up, then a cosine."""
        if fraction < self.warmup_fraction:
            return max(fraction, 1e-4) / self.warmup_fraction
        done = (fraction - self.warmup_fraction) / (1 - self.warmup_fraction)
        cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        return self.final_lr_ratio + (1 - self.final_lr_ratio) * cosine


@dataclass
class TrainingProgress:
    """What a run has done so far; checkpointed with the model."""

    num_steps: int = 0
    wall_s: float = 0.0
    loss: float | None = None  # smoothed over about 50 steps
    history: list[tuple[int, float]] = field(default_factory=list)  # (step, smoothed loss)

    def fraction(self, plan: TrainingPlan) -> float:
        """Return how much of the plan is done, 1 at its end."""
        if plan.steps is not None:
            return self.num_steps / plan.steps
        return self.wall_s / (60 * plan.minutes)

    def record(self, loss: float, wall_s: float) -> None:
        """Count one optimiser step."""
        self.loss = loss if self.loss is None else 0.98 * self.loss + 0.02 * loss
        self.num_steps += 1
        self.wall_s += wall_s
        if self.num_steps % 50 == 0:
            self.history.append((self.num_steps, round(self.loss, 4)))

    def state_dict(self) -> dict:
        """Return all fields."""
        return dict(vars(self))

    def load_state_dict(self, state: dict) -> None:
        """Set all fields."""
        vars(self).update(state)


def train(
    model: nn.Module,
    stream: PackedStream,
    loss_fn: LossFn,
    *,
    plan: TrainingPlan,
    work_dir: Path,
) -> TrainingProgress:
    """Train `model` in place, or go on from the checkpoint in `work_dir`.

    Args:
        model: A causal LM in float32.
        stream: The packed corpus.
        loss_fn: Maps (model, ids [B, T + 1]) to the mean loss.
        plan: Length, schedule and optimiser settings.
        work_dir: Scratch folder of this run's checkpoints.

    Returns:
        What the run did.
    """
    accelerator = Accelerator(mixed_precision=plan.precision)  # on a GPU if there is one
    progress = TrainingProgress()
    schedule = [(accelerator.prepare(o), peak_lr) for o, peak_lr in build_optimizers(model, plan)]
    model = accelerator.prepare(model)
    accelerator.register_for_checkpointing(progress, stream)
    checkpoint = work_dir / "checkpoint"
    if checkpoint.exists():
        accelerator.load_state(str(checkpoint))
    # One program per row length: with symbolic sizes each would be slower.
    compiled_loss = torch.compile(lambda ids: loss_fn(model, ids), dynamic=False)
    model.train()
    saved_at_s = progress.wall_s
    with tqdm(total=100, mininterval=5, bar_format="{l_bar}{bar}|{postfix}") as bar:
        while (fraction := progress.fraction(plan)) < 1:
            started_s = time.monotonic()
            length = plan.length_at(fraction)
            ids = stream.take(plan.tokens_per_step // length, length)
            loss = compiled_loss(ids.to(accelerator.device))
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), plan.clip_norm)
            for optimizer, peak_lr in schedule:
                _step(optimizer, peak_lr * plan.lr_factor_at(fraction))
            progress.record(loss.item(), time.monotonic() - started_s)
            _show(bar, progress, plan, fraction)
            if progress.wall_s - saved_at_s > 60 * plan.checkpoint_minutes:
                _save(accelerator, checkpoint)
                saved_at_s = progress.wall_s
    if progress.wall_s > saved_at_s:
        _save(accelerator, checkpoint)
    return progress


def build_optimizers(
    model: nn.Module, plan: TrainingPlan
) -> list[tuple[torch.optim.Optimizer, float]]:
    """Give Muon the hidden matrices and AdamW the embedding and the norms, with peak rates."""
    embedding = model.get_input_embeddings().weight
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim == 2 and p is not embedding]
    others = [p for p in trained if p.ndim != 2 or p is embedding]
    muon = torch.optim.Muon(
        matrices,
        weight_decay=plan.weight_decay,
        # Updates as large as AdamW's, whatever the matrix's shape (arXiv:2502.16982).
        adjust_lr_fn="match_rms_adamw",
    )
    adamw = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0)
    return [(muon, plan.lr_matrices), (adamw, plan.lr_others)]


def _step(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Update the parameters once and clear their gradients."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    optimizer.step()
    optimizer.zero_grad()


def _show(bar: tqdm, progress: TrainingProgress, plan: TrainingPlan, fraction: float) -> None:
    """Move the progress bar to the fraction done."""
    rate = progress.num_steps * plan.tokens_per_step / progress.wall_s
    bar.set_postfix_str(
        f" step {progress.num_steps}, loss {progress.loss:.3f}, rows of "
        f"{plan.length_at(fraction)} tokens, {rate:.0f} tokens/s",
        refresh=False,
    )
    bar.update(min(100.0, 100 * fraction) - bar.n)


def _save(accelerator: Accelerator, folder: Path) -> None:
    """Write a checkpoint beside the old one, then swap: an interruption loses neither."""
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    accelerator.save_state(str(fresh))
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
