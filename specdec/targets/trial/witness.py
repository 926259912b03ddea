"""What HF's own code makes of a text, without any of specdec's: the reference of the self-test.

A model that can be decoded in windows gives a text the same logits however it is cut into calls.
HF's forward over a whole text is therefore held against HF's own steps over it, with HF's own
cache. What looks at a place in the call, such as a hook on `hidden[:, -1]`, differs there by orders
of magnitude more than rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.hf.foreign import is_of_hf
from specdec.hf.forward import CACHES, cache_argument, device_of, takes_positions
from specdec.hf.special_ids import special_tokens
from specdec.torch_names import uncompiled

NUM_STEPS = 3
"""So many last tokens of a text are read one by one, after pieces of 1, 2, 4, ... tokens."""
NUM_ROWS = 1, 3, 4, 5, 8
"""Batches of so many rows are read where somebody's own code runs in a model."""


class PlainForwardError(ValueError):
    """HF's own forward of the model, as it was loaded, cannot be what decoding is held against."""


def trial_texts(model: PreTrainedModel, length: int, number: int = 0) -> Tensor:
    """Two texts `[2, length]` without special tokens, other ones for another number."""
    device = device_of(model.get_input_embeddings())
    special = special_tokens(model)
    ids = [i for i in range(model.config.get_text_config().vocab_size) if i not in special]
    order = (7919 * i + 1 + 29 * number for i in range(2 * length))  # a prime: all over the ids
    return torch.tensor([ids[i % len(ids)] for i in order], device=device).view(2, -1)


def beside(model: PreTrainedModel, texts: Tensor) -> dict[str, Any]:
    """What HF's forward reads of texts of a self-test beside their ids: of an encoder-decoder what
    its encoder made of the source of each.
    """
    return model.trial_source(texts) if hasattr(model, "trial_source") else {}


