"""Which logits processors may run in a step: functions of (ids, scores), and no others.

In plain decoding HF calls a processor once per token. Here it is called for every position of a
step, those of rejected tokens included, so one that counts its calls, or carries a cache from one
to the next, would return other scores.
"""

from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PrefixConstrainedLogitsProcessor

from specdec.arguments import name_of, shown
from specdec.hf.generation import STATELESS, prefix_function
from specdec.request.grammar import GrammarProcessor


def refuse_stateful(processors: LogitsProcessorList) -> None:
    """Raises `ValueError` for a processor that may keep state from call to call.

    HF's own are known. Plain functions have nowhere to keep any. The author of any other vouches
    for it by an attribute `is_stateless = True`.
    """
    for processor in processors:
        if type(processor) in STATELESS:
            continue
        judged, name = processor, name_of(processor)
        if type(processor) is PrefixConstrainedLogitsProcessor:  # as stateless as its function
            judged = prefix_function(processor)
            name = f"{name_of(judged)} of {name}"
        if not (getattr(judged, "is_stateless", None) is True or _is_plain(judged)):
            if type(judged).__module__.startswith("transformers."):
                raise ValueError(
                    f"{name} is HF's and keeps state from call to call, and specdec calls "
                    "processors for every drafted position, rejected ones included; leave it out, "
                    "or use HF generate"
                )
            raise ValueError(
                f"the logits processor {name} may keep state from call to call, and specdec calls "
                "processors for every drafted position, rejected ones included; if its result "
                "depends on its arguments alone, set is_stateless = True on its class (on the "
                "function, if it is one); grammars run as specdec.GrammarProcessor, other "
                "processors with state in HF generate"
            )


def check_scores(
    processor: LogitsProcessor, out: object, scores: Tensor, rows: list[int]
) -> Tensor:
    """The scores that a processor returned for `scores`; the values of `rows` are looked at where
    that waits for nothing.
    """
    who = f"the logits processor {name_of(processor)}"
    expected = f"scores {list(scores.shape)} of {scores.dtype} on {scores.device}, as it was given"
    if not isinstance(out, Tensor):
        raise TypeError(f"{who} returned {shown(out)}; expected {expected}")
    if out.shape != scores.shape or out.device != scores.device:
        raise ValueError(f"{who} returned {shown(out)} on {out.device}; expected {expected}")
    if out.dtype != scores.dtype:
        raise TypeError(f"{who} returned {shown(out)}; expected {expected}")
    if not out.is_cuda and out[rows].isnan().any():
        raise ValueError(f"{who} returned NaN; use -inf for tokens that must not come")
    return out


def _is_plain(function: object) -> bool:
    """A function that has nowhere to keep state: neither closure, defaults nor attributes, no inner
    functions, and no global names but those of modules.
    """
    if not isinstance(function, FunctionType):
        return False
    held = function.__closure__, function.__defaults__, function.__kwdefaults__, vars(function)
    code, names = function.__code__, function.__globals__
    own = [names[name] for name in code.co_names if name in names]
    own += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return not any(held) and all(isinstance(value, ModuleType) for value in own)


def started(
    request: Any,
    processors: LogitsProcessorList,
    alone: Callable[[Tensor], LogitsProcessorList] | None,
) -> tuple[tuple[slice, LogitsProcessorList], ...]:
    """See `Request.processors`; raises ValueError for processors that may keep state."""
    refuse_stateful(processors)

    def begun(processor: LogitsProcessor, ids: Tensor, first_row: int) -> LogitsProcessor:
        is_grammar = isinstance(processor, GrammarProcessor)
        return processor.start(ids, first_row) if is_grammar else processor

    groups = [(slice(0, len(request.lengths)), request.padded, processors)]
    if alone is not None:
        split = request.tokens.to(request.padded.device).split(1)
        shown = [0] * len(split) if request.is_embedded else request.lengths
        rows = [row[:, :length] for row, length in zip(split, shown, strict=True)]
        groups = [(slice(n, n + 1), ids, alone(ids)) for n, ids in enumerate(rows)]
    return tuple(
        (rows, LogitsProcessorList(begun(p, ids, rows.start) for p in processors))
        for rows, ids, processors in groups
    )
