"""A published table of acceptance lengths, measured again with any target and drafter.

    PYTHONPATH=. python examples/reproduce.py dspark-table1 --target Qwen/Qwen3-8B \\
        --drafter mask-token:deepseek-ai/dspark_qwen3_8b_block7 --data data --device cuda

`data` holds a file or folder per set, as `read_prompts` takes it, with the names of the table:
`gsm8k.jsonl`, `math500/`, .... Every draft and plain decoding take turns on each batch, so that
their times compare. `--output FOLDER` keeps the runs: the same command goes on with them, and
`Study.load(FOLDER/SET)` reads them.
`protocols.toml` has the settings and the published figures, each with its source.
"""

from __future__ import annotations

import argparse
import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from specdec import Drafter, Evaluation, Target, Tree
from specdec.lab.evaluation import Estimate, Prompt, Study, read_prompts, sweep
from specdec.loading import load_drafter, load_target

FILE = Path(__file__).with_name("protocols.toml")
MIN_PROMPTS = 6
"""Fewer get no interval, as everywhere in specdec."""


@dataclass(frozen=True)
class Figures:
    """A published row: the target's name, the column's label, nodes of the draft tree (0 for a
    chain, `None` for the best budget), and by set acceptance lengths with the bonus token and
    speeds over plain decoding, where they were published.
    """

    target: str
    label: str
    nodes: int | None
    lengths: Mapping[str, float]
    speedups: Mapping[str, float]

    @classmethod
    def of(cls, line: str, sets: Sequence[str]) -> Figures:
        """A line of the file, whose values are in the order of the sets."""
        target, label, nodes, *values = line.split()
        pairs = {name: value.split("@") for name, value in zip(sets, values, strict=False)}
        lengths = {name: float(length) for name, (length, *_) in pairs.items() if length}
        speedups = {name: float(speed[0]) for name, (_, *speed) in pairs.items() if speed}
        return cls(target, label, None if nodes == "best" else int(nodes), lengths, speedups)

    def shown(self, name: str, nodes: int) -> str:
        """Length and speed of a set, where they are of so many nodes."""
        if self.nodes not in (None, nodes):
            return ""
        shown = both_counts(self.lengths.get(name))
        return f"{shown} {self.speedups[name]:.2f} x" if name in self.speedups else shown


@dataclass(frozen=True)
class Protocol:
    """How a published table was measured: exact rejection sampling.

    Args:
        source: where its figures and settings are from.
        sets: at most so many prompts of each; `file/category` is a part of a file.
        figures: those of the first one's target stand beside other targets.
        temperature: 0 is greedy.
        num_draft_tokens: K of a chain, and the depth of trees.
        seed: of sampling, and of the choice among the prompts of a larger set.
        shuffle: whose generator chooses: Python's `random`, or NumPy's as Hugging Face datasets.
        card: what the published speeds were measured on, and with which loop.
        children: most of a tree's node; `None` for as many as nodes.
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
    shuffle: str
    card: str = ""
    children: int | None = None
    budgets: tuple[int, ...] = (0,)
    proposal: str = "sample"
    mean_over: str = "steps"
    all_turns: bool = False
    max_new_tokens: int = 2048
    thinking: bool = False
    worded: bool = True

    def prompts(self, name: str, folder: Path) -> list[Prompt]:
        """The prompts of a set that the protocol chooses and words, of a folder's files."""
        file, _, category = name.partition("/")
        stems = (file, file.replace("-", "_"))
        places = [folder / (s + end) for s in stems for end in (".jsonl", ".json", ".parquet", "")]
        if (place := next(filter(Path.exists, places), None)) is None:
            raise FileNotFoundError(
                f"{folder} does not hold the set {file}: put {file}.jsonl, .json, .parquet or a "
                f"folder {file} there, or name the sets that are there with --sets"
            )
        whole = read_prompts(place, worded=self.worded)
        found = [prompt for prompt in whole if prompt.category == category or not category]
        if len(found) > self.sets[name]:
            if self.shuffle == "random":
                random.Random(self.seed).shuffle(found)
            else:
                found = [found[i] for i in np.random.default_rng(self.seed).permutation(len(found))]
        found, turns = found[: self.sets[name]], None if self.all_turns else 1
        return [replace(prompt, turns=prompt.turns[:turns]) for prompt in found]

    def drafter(self, name: str, target: Target, nodes: int, tokenizer: Any) -> Drafter | None:
        """The drafter of a name with a tree of so many nodes, or with a chain for 0."""
        k = self.num_draft_tokens
        tree = Tree(nodes, k, self.children or nodes) if nodes else None
        size = {"tree": tree, "num_draft_tokens": None if nodes else k}
        proposal = None if self.proposal == "sample" else self.proposal
        return load_drafter(name, target, **size, tokenizer=tokenizer, proposal=proposal)

    def acceptance_length(self, run: Evaluation) -> Estimate:
        """The acceptance length as the source takes its mean."""
        if self.mean_over == "steps":
            return run.estimates["acceptance_length"]
        means: dict[str, list[float]] = {}
        for row in run.rows:
            accepted = [step.num_accepted for step in row.steps]
            means.setdefault(row.prompt, []).append(1 + sum(accepted) / len(accepted))
        sums, counts = np.array([[sum(own), len(own)] for own in means.values()]).T
        value = sums.sum() / counts.sum()
        if len(sums) < MIN_PROMPTS:
            return Estimate(value)

        def mean(sums: np.ndarray, counts: np.ndarray, axis: int) -> np.ndarray:
            return sums.sum(axis) / counts.sum(axis)

        options = {"paired": True, "vectorized": True, "method": "percentile", "rng": 0}
        ends = stats.bootstrap((sums, counts), mean, **options).confidence_interval
        return Estimate(value, ends.low, ends.high)


