"""`specdec train`: from text to a head, with Hugging Face's `Trainer`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from specdec.cli.parser import (
    EXIT_INTERRUPTED,
    LONGEST_ROWS,
    TRAINING_STEPS,
    OneLineParser,
    positive,
)
from specdec.show.text import one_line

DESCRIPTION = """\
Train a head: `specdec train eagle3 --target … --data … --output …`; or `mask-token`, `mtp`,
`eagle1`.

`python -m specdec train` is the same, and runs unchanged under `accelerate launch` (on CPUs:
`ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 …`; with `--cpu` it starts
one process, whatever the arguments are). Evaluation drafts with the head and prints its true
acceptance length; the texts that it continues are taken from the end of the data and not trained
on. A run that was interrupted goes on when it is started again.

Any other option is a field of Hugging Face's `TrainingArguments`, `--report_to wandb` for instance,
and comes before what the options below say.
"""


def main(arguments: list[str] | None = None, *, prog: str = "specdec train") -> int:
    """Trains what the command line says, and saves it in the usual layout of its family.

    Args:
        arguments: without the program's name; those of the process by default.
        prog: how the program is called.

    Returns:
        The exit status: 0, 2 for a mistake that can be named, in one line, or 130 after an
        interrupt.
    """
    options, others = _parser(prog).parse_known_args(arguments)
    from specdec.cli.training_run import train  # models and all that computes

    try:
        train(options, others)
    except (OSError, ValueError, TypeError, FloatingPointError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        where = f": {error}; the same command goes on from there" if str(error) else ""
        print(f"interrupted{where}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog=prog,
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("kind", choices=("eagle3", "eagle1", "mask-token", "mtp"))
    add("--target", required=True, help="'zoo', a folder or a Hugging Face id")
    add("--data", required=True, help="'zoo', a .jsonl or text file, or a folder of them")
    add("--output", type=Path, required=True, help="folder of the trained head and its checkpoint")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help=f"default: {TRAINING_STEPS}")
    length.add_argument("--minutes", type=float, help="of training, instead of steps")
    add("--tokens-per-step", type=int, help="default: 16384, on a CPU 512")
    add(
        "--length",
        type=positive,
        help="tokens per row; default: short rows first, and in the end as long as the target "
        f"has positions, at most {LONGEST_ROWS}",
    )
    add("--accumulation", type=int, default=1, help="batches per step; default: 1")
    add("--lr", type=float, default=5e-3, help="peak rate of hidden matrices; default: 0.005")
    add(
        "--draft-vocab-size",
        type=positive,
        help="ids that the head can propose, the most frequent ones of the data and of the "
        "target's own text; default: all of the target's",
    )
    add("--mlp-width", type=positive, help="of the head; default: the target's")
    add("--unrolled-steps", type=positive, help="of EAGLE-3's loss; default: 5")
    add(
        "--depths",
        type=positive,
        help="draft tokens that a mask-token head learns (default: 8), or prediction modules of an "
        "MTP head (default: 3, with --layout 1)",
    )
    add(
        "--layout",
        choices=("DeepSeek", "Qwen", "MiMo"),
        help="of an MTP head: the output is the target's whole checkpoint with the modules under "
        "that producer's names, as engines read them; default: the modules alone",
    )
    add("--layers", type=positive, help="of a mask-token head; default: 2")
    add("--evaluate-every", type=int, default=500, help="steps; 0: at the end only; default: 500")
    add(
        "--checkpoint-minutes",
        type=float,
        default=4.0,
        help="of training between checkpoints, 0: every step; default: 4. Evaluations and "
        "interrupts save as well",
    )
    add("--evaluation-prompts", type=int, default=16, help="0: no evaluation; default: 16")
    add("--num-draft-tokens", type=int, default=4, help="K of the evaluation; default: 4")
    add("--precision", choices=("bf16", "no"), help="default: bf16, on a CPU no")
    add("--compile", action="store_true", help="run the loss through torch.compile")
    add("--seed", type=int, default=0, help="default: 0")
    return parser
