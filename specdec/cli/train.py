"""`specdec train`: from text to a head, with Hugging Face's `Trainer`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from specdec.cli.loading import bar, find_pretrained, load_model, load_pretrained
from specdec.cli.parser import EXIT_INTERRUPTED, OneLineParser, one_line, refuse_given

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
DEFAULT_STEPS = 10_000
EVALUATED_TOKENS = 64
LONGEST_ROWS = 4096
"""Of a run that does not say how long its rows are: targets may have a hundred times as many
positions, and attention over rows of such a length takes the memory of all others.
"""
FLAGS = {
    "draft_vocab_size": ("eagle3", "mask-token"),
    "unrolled_steps": ("eagle3",),
    "depths": ("mask-token", "mtp"),
    "layers": ("mask-token",),
}
"""Options that not every kind of head has, and which have them. EAGLE-1 heads and prediction
modules use the target's vocabulary head, and so propose all of its ids.
"""
FREE = ("output", "steps", "minutes", "accumulation", "checkpoint_minutes", "evaluate_every")
FREE += ("compile", "others")
"""Arguments with which a run goes on whatever they are."""


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
    options.others = others
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


def _train(options: argparse.Namespace) -> None:
    from specdec.training.data import PackedStream, hold_out
    from specdec.training.trainer import ObjectiveTrainer

    args = _arguments(options)
    _check(options)  # before anything is loaded
    record = _record(options)
    if _is_complete(options, args, record):
        return
    tokenizer, documents = _load_data(options, args)
    trained_on, held_out = hold_out(documents, options.evaluation_prompts)
    _say_of_evaluation(args, options.evaluation_prompts, trained_on, held_out)
    stream = PackedStream(trained_on, seed=options.seed)
    target = _load_target(options.target, tokenizer)
    if options.length is None:
        args.row_lengths = _row_lengths(args, target)
    ids = _draft_ids(options, args, target, trained_on)
    drafter, objective = _objective(options, target, ids)
    trainer = ObjectiveTrainer(objective, args, stream)
    if held_out:
        trainer.add_callback(_evaluation(options, trainer, target, drafter, held_out))
    if trainer.is_world_process_zero():
        _record_path(options).write_text(json.dumps(record), encoding="utf-8")
    trainer.train_or_resume()
    if trainer.is_world_process_zero():
        for note in drafter.save_pretrained(options.output) or ():
            print(f"note: {note}")
        print(f"saved in {options.output}")
    trainer.accelerator.wait_for_everyone()


def _arguments(options: argparse.Namespace):
    """HF's arguments of the run: those of the command line before ours."""
    from accelerate.utils import parse_flag_from_env
    from transformers import HfArgumentParser

    from specdec.training.trainer import ObjectiveArguments

    class Parser(OneLineParser, HfArgumentParser):
        """HF's, with mistakes in one line."""

    import torch

    # Most CPUs have no bfloat16 products, and a step of many tokens takes a minute on them.
    is_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    if options.tokens_per_step is None:
        options.tokens_per_step = 512 if is_cpu else 16384
    if options.precision is None:
        options.precision = "no" if is_cpu else "bf16"
    steps = DEFAULT_STEPS if options.steps is None and options.minutes is None else options.steps
    every = options.evaluate_every or sys.maxsize
    parser = Parser(ObjectiveArguments, prog="specdec train", allow_abbrev=False)
    parser.set_defaults(
        output_dir=str(options.output / "run"),
        max_steps=-1 if steps is None else steps,
        minutes=options.minutes,
        tokens_per_step=options.tokens_per_step,
        row_lengths=((1.0, 1 if options.length is None else options.length),),
        gradient_accumulation_steps=options.accumulation,
        learning_rate=options.lr,
        checkpoint_minutes=options.checkpoint_minutes,
        save_steps=every if options.evaluation_prompts else sys.maxsize,
        bf16=options.precision == "bf16",
        torch_compile=options.compile,
        use_cpu=is_cpu,
        seed=options.seed,
    )
    (args,) = parser.parse_args_into_dataclasses(options.others, look_for_args_file=False)
    return args


