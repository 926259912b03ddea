"""What HF's own code makes of a text, without any of specdec's: the witness of the self-test.

A model that can be decoded in windows gives a text the same logits however it is cut into calls.
HF's forward over a whole text is therefore held against HF's own steps over it, with HF's own
cache. What looks at a place in the call, such as a hook on `hidden[:, -1]`, differs there by orders
of magnitude more than rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.hf import CACHES, cache_argument, device_of, special_tokens, takes_positions

NUM_STEPS = 3
"""So many last tokens of a text are read one by one."""


class PlainForwardError(ValueError):
    """HF's own forward of the model, as it was loaded, cannot be what decoding is held against."""


def trial_texts(model: PreTrainedModel, length: int, number: int = 0) -> Tensor:
    """Two texts `[2, length]` without special tokens, other ones for another number."""
    device = device_of(model.get_input_embeddings())
    special = special_tokens(model)
    ids = [i for i in range(model.config.get_text_config().vocab_size) if i not in special]
    order = (7919 * i + 1 + 29 * number for i in range(2 * length))  # a prime: all over the ids
    return torch.tensor([ids[i % len(ids)] for i in order], device=device).view(2, -1)


def read_whole(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Logits `[2, N, V]` of one call of the model.

    Raises:
        ValueError: the call raises an error.
    """
    try:
        with _as_it_was(model):
            return model._call_impl(input_ids=tokens, use_cache=False).logits
    except Exception as error:
        found = f"its own plain forward raises {type(error).__name__}: {error}"
        raise ValueError(found) from error


def read_in_steps(model: PreTrainedModel, tokens: Tensor) -> Tensor | None:
    """Logits `[2, N, V]` of one call over all tokens but the last, and one for each of these, with
    the cache that HF makes; `None` where HF's own steps raise an error, so that there is no
    witness.
    """
    parts = tokens.split([tokens.shape[1] - NUM_STEPS, *[1] * NUM_STEPS], dim=1)
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(2, -1)
    inputs, logits, start = {"use_cache": True}, [], 0
    try:
        with _as_it_was(model):
            for part in parts:
                if takes_positions(model):
                    inputs["position_ids"] = positions[:, start : start + part.shape[1]]
                out = model._call_impl(input_ids=part, **inputs)
                inputs[cache_argument(model)] = next(out[n] for n in CACHES if n in out)
                logits.append(out.logits)
                start += part.shape[1]
    except Exception:  # also where HF hands out no cache
        return None
    return torch.cat(logits, dim=1)


@contextmanager
def _as_it_was(model: PreTrainedModel) -> Iterator[None]:
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
