"""`specdec-hf`, a model type of lm-evaluation-harness: its `hf`, whose texts are written
speculatively.

    python -m specdec.lab.integrations.lm_eval run --model specdec-hf --tasks gsm8k \\
        --model_args pretrained=TARGET,drafter=eagle:HEAD

is lm-eval's own command (`torchrun -m ...` starts several processes). lm-eval looks up
models in a table of its own and loads no others, so this command adds one and hands on.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from specdec.drafters import Drafter
from specdec.generator import SpeculativeGenerator
from specdec.loading import find_drafter
from specdec.samplers import Sampler
from specdec.targets import Target

NAME = "specdec-hf"
"""Of the model type."""


class SpeculativeLM:
    """What `specdec-hf` adds to lm-eval's `HFLM`. For another class of lm-eval's that loads an HF
    model: `class Mine(SpeculativeLM, TheirClass)`.

    Scores of given texts (`loglikelihood`) are computed by `HFLM`, by one forward.

    Args:
        pretrained: as for `HFLM`: a folder, an id, or a model.
        drafter, sampler: as for `SpeculativeGenerator`, of `--model_args` by name.
        num_draft_tokens: K of a drafter by name.
        fuse: as for `Target`.
        options: as for `HFLM`.

    Raises:
        ValueError: no such drafter, with `mixed_precision_dtype`, or the model cannot be decoded.
    """

    def __init__(
        self,
        pretrained: Any,
        drafter: Drafter | str | None = "lookup",
        sampler: Sampler | str = "auto",
        *,
        num_draft_tokens: int | None = None,
        fuse: bool = False,
        **options: Any,
    ):
        if options.get("mixed_precision_dtype") is not None:
            raise ValueError(
                "mixed_precision_dtype generates under torch.autocast, which is not supported; "
                "load the weights in that data type (dtype=)"
            )
        drafter = "none" if drafter is None else drafter  # lm-eval reads drafter=none as None
        make = find_drafter(drafter, num_draft_tokens) if isinstance(drafter, str) else None
        super().__init__(pretrained, **options)
        target = Target(self.model, fuse=fuse)
        if make is not None:
            drafter = make(target, tokenizer=self.tokenizer, dtype="auto", device=None)
        self.generator = SpeculativeGenerator(target, drafter, sampler)
        accelerator = getattr(self, "accelerator", None)
        if accelerator is not None and self._world_size == 1:  # HFLM shares work among GPUs only
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes

    def _model_generate(self, *args: Any, **options: Any) -> Tensor:
        """As `HFLM`'s, which hands all options on to HF's `generate`."""
        return super()._model_generate(*args, custom_generate=self._decode, **options)

    def _decode(self, *inputs: Any, stopping_criteria: StoppingCriteriaList, **options: Any) -> Any:
        """HF's decoding hook; see `SpeculativeGenerator.__call__`."""
        criteria = [EachRowEnds(c) if hasattr(c, "done_tracker") else c for c in stopping_criteria]
        return self.generator(*inputs, stopping_criteria=StoppingCriteriaList(criteria), **options)


class EachRowEnds(StoppingCriteria):
    """A stop sequence of lm-eval's, row by row. Its own criterion looks at the new tokens alone,
    and ends a batch when every row has met the sequence; until then rows write text that lm-eval
    cuts off.

    Args:
        criterion: lm-eval's `MultiTokenEOSCriteria`, which notes the rows that have met it.
    """

    def __init__(self, criterion: StoppingCriteria):
        self.criterion = criterion

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        """`[B]` bool: rows that have met the sequence."""
        self.criterion(input_ids, scores, **options)
        return torch.tensor(self.criterion.done_tracker, device=input_ids.device)


def model_type() -> type:
    """The class `specdec-hf`, which lm-eval knows by that name from then on."""
    from lm_eval.api.registry import model_registry, register_model
    from lm_eval.models.huggingface import HFLM

    if NAME in model_registry:
        return model_registry.get(NAME)
    return register_model(NAME)(type("SpecdecLM", (SpeculativeLM, HFLM), {}))


def main() -> None:
    """lm-eval's command, with the model type."""
    from lm_eval.__main__ import cli_evaluate

    model_type()
    if not torch.accelerator.is_available():  # else accelerate counts one process
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    cli_evaluate()


if __name__ == "__main__":
    main()
