"""`specdec ablate`: runs a study that a file describes, and shows its tables."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console
from typer import Argument, BadParameter, Option

from specdec.atomic import replacing
from specdec.lab.cli.evaluate import print_as
from specdec.lab.cli.options import Format
from specdec.lab.show.table import Table, need

if TYPE_CHECKING:
    from specdec.lab.evaluation import Study

WATCH_S = 5.0


def cell(value: str) -> dict[str, str]:
    """Values of axes."""
    pairs = [part.partition("=")[::2] for part in value.split(",")]
    if not all(name and text for name, text in pairs):
        raise BadParameter(f"must be axes with values like drafter=lookup,draft=4, got {value}")
    return dict(pairs)


def ablate(
    study: Annotated[Path, Argument(help="TOML file, or the folder of a study that has run")],
    output: Annotated[Path | None, Option(help="folder; default: the file's name")] = None,
    columns: Annotated[
        str | None, Option(metavar="AXIS", help="of the table; default: draft")
    ] = None,
    of: Annotated[
        str | None,
        Option(
            metavar="NUMBER",
            help="acceptance_rate, block_efficiency, tokens_per_second; default: acceptance_length "
            "or, of a timed study, ms_per_token",
        ),
    ] = None,
    minus: Annotated[
        Any,
        Option(
            parser=cell,
            metavar="AXIS=VALUE,...",
            help="differences to these cells beside each, with stars; default: none",
        ),
    ] = None,
    plot: Annotated[
        Path | None, Option(metavar="FILE", help="figure: .png, .svg, .pdf; default: none")
    ] = None,
    watch: Annotated[
        bool, Option("--watch", help="of a folder: show the table until all cells are there")
    ] = False,
    format: Format = "text",
) -> None:
    """Run a study (drafters, drafts, samplers, temperatures, ...) and show its table.

    The file names arguments of specdec.lab.evaluation.sweep, and options of generate beside them.
    An interrupted study goes on where it stopped; any number of processes with one folder share it.
    Differences (--minus) are paired over prompts, and tested by swaps of labels within prompts.
    Paths in the file are seen from the working folder.
    """
    if plot is not None and not plot.parent.is_dir():
        raise ValueError(f"--plot {plot}: there is no folder {plot.parent}")
    if not study.exists():
        raise ValueError(
            f"there is no study {study}: a TOML file, or the folder of one that has run"
        )
    if watch and not study.is_dir():
        raise ValueError(
            f"--watch shows the folder of a study, and {study} is a file; pass its folder, "
            f"{output or study.with_suffix('')}"
        )
    for library, option in (("matplotlib", plot), ("pandas", format == "latex" or None)):
        if option is not None:
            need(library, "--plot" if library == "matplotlib" else "--format latex")
    from specdec.lab.evaluation import Study, sweep
    from specdec.lab.evaluation.sweep import read_study
    from specdec.processes import team

    if study.is_dir():
        if watch:
            _watch(study, lambda found: found.tables(columns, of))
        found = Study.load(study)
    else:
        arguments = read_study(study)
        output = output or study.with_suffix("")
        try:
            found = sweep(**arguments, output=output, share=True, progress=True)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"what was measured is in {output}") from None
        finally:
            if team().is_first and output.is_dir():
                with replacing(output / "study.toml") as file:
                    file.write(study.read_bytes())
    tables = found.tables(columns, of, minus=_typed(found, minus))
    content = {"timed": found.timed, "cells": found.records()}
    if minus is not None and format == "json":
        usual = "ms_per_token" if found.timed else "acceptance_length"  # as in the table
        tests = found.test(_typed(found, minus), of=of or usual)
        content["minus"] = {"cell": tests.first, "of": tests.of, "pairs": tests.records()}
        content["minus"]["note"] = tests.note()
    print_as(format, tables, content)
    if plot is not None and team().is_first:
        plot = plot if plot.suffix else plot.with_suffix(".png")  # as matplotlib does
        with replacing(plot) as file:
            found.plot(of=of).savefig(file, dpi=150, format=plot.suffix[1:])


def _watch(folder: Path, tables: Callable[[Study], list[Table]]) -> None:
    """Shows the tables of a study on standard error until all cells are there; only reads."""
    from rich.live import Live
    from rich.text import Text

    from specdec.lab.evaluation import Study
    from specdec.lab.evaluation.cells import StudyFolder

    shown = None
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        while True:
            files = StudyFolder(folder).read()[1]
            done = [file for file in files if (folder / file).exists()]
            if len(done) == len(files):
                return
            if done != shown:
                shown, parts = done, tables(Study.load(folder)) if done else []
                count = f"{len(done)} of {len(files)} cells"
                live.update(Text("\n\n".join([*map(str, parts), count])), refresh=True)
            time.sleep(WATCH_S)


def _typed(study: Any, texts: dict[str, str] | None) -> dict[str, Any] | None:
    """The values that a study has under these texts; for other texts it raises ValueError."""
    from specdec.lab.evaluation.cells import axes_of, number

    if texts is None:
        return None
    known = {
        n: {
            number(v) if isinstance(v, float) else str("own" if v is None else v): v for v in values
        }
        for n, values in axes_of(study.cells).items()
    }
    return {name: known.get(name, {}).get(text, text) for name, text in texts.items()}
