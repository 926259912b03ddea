"""`resolve_once`: what HF's `generate` says of the options of a call, which takes it milliseconds,
is not asked again for a call of the same options.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from transformers import GenerationMixin, MaxLengthCriteria, StoppingCriteriaList

from specdec.request.options import check_config, ends_among
from specdec.request.warpers import split_warpers

if TYPE_CHECKING:
    from specdec.targets.target import Target

MOST = 8
"""Kinds of calls that a target remembers, the latest ones."""
FUNCTIONS = [name for name, value in vars(GenerationMixin).items() if callable(value)]
PLAIN = bool, int, float, str, type(None)


class Kind(NamedTuple):
    """What HF's answer depends on, besides the number of tokens of a prompt."""

    functions: tuple[Any, ...]
    rows: int
    device: Any
    options: dict[str, Any]
    config: dict[str, Any]


class Remembered(NamedTuple):
    """A call, and what HF made of it; `width` tokens of its prompts are in `resolved`."""

    kind: Kind
    width: int
    resolved: tuple[Any, ...]


def resolve_once(target: Target, input_ids: Tensor, given: dict[str, Any]) -> tuple[Any, ...]:
    """As `resolve`, from an earlier call where nothing differs but the prompts.

    Calls with functions, configurations or lengths in all (`max_length`) of their own are resolved
    each time, and those in which processors look at the text.
    """
    kind = _kind(target, input_ids, given)
    rows, width = input_ids.shape
    for one in target.resolved:
        if one.kind == kind:
            processors, criteria, config, *others = one.resolved
            copies = config.num_return_sequences or 1
            target.check_room(copies * rows, width)
            check_config(config)  # which may warn
            return processors, _moved(criteria, width - one.width), config, *others
    from specdec.request.resolve import resolve

    resolved = resolve(target, input_ids, given)
    if kind is not None and _is_of_any_text(resolved):
        kept = Kind(*kind[:3], copy.deepcopy(kind.options), copy.deepcopy(kind.config))
        target.resolved = [Remembered(kept, width, resolved), *target.resolved[: MOST - 1]]
    return resolved


def _kind(target: Target, input_ids: Tensor, given: dict[str, Any]) -> Kind | None:
    """`None` for a call that is not to be remembered."""
    model, values = target.model, given.values()
    lists = (item for value in values if isinstance(value, list) for item in value)
    is_plain = all(isinstance(v, (*PLAIN, list)) for v in (*values, *lists))
    if not is_plain or given.get("max_new_tokens") is None or target.reads_source:
        return None
    config = model.generation_config
    functions = tuple(getattr(model, name) for name in FUNCTIONS)  # somebody may replace one
    return Kind(functions, len(input_ids), input_ids.device, given, vars(config))


def _is_of_any_text(resolved: tuple[Any, ...]) -> bool:
    """No processor or criterion looks at more than a length, an end and the scores of a step."""
    processors, criteria, config, *_ = resolved
    history, _ = split_warpers(processors, config)
    return not history and not ends_among(criteria)[2]


def _moved(criteria: StoppingCriteriaList, more: int) -> StoppingCriteriaList:
    """For prompts of so many more tokens."""
    moved = StoppingCriteriaList(map(copy.copy, criteria))
    for one in moved:
        if isinstance(one, MaxLengthCriteria):
            one.max_length += more
    return moved
