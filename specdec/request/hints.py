"""What to write instead of a call that cannot be right. Only such a call imports this file."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Container
from typing import Any

from transformers import GenerationConfig, GenerationMixin

from specdec.arguments import shown
from specdec.hf.forward import CACHES
from specdec.hf.generation import HEALING, UNSUPPORTED, UNUSED
from specdec.hf.prompts import PROMPT_INPUTS
from specdec.request.keywords import GenerateOptions
from specdec.targets import Target

_TOKENISE = "tokenizer(text, return_tensors='pt').input_ids makes one of a text"
_THROUGH_HF = "pass it to model.generate(..., custom_generate=generator)"
_OF_HF = {
    "inputs": "pass the prompts as input_ids",
    "return_dict_in_generate": "every result is a record; leave it out",
    "use_cache": "a generator has caches of its own; leave it out",
    "assistant_model": "build the generator with ModelDrafter(assistant_model)",
    "assistant_tokenizer": "build the generator with load_drafter(name, target, tokenizer=)",
    "prefix_allowed_tokens_fn": (
        "pass logits_processor=[PrefixConstrainedLogitsProcessor(prefix_allowed_tokens_fn, 1)]"
    ),
    "negative_prompt_ids": UNSUPPORTED["guidance_scale"][1],
    "negative_prompt_attention_mask": UNSUPPORTED["guidance_scale"][1],
    "synced_gpus": "generate on one process at a time; leave it out",
    "custom_generate": "a generator is the decoding function itself; leave it out",
    "position_ids": "row_inputs={'position_offset': ...} moves the positions of a row",
    "token_type_ids": "decoder-only models have no such input; leave it out",
    "token_healing": HEALING,
    **dict.fromkeys(CACHES, "a generator has caches of its own; pass the whole prompt without one"),
}
"""Keywords of HF's `generate` that are no settings, or that a configuration does not help."""


def for_option(target: Target, name: str, value: Any) -> str:
    """What to do about a keyword of `generate` that is no option."""
    if name in PROMPT_INPUTS:
        return f"{type(target.model).__name__} has no such input; leave it out"
    for table in (UNSUPPORTED, UNUSED):
        if name in table:
            return table[name][1]
    if name in _OF_HF:
        return _OF_HF[name]
    if hasattr(GenerationConfig(), name):
        if value is None:
            return f"a generation_config leaves out what is None; {_THROUGH_HF}"
        return f"pass generation_config=GenerationConfig({name}={shown(value)})"
    if name in inspect.signature(GenerationMixin.generate).parameters:
        return _THROUGH_HF
    known = [*GenerateOptions.__annotations__, "streamer", "trace", "check"]
    if near := difflib.get_close_matches(name, [*known, *vars(GenerationConfig())], n=1):
        is_setting = near[0] not in known
        return f"did you mean {near[0]!r}" + (" of a generation_config?" if is_setting else "?")
    return (
        f"known are {', '.join(known)}; other settings of HF generate go into "
        f"generation_config=GenerationConfig(...), and what is none: {_THROUGH_HF}"
    )


def for_prompt(value: Any) -> str:
    """What to write instead of something that is no tensor `[B, T]`."""
    if isinstance(value, str):
        return f"; {_TOKENISE}"
    if isinstance(value, list | tuple) and any(isinstance(one, str) for one in value):
        return (
            "; tokenizer(texts, return_tensors='pt', padding=True, padding_side='left') makes the "
            "ids and the mask of texts: pass what it returns"
        )
    if isinstance(value, list | tuple):
        return "; torch.tensor([[5, 6, 7]]) makes one of lists of ids, all of one length"
    if value is None:
        return f"; every call needs a prompt: {_TOKENISE}"
    if hasattr(value, "shape") and len(value.shape) == 1:
        return "; input_ids[None] is a batch of one prompt"
    return ""


def warn_of_seed(given: Container[str]) -> None:
    """Warns of a seed of a greedy call that says nothing of sampling."""
    if "temperature" not in given and "do_sample" not in given:
        warnings.warn(
            "seed has no effect: the call is greedy; pass do_sample=True or a temperature above 0 "
            "to sample, or leave seed out",
            stacklevel=2,
        )