def _check(options: argparse.Namespace) -> None:
    """Refuses settings that cannot be right, or would have no effect."""
    from specdec.arguments import check_integer

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
    if (options.output / "config.json").exists() and not (options.output / "run").exists():
        raise ValueError(
            f"--output {options.output} holds a model that no earlier run of this command wrote, "
            "and that would be lost; name a new folder"
        )


def _record(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments that a run goes on with, and size and time of change of the files they name."""
    arguments = {name: value for name, value in vars(options).items() if name not in FREE}
    files: dict[str, list] = {}
    for name in ("target", "data"):
        path = Path(arguments[name]).expanduser()
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        stats = [(str(file), file.stat()) for file in found if file.is_file()]
        files[name] = [[file, stat.st_size, stat.st_mtime_ns] for file, stat in stats]
    return {"arguments": arguments, "files": files}


def _is_complete(options: argparse.Namespace, args, record: dict[str, Any]) -> bool:
    """Says so if there is nothing left to train.

    Raises:
        ValueError: the folder holds a run with other arguments.
    """
    from transformers import TrainerState

    from specdec.training.trainer import STATE, is_finished, last_checkpoint

    folder = last_checkpoint(args.output_dir)
    if folder is None:
        return False
    try:
        saved = json.loads(_record_path(options).read_text(encoding="utf-8"))
        there, files = saved["arguments"], saved["files"]
    except (OSError, ValueError, KeyError, TypeError):
        there, files = {}, {}
    differing = [
        f"{name if name == 'kind' else '--' + name.replace('_', '-')} "
        f"({there.get(name)} there, {value} here)"
        for name, value in record["arguments"].items()
        if there.get(name) != value
    ]
    differing += [f"the files of --{n}" for n, v in record["files"].items() if files.get(n) != v]
    if differing:
        raise ValueError(
            f"the checkpoint in {folder} is of another run, delete it or choose another --output; "
            f"they differ in {', '.join(differing)}"
        )
    state = TrainerState.load_from_json(str(folder / STATE))
    if not (options.output / "config.json").exists() or not is_finished(state, args):
        return False
    if args.process_index == 0:
        measured = (log for log in reversed(state.log_history) if any("accept" in n for n in log))
        shown = [
            f"{n} {v:.3f}" for n, v in next(measured, {}).items() if n not in ("step", "epoch")
        ]
        print(
            f"already complete at step {state.global_step}{': ' if shown else ''}{', '.join(shown)}"
        )
        print(f"saved in {options.output}")
    return True


def _record_path(options: argparse.Namespace) -> Path:
    return options.output / "run" / "command.json"


def _say_of_evaluation(args, wanted: int, trained_on: Sequence, held_out: Sequence) -> None:
    """Says why there is no evaluation, or a smaller one than was asked for."""
    from specdec.evaluation.intervals import counted
    from specdec.training.data import PROMPT_TOKENS

    if len(held_out) < wanted:
        found = f"evaluating on {counted(len(held_out), 'prompt')}" if held_out else "no evaluation"
        pieces = sum(len(ids) >= PROMPT_TOKENS for ids in [*trained_on, *held_out])
        _say(
            args,
            f"{found}: --evaluation-prompts {wanted} needs {4 * wanted} pieces of text of "
            f"{PROMPT_TOKENS} tokens or more, as every fourth is kept from training, and the data "
            f"has {pieces}",
        )


def _say(args, text: str) -> None:
    """What the first process is doing, on standard error."""
    if args.process_index == 0:
        print(text, file=sys.stderr)


def _evaluation(options: argparse.Namespace, trainer, target, drafter, held_out: Sequence):
    """Measures acceptance at two temperatures, and by length of context."""
    import numpy as np
    import torch

    from specdec.evaluation.contexts import acceptance_by_context
    from specdec.generator import SpeculativeGenerator
    from specdec.training.callbacks import AcceptanceCallback
    from specdec.training.data import prompts_of

    text = torch.from_numpy(np.concatenate(held_out).astype(int))
    longest = trainer.args.row_lengths[-1][1]
    room = drafter.num_draft_tokens + EVALUATED_TOKENS
    contexts = [n for n in (longest // 4, longest // 2, longest - room) if 64 < n <= len(text)]
    settings = {"num_prompts": len(held_out), "max_new_tokens": EVALUATED_TOKENS}

    class Evaluation(AcceptanceCallback):
        def figures(self) -> dict[str, float]:
            return trainer.interruption.run(self.measure) or {}

        def measure(self) -> dict[str, float]:
            figures = super().figures()
            if contexts:
                found = acceptance_by_context(self.generator, text, contexts, **settings)
                figures |= {f"after {n} tokens": length for n, length in found.items()}
            return figures

    generator = SpeculativeGenerator(target, drafter)
    every = options.evaluate_every or sys.maxsize
    return Evaluation(trainer, generator, prompts_of(held_out), every=every)


def _objective(options: argparse.Namespace, target, target_ids):
    """An untrained drafter, and the objective that trains its head.

    Args:
        options: of the command.
        target: the HF model.
        target_ids: ids that the head can propose, or `None` for all.
    """
    from specdec import EagleDrafter, MaskTokenDrafter, MTPDrafter
    from specdec.training import eagle, mask_token, mtp

    k, sizes = options.num_draft_tokens, {"mlp_width": options.mlp_width, "seed": options.seed}
    if options.kind == "mtp":
        depths = 3 if options.depths is None else options.depths
        drafter = MTPDrafter(mtp.new_head(target, depths, **sizes), target, max(k, depths))
        return drafter, mtp.MultiTokenPrediction(drafter, target)
    sizes["target_ids"] = target_ids
    if options.kind == "mask-token":
        num_layers = 2 if options.layers is None else options.layers
        head = mask_token.new_head(target, num_layers=num_layers, **sizes)
        drafter = MaskTokenDrafter(head, target, k)
        depths = 8 if options.depths is None else options.depths
        return drafter, mask_token.MaskRollouts(drafter, target, depths)
    drafter = EagleDrafter(eagle.new_head(target, options.kind, **sizes), target, k)
    if options.kind == "eagle1":
        return drafter, eagle.FeatureAndToken(drafter, target)
    steps = 5 if options.unrolled_steps is None else options.unrolled_steps
    return drafter, eagle.TrainingTimeTest(drafter, target, steps)


def _draft_ids(options: argparse.Namespace, args, target, documents: Sequence):
    """The ids that the head can propose; those of the first process, as another device's rounding
    may order them otherwise.
    """
    from accelerate.utils import broadcast

    from specdec.training.heads import frequent_ids

    if options.draft_vocab_size is None:
        return None
    _say(args, "finding the most frequent ids of the data and of the target's own text")
    shown = partial(bar, "rows read by the target") if args.process_index == 0 else iter
    target = target.to(args.device).eval()
    ids = frequent_ids(target, documents, options.draft_vocab_size, progress=shown)
    return broadcast(ids.to(args.device)).cpu()


def _row_lengths(args, target) -> tuple[tuple[float, int], ...]:
    """Tokens per row over the run, of a command that does not say."""
    theirs = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    room = args.tokens_per_step // (args.gradient_accumulation_steps * args.world_size)
    longest = max(1, min(theirs or LONGEST_ROWS, LONGEST_ROWS, room))
    if longest < 1024:
        return ((1.0, longest),)
    return ((0.5, longest // 8), (0.75, longest // 2), (1.0, longest))


def _load_data(options: argparse.Namespace, args):
    """The target's tokenizer, and ids of each document."""
    from transformers import AutoTokenizer

    from specdec import zoo
    from specdec.training.data import encode_texts, read_texts
    from specdec.zoo import corpus

    if options.target == "zoo":
        tokenizer = zoo.load_tokenizer()
    else:
        local_only = find_pretrained(options.target)
        tokenizer = load_pretrained(AutoTokenizer, options.target, local_files_only=local_only)
    _say(args, f"encoding {options.data}")
    if options.data == "zoo":
        texts = (corpus.read_source(path) for path in corpus.library_files())
    else:
        texts = read_texts(options.data, tokenizer)
    return tokenizer, encode_texts(texts, tokenizer)


def _load_target(name: str, tokenizer):
    from specdec import zoo

    if name == "zoo":
        return zoo.load_target()
    model = load_model(name, dtype="auto", device="cpu", local_only=find_pretrained(name))
    vocab_size = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > vocab_size:
        raise ValueError(
            f"the tokenizer of {name} has {len(tokenizer)} tokens and its model only {vocab_size}"
        )
    return model
