"""Published measurements, and the settings with which `reproduce` takes them again with any target
and drafter. `PROTOCOLS` holds those of `specdec reproduce`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from specdec.arguments import check_choice, check_integer
from specdec.evaluation.evaluate import evaluate
from specdec.evaluation.evaluation import Evaluation
from specdec.evaluation.intervals import Estimate, bootstrap, ratio
from specdec.evaluation.prompts import Prompt, find_set, read_prompts, template_reads
from specdec.generator import SpeculativeGenerator
from specdec.show.table import Table, Tabular


class Figures(NamedTuple):
    """A published row: the target's name, the column's label, nodes of the draft tree (0 for a
    chain, `None` for the best budget), and acceptance lengths with the bonus token by set.
    """

    target: str
    label: str
    nodes: int | None
    lengths: Mapping[str, float]


@dataclass(frozen=True)
class Protocol:
    """How a published table was measured: drafts of exact rejection sampling, thinking off.

    Args:
        source: where its figures and settings are from.
        sets: at most so many prompts of each.
        figures: those of the first one's target stand beside other targets.
        temperature: 0 is greedy.
        num_draft_tokens: K of a chain, and the depth of trees.
        seed: of sampling, and of the choice among the prompts of a larger set.
        shuffle: whose generator chooses: Python's `random`, or NumPy's as Hugging Face datasets.
        budgets: nodes of draft trees, 0 for a chain.
        proposal: how draft tokens are drawn: `"sample"`, or `"argmax"` for point masses.
        mean_over: all steps, or texts, each with the mean of its steps.
        all_turns: answers all turns of a prompt, else the first one alone.
        max_new_tokens: of each turn.
        thinking: `enable_thinking` of chat templates that read it.
    """

    source: str
    sets: Mapping[str, int]
    figures: tuple[Figures, ...]
    temperature: float
    num_draft_tokens: int
    seed: int
    shuffle: Literal["random", "numpy"]
    budgets: tuple[int, ...] = (0,)
    proposal: Literal["sample", "argmax"] = "sample"
    mean_over: Literal["steps", "texts"] = "steps"
    all_turns: bool = False
    max_new_tokens: int = 2048
    thinking: bool = False

    def prompts(self, name: str, folder: str | Path) -> list[Prompt]:
        """The prompts of a set that the protocol chooses and words, of a folder's files."""
        found = read_prompts(find_set(name, folder), worded=True)
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
    """What was measured, evaluations by set and nodes, beside what was published."""

    protocol: Protocol
    cells: Mapping[tuple[str, int], Evaluation]

    def tables(self) -> list[Table]:
        """One table with a line per set and budget; its notes say in what the measurement differs
        from the protocol.
        """
        labels, rows = list(dict.fromkeys(row.label for row in self.protocol.figures)), []
        for record, cell in zip(self.records(), self.cells.values(), strict=True):
            draft = record["nodes"] or f"chain of {self.protocol.num_draft_tokens}"
            published = ["" if record[n] is None else f"{record[n]:.2f}" for n in labels]
            cells = [draft, record["prompts"], self.protocol.length(cell), *published]
            rows.append([record["set"], *map(str, cells)])
        header = ["set", "draft", "prompts", "acceptance length", *labels]
        return [Table(header, rows, (*self.deviations(), f"Published: {self.protocol.source}."))]

    def records(self) -> list[dict[str, Any]]:
        """One per set and budget: counts, every estimate, and the published figures."""
        lines, figures = [], self.protocol.figures
        for (name, nodes), cell in self.cells.items():
            line = {"set": name, "nodes": nodes, "prompts": cell.about["run"]["prompts"]["count"]}
            line |= self.protocol.length(cell).to_dict() | dict.fromkeys(f.label for f in figures)
            for target, label, budget, lengths in figures:
                if target == self._published_target and budget in (None, nodes):
                    line[label] = lengths.get(name)
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