def read_whole(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Logits `[2, N, V]` of one call of the model.

    Raises:
        ValueError: the call raises an error.
    """
    try:
        with as_it_was(model):
            own = beside(model, tokens)
            return uncompiled(model)(input_ids=tokens, use_cache=False, **own).logits
    except Exception as error:
        found = f"its own plain forward raises {type(error).__name__}: {error}"
        raise ValueError(found) from error


def read_in_steps(
    model: PreTrainedModel, tokens: Tensor, *, in_pieces: bool = True
) -> Tensor | None:
    """Logits `[B, N, V]` of calls over pieces of a text, of several sizes and of one token each,
    with the cache that HF makes; `None` where HF's own steps raise an error.

    Args:
        model: as HF runs it.
        tokens: `[B, N]`.
        in_pieces: else the first piece is all but the last tokens. HF begins some recurrent layers
            anew in every call of several tokens, and never goes on with several.
    """
    left = tokens.shape[1] - NUM_STEPS
    sizes = [] if in_pieces else [left]
    while sum(sizes) < left:
        sizes.append(min(2 ** len(sizes), left - sum(sizes)))
    parts = tokens.split([*sizes, *[1] * NUM_STEPS], dim=1)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
    inputs, logits, start = {"use_cache": True, **beside(model, tokens)}, [], 0
    try:
        with as_it_was(model):
            for part in parts:
                if takes_positions(model):
                    inputs["position_ids"] = positions[:, start : start + part.shape[1]]
                out = uncompiled(model)(input_ids=part, **inputs)
                inputs[cache_argument(model)] = next(out[n] for n in CACHES if n in out)
                logits.append(out.logits)
                start += part.shape[1]
    except Exception:  # also where HF hands out no cache
        return None
    return torch.cat(logits, dim=1)


def read_in_batches(model: PreTrainedModel, tokens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Which of the two texts each row of a batch has, `[B]`, and the batch's logits `[B, N, V]`:
    batches of several sizes, in which both texts stand where they do not stand in the batch of the
    two, so that what looks at a row's place is seen.
    """
    for count in NUM_ROWS:
        for first in (0, 1):
            rows = (torch.arange(count, device=tokens.device) + first) % 2
            yield rows, read_whole(model, tokens[rows])


def read_padded(model: PreTrainedModel, tokens: Tensor) -> Tensor | None:
    """Logits `[1, N - 2, V]` of the beginning of the second text, read beside the first with two
    tokens of padding before it; `None` where HF's own forward raises an error, and for decoders
    with an encoder, which count positions from the padding.
    """
    if beside(model, tokens):
        return None
    padded = tokens.clone()
    padded[1, 2:] = tokens[1, :-2]
    mask = torch.ones_like(padded)
    mask[1, :2] = 0
    inputs = {"input_ids": padded, "attention_mask": mask, "use_cache": False}
    if takes_positions(model):
        inputs["position_ids"] = (mask.cumsum(dim=1) - 1).clamp(min=0)
    try:
        with as_it_was(model):
            return uncompiled(model)(**inputs).logits[1:, 2:]
    except Exception:
        return None


def generate_of(model: PreTrainedModel) -> Callable:
    """`generate` of the first class of a model that has one of transformers'. What somebody's own
    does beside is held against it by `fault_of_outer`.
    """
    kinds = (vars(kind).get("generate") for kind in type(model).__mro__)
    return next(generate for generate in kinds if generate is not None and is_of_hf(generate))


def generated(model: PreTrainedModel, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
    """Texts `[2, n]` that HF's `generate` writes after two others by the methods of the model, and
    the logits `[2, 3, V]` that it chose from; `None` where it raises an error, or is not there.
    """
    options = {"max_new_tokens": NUM_STEPS, "do_sample": False, "eos_token_id": None}
    options |= {"return_dict_in_generate": True, "output_logits": True, "pad_token_id": 0}
    options |= {"attention_mask": torch.ones_like(tokens), **beside(model, tokens)}
    try:
        with as_it_was(model):
            out = generate_of(model)(model, tokens, **options)
        return out.sequences, torch.stack(out.logits, dim=1)
    except Exception:
        return None


Reading = tuple[Tensor | None, Tensor | None]


@torch.no_grad()
def read_little(model: PreTrainedModel) -> Reading:
    """A sample of what a model computes at this moment: logits of a few tokens, `[2, 8, V]` of two
    texts in one call and `[1, 8, V]` of one of them in steps; `None` where HF raises an error.
    """
    tokens, whole = trial_texts(model, 8), None
    with suppress(ValueError):
        whole = read_whole(model, tokens)
    return whole, read_in_steps(model, tokens[:1])


def is_same_reading(one: Reading, other: Reading) -> bool:
    """Whether two samples of a model are the same, up to rounding."""
    for left, right in zip(one, other, strict=True):
        if left is None or right is None or left.shape != right.shape:
            if left is not right:
                return False
        elif not torch.allclose(left, right, rtol=0.0, atol=_rounding_of(left), equal_nan=True):
            return False
    return True


def _rounding_of(logits: Tensor) -> float:
    finite = logits[logits.isfinite()]
    size = float(finite.abs().amax()) if finite.numel() else 0.0
    return 4 * torch.finfo(logits.dtype).eps * size


@contextmanager
def as_it_was(model: PreTrainedModel) -> Iterator[None]:
    """Runs compiled code as it was written, and takes back what forwards note down in modules. The
    model itself is run by `_call_impl`, past what `model.compile()` has put before it.
    """
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    # Without Dynamo, which takes seconds to import, nothing is compiled.
    has_compiled = "torch._dynamo" in sys.modules
    try:
        with torch.compiler.set_stance("force_eager") if has_compiled else nullcontext():
            yield
    finally:
        for now, values in before:
            for name in now.keys() - values.keys():
                del now[name]
            now.update({k: v for k, v in values.items() if now.get(k) is not v})
