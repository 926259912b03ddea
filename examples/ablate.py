"""A grid of drafter x K x temperature x sampler, one row per cell.

    python examples/ablate.py --drafters zoo:model zoo:eagle3 lookup --output grid.jsonl
    python examples/ablate.py --drafters mine:SuffixDrafter zoo:model --output grid.jsonl
    accelerate launch --num_processes 2 examples/ablate.py ... --output grid.jsonl

`mine:SuffixDrafter` is a drafter of your own: a function or class in `mine.py` of the working
folder that makes one of (target, num_draft_tokens). Cells in which several samplers are one rule
are run once, with the first of them: all are at temperature 0, and block and rejection are for
prompt lookup, whose proposals have no probabilities.

A row is appended when its cell is finished, and a run that was interrupted goes on with the cells
that are missing; a file that was measured with other settings is refused. Under `accelerate
launch` the processes, on one machine or several, share the prompts of every cell; the first one
writes. (On CPUs: `ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 ...`.)
Seeds belong to prompts, so the rows do not depend on the number of processes (but for times, which
are those of processes that run at once).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from specdec import (
    BlockSampler,
    CouplingSampler,
    Drafter,
    RejectionSampler,
    SpeculativeGenerator,
    zoo,
)
from specdec.cli.loading import HEADS, check_drafter, load_target, make_drafter
from specdec.cli.parser import EXIT_INTERRUPTED, one_line
from specdec.evaluation import (
    EvaluatedBatch,
    Evaluation,
    evaluate,
    own_prompts,
    read_prompts,
    settings_of_run,
)
from specdec.evaluation.run_file import read_rows
from specdec.settings import differences

SAMPLERS = {"block": BlockSampler, "rejection": RejectionSampler, "coupling": CouplingSampler}


@dataclass(frozen=True)
class Cell:
    """One setting of the grid."""

    drafter: str
    num_draft_tokens: int
    temperature: float
    sampler: str


def main() -> int:
    """Runs the cells that are missing.

    Returns:
        The exit status: 0, 1 for what cannot be run, in one line, or 130 after an interrupt.
    """
    arguments = _arguments()
    try:
        _run(arguments)
    except KeyboardInterrupt:
        print(
            f"\ninterrupted: {arguments.output} holds the cells that are finished; the same "
            "command goes on with the others",
            file=sys.stderr,
        )
        return EXIT_INTERRUPTED
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 1
    return 0


def _run(arguments: argparse.Namespace) -> None:
    factories = _factories(arguments)
    state = Accelerator(mixed_precision="no")
    cells = _cells(arguments)
    done = _agreed(_finished(arguments.output))
    num_done = sum(str(asdict(cell)) in done for cell in cells)
    if state.is_main_process:
        print(f"{len(cells)} cells, {num_done} finished", file=sys.stderr)
    prompts = read_prompts(arguments.prompts) if arguments.prompts else own_prompts()
    prompts = prompts[: arguments.limit]
    place = {"dtype": "auto", "device": str(state.device)}
    target, tokenizer = load_target(arguments.target, **place)
    shared = target  # its self-test is needed once
    plan = {
        "max_new_tokens": arguments.max_new_tokens,
        "max_prompt_tokens": arguments.max_prompt_tokens,
        "seed": arguments.seed,
        "batch_size": arguments.batch_size,
    }
    for cell in cells:
        make = factories.get(cell.drafter)
        if make is None:
            options = {**place, "tokenizer": tokenizer}
            drafter = make_drafter(cell.drafter, target, cell.num_draft_tokens, **options)
        else:
            drafter = _made(make, cell, target)
        generator = SpeculativeGenerator(shared, drafter, SAMPLERS[cell.sampler]())
        shared = generator.target
        samples = arguments.samples if cell.temperature > 0 else 1
        options = {**plan, "temperature": cell.temperature, "samples": samples}
        if str(asdict(cell)) in done:
            run = settings_of_run(generator, prompts, tokenizer=tokenizer, **options)
            _check_same(cell, done[str(asdict(cell))], run, arguments.output)
            continue
        shard = (state.process_index, state.num_processes)
        own = evaluate(generator, prompts, tokenizer=tokenizer, shard=shard, **options)
        gathered = gather_object([batch.to_dict() for batch in own.batches])
        if state.is_main_process:
            batches = sorted((EvaluatedBatch.from_dict(b) for b in gathered), key=lambda b: b.index)
            _append(
                arguments.output, _row(cell, Evaluation(batches, own.num_draft_tokens, own.about))
            )
        state.wait_for_everyone()


def _cells(arguments: argparse.Namespace) -> list[Cell]:
    """The grid, with one cell for samplers that are one rule."""
    cells: dict[tuple, Cell] = {}
    for values in itertools.product(
        arguments.drafters, arguments.num_draft_tokens, arguments.temperatures, arguments.samplers
    ):
        cell = Cell(*values)
        rule = cell.sampler
        if cell.temperature == 0:
            rule = "any"
        elif cell.drafter == "lookup" and rule in ("block", "rejection"):
            rule = "block or rejection"
        cells.setdefault((*values[:-1], rule), cell)
    return list(cells.values())


def _factories(arguments: argparse.Namespace) -> dict[str, Callable]:
    """The drafters of the user's own, by name; any other that cannot be found is refused.

    Raises:
        ValueError: there is no such module or function.
    """
    found = {}
    for name in dict.fromkeys(arguments.drafters):
        module, _, attribute = name.partition(":")
        if module in (*HEADS, "zoo") or not re.fullmatch(r"[^\W\d][\w.]*:[\w.]+", name):
            check_drafter(name, arguments.target)
            continue
        if "" not in sys.path:
            sys.path.insert(0, "")  # as `python -m` does
        try:
            make = import_module(module)
            for part in attribute.split("."):
                make = getattr(make, part)
        except Exception as error:  # a module of the user's may raise anything
            raise ValueError(f"--drafters {name}: {type(error).__name__}: {error}") from error
        if not callable(make):
            raise ValueError(f"--drafters {name} must be a function or class, got {make!r}")
        found[name] = make
    return found


def _made(make: Callable, cell: Cell, target) -> Drafter:
    """A drafter of the user's own."""
    drafter, k = make(target, cell.num_draft_tokens), cell.num_draft_tokens
    if not isinstance(drafter, Drafter) or drafter.num_draft_tokens != k:
        of = f" of K = {drafter.num_draft_tokens}" if isinstance(drafter, Drafter) else ""
        raise TypeError(
            f"--drafters {cell.drafter} must make a Drafter of K = {k} from (target, {k}), got "
            f"{type(drafter).__name__}{of}"
        )
    return drafter


