"""What `specdec train` does: the run that its arguments describe."""

import json
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import parse_flag_from_env
from tqdm import tqdm
from transformers import (
    HfArgumentParser,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerState,
)

from specdec import SpeculativeGenerator, evaluate, processes
from specdec.arguments import check_choice, check_integer, shown
from specdec.atomic import replacing_files, write_text
from specdec.lab.cli.options import given, refuse
from specdec.lab.cli.training_options import LONGEST_ROWS, STEPS, Run
from specdec.lab.evaluation.intervals import counted
from specdec.lab.training import data
from specdec.lab.training.callbacks import AcceptanceCallback
from specdec.lab.training.divergences import find_loss
from specdec.lab.training.heads import frequent_ids
from specdec.lab.training.kinds import KINDS
from specdec.lab.training.losses import HeadObjective
from specdec.lab.training.step_weights import find_step_weights
from specdec.lab.training.target_parts import load_sharded_target, load_spread_target
from specdec.lab.training.trainer import (
    STATE,
    ObjectiveArguments,
    ObjectiveTrainer,
    is_finished,
    last_checkpoint,
)
from specdec.lab.zoo import WEIGHTS_DIR, corpus
from specdec.loading import find_own, load_target
from specdec.paths import check_folder
from specdec.settings import differences

RECORD = "command.json"
"""With which arguments a run was made; lies beside its checkpoints."""
EVALUATED_TOKENS = 64
OPTIONS = {option for kind in KINDS.values() for option in kind.options}
"""Options that not every kind of head has."""
FREE = ("output", "steps", "minutes", "accumulation", "checkpoint_minutes", "evaluate_every")
FREE += ("compile", "spread_target", "shard_target")
"""Arguments with which a run goes on whatever they are."""


def train(run: Run, others: list[str]) -> None:
    """Trains a head and saves it, or goes on from a checkpoint.

    Args:
        run: what was asked for.
        others: the rest of the command line, fields of HF's `TrainingArguments`.
    """
    _check(run)  # before anything is loaded
    args = arguments_of(run, others)
    record = _record(run)
    if folder := last_checkpoint(args.output_dir):
        _check_same_run(folder, record)
        if _is_complete(folder, run, args):
            return
    target, tokenizer = _load(run)
    if len(tokenizer) > (size := target.get_input_embeddings().weight.shape[0]):
        raise ValueError(
            f"the tokenizer of {run.target} has {len(tokenizer)} tokens, its model only {size}"
        )
    drafter, objective = objective_of(run, target, any_ids(run, target))  # or an error, now
    if run.minutes is not None:
        beside = "encoding the data" + " and evaluations" * (run.evaluation_prompts > 0)
        _say(args, f"training for {run.minutes:g} minutes, beside {beside}")
    documents, beginning = _documents(run, args, tokenizer), data.beginning_of(tokenizer)
    trained_on, held_out = data.hold_out(documents, run.evaluation_prompts, beginning)
    if len(held_out) < run.evaluation_prompts:
        pieces = sum(len(ids) >= data.PROMPT_TOKENS for ids in [*trained_on, *held_out])
        few = f"evaluating on {counted(len(held_out), 'prompt')}, not {run.evaluation_prompts}: "
        few += f"every fourth piece of text of {data.PROMPT_TOKENS} tokens or more is kept from "
        _say(args, f"{few}training, and the data has {pieces}")
    if run.length is None:
        args.row_lengths = row_lengths_of(args, target)
    if run.draft_vocab_size is not None:
        ids = _draft_ids(run, args, target, trained_on, beginning)
        drafter, objective = objective_of(run, target, ids)
    stream = data.PackedStream(trained_on, seed=run.seed, beginning=beginning)
    trainer = ObjectiveTrainer(objective, args, stream)
    trainer.add_callback(_Progress(trainer))
    if held_out:
        trainer.add_callback(_evaluation(run, trainer, target, drafter, held_out, beginning))
    if trainer.is_world_process_zero():
        write_text(Path(args.output_dir, RECORD), json.dumps(record))
    trainer.train_or_resume()
    with processes.gathered(objective):
        if trainer.is_world_process_zero():
            _save(run, drafter, target, tokenizer)
    trainer.accelerator.wait_for_everyone()


