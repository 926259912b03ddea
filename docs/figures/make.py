"""Makes the figures of the docs from `figures.toml` and the zoo: `python make.py [NAME ...]`. Needs
`pip install 'specdec-torch[plots]'`. White grounds look alike on light and dark pages.
"""

import json
import math
import pydoc_data.topics
import re
import sys
import tomllib
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME
from rich.text import Text

from specdec import (
    BlockSampler,
    Draft,
    LogitsFilter,
    Recent,
    SelfDrafter,
    Sinks,
    SpeculativeGenerator,
    Target,
    TopSlots,
    zoo,
)
from specdec.lab.evaluation import Study, plots, sweep
from specdec.lab.evaluation.sweep import read_study
from specdec.lab.training import (
    FollowTarget,
    NextToken,
    PackedStream,
    TrainingTimeTest,
    encode_texts,
)
from specdec.samplers import Noise

FOLDER = Path(__file__).parent
TARGET, TOKENIZER = zoo.load_target(), zoo.load_tokenizer()
KINDS = {"accepted": "#bfe8bf", "recovered": "#f6c1c1", "bonus": "#bcd4f6"}
BOXES = {**KINDS, "target": "#c9dcf5", "draft": "#f5dcc0", "plain": "#ececec"}
SERIES = ["#3b6fb6", "#d98c3f", "#999999"]


def diagram(*, boxes: list, arrows: list) -> None:
    """Boxes with arrows between them; a text without a colour has no box."""
    top = max(y for _, y, *_ in boxes)
    ax = plt.figure(figsize=(8.2, 0.9 + top)).add_axes((0, 0, 1, 1), frameon=False)
    ax.set(xlim=(-0.5, 10), ylim=(-0.4, top + 0.5), xticks=[], yticks=[])
    drawn = []
    for x, y, text, *colour in boxes:
        box = (
            {"boxstyle": "round,pad=0.4", "fc": BOXES[colour[0]], "ec": "#777"} if colour else None
        )
        drawn.append(ax.text(x, y, text, ha="center", va="center", bbox=box))
    for start, end in arrows:
        ends = {"patchA": drawn[start].get_bbox_patch(), "patchB": drawn[end].get_bbox_patch()}
        places = drawn[end].get_position(), drawn[start].get_position()
        ax.annotate("", *places, arrowprops={"arrowstyle": "->", "color": "#555", **ends})


def bars(*, panels: dict, xlabel: str, series: tuple = ("",), start: float = 0) -> None:
    """Horizontal bars, a number for each of the series."""
    figure = plt.figure(figsize=(4.7 * max(len(panels), 1.4), 2.6), layout="constrained")
    for index, (title, values) in enumerate(panels.items(), start=1):
        ax = figure.add_subplot(1, len(panels), index)
        frame = pd.DataFrame(values, index=series).iloc[::-1, ::-1].T
        look = {"title": title, "xlabel": xlabel, "width": 0.8, "legend": len(series) > 1}
        look |= {"xlim": (start, 1.15 * frame.max().max()), "color": SERIES[: len(series)][::-1]}
        for container in frame.plot.barh(ax=ax, **look).containers:
            ax.bar_label(container, padding=2, fmt="{:.3g}")


def study(*, file: str, x: str, of: list[str], where: dict) -> None:
    """What the study of a file shows, which runs first, or goes on; a panel for each number."""
    arguments = read_study(FOLDER.parent / file)
    found = sweep(**arguments, output=FOLDER.parents[1] / "build" / file, progress=True)
    kept = [i for i, cell in enumerate(found.cells) if where.items() <= cell.items()]
    found = Study([found.cells[i] for i in kept], [found.runs[i] for i in kept], found.timed)
    if x == "position":
        names = (cell["drafter"] for cell in found.cells)
        plots.acceptance_by_position(dict(zip(names, found.runs, strict=True)))
    elif len(of) == 1:
        found.plot(x, *of)
    else:
        _, axes = plt.subplots(1, len(of), figsize=(9, 3), layout="constrained")
        for ax, name in zip(axes, of, strict=True):
            found.plot(x, name, ax=ax)
        axes[0].get_legend().remove()


