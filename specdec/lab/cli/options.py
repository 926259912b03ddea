"""Options that several commands share, in groups, and the types of their values."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from typer import BadParameter, Option

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from specdec import SpeculativeGenerator

DRAFTER = (
    "none, lookup, suffix; lookahead:5,4,5, its W, N and G; self:1024, the target itself over a "
    "draft cache of so many tokens; "
    "zoo:model, zoo:eagle3, zoo:mask-token or zoo:mtp for the zoo; folder or "
    "Hugging Face id of a draft model, or of a head as eagle:PATH, mask-token:PATH, mtp:PATH, "
    "medusa:PATH, assistant:PATH (folders of all but mtp are recognised); your own as "
    "mine.py:make or package.module:function, or mine.py:NAME:PATH, a head's files read by your "
    "own record or family"
)

SAMPLER = (
    "auto (block), rejection, block, coupling, typical, ensemble, or your own as mine.py:Rule or "
    "package.module:Rule"
)
USUAL = "default: zoo:model for the zoo, else lookup"


def text(value: str) -> str:
    """Text, of standard input for `-`; bytes that are not UTF-8 reach Python as surrogates."""
    value = sys.stdin.read() if value == "-" else value
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise BadParameter(f"expected text in UTF-8, got {value[:40]!a}")
    return value


def json_object(value: str) -> dict[str, Any]:
    """An object in JSON."""
    with suppress(ValueError):
        if isinstance(found := json.loads(value), dict):
            return found
    raise BadParameter(f"must be an object in JSON, got {value}")


def tree_size(value: str) -> list[int]:
    """Nodes and depth of a tree."""
    nodes, _, depth = value.partition("x")
    if not (nodes.isdecimal() and depth.isdecimal()):
        raise BadParameter(f"must be nodes and depth like 32x6, got {value}")
    return [int(nodes), int(depth)]


def several(about: str, kind: Callable[[str], Any] = str, like: str = "") -> Any:
    """An option that is a list, with commas."""

    def parse(value: str) -> list[Any]:
        try:
            return [kind(part) for part in value.split(",")]
        except ValueError as error:
            raise BadParameter(f"must be like {like}, got {value}") from error

    return Option(parser=parse, metavar="A,B,...", help=about)


def count(about: str) -> Any:
    """An option that is an integer above 0."""
    return Option(min=1, metavar="N", help=about)


Target = Annotated[str, Option(help="zoo, or a model's folder or Hugging Face id")]
Prompt = Annotated[str | None, Option(parser=text, metavar="TEXT", help="- reads standard input")]
Prompts = Annotated[list[str] | None, Option(parser=text, metavar="TEXT", help="repeatable; or -")]
Images = Annotated[
    list[Path] | None,
    Option(
        metavar="PATH",
        help="picture before the prompt, in the chat template; repeatable; default: none",
    ),
]
PromptFile = Annotated[Path | None, Option(help="file or folder; default: 16 of specdec's own")]
Format = Annotated[Literal["text", "markdown", "latex", "json"], Option(help="of the output")]
Temperature = Annotated[float, Option(metavar="T", help="0 is greedy")]
DraftTokens = Annotated[int | None, Option(metavar="K", help="drafted per step; default: 4")]
TreeHelp = "draft trees, 32x6 for instance: 32 nodes, paths of 6; default: chains of K tokens"
TreeSize = Annotated[Any, Option(parser=tree_size, metavar="NxD", help=TreeHelp)]
DType = Annotated[
    Literal["auto", "float32", "float64", "bfloat16", "float16"],
    Option(metavar="TYPE", help="auto (the files'), float32, float64, bfloat16 or float16"),
]
Device = Annotated[str, Option(help="cpu, cuda, cuda:1, ...")]


@dataclass
class Parts:
    """What makes a generator, besides the target."""

    drafter: Annotated[str | None, Option(metavar="NAME", help=f"{DRAFTER}; {USUAL}")] = None
    num_draft_tokens: DraftTokens = None
    tree: TreeSize = None
    proposal: Annotated[Literal["sample", "argmax"] | None, Option(help="default: sample")] = None
    draft_temperature: Annotated[float | None, Option(help="default: the target's")] = None
    visible: Annotated[
        str | None,
        Option(metavar="N+M", help="first and last tokens that drafters see; default: all"),
    ] = None
    sampler: Annotated[str, Option(metavar="NAME", help=SAMPLER)] = "auto"
    target_weight: Annotated[float | None, Option(help="of the ensemble; default: 0.9")] = None
    dtype: DType = "auto"
    device: Device = "cpu"

    def load(self, target: str) -> tuple[SpeculativeGenerator, Any]:
        """The generator, and the tokenizer of its target. Options are checked before any model is
        loaded, as far as they can be.
        """
        from specdec import SpeculativeGenerator, Tree
        from specdec.loading import find_drafter, load_sampler, load_target
        from specdec.processes import local_device

        usual = "zoo:model" if target == "zoo" else "lookup"
        name = usual if self.drafter is None else self.drafter
        if name.startswith("zoo:") and target != "zoo":
            raise ValueError(f"--drafter {name} drafts for --target zoo only")
        k, tree = self.num_draft_tokens, self.tree and Tree(*self.tree)
        if k is tree is None and name != "none":
            k = 4
        drawing = {"proposal": self.proposal, "draft_temperature": self.draft_temperature}
        make = find_drafter(name, k, tree=tree, visible=self.visible, **drawing)
        sampler = load_sampler(self.sampler, target_weight=self.target_weight)
        place = {"dtype": self.dtype, "device": local_device(self.device)}
        model, tokenizer = load_target(target, **place)
        use_few_threads(model)
        drafter = make(model, tokenizer=tokenizer, **place)
        return SpeculativeGenerator(model, drafter, sampler), tokenizer


SMALL = 20_000_000
"""Parameters of a model that decodes as fast on one core as on several."""


def use_few_threads(model: PreTrainedModel) -> None:
    """Decodes with a small model on one core, unless OMP_NUM_THREADS says otherwise. Its operations
    are so short that threads wait for each other most of the time; beside a busy program, which
    holds one of them up, they take ten times as long.
    """
    import torch

    is_small = model.device.type == "cpu" and model.num_parameters() < SMALL
    if is_small and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


@dataclass
class Sampling:
    """How the target's tokens are sampled."""

    temperature: Temperature = 0.0
    top_k: Annotated[int | None, Option(help="likeliest tokens kept; default: all")] = None
    top_p: Annotated[float | None, Option(help="mass of tokens kept; default: all")] = None
    min_p: Annotated[float | None, Option(help="of the likeliest's, kept; default: all")] = None
    seed: Annotated[int | None, Option(help="default: random, printed; 0 for whole files")] = None

    def given(self, parts: Parts) -> dict[str, Any]:
        """The options of `generate`; `ValueError` for one that greedy decoding would not use."""
        others = {name: value for name, value in vars(self).items() if name != "temperature"}
        if self.temperature == 0:
            others |= {name: getattr(parts, name) for name in ("proposal", "draft_temperature")}
            refuse(others, "belongs to sampling; pass a --temperature above 0 with it")
        return {"temperature": self.temperature, **given(others)}