def _save(run: Run, drafter, target, tokenizer) -> None:
    """Writes the trained head, and says what comes next."""
    whole = () if run.layout is None else (run.layout, target)  # as engines want it
    notes = drafter.save_pretrained(run.output, *whole)
    if whole:
        with replacing_files(run.output) as new:
            tokenizer.save_pretrained(new)
    for note in notes or ():
        print(f"note: {note}")
    _print_next(run)


def _load(run: Run) -> tuple[Any, Any]:
    """The target, or this process's parts of it, and its tokenizer."""
    if run.shard_target:
        return load_sharded_target(run.target)
    return (load_spread_target if run.spread_target else load_target)(run.target)


def arguments_of(run: Run, others: list[str]) -> ObjectiveArguments:
    """HF's arguments of the run: those of the command line before ours."""
    # Most CPUs have no bfloat16 products, and a step of many tokens takes a minute on them.
    is_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.accelerator.is_available()
    if run.tokens_per_step is None:
        run.tokens_per_step = 512 if is_cpu else 16384
    if run.precision is None:
        run.precision = "no" if is_cpu else "bf16"
    steps = STEPS if run.steps is run.minutes is None else run.steps
    every = run.evaluate_every or sys.maxsize
    parser = HfArgumentParser(ObjectiveArguments, allow_abbrev=False, exit_on_error=False)
    parser.set_defaults(
        output_dir=str(run.output / "run"),
        max_steps=-1 if steps is None else steps,
        minutes=run.minutes,
        tokens_per_step=run.tokens_per_step,
        row_lengths=((1.0, 1 if run.length is None else run.length),),
        gradient_accumulation_steps=run.accumulation,
        learning_rate=run.lr,
        checkpoint_minutes=run.checkpoint_minutes,
        save_steps=every if run.evaluation_prompts else sys.maxsize,
        bf16=run.precision == "bf16",
        torch_compile=run.compile,
        use_cpu=is_cpu,
        seed=run.seed,
    )
    (args,) = parser.parse_args_into_dataclasses(others, look_for_args_file=False)
    return args


def _check(run: Run) -> None:
    """Raises an error for settings that cannot be right, or would have no effect."""
    if find_own(run.kind) is None:
        advice = "or your own as mine.py:make"
        check_choice("the kind of head", run.kind, KINDS, advice=advice)
    own = KINDS[run.kind].options if run.kind in KINDS else ("depths",)
    for name in OPTIONS.difference(own):
        kinds = " and ".join(kind for kind, record in KINDS.items() if name in record.options)
        refuse({name: getattr(run, name)}, f"belongs to {kinds}; leave it out for {run.kind}")
    _loss_options(run)
    if run.spread_target and run.shard_target:
        raise ValueError(
            "--spread-target and --shard-target are two ways to do one thing; take one"
        )
    if (run.spread_target or run.shard_target) and run.layout:
        way = "--spread-target" if run.spread_target else "--shard-target"
        raise ValueError(f"--layout saves a whole target, and {way} has parts of it")
    if run.data != "zoo" and not Path(run.data).exists():
        raise FileNotFoundError(f"no training data at {run.data}")
    if run.steps is not None and run.minutes is not None:
        raise ValueError("--minutes takes the place of --steps; leave one of them out")
    check_folder("--output", run.output)
    models = [*run.output.glob("config.json"), *run.output.glob("*.safetensors")]
    if models and not last_checkpoint(run.output / "run"):
        raise ValueError(
            f"--output {run.output} holds a model that no earlier run of this command wrote, "
            "and that would be lost; name a new folder"
        )


def _record(run: Run) -> dict[str, Any]:
    """The arguments that a run goes on with, and size and time of change of the files they name."""
    record: dict[str, Any] = {"kind": run.kind}
    for name in vars(run).keys() - {"kind", *FREE}:
        record[f"--{name.replace('_', '-')}"] = getattr(run, name)
    for name in ("target", "data"):
        path = Path(getattr(run, name)).expanduser()
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        stats = [(str(file), file.stat()) for file in found if file.is_file()]
        record[f"the files of --{name}"] = [[f, s.st_size, s.st_mtime_ns] for f, s in stats]
    return record


