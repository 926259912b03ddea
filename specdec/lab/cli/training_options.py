"""Options of `specdec train`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from specdec.lab.cli.options import Target, count

STEPS = 10_000
"""Of a run without `--steps` and `--minutes`."""
LONGEST_ROWS = 4096
"""Tokens of the longest rows of a run without `--length`: targets may have a hundred times as many
positions, and attention over such rows takes the memory of all others.
"""
LENGTH = f"tokens per row; default: first short, at last the target's positions or {LONGEST_ROWS}"
IDS = "ids that the head can propose, the most frequent ones; default: all of the target's"
DEPTHS = (
    "draft tokens of a mask-token, dflash or dspark head (default: 8), modules of an MTP head "
    "(default: 3, or 1), heads of Medusa (default: K)"
)
KINDS = (
    "eagle3, eagle1, mask-token, dflash, dspark, mtp, medusa, or your own as mine.py:make, a "
    "function of (target, num_draft_tokens) that returns a HeadObjective, and takes depths= where "
    "--depths is given"
)
MINUTES = "of steps alone, without encoding and evaluations; default: --steps"
LOSS = (
    "how far the head's distribution is from the target's: ce, kl, reverse_kl, js, tv, nla, "
    "lk_hybrid, or a sum like ce:0.7,tv:0.3; default: soft_ce, cross-entropy to all of it"
)
STEP_WEIGHTS = (
    "of draft tokens in the loss: a number, which a token weighs as a multiple of the one before, "
    "dpace, dpace:0.5, or length (with tv: the expected number of accepted tokens); default: a "
    "number by the kind of head"
)
SPREAD = (
    "a part of the target in each process of torchrun (tensor parallelism); the head and its "
    "optimiser are whole in each"
)
SHARD = (
    "a part of every layer's weights in each process of torchrun or accelerate (FSDP2); a process "
    "reads its own rows, and collects one layer's weights at a time; not with --spread-target"
)
WINDOW = (
    "tokens of a text that the head sees, the last ones, in training and in drafting; default: all"
)
LAYOUT = "of MTP modules, saved with the whole target for engines; default: the modules alone"


@dataclass
class Run:
    """What is trained, on what, and for how long."""

    kind: Annotated[str, Argument(metavar="HEAD", help=KINDS)]
    target: Target
    data: Annotated[str, Option(help="zoo, a .jsonl or text file, or a folder of them")]
    output: Annotated[Path, Option(help="folder of the trained head and its checkpoint")]
    steps: Annotated[int | None, Option(help=f"default: {STEPS}")] = None
    minutes: Annotated[float | None, Option(help=MINUTES)] = None
    tokens_per_step: Annotated[int | None, Option(help="default: 16384, on a CPU 512")] = None
    length: Annotated[int | None, count(LENGTH)] = None
    accumulation: Annotated[int, Option(help="batches per step")] = 1
    lr: Annotated[float, Option(help="peak rate of hidden matrices")] = 5e-3
    draft_vocab_size: Annotated[int | None, count(IDS)] = None
    mlp_width: Annotated[int | None, count("of the head; default: the target's")] = None
    window: Annotated[int | None, count(WINDOW)] = None
    unrolled_steps: Annotated[int | None, count("of EAGLE-3's loss; default: 5")] = None
    loss: Annotated[str | None, Option(metavar="NAME", help=LOSS)] = None
    step_weights: Annotated[str | None, Option(metavar="W", help=STEP_WEIGHTS)] = None
    depths: Annotated[int | None, count(DEPTHS)] = None
    layout: Annotated[Literal["DeepSeek", "Qwen", "MiMo"] | None, Option(help=LAYOUT)] = None
    layers: Annotated[int | None, count("of mask-token, dflash, dspark; default: 2")] = None
    evaluate_every: Annotated[int, Option(help="steps; 0: at the end only")] = 500
    checkpoint_minutes: Annotated[float, Option(help="between checkpoints; 0: every step")] = 4.0
    evaluation_prompts: Annotated[int, Option(help="0: no evaluation")] = 16
    num_draft_tokens: Annotated[int, Option(metavar="K", help="of the evaluation")] = 4
    precision: Annotated[
        Literal["bf16", "no"] | None, Option(help="default: bf16, no on a CPU")
    ] = None
    spread_target: Annotated[bool, Option("--spread-target", help=SPREAD)] = False
    shard_target: Annotated[bool, Option("--shard-target", help=SHARD)] = False
    compile: Annotated[bool, Option("--compile", help="run the loss through torch.compile")] = False
    seed: Annotated[int, Option(help="of weights and data")] = 0
