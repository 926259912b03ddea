"""Ideas of the field side by side, in one loop: tokens per step on the zoo's target, and what a
certificate says of each: of its rule, where that is its own, and of its text.

    PYTHONPATH=. python examples/ideas.py                     # the table of docs/ideas.md
    PYTHONPATH=. python examples/ideas.py gls fuzzy --steps 50

Heads are trained on the way, for `--steps` steps of 512 tokens on one CPU core.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from examples import fuzzy, list_coupling
from specdec import (
    Drafter,
    EagleDrafter,
    LookaheadDrafter,
    MedusaDrafter,
    ModelDrafter,
    Recent,
    Sampler,
    SelfDrafter,
    Sinks,
    SpeculativeGenerator,
    SuffixDrafter,
    Tree,
    certify,
    evaluate,
    zoo,
)
from specdec.lab.show.table import Table
from specdec.lab.training import (
    EveryHead,
    ObjectiveArguments,
    ObjectiveTrainer,
    PackedStream,
    encode_texts,
)
from specdec.lab.training.medusa import new_head
from specdec.lab.zoo.corpus import library_files, read_source

GUIDES = Path(__file__).parents[1] / "docs"
CHOICES = ((0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0), (0, 2), (3,), (0, 0, 1), (2, 0))
CHOICES += ((0, 0, 0, 0), (4,), (0, 1, 0), (1, 1))
"""Of Medusa: the most likely ranks of its heads on the zoo, 15 nodes."""
Parts = tuple[Drafter, Sampler | str]


def of_page(heading: str) -> ModuleType:
    """The first snippet of a section of the guides, as a module."""
    module = sys.modules[heading] = ModuleType(heading)  # dataclasses look for it there
    exec(compile(snippet(heading), heading, "exec"), vars(module))
    return module


def snippet(heading: str) -> str:
    """Its code."""
    section = (GUIDES / SECTIONS[heading]).read_text(encoding="utf-8").split(f"{heading}\n")[1]
    return re.search(r"```python\n(.*?)\n```", section, flags=re.DOTALL)[1]


def texts(tokenizer: Any, count: int) -> list:
    """Ids of some files of Python's library, none of which the prompts are of."""
    return encode_texts([read_source(path) for path in library_files()[:count]], tokenizer)


def trained(objective: torch.nn.Module, steps: int) -> torch.nn.Module:
    """After so many steps."""
    stream = PackedStream(texts(zoo.load_tokenizer(), 250), seed=0)
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"max_steps": steps, "tokens_per_step": 512, "row_lengths": ((1.0, 128),)}
        silent = {"use_cpu": True, "disable_tqdm": True, "report_to": [], "save_strategy": "no"}
        arguments = ObjectiveArguments(folder, logging_strategy="no", **sizes, **silent)
        ObjectiveTrainer(objective, arguments, stream).train()
    return objective


def medusa(target: PreTrainedModel, steps: int) -> Parts:
    objective = trained(EveryHead(MedusaDrafter(new_head(target), target), target), steps)
    return MedusaDrafter(objective.drafter.head, target, tree=Tree(ranks=CHOICES)), "auto"


def hydra(target: PreTrainedModel, steps: int) -> Parts:
    return trained(of_page(HEAD).loss(target, 4), steps).drafter, "auto"


def lookahead(target: PreTrainedModel, steps: int) -> Parts:
    return LookaheadDrafter(window=5, ngram=4, guesses=5), "auto"


def gls(target: PreTrainedModel, steps: int) -> Parts:
    model = zoo.load_drafter("model", target).model
    return ModelDrafter(model, tree="3x4 paths"), list_coupling.ListSampler()


def fuzzy_rule(target: PreTrainedModel, steps: int) -> Parts:
    return zoo.load_drafter("eagle3", target), fuzzy.FuzzySampler(0.2)


def adaptive(target: PreTrainedModel, steps: int) -> Parts:
    inner = zoo.load_drafter("eagle3", target)
    return of_page(WRAPPED).AdaptiveDrafter(inner), "auto"


def eagle2(target: PreTrainedModel, steps: int) -> Parts:
    head = zoo.load_drafter("eagle3", target).head
    return EagleDrafter(head, target, tree=Tree(nodes=16, depth=4)), "auto"


def self_drafting(target: PreTrainedModel, steps: int) -> Parts:
    return SelfDrafter(target, 4, visible=Sinks(4) + Recent(64)), "auto"