def _check_same_run(folder: Path, record: dict[str, Any]) -> None:
    """Raises ValueError if the checkpoint was made with other arguments or other files."""
    try:
        saved = dict(json.loads((folder.parent / RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        saved = {}
    if differing := differences(saved, record):
        raise ValueError(
            f"the checkpoint in {folder} is of another run, delete it or choose another --output; "
            f"they differ in {', '.join(differing)}"
        )


def _is_complete(folder: Path, run: Run, args: ObjectiveArguments) -> bool:
    """Says so if there is nothing left to train."""
    state = TrainerState.load_from_json(str(folder / STATE))
    if not (run.output / "config.json").exists() or not is_finished(state, args):
        return False
    measured = [log for log in state.log_history if any("accept" in name for name in log)]
    last = {n: x for n, x in (measured or [{}])[-1].items() if n not in ("step", "epoch")}
    figures = ", ".join(f"{name} {value:.3f}" for name, value in last.items())
    if args.process_index == 0:
        print(f"already complete at step {state.global_step}{figures and ': '}{figures}")
        _print_next(run)
    return True


class _Progress(TrainerCallback):
    """The time that is left, on a bar where there is a terminal, and the figures of each log."""

    def __init__(self, trainer: ObjectiveTrainer):
        self.trainer, self.bar = trainer, None
        for others in (ProgressCallback, PrinterCallback):
            trainer.remove_callback(others)

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        """Says which parameters each optimiser has."""
        wrapped = getattr(optimizer, "optimizer", optimizer)
        _say(args, getattr(wrapped, "roles", ""))

    def on_step_end(self, args, state, control, **kwargs):
        """Moves the bar, whose unit is the whole run."""
        done = self._fraction(state)
        if self.bar is None:
            hidden = True if args.disable_tqdm or args.process_index else None
            form = "{percentage:3.0f}% {bar} {elapsed}, {remaining} left"
            shown = {"bar_format": form, "leave": False, "disable": hidden}
            self.bar = tqdm(total=1.0, initial=done, **shown)
        self.bar.update(done - self.bar.n)

    def on_train_end(self, args, state, control, **kwargs):
        """Takes the bar away."""
        if self.bar is not None:
            self.bar.close()

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Prints losses, rates and acceptance lengths, and not what HF timed."""
        names = [name for name in logs or () if not name.startswith(("epoch", "total_", "train_"))]
        if names and args.process_index == 0:
            figures = ", ".join(f"{name} {logs[name]:.4g}" for name in names)
            left = self.trainer.clock.wall_s / 60 * (1 / max(self._fraction(state), 1e-9) - 1)
            tqdm.write(f"step {state.global_step}, {left:.1f} min left: {figures}")

    def _fraction(self, state: TrainerState) -> float:
        clock = self.trainer.clock
        return state.global_step / state.max_steps if clock.minutes is None else clock.fraction


def _print_next(run: Run) -> None:
    """Where the head is, and the commands that measure and serve it."""
    head, is_whole = str(run.output), run.layout is not None
    print(f"saved in {head}")
    target = str(WEIGHTS_DIR / "target") if run.target == "zoo" else run.target
    if run.kind not in KINDS:
        where = f"{run.kind.rpartition(':')[0]}:FAMILY:{head}"
        print(f"measure: specdec evaluate --target {run.target} --drafter {where}, FAMILY your own")
        return
    kind = KINDS[run.kind]
    drafter = f"{kind.family}:{head}"
    command = ["specdec", "evaluate", "--target", run.target, "--drafter", drafter]
    print("measure:", shlex.join(command))
    if run.kind == "mtp" and not is_whole:
        print("serve: engines read modules beside their target; train with --layout")
        return
    config = {**kind.served, "num_speculative_tokens": run.num_draft_tokens}
    config |= {} if is_whole else {"model": head}
    command = ["vllm", "serve", head if is_whole else target]
    print("serve:", shlex.join([*command, "--speculative-config", json.dumps(config)]))


def _say(args, text: str) -> None:
    """What the first process is doing, on standard error."""
    if args.process_index == 0:
        tqdm.write(text, file=sys.stderr)


def _evaluation(run: Run, trainer, target, drafter, held_out: Sequence, beginning: list[int]):
    """Measures acceptance at two temperatures, and by length of context."""
    text = np.concatenate(held_out).astype(int)
    longest = trainer.args.row_lengths[-1][1]
    room = drafter.num_draft_tokens + EVALUATED_TOKENS
    contexts = [n for n in (longest // 4, longest // 2, longest - room) if 64 < n <= len(text)]
    ends = np.linspace(contexts[-1], len(text), len(held_out)).astype(int) if contexts else ()

    def before(tokens: int) -> list[list[int]]:  # so many, the beginning included
        starts = [(end - tokens + len(beginning), end) for end in dict.fromkeys(ends)]
        return [data.begun(text[start:end], beginning).tolist() for start, end in starts]

    class _Evaluation(AcceptanceCallback):
        def figures(self) -> dict[str, float]:
            return trainer.interruption.run(self.measure) or {}

        def measure(self) -> dict[str, float]:
            _say(trainer.args, f"evaluating on {counted(len(held_out), 'prompt')}")
            figures = super().figures()
            for tokens in contexts:  # more and more of them, before the same places
                options = {"max_new_tokens": EVALUATED_TOKENS, "batch_size": len(held_out)}
                found = evaluate(self.generator, before(tokens), **options)
                figures[f"after {tokens} tokens"] = found.stats.acceptance_length
            return figures

    generator = SpeculativeGenerator(target, drafter)
    every = run.evaluate_every or sys.maxsize
    return _Evaluation(trainer, generator, data.prompts_of(held_out), every=every)


def objective_of(run: Run, target, target_ids):
    """An untrained drafter that proposes ids `[Vd]`, and the objective that trains its head."""
    if (make := find_own(run.kind)) is not None:
        objective = make(target, run.num_draft_tokens, **given({"depths": run.depths}))
        if not isinstance(objective, HeadObjective):
            raise TypeError(
                f"{run.kind} must return a specdec.lab.training.losses.HeadObjective, got "
                f"{shown(objective)}"
            )
        return objective.drafter, objective
    kind = KINDS[run.kind]
    sizes = {name: getattr(run, name) for name in kind.options if name not in _OTHERWISE}
    if "draft_vocab_size" in kind.options:
        sizes["target_ids"] = target_ids
    options = given(sizes) | _loss_options(run)
    return kind.new(target, run.num_draft_tokens, seed=run.seed, **options)


_OTHERWISE = "draft_vocab_size", "loss", "step_weights"
"""Options that a head or an objective takes as ids, functions and weights."""


def _loss_options(run: Run) -> dict[str, Any]:
    """Arguments of the objective; `ValueError` for a text that names no loss or no weights."""
    options: dict[str, Any] = {}
    if run.loss is not None:
        options["loss"] = find_loss(run.loss)
    if run.step_weights is not None:
        options[KINDS[run.kind].weights] = find_step_weights(run.step_weights)
    return options


def any_ids(run: Run, target):
    """As many ids as the head can propose, which ones does not matter; `None` for all."""
    if run.draft_vocab_size is None:
        return None
    most = target.config.get_text_config().vocab_size
    size = check_integer("the number of draft ids", run.draft_vocab_size, 1, most)
    return torch.arange(size, device="cpu")


def _draft_ids(run: Run, args, target, documents: Sequence, beginning: list[int]):
    """The ids that the head can propose; those of the first process, as another device's rounding
    may order them otherwise.
    """
    _say(args, "finding the most frequent ids of the data and of the target's own text")
    hidden = None if args.process_index == 0 else True  # shown on terminals only
    shown = partial(tqdm, desc="rows read by the target", leave=False, disable=hidden)
    if target.device != args.device:  # FSDP2 would give up what it has gathered
        target = target.to(args.device)
    options = {"beginning": beginning, "progress": shown}
    ids = frequent_ids(target, documents, run.draft_vocab_size, **options)
    return processes.broadcast([ids.cpu()])[0]


def row_lengths_of(args, target) -> tuple[tuple[float, int], ...]:
    """Tokens per row over the run, of a command that does not say."""
    theirs = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    room = args.tokens_per_step // (args.gradient_accumulation_steps * args.world_size)
    longest = max(1, min(theirs or LONGEST_ROWS, LONGEST_ROWS, room))
    if longest < 1024:
        return ((1.0, longest),)
    return ((0.5, longest // 8), (0.75, longest // 2), (1.0, longest))


def _documents(run: Run, args, tokenizer):
    """Ids of each text."""
    _say(args, f"encoding {run.data}")
    if run.data == "zoo":
        texts = (corpus.read_source(path) for path in corpus.library_files())
    else:
        texts = data.read_texts(run.data, tokenizer)
    return data.encode_texts(texts, tokenizer)
