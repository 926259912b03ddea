"""Which K, which tree, at which batch size, for a target and a drafter:

    PYTHONPATH=. python examples/plan.py --target PATH --drafter PATH --batch-sizes 1,8

It takes the target, drafter and sampler of `specdec generate`.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import torch
from typer import Option, Typer

from specdec.generator import SpeculativeGenerator
from specdec.lab.cli.options import (
    Parts,
    PromptFile,
    Target,
    Temperature,
    count,
    several,
    ungrouped,
)
from specdec.lab.evaluation import own_prompts, read_prompts, sweep
from specdec.lab.evaluation.cells import called
from specdec.lab.evaluation.prompts import processor_for
from specdec.lab.show.table import Table
from specdec.lab.show.text import one_line
from specdec.loading import load_drafter, load_sampler, load_target
from specdec.loop.lengths import lengths_to_measure
from specdec.targets import Target as Wrapped


def plan(
    *,
    target: Target = "zoo",
    prompts: PromptFile = None,
    max_new_tokens: Annotated[
        int | None, count("of each prompt; default: 64, or as many as --minutes have time for")
    ] = None,
    temperature: Temperature = 0.0,
    batch_sizes: Annotated[Any, several("rows", int, "1,8")] = "1,8",
    rounds: Annotated[int, count("how often each batch is generated")] = 3,
    minutes: Annotated[
        float, Option(min=0, help="about how long to measure; with so many first prompts as fit")
    ] = 1.0,
    parts: Parts,
) -> None:
    """Say how much to draft, at which batch size.

    Measures the speed over plain decoding with K = 1, 2, 3, 4, 6, 8, 12, ... up to
    --num-draft-tokens (default 8), and with trees of such sizes up to --tree's, all of which take
    turns on the same prompts; and names the best, with those that cannot be told apart from it.
    It generates from each prompt once more than --rounds, per K and batch size, and says first how
    long that takes: from as many of the prompts as --minutes have time for, at least one batch.
    """
    name = parts.drafter or ("zoo:model" if target == "zoo" else "lookup")
    if name == "none":
        raise ValueError("plan compares lengths of drafts; name a --drafter")
    drafts: list[int | str] = lengths_to_measure(parts.num_draft_tokens or 8)[1:]
    if parts.tree is not None:
        nodes, depth = parts.tree
        sizes = {n // depth * depth for n in lengths_to_measure(nodes)} | {nodes}
        drafts += [f"{n}x{depth}" for n in sorted(sizes) if n > depth]
    records = own_prompts() if prompts is None else read_prompts(prompts)
    reader = processor_for(target, records)
    model, tokenizer = load_target(target, dtype=parts.dtype, device=parts.device)
    drafter = load_drafter(
        name, model, drafts[-1 if parts.tree is None else 0], tokenizer=tokenizer
    )
    ways, wrapped = len(drafts) + 1, Wrapped(model)
    both = [SpeculativeGenerator(wrapped, one) for one in (None, drafter)]
    seconds = {rows: ways * (rounds + 1) * seconds_per_token(both, rows) for rows in batch_sizes}

    def needed(limit: int, tokens: int) -> float:
        return sum(-(-limit // rows) * tokens * each for rows, each in seconds.items())

    least, most_s = min(max(batch_sizes), len(records)), 60 * minutes
    if max_new_tokens is None:
        max_new_tokens = min(64, max(8, int(most_s / needed(least, 1))))
    every = range(least, len(records) + 1)
    limit = max((n for n in every if needed(n, max_new_tokens) <= most_s), default=least)
    planned_s = needed(limit, max_new_tokens)
    print(
        f"{ways} ways to draft, {limit} of {len(records)} prompts, {max_new_tokens} tokens, "
        f"{rounds} rounds: about {planned_s:.0f} s (--minutes and --max-new-tokens change it)",
        flush=True,
    )
    study = sweep(
        wrapped,
        records,
        tokenizer=reader or tokenizer,
        limit=limit,
        drafters=["none", name],
        drafts=drafts,
        samplers={parts.sampler: load_sampler(parts.sampler, target_weight=parts.target_weight)},
        temperatures=[temperature],
        vary={
            "batch_size": batch_sizes,
            "proposal": [parts.proposal],
            "draft_temperature": [parts.draft_temperature],
        },
        max_new_tokens=max_new_tokens,
        timed=True,
        rounds=rounds,
        progress=True,
    )
    print(_speed_ups(study, name, batch_sizes))
    for rows in batch_sizes:
        found = study.best(batch_size=rows)
        best, *others = dict.fromkeys(_way(cell) for cell in found.cells)
        alike = f"; not told apart from it: {'; '.join(others)}" if others else ""
        pays = "" if "none" not in (best, *others) else " (drafting is not shown to pay)"
        print(f"fastest with batches of {rows}: {best}{alike}{pays}")


def _way(cell: dict[str, Any]) -> str:
    """How a cell drafts."""
    return cell["drafter"] if cell["drafter"] == "none" else called("draft", cell["draft"])


def _speed_ups(study: Any, name: str, batch_sizes: list[int]) -> Any:
    """The speed of every length of drafts over plain decoding, by batch size."""
    rows = []
    for cell in study.cells:
        if cell["drafter"] == name and cell["batch_size"] == batch_sizes[0]:
            places = [
                {"draft": cell["draft"], "batch_size": size} for size in dict.fromkeys(batch_sizes)
            ]
            pairs = [({**at, "drafter": "none"}, {**at, "drafter": name}) for at in places]
            rows.append([_way(cell), *(format(study.ratio(*pair), ".2f") for pair in pairs)])
    header = ["draft", *(f"batches of {size}" for size in dict.fromkeys(batch_sizes))]
    note = "Speed over that of plain decoding; 95 % intervals over separate batches."
    return Table(header, rows, (note,))


def seconds_per_token(generators: list[Any], rows: int) -> float:
    """Mean time of a step's token of these generators, each tried on a few; accepted drafts make
    it less.
    """
    ids, taken = torch.arange(1, 17, device=generators[0].target.device).expand(rows, -1), []
    for generator in generators:
        for _ in range(2):  # the first call allocates and compiles
            started_s = time.perf_counter()
            options = {"max_new_tokens": 8, "neutral": True, "eos_token_id": []}
            result = generator.generate(ids, **options)
            taken.append((time.perf_counter() - started_s) / int(result.lengths[0]))
    return sum(taken[1::2]) / len(generators)


def main(arguments: list[str] | None = None) -> None:
    """Runs the program; a target or drafter that cannot be loaded is one line.

    Args:
        arguments: of the command line.
    """
    app = Typer(pretty_exceptions_enable=False)
    app.command()(ungrouped(plan))
    try:
        app(arguments, standalone_mode=arguments is None)
    except (ValueError, ImportError, OSError) as error:
        raise SystemExit(f"specdec: {one_line(error)}") from error


if __name__ == "__main__":
    main()
