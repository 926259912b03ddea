"""`specdec reproduce`: measures what a paper measured, beside its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from specdec.cli.evaluate import print_as
from specdec.cli.options import DRAFTER, Device, DType, Format, Parts, Target, count, given, several
from specdec.show.table import need

Protocol = Literal["dspark-table1", "ddtree", "ddtree-sampled", "speculators-mt-bench"]
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
    output: Annotated[Path | None, Option(help="folder of the runs; default: none")] = None,
    format: Format = "text",
    dtype: DType = "auto",
    device: Device = "cpu",
) -> None:
    """Measure what a paper measured, beside its figures.

    Follows the protocol of DSpark's table 1, of DDTree's budget sweep, at temperature 0 or 1, or of
    vLLM's test of speculators' heads, and prints the acceptance lengths with intervals beside the
    published ones, and in what the measurement differs. With --output a run that was interrupted
    goes on where it stopped.
    """
    from specdec.evaluation.protocols import PROTOCOLS, reproduce

    found, loaded = PROTOCOLS[protocol], None
    if format == "latex":
        need("pandas", "--format latex")

    def load(nodes: int):
        nonlocal loaded
        k = found.num_draft_tokens
        # As many children as nodes, so that the tree holds the best nodes of all.
        shape = {"tree": (nodes, k, nodes)} if nodes else {"num_draft_tokens": k}
        shape["proposal"] = None if found.proposal == "sample" else found.proposal
        parts = Parts(drafter, sampler="rejection", dtype=dtype, device=device, **shape)
        generator, tokenizer = parts.load(target, loaded)
        loaded = generator.target.model, tokenizer
        return generator, tokenizer

    options = {"limit": limit, "max_new_tokens": max_new_tokens, "batch_size": batch_size}
    options |= {"max_prompt_tokens": max_prompt_tokens, "sets": sets, "budgets": budgets}
    options |= {"output": output, "share": True, "progress": True}
    cells = reproduce(found, load, data, **given(options))
    print_as(format, cells.tables(), {"source": found.source, "cells": cells.records()})
