"""A grid of drafter x K x temperature x sampler, one row per cell.

    python examples/ablate.py --drafters model eagle3 --num-draft-tokens 2 4 --output grid.jsonl
    accelerate launch --num_processes 2 examples/ablate.py ... --output grid.jsonl

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
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from specdec import BlockSampler, CouplingSampler, RejectionSampler, SpeculativeGenerator, zoo
from specdec.cli.loading import load_model, load_pretrained, make_drafter
from specdec.evaluation import (
    EvaluatedBatch,
    Evaluation,
    evaluate,
    own_prompts,
    read_prompts,
    settings_of_run,
)
from specdec.settings import differences

SAMPLERS = {"block": BlockSampler, "rejection": RejectionSampler, "coupling": CouplingSampler}


@dataclass(frozen=True)
class Cell:
    """One setting of the grid."""

    drafter: str
    num_draft_tokens: int
    temperature: float
    sampler: str


def main() -> None:
    """Runs the cells that are missing."""
    arguments = _arguments()
    state = Accelerator(mixed_precision="no")
    cells = [
        Cell(*values)
        for values in itertools.product(
            arguments.drafters,
            arguments.num_draft_tokens,
            arguments.temperatures,
            arguments.samplers,
        )
    ]
    done = _agreed(_finished(arguments.output))
    num_done = sum(str(asdict(cell)) in done for cell in cells)
    if state.is_main_process:
        print(f"{len(cells)} cells, {num_done} finished", file=sys.stderr)
    prompts = read_prompts(arguments.prompts) if arguments.prompts else own_prompts()
    prompts = prompts[: arguments.limit]
    target, tokenizer = _load(arguments, state.device)
    shared = target  # its self-test is needed once
    plan = {
        "max_new_tokens": arguments.max_new_tokens,
        "max_prompt_tokens": arguments.max_prompt_tokens,
        "seed": arguments.seed,
        "batch_size": arguments.batch_size,
    }
    for cell in cells:
        drafter = _drafter(cell, target, state.device)
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
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), 1):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        try:
            done[str(asdict(Cell(**row["cell"])))] = row["about"]["run"]
        except (TypeError, KeyError):
            sys.exit(f"error: {path}, line {number} is no row of a grid; choose another --output")
    return done


def _check_same(cell: Cell, theirs: dict, ours: dict, path: Path) -> None:
    """Ends the program if a finished cell was measured otherwise than this grid would do it."""
    theirs = {name: value for name, value in theirs.items() if name != "shard"}
    found = differences(theirs, json.loads(json.dumps(ours)))
    if found:
        sys.exit(
            f"error: {path} holds another grid; {cell} differs in {', '.join(found)}; choose "
            "another --output"
        )


def _agreed(done: dict[str, dict]) -> dict[str, dict]:
    """What the first process has read; the others may see another disk."""
    holder = [done]
    broadcast_object_list(holder)
    return holder[0]


def _load(arguments: argparse.Namespace, device: torch.device):
    """Target and tokenizer."""
    if arguments.target == "zoo":
        return zoo.load_target().to(device), zoo.load_tokenizer()
    from transformers import AutoTokenizer

    tokenizer = load_pretrained(AutoTokenizer, arguments.target)
    return load_model(arguments.target, dtype="auto", device=str(device)), tokenizer


def _drafter(cell: Cell, target, device: torch.device):
    """A drafter of the zoo by its name, else as `specdec generate --drafter` takes it."""
    k = cell.num_draft_tokens
    if cell.drafter in zoo.DRAFTERS:
        return zoo.load_drafter(cell.drafter, target, num_draft_tokens=k)
    return make_drafter(cell.drafter, target, k, dtype="auto", device=str(device))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--target", default="zoo", help="folder or Hugging Face id (default: zoo)")
    of_zoo = [name for name, folder in zoo.DRAFTERS.items() if (zoo.WEIGHTS_DIR / folder).is_dir()]
    add("--drafters", nargs="+", default=[*of_zoo, "lookup"])
    add("--num-draft-tokens", nargs="+", type=int, default=[2, 4, 6])
    add("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    add("--samplers", nargs="+", choices=SAMPLERS, default=["block", "rejection"])
    add("--prompts", type=Path, help="JSONL file (default: specdec's own prompts)")
    add("--limit", type=int, help="take the first prompts only")
    add("--max-new-tokens", type=int, default=128)
    add("--max-prompt-tokens", type=int)
    add("--batch-size", type=int, default=8)
    add("--samples", type=int, default=1, help="texts per prompt above temperature 0")
    add("--seed", type=int, default=0)
    add("--output", type=Path, required=True, help="JSONL file, one row per cell")
    return parser.parse_args()


if __name__ == "__main__":
    main()
