"""Options of `specdec train`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from specdec.cli.options import count

STEPS = 10_000
"""Of a run without `--steps` and `--minutes`."""
LONGEST_ROWS = 4096
"""Tokens of the longest rows of a run without `--length`: targets may have a hundred times as many
positions, and attention over such rows takes the memory of all others.
"""


@dataclass
class Run:
    """What is trained, on what, and for how long."""

    kind: Annotated[Literal["eagle3", "eagle1", "mask-token", "mtp"], Argument(help="of head")]
    target: Annotated[str, Option(help="zoo, or a model's folder or Hugging Face id")]
    data: Annotated[str, Option(help="zoo, a .jsonl or text file, or a folder of them")]
    output: Annotated[Path, Option(help="folder of the trained head and its checkpoint")]
    steps: Annotated[int | None, Option(help=f"default: {STEPS}")] = None
    minutes: Annotated[float | None, Option(help="instead of --steps; default: none")] = None
    tokens_per_step: Annotated[int | None, Option(help="default: 16384, on a CPU 512")] = None
    length: Annotated[
        int | None,
        count(
            "tokens per row; default: short rows first, and in the end as long as the target has "
            f"positions, at most {LONGEST_ROWS}"
        ),
    ] = None
    accumulation: Annotated[int, Option(help="batches per step")] = 1
    lr: Annotated[float, Option(help="peak rate of hidden matrices")] = 5e-3
    draft_vocab_size: Annotated[
        int | None,
        count(
            "ids that the head can propose, the most frequent ones of the data and of the "
            "target's own text; default: all of the target's"
        ),
    ] = None
    mlp_width: Annotated[int | None, count("of the head; default: the target's")] = None
    unrolled_steps: Annotated[int | None, count("of EAGLE-3's loss; default: 5")] = None
    depths: Annotated[
        int | None,
        count(
            "draft tokens that a mask-token head learns (default: 8), or prediction modules of an "
            "MTP head (default: 3, with --layout 1)"
        ),
    ] = None
    layout: Annotated[
        Literal["DeepSeek", "Qwen", "MiMo"] | None,
        Option(
            help="of an MTP head: the output is the target's whole checkpoint with the modules "
            "under that producer's names, as engines read them; default: the modules alone"
        ),
    ] = None
    layers: Annotated[int | None, count("of a mask-token head; default: 2")] = None
    evaluate_every: Annotated[int, Option(help="steps; 0: at the end only")] = 500
    checkpoint_minutes: Annotated[
        float,
        Option(help="between checkpoints, 0: every step; evaluations and interrupts save as well"),
    ] = 4.0
    evaluation_prompts: Annotated[int, Option(help="0: no evaluation")] = 16
    num_draft_tokens: Annotated[int, Option(metavar="K", help="of the evaluation")] = 4
    precision: Annotated[
        Literal["bf16", "no"] | None, Option(help="default: bf16, on a CPU no")
    ] = None
    compile: Annotated[bool, Option("--compile", help="run the loss through torch.compile")] = False
    seed: Annotated[int, Option(help="of weights and data")] = 0
