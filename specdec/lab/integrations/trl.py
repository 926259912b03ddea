"""`speculate`: the rollouts of TRL's trainers, written speculatively.

TRL's trainers have one way to their own model's texts, `generate` of that model, whatever else they
change from version to version. So that one attribute is what is replaced: the generation
configuration, the processing of completions and the log-probabilities stay TRL's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.arguments import shown
from specdec.drafters import Drafter, SuffixDrafter
from specdec.generator import SpeculativeGenerator
from specdec.lab.training.callbacks import MemoryCallback, in_evaluation
from specdec.samplers import Sampler
from specdec.targets import Target

_OTHER_WAYS = {
    "use_vllm": "use_vllm=False",
    "use_transformers_continuous_batching": "use_transformers_continuous_batching=False",
    "rollout_func": "no rollout_func, or call a SpeculativeGenerator in it",
}
"""Attributes of a trainer that writes rollouts without `generate` of its model, and what to do."""


def speculate(
    trainer: Any,
    drafter: Drafter | str | None,
    sampler: Sampler | str = "auto",
    *,
    fuse: bool = False,
    **options: Any,
) -> SpeculativeGenerator:
    """From now on the model that a trainer of TRL's trains generates speculatively.

    Rollouts are the policy's own: drawn from the weights as they are at that moment, without
    dropout. Each row's seed is drawn from torch's generator on the CPU, which TRL seeds by
    `args.seed`, another in each process, and which is saved with the trainer's checkpoints.

    Weights that change in place, as optimisers change them, need nothing. After an edit of another
    kind (`generator.refresh` lists them) the next rollout raises an error until the generator that
    is returned was refreshed.

    A `SuffixDrafter`, also one among others, remembers each rollout by its prompt, so that the next
    epoch's is drafted from it. Checkpoints keep its memory (`MemoryCallback`). Give each run a
    drafter of its own: a run with the seeds of another one must not draft the other one's texts.

    Args:
        trainer: with a `model`, plain or of PEFT: `GRPOTrainer`, `RLOOTrainer`, ..., made, and
            before or in training.
        drafter, sampler, options: as for `SpeculativeGenerator`. The sampler must be lossless: TRL
            takes the policy's probabilities for those that the rollouts were drawn from.
        fuse: as for `Target`.

    Returns:
        The generator. Its `last_result` is that of the last rollout.

    Raises:
        TypeError: the trainer has no model that generates.
        ValueError: a lossy sampler; or the trainer's rollouts would not go through the model's
            `generate`.
    """
    model = getattr(trainer, "model", None)
    if not callable(getattr(model, "generate", None)):
        raise TypeError(
            f"trainer must have a model that generates, as TRL's trainers do, got {shown(trainer)}"
        )
    for name, advice in _OTHER_WAYS.items():
        if getattr(trainer, name, None):
            raise ValueError(
                f"{type(trainer).__name__} writes its rollouts another way than by its model's "
                f"generate ({name} is set), so specdec would write none; make it with {advice}"
            )
    on_gpu = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(on_gpu):  # a head that is loaded may draw initial values
        generator = SpeculativeGenerator(Target(model, fuse=fuse), drafter, sampler, **options)
    if not generator.sampler.lossless:
        raise ValueError(
            f"{type(generator.sampler).__name__} is lossy: rollouts would not have the "
            "policy's distribution, which the trainer assumes; choose a lossless sampler"
        )
    memory = MemoryCallback(generator.drafter)
    if memory.drafters:
        trainer.add_callback(memory)
    plain = model.generate
    plain = plain.plain if isinstance(plain, Rollouts) else plain
    model.generate = Rollouts(plain, generator, memory.drafters)
    return generator


class Rollouts:
    """`generate` of a model in training: HF's own, with a generator as its decoding function.

    Args:
        plain: the model's `generate`.
        generator: of that model.
        memories: drafters that remember its texts. Those of seeds that callers choose are left out:
            what seeds have written must not be drafted for them.
    """

    __slots__ = ("generator", "memories", "plain")  # a private view passes by what has no __dict__

    def __init__(
        self,
        plain: Callable,
        generator: SpeculativeGenerator,
        memories: Sequence[SuffixDrafter] = (),
    ):
        self.plain, self.generator, self.memories = plain, generator, memories

    def __call__(self, *args: Any, **options: Any) -> Any:
        """As HF's; `seed=` and `output_logprobs=` may be passed as well."""
        with in_evaluation(self.generator.target.model):
            return self.plain(*args, **{"custom_generate": self.decode} | options)

    def decode(
        self,
        *inputs: Any,
        stop_strings: Any = None,
        seed: Any = None,
        output_logprobs: bool = False,
        **options: Any,
    ) -> Any:
        """HF's decoding hook; see `SpeculativeGenerator.__call__`. HF passes no keyword of a caller
        that is not named here.
        """
        rows: Tensor = inputs[1]
        memories = self.memories if seed is None else ()
        if seed is None:
            seed = torch.randint(2**63 - 1, (len(rows),), device="cpu").tolist()
        options |= {"stop_strings": stop_strings, "output_logprobs": output_logprobs}
        found = self.generator(*inputs, seed=seed, **options)
        result = self.generator.last_result
        for drafter in memories:
            drafter.remember(result.texts, result.prompts)
        return found
