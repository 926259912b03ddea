"""Train a head: `specdec train eagle3 --target … --data … --output …`; or `mask-token`, `mtp`,
`eagle1`.

`python -m specdec.training` is the same, and runs unchanged under `accelerate launch` (on CPUs:
`ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 …`; with `--cpu` it starts
one process, whatever the arguments are). Evaluation drafts with the head and prints its true
acceptance length; the texts that it continues are taken from the end of the data and not trained
on. A run that was interrupted goes on when it is started again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast, broadcast_object_list, parse_flag_from_env
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from specdec import zoo
from specdec.arguments import check_integer, make_folder
from specdec.cli.loading import bar, find_pretrained, load_model, load_pretrained
from specdec.cli.parser import EXIT_INTERRUPTED, OneLineParser, one_line, refuse_given
from specdec.cli.run_record import RunRecord
from specdec.drafters.eagle import EagleDrafter
from specdec.drafters.head import HeadDrafter
from specdec.drafters.mask_token import MaskTokenDrafter
from specdec.drafters.mtp import MTPDrafter
from specdec.evaluation.contexts import acceptance_by_context
from specdec.evaluation.evaluate import evaluate
from specdec.evaluation.intervals import counted
from specdec.generator import SpeculativeGenerator
from specdec.training.data import (
    PROMPT_TOKENS,
    PackedStream,
    encode_texts,
    hold_out,
    prompts_of,
    read_texts,
)
from specdec.training.eagle import FeatureAndToken, TrainingTimeTest, new_head
from specdec.training.heads import frequent_ids
from specdec.training.loop import train
from specdec.training.mask_token import MaskRollouts
from specdec.training.mask_token import new_head as new_mask_token_head
from specdec.training.mtp import MultiTokenPrediction
from specdec.training.mtp import new_head as new_mtp_head
from specdec.training.plan import TrainingPlan, TrainingProgress
from specdec.training.run_checkpoint import CheckpointError
from specdec.zoo import corpus

DEFAULT_STEPS = 10_000
EVALUATED_TOKENS = 64
LONGEST_ROWS = 4096
"""Of a run that does not say how long its rows are: targets may have a hundred times as many
positions, and attention over rows of such a length takes the memory of all others.
"""


def main(arguments: list[str] | None = None, *, prog: str = "python -m specdec.training") -> int:
    """Trains what the command line says, and saves it in the usual layout of its family.

    Args:
        arguments: without the program's name; those of the process by default.
        prog: how the program is called.

    Returns:
        The exit status: 0, 2 for a mistake that can be named, in one line, or 130 after an
        interrupt.
    """
    options = _parser(prog).parse_args(arguments)
    try:
        _train(options)
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
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("kind", choices=tuple(KINDS))
    add("--target", required=True, help="'zoo', a folder or a Hugging Face id")
    add("--data", required=True, help="'zoo', a .jsonl or text file, or a folder of them")
    add("--output", type=Path, required=True, help="folder of the trained head and its checkpoint")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, help=f"default: {DEFAULT_STEPS}")
    length.add_argument("--minutes", type=float, help="of training, instead of steps")
    add("--tokens-per-step", type=int, help="default: 16384, on a CPU 512")
    add(
        "--length",
        type=int,
        help="tokens per row; default: short rows first, and in the end as long as the target "
        f"has positions, at most {LONGEST_ROWS}",
    )
    add("--accumulation", type=int, default=1, help="batches per step; default: 1")
    add("--lr", type=float, default=5e-3, help="peak rate of hidden matrices; default: 0.005")
    add(
        "--draft-vocab-size",
        type=int,
        help="ids that the head can propose, the most frequent ones of the data and of the "
        "target's own text; default: all of the target's",
    )
    add("--mlp-width", type=int, help="of the head; default: the target's")
    add("--unrolled-steps", type=int, help="of EAGLE-3's loss; default: 5")
    add(
        "--depths",
        type=int,
        help="draft tokens that a mask-token head learns (default: 8), or prediction modules of an "
        "MTP head (default: 3)",
    )
    add("--layers", type=int, help="of a mask-token head; default: 2")
    add("--evaluate-every", type=int, default=500, help="steps; 0: at the end only; default: 500")
    add(
        "--checkpoint-minutes",
        type=float,
        default=TrainingPlan.checkpoint_minutes,
        help="of training between checkpoints, 0: every step; default: "
        f"{TrainingPlan.checkpoint_minutes:g}. Evaluations and interrupts save as well",
    )
    add("--evaluation-prompts", type=int, default=16, help="0: no evaluation; default: 16")
    add("--num-draft-tokens", type=int, default=4, help="K of the evaluation; default: 4")
    add("--precision", choices=("bf16", "no"), help="default: bf16, on a CPU no")
    add("--compile", action="store_true", help="run the loss through torch.compile")
    add("--seed", type=int, default=0, help="default: 0")
    return parser


def _train(options: argparse.Namespace) -> None:
    # Made once, and the launcher's word that it started CPUs is part of it: by default each process
    # would take itself for the only one.
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    # Most CPUs have no bfloat16 products, and a step of many tokens takes a minute on them.
    is_cpu = state.device.type == "cpu"
    if options.tokens_per_step is None:
        options.tokens_per_step = 512 if is_cpu else 16384
    if options.precision is None:
        options.precision = "no" if is_cpu else "bf16"
    _check(options)  # before anything is loaded
    if (options.output / "config.json").exists() and not (options.output / "run").exists():
        raise ValueError(
            f"--output {options.output} holds a model that no earlier run of this command wrote, "
            "and that would be lost; name a new folder"
        )
    make_folder("--output", options.output)
    record = RunRecord(options)
    if _is_complete(options, record):
        return
    tokenizer, documents = _load_data(options)
    trained_on, held_out = hold_out(documents, options.evaluation_prompts)
    _say_of_evaluation(options, trained_on, held_out)
    stream = PackedStream(trained_on, seed=options.seed)
    model = _load_target(options.target, tokenizer)
    plan = _plan(options, *_row_lengths(options, model))
    drafter, objective = KINDS[options.kind](options, model, _draft_ids(options, model, trained_on))
    if state.is_main_process:
        record.begin()
    try:
        progress = train(
            objective,
            stream,
            plan=plan,
            work_dir=options.output / "run",
            evaluate=_evaluation(model, drafter, held_out, plan) if held_out else None,
        )
    except CheckpointError as error:
        raise ValueError(_refusal(error, record)) from error
    if state.is_main_process:
        for note in drafter.save_pretrained(options.output) or ():
            print(f"note: {note}")
        print(f"saved in {options.output}")
        record.finish(progress)
    state.wait_for_everyone()


def _check(options: argparse.Namespace) -> None:
    """Refuses settings that cannot be right, or would have no effect."""
    _plan(options, (1.0, 1))
    for name in ("mlp_width", "length", *FLAGS):
        if getattr(options, name) is not None:
            check_integer(f"--{name.replace('_', '-')}", getattr(options, name), 1)
    for name, kinds in FLAGS.items():
        if options.kind not in kinds:
            why = f"belongs to {' and '.join(kinds)}; leave it out for {options.kind}"
            refuse_given(options, (name,), why)
    if options.data != "zoo" and not Path(options.data).exists():
        raise FileNotFoundError(f"no training data at {options.data}")
    if options.target != "zoo":
        find_pretrained(options.target)


def _is_complete(options: argparse.Namespace, record: RunRecord) -> bool:
    """Says so if there is nothing left to train, as the first process finds."""
    end = record.finished() if (options.output / "config.json").exists() else None
    found = [end if PartialState().is_main_process else None]
    broadcast_object_list(found)  # others may see another disk
    if found[0] is None:
        return False
    evaluation, end = found[0].pop("evaluation"), found[0]
    if TrainingProgress(**end).fraction(_plan(options, (1.0, 1))) < 1:
        return False
    figures = [f"{n} {v:.3f}" for n, v in (evaluation or {}).items() if n != "step"]
    shown = f": {', '.join(figures)}" if figures else ""
    if PartialState().is_main_process:
        print(f"already complete at step {end['num_steps']}{shown}")
        print(f"saved in {options.output}")
    return True


def _refusal(error: CheckpointError, record: RunRecord) -> str:
    """The message about a checkpoint in terms of the command line."""
    differing = record.differences() if error.is_another_run else []
    if not differing:
        return error.text("--output")
    return error.text("--output", f"; they differ in {', '.join(differing)}")


def _say(text: str) -> None:
    """What the first process is doing, on standard error."""
    if PartialState().is_main_process:
        print(text, file=sys.stderr)


def _say_of_evaluation(
    options: argparse.Namespace, trained_on: list[np.ndarray], held_out: list[np.ndarray]
) -> None:
    """Says why there is no evaluation, or a smaller one than was asked for."""
    wanted = options.evaluation_prompts
    if len(held_out) < wanted:
        found = f"evaluating on {counted(len(held_out), 'prompt')}" if held_out else "no evaluation"
        pieces = sum(len(ids) >= PROMPT_TOKENS for ids in [*trained_on, *held_out])
        _say(
            f"{found}: --evaluation-prompts {wanted} needs {4 * wanted} pieces of text of "
            f"{PROMPT_TOKENS} tokens or more, as every fourth is kept from training, and the data "
            f"has {pieces}"
        )


def _evaluation(
    model: PreTrainedModel, drafter: HeadDrafter, held_out: list[np.ndarray], plan: TrainingPlan
) -> Callable[[], dict[str, float]]:
    """Measures acceptance at two temperatures, and by length of context."""
    prompts, text = prompts_of(held_out), torch.from_numpy(np.concatenate(held_out).astype(int))
    longest, room = plan.lengths[-1][1], drafter.num_draft_tokens + EVALUATED_TOKENS
    contexts = [n for n in (longest // 4, longest // 2, longest - room) if 64 < n <= len(text)]

    def measure() -> dict[str, float]:
        generator = SpeculativeGenerator(model, drafter)
        stats = {t: evaluate(generator, prompts, temperature=t).stats for t in (0.0, 1.0)}
        figures = {f"acceptance length at T = {t:g}": s.acceptance_length for t, s in stats.items()}
        options = {"num_prompts": len(prompts), "max_new_tokens": EVALUATED_TOKENS}
        if contexts:
            by_context = acceptance_by_context(generator, text, contexts, **options)
            figures |= {f"after {n} tokens": length for n, length in by_context.items()}
        return figures

    return measure


def _eagle(
    options: argparse.Namespace, target: PreTrainedModel, target_ids: Tensor | None
) -> tuple[HeadDrafter, nn.Module]:
    sizes = {"mlp_width": options.mlp_width, "target_ids": target_ids, "seed": options.seed}
    head = new_head(target, options.kind, **sizes)
    drafter = EagleDrafter(head, target, options.num_draft_tokens)
    if options.kind == "eagle3":
        steps = 5 if options.unrolled_steps is None else options.unrolled_steps
        return drafter, TrainingTimeTest(drafter, target, steps)
    return drafter, FeatureAndToken(drafter, target)


def _mask_token(
    options: argparse.Namespace, target: PreTrainedModel, target_ids: Tensor | None
) -> tuple[HeadDrafter, nn.Module]:
    num_layers = 2 if options.layers is None else options.layers
    sizes = {"num_layers": num_layers, "mlp_width": options.mlp_width}
    head = new_mask_token_head(target, **sizes, target_ids=target_ids, seed=options.seed)
    drafter = MaskTokenDrafter(head, target, options.num_draft_tokens)
    return drafter, MaskRollouts(drafter, target, 8 if options.depths is None else options.depths)


def _mtp(
    options: argparse.Namespace, target: PreTrainedModel, target_ids: Tensor | None
) -> tuple[HeadDrafter, nn.Module]:
    depths = 3 if options.depths is None else options.depths
    head = new_mtp_head(target, depths, mlp_width=options.mlp_width, seed=options.seed)
    drafter = MTPDrafter(head, target, max(options.num_draft_tokens, depths))
    return drafter, MultiTokenPrediction(drafter, target)


FLAGS = {
    "draft_vocab_size": ("eagle3", "mask-token"),
    "unrolled_steps": ("eagle3",),
    "depths": ("mask-token", "mtp"),
    "layers": ("mask-token",),
}
"""Options that not every kind of head has, and which have them. EAGLE-1 heads and prediction
modules use the target's vocabulary head, and so propose all of its ids.
"""

KINDS = {"eagle3": _eagle, "eagle1": _eagle, "mask-token": _mask_token, "mtp": _mtp}
"""What can be trained: (options, target, ids that the head can propose or `None`) -> an untrained
drafter and its objective.
"""


def _draft_ids(
    options: argparse.Namespace, target: PreTrainedModel, documents: list[np.ndarray]
) -> Tensor | None:
    """The ids that the head can propose; those of the first process, as another device's rounding
    may order them otherwise.
    """
    if options.draft_vocab_size is None:
        return None
    device = PartialState().device
    _say("finding the most frequent ids of the data and of the target's own text")
    shown = partial(bar, "rows read by the target") if PartialState().is_main_process else iter
    target = target.to(device).eval()
    ids = frequent_ids(target, documents, options.draft_vocab_size, progress=shown)
    return broadcast(ids.to(device)).cpu()


def _row_lengths(
    options: argparse.Namespace, target: PreTrainedModel
) -> tuple[tuple[float, int], ...]:
    """Tokens per row over the run, as in `TrainingPlan.lengths`."""
    if options.length is not None:
        return ((1.0, options.length),)
    theirs = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    processes = PartialState().num_processes
    room = options.tokens_per_step // (options.accumulation * processes)
    longest = max(1, min(theirs or LONGEST_ROWS, LONGEST_ROWS, room))
    if longest < 1024:
        return ((1.0, longest),)
    return ((0.5, longest // 8), (0.75, longest // 2), (1.0, longest))


def _plan(options: argparse.Namespace, *lengths: tuple[float, int]) -> TrainingPlan:
    has_length = options.steps is not None or options.minutes is not None
    return TrainingPlan(
        steps=options.steps if has_length else DEFAULT_STEPS,
        minutes=options.minutes,
        tokens_per_step=options.tokens_per_step,
        lengths=lengths,
        accumulation=options.accumulation,
        lr_matrices=options.lr,
        lr_others=0.4 * options.lr,
        seed=options.seed,
        precision=options.precision,
        evaluate_every=options.evaluate_every,
        checkpoint_minutes=options.checkpoint_minutes,
        compiled=options.compile,
    )


def _load_data(options: argparse.Namespace) -> tuple[PreTrainedTokenizerBase, list[np.ndarray]]:
    """The target's tokenizer, and ids of each document."""
    if options.target == "zoo":
        tokenizer = zoo.load_tokenizer()
    else:
        local_only = find_pretrained(options.target)
        tokenizer = load_pretrained(AutoTokenizer, options.target, local_files_only=local_only)
    _say(f"encoding {options.data}")
    if options.data == "zoo" and options.target == "zoo":
        return tokenizer, corpus.encode_files(tokenizer, corpus.library_files())
    if options.data == "zoo":
        texts = (corpus.read_source(path) for path in corpus.library_files())
    else:
        texts = read_texts(options.data, tokenizer)
    return tokenizer, encode_texts(texts, tokenizer)


def _load_target(name: str, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    if name == "zoo":
        return zoo.load_target()
    model = load_model(name, dtype="auto", device="cpu", local_only=find_pretrained(name))
    vocab_size = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer of {name} has {len(tokenizer)} tokens and its model only {vocab_size}"
        )
    return model
