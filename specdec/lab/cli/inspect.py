"""`specdec inspect`: shows what a drafter is, how its checkpoint is read, and tries the usual
misreadings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from typer import Argument, Option

from specdec.lab.cli.options import (
    DRAFTER,
    Device,
    DraftTokens,
    DType,
    Prompts,
    count,
    refuse,
    several,
)

PROMPTS = (
    "def fibonacci(n):\n    ",
    "The history of the bicycle begins",
    "Dear Sir or Madam,\n\nI am writing to",
)
"""What a target continues in the parity check, where the caller names no text."""


FEATURES = "hidden states to read"


def hidden_state(value: str) -> int | str:
    """A number, or `final`."""
    return value if value == "final" else int(value)


@dataclass
class Reading:
    """What a checkpoint leaves open."""

    allow_pickle: Annotated[bool, Option("--allow-pickle", help="read pickled .bin files")] = False
    revision: Annotated[str | None, Option(help="branch, tag or commit on the hub")] = None
    layer_convention: Annotated[
        Literal["hidden_state", "layer_output"] | None, Option(help="default: the producer's")
    ] = None
    feature_layers: Annotated[Any, several(FEATURES, hidden_state, "2,16,final")] = None
    rope_theta: Annotated[float | None, Option(help="base of the rotary embedding")] = None
    mask_token_id: Annotated[int | None, Option(help="of a parallel drafter's masks")] = None
    ignore_keys: Annotated[
        Any, several("keys of config.json that change nothing; default: none")
    ] = None


def inspect(
    *,
    name: Annotated[str, Argument(metavar="DRAFTER", help=f"a head's folder or id; {DRAFTER}")],
    target: Annotated[str | None, Option(help="zoo, or folder or id of what it drafts for")] = None,
    prompt: Prompts = None,
    max_new_tokens: Annotated[int | None, count("of each prompt; default: 64")] = None,
    num_draft_tokens: DraftTokens = None,
    dtype: DType = "auto",
    device: Device = "cpu",
    reading: Reading,
) -> None:
    """Show how a drafter checkpoint is read, and try the usual misreadings.

    Prints who wrote a checkpoint, how it is wired, and whether its tensors are those of such a
    head. With a target, generates with that reading and with the usual misreadings (layers off by
    one, norms, rope base, vocabulary map, what the rows of a block predict and see) and compares
    how many draft tokens are accepted. Exits 2 if the checkpoint cannot be loaded. Of a drafter
    that is no checkpoint of a head, your own for instance, prints what it is. mine.py:NAME:PATH
    reads a head's files by a record or a family of your own.
    """
    from specdec.checkpoints import survey_checkpoint
    from specdec.checkpoints.families import FAMILIES
    from specdec.lab.inspection import alternatives, describe, describe_part, table, try_readings
    from specdec.loading import find_drafter, find_reading, load_target

    everybody = tuple(FAMILIES.values())
    families, layouts, folder = find_reading(name) or (everybody, (), _folder_of(name))
    usual = 4 if num_draft_tokens is None else num_draft_tokens
    make = find_drafter(name, usual) if folder is None else None
    target = target or ("zoo" if make or name.startswith("zoo:") else None)
    if make or target is None:
        parity = {"prompt": prompt or None, "max_new_tokens": max_new_tokens}
        parity |= {} if make else {"num_draft_tokens": num_draft_tokens}
        refuse(parity, "belongs to the parity check of a head; pass --target with it")
    place = {"dtype": dtype, "device": device}
    model, tokenizer = load_target(target, **place) if target else (None, None)
    if make:
        print(describe_part(make(model, tokenizer=tokenizer, **place)))
        return
    survey = survey_checkpoint(folder, model, families=families, layouts=layouts, **vars(reading))
    try:
        checkpoint = survey.load(model)
    except ValueError:
        print(describe(survey, None))
        raise
    print(describe(survey, checkpoint))
    if model is None:
        return
    readings = alternatives(survey, checkpoint, model)
    inputs = _inputs(prompt, target, tokenizer).to(model.device)
    most = getattr(survey.config, "max_draft_tokens", None) or 4
    k = min(4, most) if num_draft_tokens is None else num_draft_tokens
    sizes = {"max_new_tokens": max_new_tokens or 64, "num_draft_tokens": k}
    masks = (inputs.input_ids, inputs.attention_mask)
    trials = try_readings(readings, survey.family.drafter, model, *masks, **sizes)
    print(f"\nparity check, greedy, K = {k}:\n{table(trials)}")


def _folder_of(name: str) -> str | None:
    """Folder or id of a head's checkpoint; `None` for the name of another drafter."""
    from specdec.checkpoints.families import FAMILIES
    from specdec.lab import zoo

    kind, _, path = name.partition(":")
    if kind == "zoo" and path in zoo.DRAFTERS:
        return None if path == "model" else str(zoo.WEIGHTS_DIR / zoo.DRAFTERS[path])
    if kind in FAMILIES and path:
        return path
    return None if path or name in ("none", "lookup", "suffix") else name


def _inputs(prompts: list[str] | None, target: str, tokenizer):
    """What the target continues: the caller's prompts, or the usual ones."""
    from specdec.lab import zoo

    if not prompts:
        prompts = zoo.heldout_prompts(4) if target == "zoo" else list(PROMPTS)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
