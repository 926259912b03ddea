"""The self-test of prompts that are more than token ids: HF's own `generate` goes on with the first
prompts of a kind, and windows over slots must have the logits of its every step.

The yardstick is rounding, as in `rounding.py`: how far the logits of the windows move when the
prompt's embeddings are rounded once more.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from specdec.graphs.tree import fill
from specdec.targets.prompt_inputs import PromptInputs
from specdec.targets.reading import Recording, inputs_of, refuse_prompts
from specdec.targets.trial.rounding import (
    FINE_NOISE_FACTOR,
    MOST_ROUNDING,
    NOISE_FACTOR,
    STEPS_FACTOR,
    unit_of,
)

GARBAGE = 0.5
"""What slots hold before the prompts are read."""


def compare_prompts(target, prompts: PromptInputs, recording: Recording) -> None:
    """Raises `ValueError` if windows over slots do not have the logits of HF's steps after these
    prompts.

    Args:
        target: a `Target` without edits of the user's.
        prompts: of the recording.
        recording: one that went on.
    """
    theirs, model = recording.logits, target.model
    unit = unit_of(prompts.arguments["inputs_embeds"])
    factor = NOISE_FACTOR if unit > 1e-5 else FINE_NOISE_FACTOR
    if target.is_recurrent:  # see STEPS_FACTOR; in half precision rounding drowns such sums
        factor = 2 * NOISE_FACTOR if unit > 1e-5 else STEPS_FACTOR
    ours = _logits(target, prompts, recording.new_tokens)
    moved = _logits(
        target, prompts.rounded(unit, torch.Generator().manual_seed(0)), recording.new_tokens
    )
    size = _rms(ours)
    rounding = _rms(moved - ours).minimum(MOST_ROUNDING[1] * unit * size).maximum(unit * size)
    excess = _rms(ours - theirs.to(ours.device)) / (factor * rounding)  # [B, N]
    excess = excess.masked_fill(ours.eq(theirs.to(ours.device)).all(dim=-1), 0)
    excess = excess.nan_to_num(torch.inf)
    # Where rounding may choose other experts, a token may differ; a wrong prompt changes them all.
    may_flip = unit > 1e-5 and any("expert" in name for name, _ in model.named_modules())
    worst = excess.amin(dim=1) if may_flip else excess.amax(dim=1)
    if bool((worst > 1).any()):
        row = int(worst.argmax())
        column = int(excess[row].argmax())
        found = float(_rms(ours - theirs.to(ours.device))[row, column])
        raise ValueError(
            f"{type(model).__name__} cannot be decoded with such prompts: after that of row {row} "
            f"its logits differ from those of HF generate by {found:.3g} in rms, where rounding is "
            f"{float(factor * rounding[row, column]):.3g}. Its steps read more than the ids of new "
            "tokens and their positions; use HF generate for such prompts"
        )


def _logits(target, prompts: PromptInputs, new: Tensor) -> Tensor:
    """`[B, N, V]` after the prompts and each of the new tokens `[B, N]` but the last."""
    rows, count = new.shape
    device = target.device
    lengths = torch.tensor(prompts.lengths, device=device)
    width = int(lengths.max())
    cache = target.init_cache(rows, width + count, max_window=count)
    if not target.is_recurrent:
        fill((cache.stores,), GARBAGE)
    own = {name: value.to(device) for name, value in prompts.row_inputs.items()}
    cache.row_inputs = {**own, "prompt_end": lengths - 1 + own["position_offset"]}
    tokens = torch.zeros(rows, width, dtype=torch.long, device=device)
    for chunk in prompts.chunks(prompts.trial_size):
        columns = slice(chunk.start, chunk.start + chunk.size)
        target.prefill(cache, tokens[:, columns], lengths, offset=chunk.start, prompt=chunk)
    ids = torch.cat([prompts.last_ids.to(device)[:, None], new[:, :-1].to(device)], dim=1)
    slots = (lengths - 1)[:, None] + torch.arange(count, device=device)
    return target.forward(ids, cache, slots)[0].float()


def _rms(x: Tensor) -> Tensor:
    return x.float().square().mean(dim=-1).sqrt()


def read_prompts(
    target: Any,
    input_ids: Tensor | None,
    attention_mask: Tensor,
    given: Mapping[str, Any],
    config: GenerationConfig | None,
) -> PromptInputs:
    """As `Target.read_prompts`."""
    refuse_prompts(target.model)
    kind = frozenset(name for name, value in given.items() if value is not None)
    tried = target._tried_prompts
    goes_on = not any(kind == one for one, _ in tried)
    inputs = input_ids, attention_mask, given, config
    prompts, recording = _recorded(target, *inputs, goes_on=goes_on)
    if (kind, prompts.kind) not in tried:
        if not goes_on:  # the same inputs, of which something else is made
            prompts, recording = _recorded(target, *inputs, goes_on=True)
        plain = copy.copy(target)
        plain.edits, plain.feature_layers = (), ()
        for name in ("_views", "_prompt_views"):
            vars(plain).pop(name, None)
        compare_prompts(plain, prompts, recording)
        tried.add((kind, prompts.kind))
    target._uncut = max(target._uncut, (prompts.uncut[1], prompts.uncut_note))
    return prompts


def _recorded(
    target: Any,
    input_ids: Tensor | None,
    attention_mask: Tensor,
    given: Mapping[str, Any],
    config: GenerationConfig | None,
    *,
    goes_on: bool,
) -> tuple[PromptInputs, Recording]:
    recording = Recording(target.model, goes_on=goes_on)
    if config is None:
        recording.generate(input_ids, attention_mask, given)
    else:
        recording.prepared(input_ids, config, given)
    prompts = inputs_of(recording, target.route, input_ids, attention_mask != 0)
    if target.is_recurrent and not prompts.is_causal:
        raise ValueError(
            f"{type(target.model).__name__} has recurrent layers and a prompt that sees itself "
            "both ways, which cannot be read in windows; use HF generate for such prompts"
        )
    return prompts, recording