def coloured(*, prompts: list[str], options: dict) -> str:
    """The texts of a call, each token in the colour of its origin."""
    generator = SpeculativeGenerator(TARGET, zoo.load_drafter("eagle3", TARGET))
    inputs = TOKENIZER(prompts, return_tensors="pt", padding=True)
    result = generator.generate(**inputs, do_sample=True, tokenizer=TOKENIZER, **options)
    parts = []
    for row, prompt in enumerate(prompts):
        text = [(piece, f"black on {KINDS[kind]}") for piece, kind in result.pieces(row)]
        parts += [(prompt, "bold"), *text, "\n\n"]
    legend = [(f" {kind} ", f"black on {colour}") for kind, colour in KINDS.items()]
    emitted, steps = sum(result.stats.emitted), sum(result.stats.steps)
    console = Console(record=True, width=80, stderr=True)
    console.print(Text.assemble(*parts, *legend, f"  {emitted} tokens in {steps} target passes"))
    svg = console.export_svg(title="", theme=DEFAULT_TERMINAL_THEME, unique_id="text")
    return re.sub(r"@font-face {.*?}", "", svg, flags=re.DOTALL)  # a page asks no other host


def bets(*, file: str, names: list[str], way: str) -> None:
    """The logarithm of e-values over tokens, of runs of `benchmarks/certificates.py power`."""
    runs = {line["name"]: line for line in map(json.loads, (FOLDER / file).open(encoding="utf-8"))}
    _, ax = plt.subplots(figsize=(7, 3), layout="constrained")
    for name in names:
        curve = runs[name]["curves"][way]
        ax.plot(runs[name]["tokens"][: len(curve)], curve, label=name)
    ax.axhline(math.log(1000), color="#999999", linestyle=":", label="e = 1 000")
    ax.set(xlabel="tokens", ylabel="log e-value", xscale="log", ylim=(-2, 11))
    ax.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))