def read_protocols(file: Path = FILE) -> dict[str, Protocol]:
    """The protocols by name."""
    found = {}
    for name, given in tomllib.loads(file.read_text(encoding="utf-8")).items():
        lines = given.pop("figures").strip().splitlines()
        figures = tuple(Figures.of(line, [*given["sets"]]) for line in lines)
        found[name] = Protocol(**given, figures=figures)
    return found


def both_counts(length: float | None) -> str:
    """Tokens per step with the target's own token, and (without it)."""
    return "" if length is None else f"{length:.2f} ({length - 1:.2f})"


def measure(
    protocol: Protocol,
    target: Target,
    tokenizer: Any,
    drafter: str,
    prompts: Mapping[str, list[Prompt]],
    *,
    budgets: Sequence[int] = (),
    plain: bool = True,
    output: Path | None = None,
    **options: Any,
) -> Iterator[tuple[str, Study]]:
    """A study of each set, whose drafters are the budgets, and plain decoding.

    Args:
        protocol: what is measured.
        target: that writes the texts.
        tokenizer: of the target.
        drafter: a name, see `specdec.loading.load_drafter`.
        prompts: of each set.
        budgets: some of the protocol's; all by default.
        plain: decodes plainly as well, for speeds over it; takes the most time of all.
        output: folder that gets one for each set.
        options: of `sweep`, before those of the protocol.
    """
    sizes = budgets or protocol.budgets
    ways = {str(n): protocol.drafter(drafter, target, n, tokenizer) for n in sizes}
    ways |= {"plain": "none"} if plain else {}
    own = {"max_new_tokens": protocol.max_new_tokens, "seed": protocol.seed, "timed": True}
    if "enable_thinking" in str(tokenizer.chat_template):
        own["chat_template_kwargs"] = {"enable_thinking": protocol.thinking}
    axes = {"drafters": ways, "samplers": ["rejection"], "temperatures": [protocol.temperature]}
    for name, those in prompts.items():
        given = {**own, "output": output and output / name, **options}
        yield name, sweep(target, those, **axes, tokenizer=tokenizer, **given)


def table(protocol: Protocol, name: str, study: Study) -> Iterator[list[str]]:
    """A line per budget: measured lengths, times and speeds, then the published ones."""
    rows = published(protocol, study.runs[0])
    for cell, run in zip(study.cells, study.runs, strict=True):
        if cell["drafter"] == "plain":
            continue
        nodes, length = int(cell["drafter"]), protocol.acceptance_length(run)
        own = [name, str(nodes or f"chain of {protocol.num_draft_tokens}")]
        own += [f"{length} ({length.value - 1:.2f})", f"{run.estimates['ms_per_token']:.2f}"]
        ways = {each["drafter"] for each in study.cells}
        pair = {"drafter": "plain"}, {"drafter": cell["drafter"]}
        own.append(f"{study.ratio(*pair):.2f}" if "plain" in ways else "")
        labels = dict.fromkeys(row.label for row in rows)
        shown = {row.label: text for row in rows if (text := row.shown(name, nodes))}
        yield own + [shown.get(label, "") for label in labels]


