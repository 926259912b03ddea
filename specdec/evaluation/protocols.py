"""Published measurements, and the settings with which `reproduce` takes them again with any target
and drafter. `PROTOCOLS` holds those of `specdec reproduce`.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from specdec.arguments import check_choice, check_integer
from specdec.evaluation.evaluation import Evaluation
from specdec.evaluation.intervals import Estimate, bootstrap, ratio
from specdec.evaluation.paired import quotient
from specdec.evaluation.prompts import Prompt, find_set, read_prompts, template_reads
from specdec.evaluation.sweep import sweep
from specdec.generator import SpeculativeGenerator
from specdec.show.table import Table, Tabular

COUNTS = "Tokens per step with the target's own token, and (without it)."
"""Half of the figures in the field are of one of these counts, half of the other."""


class Figures(NamedTuple):
    """A published row: the target's name, the column's label, nodes of the draft tree (0 for a
    chain, `None` for the best budget), and by set acceptance lengths with the bonus token and
    speeds over plain decoding, where they were published.
    """

    target: str
    label: str
    nodes: int | None
    lengths: Mapping[str, float]
    speedups: Mapping[str, float] = {}


@dataclass(frozen=True)
class Protocol:
    """How a published table was measured: drafts of exact rejection sampling, thinking off.

    Args:
        source: where its figures and settings are from.
        sets: at most so many prompts of each; `file/category` is a part of a file.
        figures: those of the first one's target stand beside other targets.
        temperature: 0 is greedy.
        num_draft_tokens: K of a chain, and the depth of trees.
        card: what the published speeds were measured on, and with which loop.
        children: most of a tree's node; `None` for as many as nodes, so that the tree holds the
            best nodes of all.
        seed: of sampling, and of the choice among the prompts of a larger set.
        shuffle: whose generator chooses: Python's `random`, or NumPy's as Hugging Face datasets.
        budgets: nodes of draft trees, 0 for a chain.
        proposal: how draft tokens are drawn: `"sample"`, or `"argmax"` for point masses.
        mean_over: all steps, or texts, each with the mean of its steps.
        all_turns: answers all turns of a prompt, else the first one alone.
        max_new_tokens: of each turn.
        thinking: `enable_thinking` of chat templates that read it.
        worded: prompts get DFlash's and DSpark's instructions, see `read_prompts`.
    """

    source: str
    sets: Mapping[str, int]
    figures: tuple[Figures, ...]
    temperature: float
    num_draft_tokens: int
    seed: int
    shuffle: Literal["random", "numpy"]
    card: str = ""
    children: int | None = None
    budgets: tuple[int, ...] = (0,)
    proposal: Literal["sample", "argmax"] = "sample"
    mean_over: Literal["steps", "texts"] = "steps"
    all_turns: bool = False
    max_new_tokens: int = 2048
    thinking: bool = False
    worded: bool = True

    def prompts(self, name: str, folder: str | Path) -> list[Prompt]:
        """The prompts of a set that the protocol chooses and words, of a folder's files."""
        file, _, category = name.partition("/")
        whole = read_prompts(find_set(file, folder), worded=self.worded)
        found = [prompt for prompt in whole if prompt.category == category or not category]
        if not found:
            others = ", ".join(sorted({prompt.category or "none" for prompt in whole}))
            raise ValueError(f"the set {file} has no prompts of category {category}: {others}")
        if len(found) > self.sets[name]:
            if self.shuffle == "random":
                random.Random(self.seed).shuffle(found)
            else:
                found = [found[i] for i in np.random.default_rng(self.seed).permutation(len(found))]
        found, turns = found[: self.sets[name]], None if self.all_turns else 1
        return [replace(p, turns=p.turns[:turns], category=p.category or name) for p in found]

    def length(self, evaluation: Evaluation) -> Estimate:
        """The acceptance length as the source takes its mean."""
        if self.mean_over == "steps":
            return evaluation.estimates["acceptance_length"]
        texts: dict[str, list[float]] = {}
        for row in evaluation.rows:
            accepted = [step.num_accepted for step in row.steps]
            texts.setdefault(row.prompt, []).append(1 + sum(accepted) / len(accepted))
        totals = [[sum(means), len(means)] for means in texts.values()]
        return bootstrap(totals, ratio, level=evaluation.level, unit="prompt")[0]