def hiding(*, seen: list[int], depths: list[int], tokens: int, options: dict) -> None:
    """Acceptance of the zoo's target where it drafts for itself, over how much of long texts it
    sees and over how many layers run; the study runs first, or goes on.
    """
    prompts = [TOKENIZER(p).input_ids[-tokens:] for p in zoo.heldout_prompts(8, num_lines=160)]
    prompts = [ids for ids in prompts if len(ids) == tokens]
    kinds = {
        "sinks and recent": {n: {"visible": Sinks(4) + Recent(n - 4)} for n in seen},
        "half of them by attention": {
            n: {"visible": Sinks(4) + TopSlots(n // 2) + Recent(n // 2 - 4)} for n in seen
        },
        "early exit": {n: {"layers": n} for n in depths},
    }
    target = Target(TARGET)
    drafters = {
        f"{kind}, {n}": SelfDrafter(target, 4, **own)
        for kind, of in kinds.items()
        for n, own in of.items()
    }
    output = FOLDER.parents[1] / "build" / "self-drafting"
    found = sweep(target, prompts, drafters=drafters, output=output, progress=True, **options)
    runs = {cell["drafter"]: run for cell, run in zip(found.cells, found.runs, strict=True)}
    _, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained", sharey=True)
    for kind, of in kinds.items():
        ax, means = axes[int(kind == "early exit")], []
        for n in of:
            means.append(runs[f"{kind}, {n}"].stats.acceptance_length)
            print(f"{kind}, {n}: {means[-1]:.2f} of {len(prompts)} texts")
        ax.plot(list(of), means, marker=".", label=kind)
    axes[0].set(
        xlabel=f"visible slots, texts of {tokens} tokens", xscale="log", ylabel="tokens per step"
    )
    axes[1].set(xlabel="layers of 16 that run")
    for ax in axes:
        ax.legend(fontsize=7)


def following(*, updates: int, rows: int, prompt: int, tokens: int, rate: float) -> None:
    """Tokens per step of rollouts of a policy that learns Python's manual, with EAGLE-3 as it is
    and as it follows; with the same draws, so that both runs have the same texts.
    """
    documents = encode_texts(pydoc_data.topics.topics.values(), TOKENIZER)
    texts, _, ax = [], *plt.subplots(figsize=(6, 3), layout="constrained")
    for name, colour in [("EAGLE-3 that follows", SERIES[0]), ("EAGLE-3 as it is", SERIES[1])]:
        policy, lengths = zoo.load_target(), []
        generator = SpeculativeGenerator(policy, zoo.load_drafter("eagle3", policy), "coupling")
        follow = FollowTarget(generator, TrainingTimeTest)
        learn, loss_of = torch.optim.AdamW(policy.parameters(), lr=rate), NextToken(policy)
        stream = PackedStream(documents, seed=0)
        for update, ids in enumerate(stream.batches([(rows, prompt + tokens)] * updates)):
            seeds = [update * rows + row for row in range(rows)]
            options = {"max_new_tokens": tokens, "do_sample": True, "seed": seeds}
            inputs = ids[:, :prompt], torch.ones(rows, prompt)
            result = generator.generate(*inputs, **options)
            texts.append(result.sequences)
            lengths.append(result.stats.acceptance_length)
            learn.zero_grad()
            loss_of(ids).backward()
            learn.step()
            if name.endswith("follows"):
                follow(result)
        means = pd.Series(lengths).rolling(10).mean()
        print(name, *(f"{mean:.3f}" for mean in means[9::10]), flush=True)
        ax.plot(means, color=colour, label=name)
    assert all(map(torch.equal, texts[:updates], texts[updates:]))
    ax.set(xlabel="updates of the policy", ylabel="tokens per step, mean of 10 rollouts")
    ax.legend(fontsize=7)


def certify(*, target: list[float], draft: list[float], rows: int, **look) -> None:
    """The first token of a lossless rule and of the guide's lossy one, by `rows` draws."""
    names, guide = {}, (FOLDER.parent / "own-rule.md").read_text(encoding="utf-8")
    (rule,) = (block for block in guide.split("```python\n") if "class LenientSampler" in block)
    exec(rule.split("print(certify")[0], names)
    p, q = torch.tensor(target), torch.tensor(draft)
    noise = Noise(list(range(rows))).at(torch.zeros(rows, dtype=torch.long), width=2)
    tokens = torch.multinomial(q, rows, True, generator=torch.Generator().manual_seed(0))
    call = (
        Draft(tokens[:, None], q.expand(rows, 1, -1)),
        p.log().expand(rows, 2, -1),
        LogitsFilter(rows),
    )
    rules = BlockSampler(), names["LenientSampler"](1.5)
    firsts = [rule(*call, noise).tokens[:, 0].bincount() / rows for rule in rules]
    shares = enumerate(torch.stack([*firsts, p], dim=1).tolist())
    values = {f"token {index}": each for index, each in shares}
    bars(panels={"": values}, **look)


def main() -> None:
    """Makes the figures that are named, or all; the same bytes from the same numbers."""
    kinds = tomllib.loads((FOLDER / "figures.toml").read_text(encoding="utf-8"))
    plt.rcParams |= kinds.pop("style")
    for kind, figures in kinds.items():
        for name in figures.keys() & (sys.argv[1:] or figures):
            path = FOLDER / f"{name}.{'png' if kind == 'study' else 'svg'}"
            if svg := globals()[kind](**figures[name]):
                path.write_text(svg, encoding="utf-8")
            else:
                plt.savefig(path, bbox_inches="tight", dpi=100, metadata={"Date": None})


if __name__ == "__main__":
    main()
