"""The models and parts that a command's arguments name."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli.parser import DRAWING, given, refuse_given
from specdec.show.text import one_line, printable

if TYPE_CHECKING:
    from specdec import SpeculativeGenerator, Tree

HEADS = {"eagle": "EagleDrafter", "mask-token": "MaskTokenDrafter", "mtp": "MTPDrafter"}
"""Kinds of heads on the command line, and their drafters in `specdec`."""


def check_device(name: str) -> None:
    """Raises `ValueError` unless models can be moved to a device of that name."""
    import torch

    try:
        torch.zeros(1, device=name).item()
    except Exception as error:  # torch raises RuntimeError, AssertionError and others
        reason = one_line(error)[:120]
        raise ValueError(
            f"--device {name} cannot be used here: {reason}; try --device cpu"
        ) from error


def find_pretrained(name: str) -> bool:
    """Looks for a model's files, before anything large is loaded.

    Returns:
        Whether only local files may be read: a folder, or the cache while the hub is out of reach.

    Raises:
        ValueError: nothing is there; the message names the places that were searched.
    """
    from specdec.checkpoints.hub import check_reachable, is_repository_id

    path = Path(name).expanduser()
    if name and (path / "config.json").is_file():
        return True
    is_local = path.exists() or not name or "\\" in name or "/" in name
    if is_local and (path.exists() or not is_repository_id(name)):
        raise ValueError(
            f"cannot load {name!r}: it must be a folder with a config.json or a Hugging Face id of "
            "a causal LM with its tokenizer, and there is no such folder"
        )
    try:
        return not check_reachable(name)
    except ValueError as error:
        raise ValueError(f"cannot load {name!r}: {error}") from error


def load_pretrained(auto_class: type, path: str, **options: Any) -> Any:
    """Loads from a folder or Hugging Face id; whatever goes wrong is a `ValueError`."""
    try:
        return auto_class.from_pretrained(path, **options)
    except Exception as error:  # damaged or hostile files end in errors of any kind
        raise ValueError(
            f"cannot load {path!r}: it must be a folder or a Hugging Face id of a causal LM with "
            f"its tokenizer ({type(error).__name__}: {error})"
        ) from error


def load_model(path: str, *, dtype: str, device: str, local_only: bool = False):
    """A causal LM in eval mode.

    Raises:
        ValueError: it cannot be loaded, or its files lack weights, which HF would draw at random.
    """
    from transformers import AutoModelForCausalLM

    options = {"dtype": dtype, "local_files_only": local_only, "output_loading_info": True}
    model, info = load_pretrained(AutoModelForCausalLM, path, **options)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{path} is no whole causal LM: its files lack {len(missing)} tensors, "
            f"{', '.join(map(printable, missing[:3]))} among them; name a head as --drafter "
            f"eagle:{path} (or mask-token:, mtp:)"
        )
    return model.to(device).eval()


def load_tokenizer(name: str, *, local_only: bool):
    """The tokenizer of a folder or Hugging Face id."""
    from transformers import AutoTokenizer

    return load_pretrained(AutoTokenizer, name, local_files_only=local_only)


def load_target(name: str, *, dtype: str, device: str):
    """The model and its tokenizer: `"zoo"`, a folder or a Hugging Face id."""
    if name == "zoo":
        import torch

        from specdec import zoo

        dtype = "float32" if dtype == "auto" else dtype
        model = zoo.load_target(dtype=getattr(torch, dtype)).to(device)
        return model, zoo.load_tokenizer()
    local_only = find_pretrained(name)
    tokenizer = load_tokenizer(name, local_only=local_only)
    return load_model(name, dtype=dtype, device=device, local_only=local_only), tokenizer


def make_drafter(
    name: str,
    target,
    num_draft_tokens: int,
    *,
    dtype: str,
    device: str,
    tree: Tree | None = None,
    tokenizer=None,
    **options: Any,
):
    """The drafter that `DRAFTERS_HELP` describes.

    Args:
        name: as on the command line.
        target: the HF model.
        num_draft_tokens: K.
        dtype, device: of a draft model.
        tree: drafted instead of chains of K tokens.
        tokenizer: the target's; a draft model with another one drafts what both have in common.
        options: `proposal` and `draft_temperature`, of drafters with probabilities.
    """
    from specdec import ModelDrafter, PromptLookupDrafter, zoo

    if name == "none":
        return None
    if name == "lookup":
        if tree is None:
            return PromptLookupDrafter(num_draft_tokens)
        return PromptLookupDrafter(tree.nodes, num_continuations=tree.nodes // tree.depth)
    options["tree"] = tree
    if name.startswith("zoo:"):
        options["num_draft_tokens"] = num_draft_tokens
        return zoo.load_drafter(name.removeprefix("zoo:"), target, **options)
    kind, path = _split(name)
    head_class = _head_class(kind, path)
    if head_class is not None:
        return head_class.from_pretrained(path, target, num_draft_tokens, **options).to(device)
    local_only = find_pretrained(path)
    if tokenizer is not None:
        options["vocabulary"] = _common_vocabulary(path, tokenizer, local_only)
    model = load_model(path, dtype=dtype, device=device, local_only=local_only)
    return ModelDrafter(model, num_draft_tokens, **options)


def load_generator(
    arguments: argparse.Namespace, loaded: tuple[Any, Any] | None = None
) -> tuple[SpeculativeGenerator, Any]:
    """The generator that a command's arguments describe, and the tokenizer of its target. What can
    be refused without loading anything is refused first. A target and tokenizer that are `loaded`
    are taken as they are.
    """
    from specdec import SpeculativeGenerator
    from specdec.samplers import EnsembleSampler, sampler_named

    name = arguments.drafter
    if name is None:
        name = "zoo:model" if arguments.target == "zoo" else "lookup"
    check_device(arguments.device)
    tree = tree_of(arguments, has_continuations=name == "lookup")
    if name == "none":
        refuse_given(arguments, ("num_draft_tokens", "tree"), "belongs to a drafter; there is none")
    if name in ("none", "lookup"):
        refuse_given(arguments, DRAWING, f"belongs to drafters with probabilities, not to {name}")
    elif not name.startswith("zoo:"):
        find_pretrained(_split(name)[1])
    elif arguments.target != "zoo":
        raise ValueError(f"--drafter {name} drafts for --target zoo only")
    if arguments.sampler == "ensemble":
        weight = arguments.target_weight
        sampler = EnsembleSampler(0.9 if weight is None else weight)
    else:
        refuse_given(arguments, ("target_weight",), "belongs to --sampler ensemble")
        sampler = sampler_named(arguments.sampler)
    place = {"dtype": arguments.dtype, "device": arguments.device}
    target, tokenizer = loaded or load_target(arguments.target, **place)
    k = 4 if arguments.num_draft_tokens is None else arguments.num_draft_tokens
    options = {**place, "tree": tree, "tokenizer": tokenizer, **given(arguments, DRAWING)}
    drafter = make_drafter(name, target, k, **options)
    return SpeculativeGenerator(target, drafter, sampler), tokenizer


def tree_of(arguments: argparse.Namespace, *, has_continuations: bool = False) -> Tree | None:
    """The tree that `--tree` names; of a drafter of whole continuations each is a path of it."""
    from specdec import Tree

    if arguments.tree is None:
        return None
    refuse_given(arguments, ("num_draft_tokens",), "belongs to chains; leave it out beside --tree")
    nodes, depth = arguments.tree[:2]
    tree = Tree(*arguments.tree)
    if has_continuations and nodes % depth:
        raise ValueError(
            f"--tree {nodes}x{depth} for lookup is made of continuations of {depth} tokens each; "
            f"pass a multiple of {depth} nodes, {nodes - nodes % depth}x{depth} for instance"
        )
    return tree


def _split(name: str) -> tuple[str | None, str]:
    """The kind of head before a drafter's name, `None` without one, and its path or id."""
    kind, separator, path = name.partition(":")
    return (kind, path) if separator and kind in HEADS else (None, name)


