"""`FollowTarget`: a drafter that learns from the rollouts of a policy that is being trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from specdec import processes
from specdec.arguments import check_integer
from specdec.atomic import replacing
from specdec.generator import SpeculativeGenerator
from specdec.lab.training.callbacks import in_evaluation
from specdec.results import GenerationResult


class FollowTarget(TrainerCallback):
    """Distils the policy into its drafter: a step of an optimiser after every so many rollouts.

    It learns the distributions of the newest weights along the texts of the rollout. A step costs
    one forward of the target over prompts and new tokens, without gradients, and forward and
    backward of the drafter. The policy stays as it is, and so does the distribution of its texts,
    as long as no call repeats the seed of a text that was learned.

    Call it with each result, or add it to the trainer of `speculate(trainer, ...)`, for a rollout
    per step. The trainer's checkpoints then hold its state, and a run that goes on from one in its
    `output_dir`, in as many processes, goes on with that. All of them must call it equally often,
    as they average their gradients.

    Args:
        generator: that writes the rollouts, over the policy.
        objective: makes what is minimised, given the drafter and the target's model, such as
            `TrainingTimeTest` or `lambda drafter, model: Distillation(drafter.model, model)`.
        optimizer: over weights of the drafter; `None` is `AdamW` with a rate of 5e-4. Gradients are
            clipped to a norm of 1.
        every: rollouts between two steps.
        texts: of a rollout that are learned, the first ones; `None` for all.

    Raises:
        ValueError: weights that cannot be trained: none, the target's own, or in less than float32.

    Example:
        >>> from specdec.lab import zoo
        >>> from specdec.lab.training import TrainingTimeTest
        >>> generator = SpeculativeGenerator(zoo.load_target(), "zoo:eagle3")
        >>> follow = FollowTarget(generator, TrainingTimeTest)
        >>> follow(generator.generate(torch.tensor([[5, 6]]), max_new_tokens=16)) > 0
        True
    """

    def __init__(
        self,
        generator: SpeculativeGenerator,
        objective: Callable[[Any, PreTrainedModel], nn.Module],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        every: int = 1,
        texts: int | None = None,
    ):
        self.every = check_integer("every", every, 1)
        self.texts = None if texts is None else check_integer("texts", texts, 1)
        self.drafter, self._target = generator.drafter, generator.target.model
        self._generator, self._objective, self._seen = generator, objective, generator.last_result
        own = [weight for weight in self.drafter.parameters() if weight.requires_grad]
        self._check(own)
        with in_evaluation(self._target, self.drafter):
            objective(self.drafter, self._target)  # raises for a drafter that it cannot train
        self.optimizer = optimizer or torch.optim.AdamW(own, lr=5e-4, weight_decay=0.0)
        self._weights = [w for group in self.optimizer.param_groups for w in group["params"]]
        self.rollouts = self.updates = 0

    def _check(self, own: list[nn.Parameter]) -> None:
        name, theirs = type(self.drafter).__name__, map(id, self._target.parameters())
        if not own:
            raise ValueError(f"{name} has no weights to train; follow with a learned drafter")
        if not set(map(id, own)).isdisjoint(theirs):
            raise ValueError(f"{name} has weights of the target's; train weights of its own")
        if low := [weight.dtype for weight in own if weight.dtype.itemsize < 4]:
            raise ValueError(f"{name} has weights in {low[0]}; make it of float32 ones to train it")

    @torch.enable_grad()
    def __call__(self, result: GenerationResult) -> float | None:
        """Learns from a rollout, and returns the loss before the step; `None` if none is due.

        Raises:
            ValueError: all texts are shorter than what the objective unrolls.
            FloatingPointError: a gradient is not finite; the drafter stays as it is.
        """
        self.rollouts += 1
        if self.rollouts % self.every:
            return None
        device = self._target.device
        on_gpu = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(on_gpu), in_evaluation(self._target, self.drafter):
            torch.manual_seed(self.updates)  # what an objective draws moves no seed of a rollout
            objective = self._objective(self.drafter, self._target).train()  # of an edited model
            loss = objective(_rows(result, self.texts).to(device))
            loss.backward()
        processes.average([weight.grad for weight in self._weights if weight.grad is not None])
        norm = nn.utils.clip_grad_norm_(self._weights, 1.0)
        if is_sound := bool(norm.isfinite()):
            self.optimizer.step()
            self.updates += 1
        self.optimizer.zero_grad()
        if not is_sound:
            raise FloatingPointError(f"a gradient of the drafter is {norm}; take a lower rate")
        return loss.item()

    def state_dict(self) -> dict[str, Any]:
        """Weights of the drafter, state of the optimiser, counts of rollouts and of steps."""
        parts = {"drafter": self.drafter.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**parts, "rollouts": self.rollouts, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state; the weights change in place."""
        self.drafter.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rollouts, self.updates = state["rollouts"], state["updates"]

    def on_train_begin(self, args, state, control, **kwargs):
        """Goes on from the state in the checkpoint of this step, if there is one."""
        if state.global_step and (file := _file(args, state)).exists():
            self.load_state_dict(torch.load(file, self._target.device, weights_only=True))

    def on_step_end(self, args, state, control, **kwargs):
        """Learns from a new rollout."""
        if (result := self._generator.last_result) is not self._seen:
            self._seen = result
            self(result)

    def on_save(self, args, state, control, **kwargs):
        """Writes the state into the checkpoint."""
        if state.is_world_process_zero and not args.save_only_model:  # as MemoryCallback
            with replacing(_file(args, state)) as file:
                torch.save(self.state_dict(), file)


def _file(args: Any, state: Any) -> Path:
    name = f"drafter-process-0-of-{args.world_size}.pt"
    return Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}", name)


def _rows(result: GenerationResult, count: int | None) -> Tensor:
    """Ids `[B, T]` of the first texts, as long as the longest. The next text follows a text's end,
    as it does in packed rows, so none is cut and no padding is learned.
    """
    pairs = zip(result.prompts, result.texts, strict=True)
    texts = [torch.tensor(prompt + text, device="cpu") for prompt, text in pairs][:count]
    lengths = torch.tensor([len(text) for text in texts], device="cpu")
    starts, stream = lengths.cumsum(0) - lengths, torch.cat(texts)
    return stream[(starts[:, None] + torch.arange(int(lengths.max()), device="cpu")) % len(stream)]
