"""`specdec inspect`: shows how a drafter checkpoint is read, and tries the usual misreadings."""

from __future__ import annotations

import argparse

from specdec.cli.loading import check_device, load_target
from specdec.cli.parser import add_model_arguments, refuse_given, text

PROMPTS = (
    "def fibonacci(n):\n    ",
    "The history of the bicycle begins",
    "Dear Sir or Madam,\n\nI am writing to",
)
"""What a target continues in the parity check, where the caller names no text."""


def add_parser(commands) -> None:
    """Adds the command to `argparse`'s subparsers."""
    parser = commands.add_parser(
        "inspect",
        help="show how a drafter checkpoint is read, and try the usual misreadings",
        description="Prints who wrote a checkpoint, how it is wired, and whether its tensors are "
        "those of such a head. With a target, generates with that reading and with the usual "
        "misreadings (layers off by one, norms, rope base, vocabulary map, what the rows of a "
        "block predict and see) and compares how many draft tokens are accepted. Exits 2 if the "
        "checkpoint cannot be loaded.",
    )
    parser.add_argument("checkpoint", help="folder or Hugging Face id of the head")
    parser.add_argument("--target", help="folder or id of the model it drafts for, or 'zoo'")
    parser.add_argument("--allow-pickle", action="store_true", help="read pickled .bin weights")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument(
        "--layer-convention",
        choices=("boundary", "layer_output"),
        help="how to take the layer ids (default: as their producer means them)",
    )
    parser.add_argument("--feature-layers", help="boundaries to read, for instance 2,16,29")
    parser.add_argument("--rope-theta", type=float, help="base of the rotary embedding")
    parser.add_argument("--mask-token-id", type=int, help="id of a parallel drafter's masks")
    parser.add_argument(
        "--prompt", type=text, action="append", help="text to continue (several: repeat)"
    )
    parser.add_argument("--new-tokens", type=int, help="of each prompt (default 64)")
    parser.add_argument("--num-draft-tokens", type=int, help="K (default 4)")
    add_model_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the reading, and with a target the parity check."""
    from specdec.arguments import check_integer
    from specdec.checkpoints import survey_checkpoint
    from specdec.drafters import EagleDrafter, MaskTokenDrafter, MTPDrafter
    from specdec.inspection import alternatives, describe, table, try_readings

    known = EagleDrafter, MaskTokenDrafter, MTPDrafter
    drafters = {drafter.family: drafter for drafter in known}
    options = {
        "allow_pickle": arguments.allow_pickle,
        "revision": arguments.revision,
        "layer_convention": arguments.layer_convention,
        "rope_theta": arguments.rope_theta,
        "feature_layers": _layers(arguments.feature_layers),
        "mask_token_id": arguments.mask_token_id,
    }
    of_target = ("prompt", "new_tokens", "num_draft_tokens")
    if arguments.target is None:
        refuse_given(arguments, of_target, "belongs to the parity check; pass --target with it")
    k = 4 if arguments.num_draft_tokens is None else arguments.num_draft_tokens
    new_tokens = 64 if arguments.new_tokens is None else arguments.new_tokens
    check_integer("--num-draft-tokens", k, 1)
    check_integer("--new-tokens", new_tokens, 1)
    model, tokenizer, prompts = None, None, None
    if arguments.target is not None:
        model, tokenizer, prompts = _load_target(arguments)
    survey = survey_checkpoint(arguments.checkpoint, model, families=tuple(drafters), **options)
    try:
        checkpoint = survey.load(model)
    except ValueError:
        print(describe(survey, None))
        raise
    print(describe(survey, checkpoint))
    if model is None:
        return 0
    inputs = tokenizer(
        arguments.prompt or prompts, return_tensors="pt", padding=True, padding_side="left"
    ).to(model.device)
    trials = try_readings(
        alternatives(survey, checkpoint, model),
        drafters[survey.family],
        model,
        inputs.input_ids,
        inputs.attention_mask,
        max_new_tokens=new_tokens,
        num_draft_tokens=k,
    )
    print(f"\nparity check, greedy, K = {k}:\n{table(trials)}")
    return 0


def _layers(text: str | None) -> tuple[int | str, ...] | None:
    if text is None:
        return None
    try:
        return tuple(part if part == "final" else int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(
            f"--feature-layers must be boundaries like 2,16,29, got {text!r}"
        ) from error


def _load_target(arguments: argparse.Namespace):
    """Model, tokenizer and prompts."""
    check_device(arguments.device)
    place = {"dtype": arguments.dtype, "device": arguments.device}
    model, tokenizer = load_target(arguments.target, **place)
    if arguments.target == "zoo":
        from specdec import zoo

        return model, tokenizer, zoo.heldout_prompts(4)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer, list(PROMPTS)