def reproduce(
    protocol: Protocol,
    load: Callable[[int], tuple[SpeculativeGenerator, PreTrainedTokenizerBase]],
    data: str | Path,
    *,
    output: str | Path | None = None,
    sets: Iterable[str] | None = None,
    budgets: Iterable[int] | None = None,
    limit: int | None = None,
    **options: Any,
) -> Reproduction:
    """Measures what a protocol measures.

    Args:
        protocol: settings, sets and published figures.
        load: returns the generator whose drafter drafts trees of so many nodes, chains for 0, and
            the tokenizer. It is called after all prompts were read, once per budget.
        data: folder with a file or a folder for each set, see `find_set`.
        output: folder for a file per set and budget. Where it holds some, the run goes on after
            their last batch.
        sets, budgets: some of the protocol's; all by default.
        limit: so many prompts of each set, to try it out.
        options: of `evaluate`, before those of the protocol.

    Raises:
        FileNotFoundError: a set is not in the folder.
        ValueError: a set or budget that the protocol has not, and as `read_prompts` and `evaluate`.

    Example:
        >>> PROTOCOLS["dspark-table1"].figures[2].label
        'DSpark'
    """
    names = [check_choice("a set", n, protocol.sets) for n in sets or protocol.sets]
    sizes = [check_choice("a budget", b, protocol.budgets) for b in budgets or protocol.budgets]
    check_integer("limit", 1 if limit is None else limit, 1)
    chosen, cells = {name: protocol.prompts(name, data)[:limit] for name in names}, {}
    if output is not None:
        Path(output).mkdir(parents=True, exist_ok=True)
    own = {n: getattr(protocol, n) for n in ("max_new_tokens", "temperature", "seed")}
    for nodes in sizes:
        generator, tokenizer = load(nodes)
        if template_reads(tokenizer, "enable_thinking"):
            own["chat_template_kwargs"] = {"enable_thinking": protocol.thinking}
        for name, prompts in chosen.items():
            path = None if output is None else Path(output, f"{name}-{nodes or 'chain'}.jsonl")
            files = {"tokenizer": tokenizer, "output": path}
            cells[name, nodes] = evaluate(generator, prompts, **files, **own | options)
    return Reproduction(protocol, {(n, size): cells[n, size] for n in names for size in sizes})


def _published(sets: str, rows: str) -> dict[str, Any]:
    """`sets` and `figures` of a protocol, of a text with a row per target and label: nodes, then
    lengths in the order of the sets.
    """
    counts = {name: int(count) for name, count in (each.split(":") for each in sets.split())}
    figures = []
    for target, label, nodes, *lengths in map(str.split, rows.strip().splitlines()):
        by_set = dict(zip(counts, map(float, lengths), strict=False))
        figures.append(Figures(target, label, None if nodes == "best" else int(nodes), by_set))
    return {"sets": counts, "figures": tuple(figures)}