def given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that were given; the others are `None`."""
    return {name: value for name, value in options.items() if value is not None}


def refuse(options: Mapping[str, Any], why: str) -> None:
    """Raises `ValueError` for an option that was given and would have no effect; says why."""
    for name in given(options):
        raise ValueError(f"--{name.replace('_', '-')} {why}")


def ungrouped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the fields of a group (a dataclass) in the place of a parameter of that
    type, as `typer` reads functions.

    Example:
        >>> @ungrouped
        ... def show(sampling: Sampling) -> None:
        ...     print(sampling.top_k)
        >>> show(**vars(Sampling(top_k=5)))
        5
    """
    hints = get_type_hints(function)
    groups = {name: hint for name, hint in hints.items() if is_dataclass(hint)}

    @wraps(function)
    def run(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(
                **{field: values.pop(field) for field in signature(group).parameters}
            )
        return function(**values)

    run.__signature__ = signature(function).replace(parameters=_options_of(function))
    run.__annotations__ = {each.name: each.annotation for each in _options_of(function)}
    return run


def _options_of(part: Any) -> list[Parameter]:
    hints, found = get_type_hints(part, include_extras=True), []
    for each in signature(part).parameters.values():
        hint, kind = hints[each.name], Parameter.KEYWORD_ONLY
        is_group = is_dataclass(hint)
        found += _options_of(hint) if is_group else [each.replace(annotation=hint, kind=kind)]
    return found
