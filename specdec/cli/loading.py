"""What several commands load and measure."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def load_pretrained(auto_class: type, path: str, **options: Any) -> Any:
    """Loads from a folder or Hugging Face id.

    Raises:
        ValueError: there is nothing of the kind.
    """
    try:
        return auto_class.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"cannot load {path!r}: it must be a folder or a Hugging Face id of a causal LM with "
            f"its tokenizer ({error})"
        ) from error


def load_model(path: str, *, dtype: str, device: str):
    """A causal LM in eval mode."""
    from transformers import AutoModelForCausalLM

    return load_pretrained(AutoModelForCausalLM, path, dtype=dtype).to(device).eval()


def make_drafter(name: str, target, num_draft_tokens: int, *, dtype: str, device: str):
    """`"none"`, `"lookup"`; `"eagle:"`, `"mask-token:"` or `"mtp:"` and the path or id of a head
    for `target`; or the path or id of a draft model.
    """
    from specdec import (
        EagleDrafter,
        MaskTokenDrafter,
        ModelDrafter,
        MTPDrafter,
        PromptLookupDrafter,
    )

    if name == "none":
        return None
    if name == "lookup":
        return PromptLookupDrafter(num_draft_tokens)
    kind, _, path = name.partition(":")
    families = {"eagle": EagleDrafter, "mask-token": MaskTokenDrafter, "mtp": MTPDrafter}
    if kind in families and path:
        return families[kind].from_pretrained(path, target, num_draft_tokens).to(device)
    return ModelDrafter(load_model(name, dtype=dtype, device=device), num_draft_tokens)


def one_line(error: Exception) -> str:
    """What an error says, for a terminal."""
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else text[:397] + "..."


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """The result and the seconds that it took."""
    start = time.perf_counter()
    result = run()
    return result, time.perf_counter() - start
