"""The models and parts that a command's arguments name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from specdec.cli.parser import DRAWING, given

if TYPE_CHECKING:
    from specdec import SpeculativeGenerator


def load_generator(
    arguments: argparse.Namespace, loaded: tuple[Any, Any] | None = None
) -> tuple[SpeculativeGenerator, Any]:
    """The generator that a command's arguments describe, and the tokenizer of its target. What can
    be refused without loading anything is refused first. A target and tokenizer that are `loaded`
    are taken as they are.
    """
    from specdec import SpeculativeGenerator, Tree
    from specdec.loading import find_drafter, load_sampler, load_target

    name = arguments.drafter
    if name is None:
        name = "zoo:model" if arguments.target == "zoo" else "lookup"
    k = arguments.num_draft_tokens
    if k is None and arguments.tree is None and name != "none":
        k = 4
    if name.startswith("zoo:") and arguments.target != "zoo":
        raise ValueError(f"--drafter {name} drafts for --target zoo only")
    tree = None if arguments.tree is None else Tree(*arguments.tree)
    make = find_drafter(name, k, tree=tree, **given(arguments, DRAWING))
    sampler = load_sampler(arguments.sampler, target_weight=arguments.target_weight)
    place = {"dtype": arguments.dtype, "device": arguments.device}
    target, tokenizer = loaded or load_target(arguments.target, **place)
    drafter = make(target, tokenizer=tokenizer, **place)
    return SpeculativeGenerator(target, drafter, sampler), tokenizer


def bar(name: str, batches: Sequence) -> Iterable:
    """A progress bar on a terminal, nothing elsewhere."""
    from tqdm import tqdm

    is_terminal = sys.stderr.isatty()
    return tqdm(batches, desc=name, file=sys.stderr, disable=not is_terminal, leave=False)