@dataclass(frozen=True, eq=False, repr=False)
class Reproduction(Tabular):
    """What was measured, evaluations by set and nodes, beside what was published.

    Args:
        protocol: what is reproduced.
        cells: by set and nodes of the draft tree.
        plain: plain decoding of the same prompts by set, which took turns with the cells on every
            batch; empty where it was left out.
    """

    protocol: Protocol
    cells: Mapping[tuple[str, int], Evaluation]
    plain: Mapping[str, Evaluation]

    def speedup(self, name: str, nodes: int) -> Estimate | None:
        """Speed over that of plain decoding in the same loop, paired over batches; `None` where
        plain decoding was left out.
        """
        plain = self.plain.get(name)
        return None if plain is None else quotient(plain, self.cells[name, nodes])

    def tables(self) -> list[Table]:
        """One table with a line per set and budget; its notes say in what the measurement differs
        from the protocol.
        """
        target, rows = self._published_target, []
        known = [row.label for row in self.protocol.figures if row.target == target]
        labels = list(dict.fromkeys(known))
        for record, (name, nodes) in zip(self.records(), self.cells, strict=True):
            cell = self.cells[name, nodes]
            length, speed = self.protocol.length(cell), self.speedup(name, nodes)
            cells = [nodes or f"chain of {self.protocol.num_draft_tokens}", record["prompts"]]
            cells += [f"{length} ({length.value - 1:.2f})"]
            cells += [format(cell.estimates["ms_per_token"], ".2f")]
            cells += [] if speed is None else [format(speed, ".2f")]
            cells += [_published(record, label) for label in labels]
            rows.append([name, *map(str, cells)])
        over = ["x plain"][: len(self.plain)]
        header = ["set", "draft", "prompts", "acceptance length", "ms per token", *over, *labels]
        notes = (*self.deviations(), COUNTS, f"Published: {self.protocol.source}.")
        return [Table(header, rows, notes)]

    def records(self) -> list[dict[str, Any]]:
        """One per set and budget: counts, every estimate, the speed over plain decoding, and the
        published figures, of which `"LABEL x plain"` are speeds.
        """
        lines, figures = [], self.protocol.figures
        for (name, nodes), cell in self.cells.items():
            line = {"set": name, "nodes": nodes, "prompts": cell.about["run"]["prompts"]["count"]}
            length, speed = self.protocol.length(cell), self.speedup(name, nodes)
            line |= length.to_dict() | {"accepted_per_step": length.value - 1}
            if speed is not None:
                found = speed.to_dict()
                line |= {"speedup": speed.value}
                line |= {f"speedup_{end}": found[end] for end in ("low", "high")}
            line |= dict.fromkeys(f.label for f in figures)
            for row in figures:
                if row.target == self._published_target and row.nodes in (None, nodes):
                    line[row.label] = row.lengths.get(name)
                    if name in row.speedups:
                        line[f"{row.label} x plain"] = row.speedups[name]
            lines.append(line | {n: e.to_dict()["value"] for n, e in cell.estimates.items()})
        return lines

    def deviations(self) -> list[str]:
        """In what the measurement differs from the protocol, a sentence each."""
        protocol, run, found = self.protocol, self._run, []
        if (own := run["target"]["name"]) != self._published_target:
            found.append(f"Published for {self._published_target}; the target here is {own!r}.")
        if "enable_thinking" not in run["plan"]["chat_template_kwargs"]:
            reads = "does not read it" if run["tokenizer"]["chat_template"] else "is missing"
            found.append(f"enable_thinking={protocol.thinking} was not set: the template {reads}.")
        if (most := run["plan"]["max_new_tokens"]) != protocol.max_new_tokens:
            found.append(f"At most {most} new tokens; {protocol.max_new_tokens} in the source.")
        if any(row.speedups for row in protocol.figures):
            found.append(f"Published speeds: {protocol.card}; these: {run['device']}.")
        if cut := sum(row.was_cut for cell in self.cells.values() for row in cell.rows):
            found.append(f"{cut} prompts were shortened from the left.")
        counts = {name: c.about["run"]["prompts"]["count"] for (name, _), c in self.cells.items()}
        few = [f"{n} {c} of {protocol.sets[n]}" for n, c in counts.items() if c < protocol.sets[n]]
        return found + ([f"Fewer prompts than in the source: {', '.join(few)}."] if few else [])

    @property
    def _run(self) -> dict[str, Any]:
        return next(iter(self.cells.values())).about["run"]

    @property
    def _published_target(self) -> str:
        """The target itself where figures of it are published, else that of the first figures."""
        known = [row.target for row in self.protocol.figures]
        return own if (own := self._run["target"]["name"]) in known else known[0]


