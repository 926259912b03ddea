"""`Request`: what one call asks for, read and checked before anything is computed."""

from __future__ import annotations

import difflib
import inspect
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from specdec.request.options import Options, is_warper, resolve_options
from specdec.request.processors import refuse_stateful
from specdec.request.prompts import Prompts
from specdec.samplers.warp import Warp
from specdec.target import Target


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`, `stream` and `start`, with HF's names and meanings.

    Sampling values and the seed may be a scalar or a sequence of one value per row. What is left
    out comes from `generation_config`, and then from the model's own, as in HF. Without a seed, a
    sampled row draws one at random and reports it in the result. One seed for all rows gives equal
    prompts equal samples: pass `seed=list(range(B))` for B samples of one prompt.

    `draft_probs=False` keeps the probabilities of draft tokens from the sampler: they become point
    masses, which is lossless too and accepts less. It is there to measure the difference.
    """

    max_new_tokens: int
    do_sample: bool
    temperature: float | list[float]
    top_k: int | list[int]
    top_p: float | list[float]
    min_p: float | list[float]
    seed: int | list[int]
    eos_token_id: int | list[int]
    pad_token_id: int
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    draft_probs: bool


_WARP_NAMES = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of one call. `read` and `from_hook` check them.

    Args:
        prompts: the batch.
        options: HF's options, resolved.
        seeds: one per row, or `None` for a greedy generation.
    """

    prompts: Prompts
    options: Options
    seeds: list[int] | None

    @property
    def max_new_tokens(self) -> int:
        """Tokens that each row may get; 0 where the prompts fill the allowed length."""
        return self.options.max_length - self.prompts.padded.shape[1]

    def filled_to(self, rows: int) -> Request:
        """The call with inert rows after its own, up to so many: prompts of one token, the sampling
        values of the last row, seed 0. Whoever loads it lets them commit nothing.
        """
        missing = rows - len(self.prompts.lengths)
        if missing == 0:
            return self
        warp = {name: _extended(value, missing) for name, value in self.options.warp.items()}
        seeds = None if self.seeds is None else [*self.seeds, *[0] * missing]
        options = replace(self.options, warp=warp)
        return Request(self.prompts.filled_to(rows), options, seeds)

    @classmethod
    def read(
        cls, target: Target, input_ids: Tensor, attention_mask: Tensor | None, options: dict
    ) -> Request:
        """Reads a call with `GenerateOptions`.

        Raises:
            TypeError: an unknown keyword, or `input_ids` that are no integer tensor.
            ValueError: a prompt or an option that cannot be right.
        """
        for name in options.keys() - GenerateOptions.__annotations__.keys():
            near = difflib.get_close_matches(name, GenerateOptions.__annotations__, n=1)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else (
                    f"known are {', '.join(GenerateOptions.__annotations__)}; other options of HF "
                    "generate work through model.generate(..., custom_generate=generator)"
                )
            )
            raise TypeError(f"unknown option {name!r}: {hint}")
        num_new = options.get("max_new_tokens")
        if num_new is not None and (isinstance(num_new, bool) or not isinstance(num_new, int)):
            raise TypeError(f"max_new_tokens must be an integer, got {num_new!r}")
        # Ids and mask first: HF's own messages about them are obscure.
        _read_prompts(target, input_ids, attention_mask, None)
        seed = options.pop("seed", None)
        draft_probs = options.pop("draft_probs", True)
        if not isinstance(draft_probs, bool):
            raise TypeError(f"draft_probs must be True or False, got {draft_probs!r}")
        warp = {name: options.pop(name, None) for name in _WARP_NAMES}
        Warp(len(input_ids), **{name: v for name, v in warp.items() if v is not None})
        per_row, uniform = _split_warp(warp)
        resolved = resolve_options(target.model, input_ids, **options, **uniform)
        resolved.check_sampling(uniform)
        own = [type(p).__name__ for p in options.get("logits_processor") or () if is_warper(p)]
        resolved = replace(resolved.with_warp(own, **per_row), draft_probs=draft_probs)
        prompts = _read_prompts(target, input_ids, attention_mask, resolved.padding_id)
        return cls._checked(target, prompts, resolved, seed)

    @classmethod
    def from_hook(
        cls,
        target: Target,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        options: Options,
        seed: int | Sequence[int] | None,
    ) -> Request:
        """Reads a call that HF has resolved already. What it passes on without a mask has no
        padding: it has looked for the padding id itself, and drops masks of ones.
        """
        prompts = _read_prompts(target, input_ids, attention_mask, None)
        return cls._checked(target, prompts, options, seed)

    @classmethod
    def _checked(cls, target: Target, prompts: Prompts, options: Options, seed) -> Request:
        target.check_unchanged()
        rows, room = len(prompts.lengths), options.max_length - prompts.padded.shape[1]
        total, limit = max(prompts.lengths) + room, target.max_positions
        if limit is not None and total > limit:
            raise ValueError(
                f"a prompt of {max(prompts.lengths)} tokens and {room} new tokens make {total}, "
                f"but the target has {limit} positions; shorten the prompt or pass max_new_tokens "
                f"<= {max(0, limit - max(prompts.lengths))}"
            )
        refuse_stateful(options.processors, prompts.padded, target.vocab_size)
        is_greedy = Warp(rows, **options.warp).is_greedy
        return cls(prompts, options, None if is_greedy else _read_seeds(seed, rows))


def check_hook(
    target: Target, model: PreTrainedModel, synced_gpus: bool, model_kwargs: dict
) -> None:
    """Refuses what HF may hand to a decoding method and specdec would silently ignore.

    Args:
        target: the generator's.
        model: that `generate` was called on.
        synced_gpus: HF's request to keep several processes in step.
        model_kwargs: HF's inputs of the model.

    Raises:
        ValueError: says what was expected.
    """
    if model is not target.model:
        raise ValueError(
            "custom_generate was called on another model than the generator's target; call "
            "generator.target.model.generate(..., custom_generate=generator)"
        )
    if _locals_of_generate().get("assistant_model") is not None:
        raise ValueError(
            "assistant_model has no effect beside custom_generate; leave it out and build the "
            "generator with ModelDrafter(assistant_model)"
        )
    if synced_gpus:
        raise ValueError("synced_gpus=True is not supported; generate on one process at a time")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            "past_key_values holds tokens already; specdec keeps its own cache, so pass the whole "
            "prompt"
        )
    _check_positions(model_kwargs.get("position_ids"), model_kwargs.get("attention_mask"))
    known = {"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"}
    unknown = [name for name, v in model_kwargs.items() if name not in known and v is not None]
    if unknown:
        raise ValueError(
            f"specdec generates from input_ids only and does not know: {', '.join(sorted(unknown))}"
        )


def _locals_of_generate() -> dict:
    """What HF's `generate` knows when it calls a decoding method: it drops `assistant_model`, which
    cannot be seen in any other way.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "generate":
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def _check_positions(position_ids: Tensor | None, attention_mask: Tensor | None) -> None:
    """Raises `ValueError` for positions that are not 0, 1, ... over the real tokens of each row."""
    if position_ids is None:
        return
    mask = torch.ones_like(position_ids) if attention_mask is None else attention_mask
    is_real = mask.to(position_ids.device) != 0
    counted = is_real.long().cumsum(dim=-1) - 1
    if position_ids.shape != mask.shape or bool(((position_ids != counted) & is_real).any()):
        raise ValueError(
            "position_ids other than 0, 1, 2, ... over the tokens of each prompt are not "
            "supported; leave position_ids out"
        )


def _read_prompts(
    target: Target, input_ids: Tensor, attention_mask: Tensor | None, padding_id: int | None
) -> Prompts:
    if attention_mask is None and padding_id is not None:
        is_real = input_ids != padding_id
        attention_mask = None if is_real.all() else is_real
    return Prompts.read(
        input_ids, attention_mask, vocab_size=target.vocab_size, device=target.device
    )


def _split_warp(values: dict) -> tuple[dict, dict]:
    """Values that only specdec knows (one per row, and temperature 0), and those that HF can apply
    in its own order among whatever else a configuration asks for.
    """
    per_row, uniform = {}, {}
    for name, value in values.items():
        if value is None:
            continue
        if isinstance(value, int | float) and not (name == "temperature" and value == 0):
            uniform[name] = int(value) if name == "top_k" else float(value)
        else:
            per_row[name] = value
    return per_row, uniform


def _extended(value, missing: int):
    """A sampling value for so many rows more: a scalar holds for all."""
    values = value.tolist() if isinstance(value, Tensor) else value
    if not isinstance(values, Sequence):
        return value
    return [*values, *[values[-1]] * missing]


def _read_seeds(seed: int | Sequence[int] | Tensor | None, rows: int) -> list[int]:
    if seed is None:
        return [secrets.randbits(64) for _ in range(rows)]
    if isinstance(seed, Tensor):
        seed = seed.tolist()
    seeds = list(seed) if isinstance(seed, Sequence) else [seed] * rows
    if len(seeds) != rows:
        raise ValueError(
            f"seed has {len(seeds)} values for a batch of {rows} rows; give one per row, or a "
            "single value"
        )
    for value in seeds:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"seed must be an integer or one integer per row, got {value!r}")
    return seeds