_DSPARK = _published(
    "gsm8k:500 math500:500 aime25:30 mbpp:256 humaneval:164 livecodebench:500 mt-bench:80 "
    "alpaca:500 arena-hard-v2:500",
    """
    Qwen3-8B EAGLE-3 0 5.30 4.77 3.91 3.96 4.33 4.17 2.66 2.54 2.54
    Qwen3-8B DFlash 0 5.33 4.91 4.07 4.36 4.64 4.39 3.11 2.98 2.81
    Qwen3-8B DSpark 0 6.17 5.78 5.01 5.16 5.52 5.17 3.72 3.58 3.21
    Qwen3-4B EAGLE-3 0 5.14 4.62 3.92 3.69 4.16 3.77 2.39 2.26 2.55
    Qwen3-4B DFlash 0 5.40 4.85 4.15 4.40 4.74 4.18 3.07 2.96 2.83
    Qwen3-4B DSpark 0 6.11 5.70 4.89 5.13 5.38 4.86 3.64 3.54 3.29
    Qwen3-14B EAGLE-3 0 5.24 4.60 3.71 3.81 4.14 4.01 2.62 2.47 2.48
    Qwen3-14B DFlash 0 5.41 4.84 3.98 4.44 4.59 4.33 3.10 2.94 2.72
    Qwen3-14B DSpark 0 6.21 5.74 4.94 5.26 5.43 5.02 3.70 3.58 3.13
    gemma-4-12B-it EAGLE-3 0 5.87 5.46 4.83 4.72 5.37 4.16 3.19 3.06 2.72
    gemma-4-12B-it DFlash 0 5.45 5.04 4.22 4.39 4.95 3.70 2.98 2.84 2.59
    gemma-4-12B-it DSpark 0 6.05 5.78 5.12 5.11 5.64 4.51 3.49 3.35 2.92
    """,
)
_DDTREE_SETS = (
    "math500:128 gsm8k:128 aime24:30 aime25:30 humaneval:164 mbpp:128 livecodebench:128 "
    "swe-bench:128 mt-bench:80 alpaca:128"
)
# Budgets have figures for MATH-500 alone, read off the vector graphics of figure 3.
_DDTREE_GREEDY = """
    Qwen3-8B DFlash 0 7.79 6.57 7.46 7.39 6.61 5.99 7.22 3.60 4.28 3.12
    Qwen3-8B DDTree 16 8.61
    Qwen3-8B DDTree 32 9.27
    Qwen3-8B DDTree 64 9.75
    Qwen3-8B DDTree 128 10.20
    Qwen3-8B DDTree 256 10.43
    Qwen3-8B DDTree 512 10.73
    Qwen3-8B DDTree 1024 10.97
    Qwen3-8B best-DDTree best 10.73 9.54 10.42 9.86 9.67 9.07 10.28 5.91 6.58 5.09
    Qwen3-4B DFlash 0 7.72 6.51 7.54 7.37 6.62 6.10 7.02 3.66 4.38 3.11
    Qwen3-4B best-DDTree best 10.71 9.33 10.37 10.23 9.44 9.16 9.79 5.99 6.70 5.35
"""
_DDTREE_SAMPLED = """
    Qwen3-8B DFlash 0 6.46 5.93 4.98 4.79 5.48 5.30 6.61 2.82 3.77 2.94
    Qwen3-8B best-DDTree best 9.54 8.95 7.79 7.71 8.59 8.34 9.53 4.86 6.02 4.89
    Qwen3-4B DFlash 0 6.60 5.99 5.01 4.79 5.97 5.56 6.53 3.07 4.05 2.96
    Qwen3-4B best-DDTree best 9.61 8.87 7.82 7.22 9.18 8.72 9.44 5.20 6.27 4.97
"""
_DDTREE = Protocol(
    source="Ringel and Romano, arXiv:2604.12989, table 1 (the best budget is the fastest one) and "
    "figure 3; settings of liranringel/ddtree, run_benchmark.sh",
    **_published(_DDTREE_SETS, _DDTREE_GREEDY),
    temperature=0.0,
    num_draft_tokens=15,
    seed=0,
    shuffle="numpy",
    budgets=(0, 16, 32, 64, 128, 256, 512, 1024),
    mean_over="texts",
    all_turns=True,
)
_SPECULATORS = _published(
    "mt-bench:80",
    """
    Qwen3-8B EAGLE-3 0 2.26
    Llama-3.1-8B-Instruct EAGLE-3 0 2.60
    gpt-oss-20b EAGLE-3 0 2.56
    Qwen3-VL-30B-A3B-Instruct-FP8 EAGLE-3 0 1.35
    """,
)
PROTOCOLS = {
    "dspark-table1": Protocol(
        source="DSpark, table 1 (DSpark_paper.pdf of deepseek-ai/DeepSpec); settings of eval.py",
        **_DSPARK,
        temperature=1.0,
        num_draft_tokens=7,
        seed=980406,
        shuffle="random",
    ),
    "ddtree": _DDTREE,
    "ddtree-sampled": replace(
        _DDTREE,
        **_published(_DDTREE_SETS, _DDTREE_SAMPLED),
        temperature=1.0,
        proposal="argmax",
    ),
    "speculators-mt-bench": Protocol(
        source="vllm-project/vllm, tests/v1/spec_decode/test_acceptance_length.py, with heads of "
        "speculators (RedHatAI/*-speculator.eagle3)",
        **_SPECULATORS,
        temperature=0.0,
        num_draft_tokens=3,
        seed=42,
        shuffle="random",
        max_new_tokens=256,
        thinking=True,
    ),
}
"""By the names of the command line."""