def _head_class(kind: str | None, path: str):
    """The drafter of a kind of heads, or of the heads that a local folder is recognised to hold;
    `None` for a model. Prediction modules lie in whole models, so they are never guessed.
    """
    import specdec
    from specdec.checkpoints.survey import family_of

    if kind is not None:
        return getattr(specdec, HEADS[kind])
    guessed = {head.family: head for head in (specdec.EagleDrafter, specdec.MaskTokenDrafter)}
    return guessed.get(family_of(path, families=tuple(guessed)))


def _common_vocabulary(path: str, tokenizer, local_only: bool):
    """Of a draft model's tokenizer, if it has one, and the target's; `None` where both are one."""
    from specdec.drafters import CommonVocabulary
    from specdec.drafters.model import check_same_tokenizer

    try:
        own = load_tokenizer(path, local_only=local_only)
    except ValueError:  # a draft model need not come with one; then only sizes can be compared
        return None
    try:
        check_same_tokenizer(tokenizer, own)
    except ValueError:
        return CommonVocabulary.of(tokenizer, own)
    return None


def bar(name: str, batches: Sequence) -> Iterable:
    """A progress bar on a terminal, nothing elsewhere."""
    from tqdm import tqdm

    is_terminal = sys.stderr.isatty()
    return tqdm(batches, desc=name, file=sys.stderr, disable=not is_terminal, leave=False)