def _published(record: Mapping[str, Any], label: str) -> str:
    """Both counts of a published length, and the speed where it was published, too."""
    length, speed = record[label], record.get(f"{label} x plain")
    shown = [] if length is None else [f"{length:.2f} ({length - 1:.2f})"]
    return ", ".join(shown + ([] if speed is None else [f"{speed:.2f} x"]))


def reproduce(
    protocol: Protocol,
    load: Callable[[int], tuple[SpeculativeGenerator, PreTrainedTokenizerBase]],
    data: str | Path,
    *,
    output: str | Path | None = None,
    sets: Iterable[str] | None = None,
    budgets: Iterable[int] | None = None,
    limit: int | None = None,
    plain: bool = True,
    **options: Any,
) -> Reproduction:
    """Measures what a protocol measures, and how long it takes beside plain decoding in the same
    loop: all budgets and plain decoding take turns on every batch.

    Args:
        protocol: settings, sets and published figures.
        load: returns the generator whose drafter drafts trees of so many nodes, chains for 0, and
            the tokenizer. It is called after all prompts were read, once per budget.
        data: folder with a file or a folder for each set, see `find_set`.
        output: folder that gets one for each set, with a file per budget. Where it holds some, the
            run goes on after their last batch.
        sets, budgets: some of the protocol's; all by default.
        limit: so many prompts of each set, to try it out.
        plain: decodes plainly as well. It takes the most time of all; without it no speed over it
            is known.
        options: of `sweep`, `evaluate` and `generate`, before those of the protocol.

    Raises:
        FileNotFoundError: a set is not in the folder.
        ValueError: a set or budget that the protocol has not, and as `read_prompts` and `evaluate`.

    Example:
        >>> PROTOCOLS["dspark-table1"].figures[2].label
        'DSpark'
    """
    names, sizes = list(sets or protocol.sets), list(budgets or protocol.budgets)
    for name in names:
        check_choice("a set of sets= (--sets)", name, protocol.sets)
    for size in sizes:
        check_choice("a budget of budgets= (--budgets)", size, protocol.budgets)
    check_integer("limit", 1 if limit is None else limit, 1)
    check_choice("plain", plain, (True, False))
    chosen = {name: protocol.prompts(name, data)[:limit] for name in names}
    made = {size: load(size) for size in sizes}
    generator, tokenizer = made[sizes[0]]
    ways = {str(size or "chain"): made[size][0] for size in sizes}
    if plain:
        ways["plain"] = SpeculativeGenerator(generator.target, None, generator.sampler)
    own = {n: getattr(protocol, n) for n in ("max_new_tokens", "seed")}
    if template_reads(tokenizer, "enable_thinking"):
        own["chat_template_kwargs"] = {"enable_thinking": protocol.thinking}
    axes = {"drafters": ways, "temperatures": [protocol.temperature]}
    found = {}
    for name, prompts in chosen.items():
        folder = None if output is None else Path(output, name)
        given = {**own, "tokenizer": tokenizer, "timed": True, "output": folder, **options}
        study = sweep(generator.target, prompts, **axes, **given)
        for cell, run in zip(study.cells, study.runs, strict=True):
            found[name, cell["drafter"]] = run
    cells = {(name, size): found[name, str(size or "chain")] for name in names for size in sizes}
    return Reproduction(protocol, cells, {name: found[name, "plain"] for name in names if plain})


def _read(given: Mapping[str, Any]) -> Protocol:
    """A protocol of the file, which says how its `figures` are written."""
    figures = []
    for line in given["figures"].strip().splitlines():
        target, label, nodes, *values = line.split()
        lengths, speedups = {}, {}
        for name, value in zip(given["sets"], values, strict=False):
            length, _, speed = value.partition("@")
            if length:
                lengths[name] = float(length)
            if speed:
                speedups[name] = float(speed)
        budget = None if nodes == "best" else int(nodes)
        figures.append(Figures(target, label, budget, lengths, speedups))
    settings = {**given, "figures": tuple(figures), "budgets": tuple(given.get("budgets", (0,)))}
    return Protocol(**settings)


PROTOCOLS = {
    name: _read(given)
    for name, given in tomllib.loads(
        (Path(__file__).parent / "protocols.toml").read_text(encoding="utf-8")
    ).items()
}
"""By the names of the command line."""
