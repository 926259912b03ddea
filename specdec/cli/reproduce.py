"""`specdec reproduce`: measures what a paper measured, beside its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from specdec.cli.evaluate import print_as
from specdec.cli.options import DRAFTER, Device, DType, Format, Parts, Target, count, given, several
from specdec.show.table import need

Protocol = Literal[
    "dspark-table1", "ddtree", "ddtree-sampled", "speculators-mt-bench",
    "eagle2", "eagle2-sampled", "eagle3", "eagle3-sampled", "spec-bench",
    "dflash", "dflash-sampled", "dflash-sglang", "speed-bench",
]  # fmt: skip
"""Names of `PROTOCOLS`, which takes importing torch."""


def reproduce(
    *,
    protocol: Annotated[Protocol, Argument(help="what is reproduced")],
    target: Target = "zoo",
    drafter: Annotated[str, Option(metavar="NAME", help=DRAFTER)],
    data: Annotated[Path, Option(help="folder with a file or folder for each set")],
    sets: Annotated[Any, several("some of the protocol's; default: all")] = None,
    budgets: Annotated[Any, several("tree nodes, 0: chains; default: all", int, "0,16")] = None,
    limit: Annotated[int | None, count("prompts of each set; default: the protocol's")] = None,
    max_new_tokens: Annotated[int | None, count("of each turn; default: the protocol's")] = None,
    max_prompt_tokens: Annotated[int | None, count("the last so many; default: all")] = None,
    batch_size: Annotated[int, count("prompts at a time")] = 1,
    plain: Annotated[bool, Option(help="plain decoding as well, for speeds over it")] = True,
    output: Annotated[Path | None, Option(help="folder of the runs; default: none")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="only say what it takes")] = False,
    format: Format = "text",
    dtype: DType = "auto",
    device: Device = "cpu",
) -> None:
    """Measure what a paper measured, beside its figures.

    Follows the protocol of a published table and prints acceptance lengths, times per token and
    speeds over plain decoding in the same loop with intervals beside the published ones, and in
    what the measurement differs. With --output a run that was interrupted goes on where it stopped.
    --dry-run lists models, prompts and about how long it takes, before anything large is loaded.
    """
    from specdec.evaluation.protocols import PROTOCOLS, reproduce

    found, loaded = PROTOCOLS[protocol], None
    if dry_run:
        chosen = {"sets": sets, "budgets": budgets, "limit": limit}
        sizes = {"max_new_tokens": max_new_tokens or found.max_new_tokens, "plain": plain}
        print_as(format, *_needs(found, (target, drafter), data, device, **chosen, **sizes))
        return
    if format == "latex":
        need("pandas", "--format latex")

    def load(nodes: int):
        nonlocal loaded
        k = found.num_draft_tokens
        tree = (nodes, k, found.children or nodes)
        shape = {"tree": tree} if nodes else {"num_draft_tokens": k}
        shape["proposal"] = None if found.proposal == "sample" else found.proposal
        parts = Parts(drafter, sampler="rejection", dtype=dtype, device=device, **shape)
        generator, tokenizer = parts.load(target, loaded)
        loaded = generator.target.model, tokenizer
        return generator, tokenizer

    options = {"limit": limit, "max_new_tokens": max_new_tokens, "batch_size": batch_size}
    options |= {"max_prompt_tokens": max_prompt_tokens, "sets": sets, "budgets": budgets}
    options |= {"output": output, "share": True, "progress": True, "plain": plain}
    cells = reproduce(found, load, data, **given(options))
    print_as(format, cells.tables(), {"source": found.source, "cells": cells.records()})


def _needs(
    protocol: Any,
    names: tuple[str, str],
    data: Path,
    device: str,
    *,
    sets: list[str] | None,
    budgets: list[int] | None,
    limit: int | None,
    max_new_tokens: int,
    plain: bool,
) -> tuple[list[Any], dict[str, Any]]:
    """What a reproduction takes: prompts, forwards of the target and their time, at least, as a
    table and as a record. Nothing large is loaded.
    """
    from specdec.show.table import Table

    rows, forwards = [], 0
    for name in sets or protocol.sets:
        most = min(limit or protocol.sets[name], protocol.sets[name])
        try:
            prompts = protocol.prompts(name, data)[:most]
            turns, found = sum(len(prompt.turns) for prompt in prompts), str(len(prompts))
        except FileNotFoundError:
            turns, found = most, "not there"
        tokens = turns * max_new_tokens
        lengths = [f.lengths[name] for f in protocol.figures if name in f.lengths]
        expected = sum(lengths) / len(lengths) if lengths else 1.0
        own = int(tokens * (plain + len(budgets or protocol.budgets) / expected))
        forwards += own
        rows.append([name, str(most), found, str(turns), f"{tokens:,}", f"{own:,}"])
    sizes = {name: _weights(name) for name in names}
    bandwidth = _copied_per_second(device)
    each_s = (sizes[names[0]] or 0) / bandwidth
    shown = [f"{n}: {'not known' if s is None else f'{s / 1e9:.2f} GB'}" for n, s in sizes.items()]
    reading = "" if plain else "out"
    notes = (
        f"Forwards: with{reading} plain decoding, and with drafts of the published lengths.",
        f"Weights: {'; '.join(shown)}.",
        f"{device} reads {bandwidth / 1e9:.0f} GB/s here, so a forward of the target takes at "
        f"least {1e3 * each_s:.2f} ms and all of them {forwards * each_s / 3600:.1f} h, for texts "
        f"of {max_new_tokens} tokens one by one. A small model's take many times as long.",
    )
    header = ["set", "prompts", "in the folder", "turns", "tokens at most", "forwards"]
    record = {"forwards": forwards, "weight_bytes": sizes, "hours": forwards * each_s / 3600}
    return [Table(header, rows, notes)], record


def _weights(name: str) -> int | None:
    """Bytes of a model's or head's weights by the name of a command; `None` where there is no such
    file, or the hub is out of reach.
    """
    from specdec import zoo
    from specdec.checkpoints.hub import weight_bytes

    kind, _, path = name.rpartition(":")
    if name == "zoo" or kind == "zoo":
        path = zoo.WEIGHTS_DIR / ("target" if name == "zoo" else zoo.DRAFTERS[path])
    try:
        return weight_bytes(path) or None
    except ValueError:
        return None


def _copied_per_second(device: str) -> float:
    """Bytes that a device reads in a second, of a copy."""
    import torch

    from specdec.evaluation.evaluate import timed

    table = torch.zeros(2**26, dtype=torch.uint8, device=device)
    other = table.clone()
    taken = min(timed(lambda: other.copy_(table), table.device)[1] for _ in range(5))
    return 2 * table.numel() / taken