def rest(target: PreTrainedModel, steps: int) -> Parts:
    drafter = SuffixDrafter(4, max_tokens=2**17)
    stored = texts(zoo.load_tokenizer(), 60)
    drafter.remember([torch.from_numpy(ids.astype("int64")) for ids in stored])
    return drafter, "auto"


class Idea(NamedTuple):
    """What it is, its paper, where its code is, the code, and (target, steps) -> its parts."""

    what: str
    paper: str
    where: str
    code: Any
    make: Callable[[PreTrainedModel, int], Parts]


HEAD, WRAPPED = "# A head of your own", "## Around another drafter"
SECTIONS = {HEAD: "own-head.md", WRAPPED: "own-drafter.md"}
"""The pages of the sections whose first snippet is an idea."""
IDEAS = {
    "medusa": Idea(
        "Medusa-1, tree of ranks", "2401.10774", "`MedusaDrafter`", MedusaDrafter, medusa
    ),
    "hydra": Idea("Hydra", "2402.05109", "[own head](own-head.md)", HEAD, hydra),
    "lookahead": Idea(
        "lookahead decoding", "2402.02057", "`LookaheadDrafter`", LookaheadDrafter, lookahead
    ),
    "gls": Idea(
        "Gumbel-max list coupling, 3 paths",
        "2506.05632",
        "`examples/list_coupling.py`",
        list_coupling.ListSampler,
        gls,
    ),
    "fuzzy": Idea(
        "fuzzy acceptance, T = 0.2", "2502.20704", "`examples/fuzzy.py`", fuzzy, fuzzy_rule
    ),
    "adaptive": Idea(
        "a bias by rejected tokens",
        "",
        "[own drafter](own-drafter.md#around-another-drafter)",
        WRAPPED,
        adaptive,
    ),
    "eagle2": Idea("EAGLE-2's tree, 16 nodes", "2406.16858", "`Tree(16, 4)`", None, eagle2),
    "self": Idea(
        "the target over 68 KV cache slots", "2404.11912", "`SelfDrafter`", None, self_drafting
    ),
    "rest": Idea("REST, a datastore of 60 files", "2311.08252", "`SuffixDrafter`", None, rest),
}
"""By the names of the command. Those without code of their own are arguments of a part."""


def num_lines(code: Any) -> str:
    """Lines of code, without blank ones: of a section of the page, or of the file of an object."""
    if code is None:
        return "-"
    text = snippet(code) if isinstance(code, str) else inspect.getsource(inspect.getmodule(code))
    return str(sum(bool(line.strip()) for line in text.splitlines()))


def row(idea: Idea, steps: int, num_prompts: int, samples: int) -> list[str]:
    """One line of the table."""
    target, tokenizer = zoo.load_target(), zoo.load_tokenizer()
    drafter, sampler = idea.make(target, steps)
    generator = SpeculativeGenerator(target, drafter, sampler)
    prompts = [tokenizer(text).input_ids for text in zoo.heldout_prompts(num_prompts)]
    found = []
    for temperature in (0.0, 1.0):
        options = {"temperature": temperature, "max_new_tokens": 64, "tokenizer": tokenizer}
        stats = evaluate(generator, prompts, **options).estimates["acceptance_length"]
        found.append(f"{stats.value:.2f} [{stats.low:.2f}, {stats.high:.2f}]")
    reports = [certify(generator, prompts[:2], num_samples=samples, max_new_tokens=48)]
    if sampler != "auto":  # a rule of its own
        reports.insert(0, certify(generator.sampler))
    verdicts = ", ".join(str(report).split()[0] for report in reports)
    paper = f"[{idea.paper}](https://arxiv.org/abs/{idea.paper})" if idea.paper else ""
    return [idea.what, paper, idea.where, num_lines(idea.code), *found, verdicts]


def main() -> None:
    """As on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help=", ".join(IDEAS))
    parser.add_argument("--steps", type=int, default=600, help="of training; default: 600")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8, help="of the certificate")
    args = parser.parse_args()
    if unknown := {*args.names} - IDEAS.keys():
        parser.error(
            f"no idea is called {', '.join(sorted(unknown))}; there are {', '.join(IDEAS)}"
        )
    torch.set_num_threads(1)
    header = ["idea", "paper", "code", "lines", "tokens per step, T = 0", "T = 1", "certificate"]
    rows = []
    for name in args.names or IDEAS:
        start = time.perf_counter()
        rows.append(row(IDEAS[name], args.steps, args.prompts, args.samples))
        print(
            f"{name}: {' | '.join(rows[-1][4:])}, {time.perf_counter() - start:.0f} s", flush=True
        )
    print(Table(header, rows).markdown())


if __name__ == "__main__":
    main()
