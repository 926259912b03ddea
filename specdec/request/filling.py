"""Rows that fill a call up to the rows of its storage."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad


def filled(request: Any, missing: int) -> Any:
    """See `Request.filled_to`; so many rows more."""
    logits_filter = {
        name: [*value, *value[-1:] * missing] if isinstance(value, list) else value
        for name, value in request.logits_filter.items()
    }
    own = {
        name: torch.cat([value, value[-1:].expand(missing, *value.shape[1:])])
        for name, value in request.row_inputs.items()
    }
    return replace(
        request,
        padded=pad(request.padded, (0, 0, 0, missing)),
        tokens=pad(request.tokens, (0, 0, 0, missing)),
        lengths=[*request.lengths, *[1] * missing],
        logits_filter=logits_filter,
        seeds=None if request.seeds is None else [*request.seeds, *[0] * missing],
        row_inputs=own,
        prompt_inputs=request.prompt_inputs
        and request.prompt_inputs.filled_to(len(request.lengths) + missing),
    )
