"""`specdec inspect`: shows how a drafter checkpoint is read, and tries the usual misreadings."""

from __future__ import annotations

import argparse

from specdec.cli.parser import add_place_arguments, positive, refuse_given, text

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
    add = parser.add_argument
    add("checkpoint", help="folder or Hugging Face id of the head")
    add("--target", help="folder or id of the model it drafts for, or 'zoo'")
    add("--allow-pickle", action="store_true", help="read pickled .bin weights")
    add("--revision", help="branch, tag or commit on the hub")
    add(
        "--layer-convention",
        choices=("boundary", "layer_output"),
        help="how to take the layer ids (default: as their producer means them)",
    )
    add("--feature-layers", type=_layers, help="boundaries to read, for instance 2,16,29")
    add("--rope-theta", type=float, help="base of the rotary embedding")
    add("--mask-token-id", type=int, help="id of a parallel drafter's masks")
    add("--prompt", type=text, action="append", help="text to continue (several: repeat)")
    add("--new-tokens", type=positive, help="of each prompt (default 64)")
    add("--num-draft-tokens", type=positive, help="K (default 4)")
    add_place_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the reading, and with a target the parity check."""
    from specdec.checkpoints import survey_checkpoint
    from specdec.drafters import head_drafters
    from specdec.inspection import alternatives, describe, table, try_readings

    drafters = {d.family: d for d in head_drafters().values()}
    names = ("allow_pickle", "revision", "layer_convention", "rope_theta", "feature_layers")
    options = {name: getattr(arguments, name) for name in (*names, "mask_token_id")}
    model = None
    if arguments.target is None:
        of_target = ("prompt", "new_tokens", "num_draft_tokens")
        refuse_given(arguments, of_target, "belongs to the parity check; pass --target with it")
    else:
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
    k = arguments.num_draft_tokens or 4
    trials = try_readings(
        alternatives(survey, checkpoint, model),
        drafters[survey.family],
        model,
        inputs.input_ids,
        inputs.attention_mask,
        max_new_tokens=arguments.new_tokens or 64,
        num_draft_tokens=k,
    )
    print(f"\nparity check, greedy, K = {k}:\n{table(trials)}")
    return 0


def _layers(argument: str) -> tuple[int | str, ...]:
    """The type of boundaries, which are numbers or `final`."""
    parts = argument.split(",")
    if not all(part == "final" or part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"must be boundaries like 2,16,29, got {argument}")
    return tuple(part if part == "final" else int(part) for part in parts)


def _load_target(arguments: argparse.Namespace):
    """Model, tokenizer and prompts."""
    from specdec.loading import load_target

    model, tokenizer = load_target(arguments.target, dtype=arguments.dtype, device=arguments.device)
    if arguments.target == "zoo":
        from specdec import zoo

        return model, tokenizer, zoo.heldout_prompts(4)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer, list(PROMPTS)
