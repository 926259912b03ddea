"""HF's warpers of a call, as the values of a `LogitsFilter`."""

from __future__ import annotations

from typing import Any

from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

WARPERS = {  # in HF's order, with the attribute that holds the value
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


def split_warpers(
    processors: LogitsProcessorList, config: GenerationConfig
) -> tuple[LogitsProcessorList, dict[str, Any]]:
    """History-dependent processors, and the values of the four warpers if these close the list in
    HF's order and the configuration samples.

    Another order, or another warper after them, gives other probabilities: then the whole list is
    applied as it stands.
    """
    if not config.do_sample:
        return processors, {}
    split = len(processors)
    while split and type(processors[split - 1]) in WARPERS:
        split -= 1
    tail = processors[split:]
    ranks = [list(WARPERS).index(type(warper)) for warper in tail]
    if ranks != sorted(set(ranks)):
        return processors, {}
    values = {WARPERS[type(warper)]: getattr(warper, WARPERS[type(warper)]) for warper in tail}
    return LogitsProcessorList(processors[:split]), values
