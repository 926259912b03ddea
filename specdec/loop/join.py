"""The parts and settings of a new generator, checked before and against each other."""

from __future__ import annotations

from typing import Any

from torch import nn

from specdec.arguments import check_choice, check_integer, shown
from specdec.drafters import Drafter, NoDrafter
from specdec.drafters.check import check_drafter
from specdec.graphs.tree import modules_of
from specdec.samplers import BlockSampler, Sampler
from specdec.samplers.check import check_sampler
from specdec.targets import Target
from specdec.targets.slot_model import SlotModel


def joined(
    target: nn.Module | Target, drafter: Drafter | str | None, sampler: Sampler | str, **settings
) -> tuple[Target, Drafter, Sampler]:
    """The three parts, the target with the features that the drafter reads.

    Raises:
        TypeError, ValueError: a part or a setting that cannot be, a target that cannot be decoded
        this way, or a drafter that does not fit it.
    """
    parts = _loaded(target, drafter, sampler)
    _check_settings(**settings)
    # The target is tried in forward passes, so what can be checked without it comes first.
    return _fitted(target, *parts)


def models_of(drafter: Drafter) -> list[SlotModel]:
    """The models that a drafter and its parts decode, but their target."""
    held = [value for part in modules_of(drafter) for value in vars(part).values()]
    return [value for value in held if isinstance(value, SlotModel)]


def _loaded(
    target: nn.Module | Target, drafter: Drafter | str | None, sampler: Sampler | str
) -> tuple[Drafter, Sampler]:
    """Drafter and sampler, those that are named loaded."""
    if isinstance(drafter, str) or (isinstance(sampler, str) and sampler != "auto"):
        from specdec.loading import load_drafter, load_sampler

        drafter = load_drafter(drafter, target) if isinstance(drafter, str) else drafter
        sampler = load_sampler(sampler) if isinstance(sampler, str) else sampler
    drafter = _as_part("drafter", NoDrafter() if drafter is None else drafter, Drafter)
    sampler = BlockSampler() if isinstance(sampler, str) else sampler
    sampler = _as_part("sampler", sampler, Sampler)
    check_drafter(drafter)
    check_sampler(sampler)
    return drafter, sampler


def _check_settings(
    *,
    graphs: Any,
    prefill_chunk_size: Any,
    kept_bytes: Any,
    steps_ahead: Any,
    draft_length: Any,
) -> None:
    """Raises `TypeError` or `ValueError` for arguments of a generator that cannot be right."""
    check_integer("prefill_chunk_size", prefill_chunk_size, 1)
    for name, number in (("steps_ahead", steps_ahead), ("kept_bytes", kept_bytes)):
        if number is not None:
            check_integer(name, number, 0)
    check_choice("graphs", graphs, (True, False, "auto"))
    is_function = callable(draft_length) and not isinstance(draft_length, type)
    if not (draft_length in (None, "auto") or is_function):
        raise TypeError(
            'draft_length must be None, "auto" or a function (acceptance, rows, tokens) -> '
            f"draft tokens, got {shown(draft_length)}; generate(num_draft_tokens=) fixes one"
        )


def _fitted(
    target: nn.Module | Target, drafter: Drafter, sampler: Sampler
) -> tuple[Target, Drafter, Sampler]:
    """The three parts, the target with the features that the drafter reads."""
    target = target if isinstance(target, Target) else Target(target)
    limit = target.max_positions
    if limit is not None and drafter.num_draft_tokens >= limit:
        raise ValueError(
            f"the drafter's num_draft_tokens is {drafter.num_draft_tokens}, and the "
            f"target has {limit} positions for text and draft together; draft fewer"
        )
    if drafter.tree_depth is not None:
        sampler.check_drafter(drafter)
        target.check_trees()
    if drafter.reads_target:
        target.check_reads_ahead()
    drafter.validate(vocab_size=target.vocab_size, device=target.device)
    drafter.check_target(target)
    if drafter.feature_layers not in ((), target.feature_layers):
        target = target.with_features(drafter.feature_layers)
    return target, drafter, sampler


def _as_part(name: str, value: Any, kind: type) -> Any:
    """A drafter or sampler, and nothing else."""
    if isinstance(value, type):
        made = f"{value.__name__}()"
        raise TypeError(f"{name} must be a specdec {kind.__name__}, got the class; pass {made}")
    if not isinstance(value, kind):
        advice = "; wrap a draft model as ModelDrafter(model)" if kind is Drafter else ""
        raise TypeError(f"{name} must be a specdec {kind.__name__}, got {shown(value)}{advice}")
    return value