def published(protocol: Protocol, run: Evaluation) -> list[Figures]:
    """The figures of the run's target, or else of the first target that has figures."""
    own, known = run.about["run"]["target"]["name"], [row.target for row in protocol.figures]
    return [row for row in protocol.figures if row.target == (own if own in known else known[0])]


def deviations(protocol: Protocol, studies: Mapping[str, Study]) -> Iterator[str]:
    """In what the measurement differs from the protocol, a sentence each."""
    runs = {name: study.runs[0] for name, study in studies.items()}
    first = next(iter(runs.values()))
    run, rows = first.about["run"], published(protocol, first)
    if (own := run["target"]["name"]) != rows[0].target:
        yield f"Published for {rows[0].target}; the target here is {own!r}."
    if "enable_thinking" not in run["plan"]["chat_template_kwargs"]:
        yield f"enable_thinking={protocol.thinking} was not set: no chat template reads it."
    if (most := run["plan"]["max_new_tokens"]) != protocol.max_new_tokens:
        yield f"At most {most} new tokens; {protocol.max_new_tokens} in the source."
    if any(row.speedups for row in rows):
        yield f"Published speeds: {protocol.card}; these: {run['device']}."
    counts = {name: run.about["run"]["prompts"]["count"] for name, run in runs.items()}
    for name, count in counts.items():
        if count < protocol.sets[name]:
            yield f"{count} prompts of {name}; {protocol.sets[name]} in the source."


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table in Markdown, then what differs from the source."""
    protocols = read_protocols()
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("protocol", choices=protocols)
    parser.add_argument("--target", default="zoo", help="zoo, a folder or a Hugging Face id")
    parser.add_argument("--drafter", required=True, help="as of specdec evaluate --drafter")
    parser.add_argument("--data", type=Path, required=True, help="folder of the sets")
    parser.add_argument("--sets", nargs="+", help="some of the protocol's")
    parser.add_argument("--budgets", nargs="+", type=int, default=(), help="tree nodes, 0: chain")
    parser.add_argument("--limit", type=int, help="prompts of each set")
    parser.add_argument("--max-new-tokens", type=int, help="of each turn")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--no-plain", action="store_true", help="no plain decoding, no speeds")
    parser.add_argument("--output", type=Path, help="folder of the runs")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args(argv)
    protocol = protocols[given.protocol]
    if unknown := {*(given.sets or ())} - {*protocol.sets}:
        parser.error(f"--sets are of {', '.join(protocol.sets)}, got {', '.join(unknown)}")
    if unknown := {*given.budgets} - {*protocol.budgets}:
        parser.error(f"--budgets are of {protocol.budgets}, got {unknown}")
    names = given.sets or protocol.sets
    prompts = {name: protocol.prompts(name, given.data)[: given.limit] for name in names}
    model, tokenizer = load_target(given.target, device=given.device)
    options = {"budgets": given.budgets, "plain": not given.no_plain, "output": given.output}
    options |= {"batch_size": given.batch_size, "progress": True}
    if given.max_new_tokens:
        options["max_new_tokens"] = given.max_new_tokens
    studies = {}
    for name, study in measure(
        protocol, Target(model), tokenizer, given.drafter, prompts, **options
    ):
        if not studies:
            header = ["set", "draft", "acceptance length", "ms per token", "x plain"]
            header += dict.fromkeys(row.label for row in published(protocol, study.runs[0]))
            print("|", " | ".join(header), "|\n|", "---|" * len(header))
        for row in table(protocol, name, study):
            print("|", " | ".join(row), "|", flush=True)
        studies[name] = study
    print("\n" + "\n".join([*deviations(protocol, studies), f"Published: {protocol.source}."]))


if __name__ == "__main__":
    main()
