"""`Witness`: what Hugging Face's own model says of one text, alone and by its own code.

Nothing of this library has a part in it: no cache, no mask, no window and no batch. A text is read
whole, without a cache, or in pieces through HF's own cache. How far the two differ is what rounding
does to this model on this text, and the only tolerance of the audits.

Legend: T tokens of a text, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, GenerationMixin, PreTrainedModel

from specdec.hf.forward import cache_argument, device_of, takes_positions

PIECE = 8
"""Tokens of a piece, about as many as a step of the loop reads."""
MAX_ROUNDING = 16
"""Most last bits of the largest logit that count as rounding, whatever the two forwards say."""


@dataclass(frozen=True)
class RowText:
    """The text of one row, and how it is read.

    Args:
        ids: of the prompt and of what follows it.
        start: tokens of the prompt.
        offset: position of its first token.
        adapter: PEFT's name of its adapter; `None` for those that are active.
        activated: how many tokens of the prompt Activated LoRA reads; 0 for none.
        prompt: what the model's processor makes of the prompt, where it is more than ids.
    """

    ids: Sequence[int]
    start: int
    offset: int = 0
    adapter: str | None = None
    activated: int = 0
    prompt: Mapping[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class Witness:
    """A model of HF's, read one text at a time.

    Args:
        model: whose forwards count.
        vocab_size: ids of the target.
        piece: tokens of a piece of `in_pieces`.
    """

    model: PreTrainedModel
    vocab_size: int
    piece: int = PIECE

    @torch.inference_mode()
    def logits(self, text: RowText) -> Tensor:
        """`[T, V]` before each new token, from one forward without a cache; of prompts that are
        more than ids from the steps of HF's `generate`, which are led along the text.
        """
        if text.prompt is not None:
            return self._led(text)
        ids = torch.tensor([list(text.ids)], device=device_of(self.model))
        with _adapted(self.model, text):
            own = self._positions(text, 0, ids.shape[1])
            logits = self.model(input_ids=ids, use_cache=False, **own).logits
        return self._cut(logits[0, text.start - 1 : -1])

    @torch.inference_mode()
    def in_pieces(self, text: RowText) -> Tensor:
        """`[T, V]` likewise: the prompt at once and then a few tokens at a time, through HF's own
        cache.
        """
        if text.prompt is not None:
            return self.logits(text)
        ids = torch.tensor([list(text.ids)], device=device_of(self.model))
        past = {cache_argument(self.model): DynamicCache(config=self.model.config)}
        found, at = [], 0
        for piece in [ids[:, : text.start], *ids[:, text.start : -1].split(self.piece, dim=1)]:
            if piece.numel():
                own = self._positions(text, at, piece.shape[1])
                at += piece.shape[1]
                with _adapted(self.model, text, len(text.ids) - at):
                    found.append(self.model(input_ids=piece, use_cache=True, **past, **own).logits)
        return self._cut(torch.cat([found[0][0, -1:], *(logits[0] for logits in found[1:])]))

    def rounding(self, text: RowText, one: Tensor, other: Tensor | None = None) -> float:
        """By how much rounding may move a logit of this text: twice the largest difference between
        two sound forwards of it, at least one last bit of the largest logit and at most
        `MAX_ROUNDING` of them.

        Args:
            text: what was read.
            one: `[T, V]`, its `logits`.
            other: `[T, V]` of another sound forward; `None` for `in_pieces`.
        """
        if text.prompt is not None:  # HF has one way of reading it: the most that may be
            finite = one.double().masked_fill(one.isinf(), 0.0)
            eps = max(torch.finfo(dtype).eps for dtype in (self.model.dtype, one.dtype))
            return MAX_ROUNDING * eps * finite.abs().max().item()
        other = self.in_pieces(text) if other is None else other
        off = (one.double() - other.double().to(one.device)).nan_to_num(nan=0.0).abs().max().item()
        eps = max(torch.finfo(dtype).eps for dtype in (self.model.dtype, one.dtype, other.dtype))
        finite = one.double().masked_fill(one.isinf(), 0.0)
        last_bit = eps * finite.abs().max().item()
        return min(max(2 * off, last_bit), MAX_ROUNDING * last_bit)

    def _led(self, text: RowText) -> Tensor:
        new = text.ids[text.start :]

        def lead(ids: Tensor, scores: Tensor) -> Tensor:
            own = torch.full_like(scores, -torch.inf)
            own[:, new[ids.shape[1] - text.start]] = 0
            return own

        device = device_of(self.model)
        inputs = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in text.prompt.items()}
        options = {"max_new_tokens": len(new), "do_sample": False, "pad_token_id": 0}
        options |= {"return_dict_in_generate": True, "output_logits": True, "eos_token_id": None}
        own, generate = copy.copy(self.model), type(self.model).generate
        own.generation_config = GenerationConfig()
        if "decoder_input_ids" in inputs:  # Whisper's own would go window by window
            options["decoder_start_token_id"] = text.ids[0]
            generate = GenerationMixin.generate
        with _adapted(self.model, text):
            out = generate(own, **inputs, **options, logits_processor=[lead])
        return self._cut(torch.cat(out.logits))

    def _positions(self, text: RowText, first: int, count: int) -> dict[str, Tensor]:
        """Where tokens stand, for a row that is moved on; models without positions need none."""
        if not text.offset or not takes_positions(self.model):
            return {}
        positions = torch.arange(count, device=device_of(self.model)) + first + text.offset
        return {"position_ids": positions[None]}

    def _cut(self, logits: Tensor) -> Tensor:
        """Logits of the target's ids, a copy, so that those of the prompt are not kept."""
        if logits.shape[-1] < self.vocab_size:
            raise ValueError(
                f"{type(self.model).__name__} has logits of {logits.shape[-1]} ids and the target "
                f"has {self.vocab_size}; pass a reference with the target's vocabulary"
            )
        return logits[:, : self.vocab_size].clone()


def moved(logits: Tensor, token: int, by: float) -> Tensor:
    """Logits `[V]` moved by `by` at most, as far as possible in favour of one token: it and those
    below it go up, those above it go down. What rounding of this size can do for a token is done.

    Example:
        >>> moved(torch.tensor([3.0, 1.0, 2.0]), 2, by=0.5).argmax().item()
        0
        >>> moved(torch.tensor([3.0, 1.0, 2.0]), 2, by=0.6).argmax().item()
        2
    """
    logits = logits.double()
    # Those below move a little less, so that the token passes its equals.
    other = torch.where(logits > logits[token], logits - by, logits + 0.999 * by)
    other[token] = logits[token] + by
    return other


@contextmanager
def _adapted(model: nn.Module, text: RowText, num_left: int = 0) -> Iterator[None]:
    """All LoRA layers of PEFT's compute with one adapter, as under PEFT's `adapter_names=`, or from
    an activation on, as under its `alora_offsets=`, in forwards that leave out so many last tokens.
    """
    name, options = text.adapter, {}
    if name is not None:
        options["adapter_names"] = [name]
    if text.activated:
        behind = len(text.ids) - num_left - text.start
        options["alora_offsets"] = [max(text.activated + behind, 0)]
    with ExitStack() as stack:
        if options:
            from peft.tuners.lora import LoraLayer

            layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
            if not layers:
                raise ValueError(
                    f"a row has an adapter ({options}), and {type(model).__name__} has no LoRA "
                    "layers; pass a reference with the target's adapters"
                )
            for layer in layers:
                hook = layer.register_forward_pre_hook(
                    lambda _, args, given: (args, {**given, **options}),
                    with_kwargs=True,
                )
                stack.callback(hook.remove)
        yield