def _row(cell: Cell, evaluation: Evaluation) -> dict:
    """The figures of a cell, and where they come from."""
    estimates = {name: found.to_dict() for name, found in evaluation.estimates.items()}
    names = "steps", "drafted", "accepted", "emitted"
    counts = {name: sum(getattr(evaluation.stats, name)) for name in names}
    return {"cell": asdict(cell), **estimates, **counts, "about": evaluation.about}


def _append(path: Path, row: dict) -> None:
    """Adds a row, and waits until it is on disk. A line that was cut off is ended first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_cut = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * is_cut + json.dumps(row) + "\n")
        file.flush()
        os.fsync(file.fileno())
    length = row["acceptance_length"]["value"]
    print(f"{row['cell']}: acceptance length {length:.2f}", file=sys.stderr)


def _finished(path: Path) -> dict[str, dict]:
    """Cells of a file and their runs; lines that an interruption cut off are none."""
    done = {}
    for number, row in read_rows(path) if path.exists() else ():
        try:
            done[str(asdict(Cell(**row["cell"])))] = row["about"]["run"]
        except (TypeError, KeyError):
            raise ValueError(
                f"{path}, line {number} is no row of a grid; choose another --output"
            ) from None
    return done


def _check_same(cell: Cell, theirs: dict, ours: dict, path: Path) -> None:
    """Raises `ValueError` if a finished cell was measured otherwise than this grid would do it."""
    theirs = {name: value for name, value in theirs.items() if name != "shard"}
    found = differences(theirs, json.loads(json.dumps(ours)))
    if found:
        raise ValueError(
            f"{path} holds another grid, choose another --output; {cell} differs in "
            f"{', '.join(found)}"
        )


def _agreed(done: dict[str, dict]) -> dict[str, dict]:
    """What the first process has read; the others may see another disk."""
    holder = [done]
    broadcast_object_list(holder)
    return holder[0]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def add(name: str, about: str, default: object = None, **options: object) -> None:
        shown = " ".join(map(str, default)) if isinstance(default, list) else default
        about = about if default is None else f"{about} (default: {shown})"
        parser.add_argument(name, help=about, default=default, **options)

    of_zoo = [f"zoo:{name}" for name, folder in zoo.DRAFTERS.items() if _has_weights(folder)]
    several = {"nargs": "+"}
    add("--target", "folder or Hugging Face id, or 'zoo'", "zoo")
    add(
        "--drafters",
        "as `specdec generate --drafter` takes them, or 'module:function' of your own",
        [*of_zoo, "lookup"],
        **several,
    )
    add("--num-draft-tokens", "K", [2, 4, 6], type=int, **several)
    add("--temperatures", "0 is greedy", [0.0, 1.0], type=float, **several)
    add("--samplers", "rules", ["block", "rejection"], choices=SAMPLERS, **several)
    add("--prompts", "JSONL file (default: specdec's own prompts)", type=Path)
    add("--limit", "take so many first prompts (default: all)", type=int)
    add("--max-new-tokens", "of each turn", 128, type=int)
    add("--max-prompt-tokens", "cut longer prompts on the left (default: no)", type=int)
    add("--batch-size", "prompts at a time", 8, type=int)
    add("--samples", "texts per prompt above temperature 0", 1, type=int)
    add("--seed", "of the first prompt", 0, type=int)
    add("--output", "JSONL file, one row per cell", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.target == "zoo":
        short = {name: f"zoo:{name}" for name in zoo.DRAFTERS}
        arguments.drafters = [short.get(name, name) for name in arguments.drafters]
    return arguments


def _has_weights(folder: str) -> bool:
    return (zoo.WEIGHTS_DIR / folder).is_dir()


if __name__ == "__main__":
    sys.exit(main())
