"""`HFGenerate`: Hugging Face's own `generate`, as a way of decoding to be measured."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.arguments import check_integer
from specdec.drafters import NoDrafter
from specdec.request.resolve import neutral, with_config
from specdec.row_step import RowStep
from specdec.samplers import RejectionSampler
from specdec.settings import settings_of
from specdec.targets import Target


class HFGenerate:
    """Hugging Face's `generate`, plain or assisted, as a way of decoding that `evaluate`, `sweep`
    and `compare` measure. What assisted generation accepts is not known, and not shown.

    Args:
        model: the target.
        assistant_model: a draft model for assisted generation; `None` decodes plainly.
        num_assistant_tokens: K of assisted generation, constant, with no confidence threshold.

    Example:
        >>> from specdec import evaluate, zoo
        >>> way = HFGenerate(zoo.load_target())
        >>> len(evaluate(way, [[7, 8, 9]], max_new_tokens=4).rows[0].new_tokens)
        4
    """

    def __init__(
        self,
        model: PreTrainedModel | Target,
        assistant_model: PreTrainedModel | None = None,
        *,
        num_assistant_tokens: int = 4,
    ):
        check_integer("num_assistant_tokens", num_assistant_tokens, 1)
        self.target = model if isinstance(model, Target) else Target(model)
        if self.target.edits:
            raise ValueError(
                "HFGenerate runs the model itself, which has none of its target's edits; pass a "
                "model with hooks that do the same, or evaluate SpeculativeGenerator(target, None)"
            )
        if "alora_offsets" in self.target.own_inputs:
            raise ValueError(
                "HFGenerate runs the model inside of its wrapper, where no Activated LoRA begins; "
                "evaluate SpeculativeGenerator(target, None), or use another adapter"
            )
        self.drafter, self.sampler = _NotKnown(assistant_model), RejectionSampler()
        self._options = {}
        if assistant_model is not None:  # HF reads these from the assistant's configuration
            config = copy.deepcopy(assistant_model.generation_config)
            config.num_assistant_tokens = num_assistant_tokens
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0
            self._options = {"assistant_model": with_config(assistant_model, config)}

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor, *, seed: Any = None, **options: Any
    ) -> SimpleNamespace:
        """As `SpeculativeGenerator.generate`, as far as an evaluation reads its result. Sampled
        text uses torch's global generator, which is put back afterwards.
        """
        model = self.target.model
        if options.pop("neutral", False):
            model = neutral(model)
            if options["do_sample"]:
                options.setdefault("top_k", 0)  # HF takes 50 for one that is not set
        if rows := (options.pop("row_inputs", None) or {}).get("prompt"):
            if len(rows) > 1:
                raise ValueError(
                    "HFGenerate reads prompts that are more than ids one by one; pass batch_size=1"
                )
            own = {**(rows[0] or {}), "input_ids": None, "attention_mask": None}
            tensors = {name: value for name, value in own.items() if value is not None}
            options |= {name: value.to(input_ids.device) for name, value in tensors.items()}
        of_cuda = [input_ids.device] if input_ids.device.type == "cuda" else []
        with torch.random.fork_rng(of_cuda):
            torch.manual_seed(0 if seed is None else seed[0])
            options |= {"attention_mask": attention_mask, **self._options}
            sequences = type(model).generate(model, input_ids, **options)  # HF's own in any case
        ends = np.atleast_1d(options.get("eos_token_id", model.generation_config.eos_token_id))
        texts = [_until_end(row, ends) for row in sequences[:, input_ids.shape[1] :].tolist()]
        return SimpleNamespace(
            steps=[[RowStep([], 0, [token]) for token in text] for text in texts],
            finish_reasons=["eos" if text and text[-1] in ends else "length" for text in texts],
            seeds=seed,
        )


class _NotKnown(NoDrafter):
    """The drafter of `HFGenerate`, of which an evaluation reads the settings and K alone."""

    def __init__(self, assistant_model: PreTrainedModel | None):
        super().__init__()
        self._assistant = assistant_model
        self.num_draft_tokens = 0 if assistant_model is None else None

    def settings(self) -> dict[str, Any]:
        return {
            "class": "HFGenerate",
            "assistant": self._assistant and settings_of(self._assistant),
        }


def _until_end(row: list[int], ends: Sequence[int]) -> list[int]:
    """A row up to and including its first end-of-sequence token; what follows is padding."""
    return row[: 1 + next((i for i, token in enumerate(row) if token in ends), len(row))]
