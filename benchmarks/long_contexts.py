"""What keeps the acceptance of heads in texts longer than the rows that they were trained on.

    PYTHONPATH=. python benchmarks/rematch.py --output rows-512 --train-only --positions 8192
    PYTHONPATH=. python benchmarks/long_contexts.py --output long --heads rows-512
    PYTHONPATH=. python benchmarks/long_contexts.py --output long --page-only

The target is the zoo's, which knows 2 048 positions, with YaRN of factor 4 (`--loss` prints its
loss by position, with YaRN and without). Measured are the zoo's drafters, trained on rows of up to
2 048 tokens (`--zoo` names some of them), and `rematch.py`'s in the folder --heads; as they are,
where they see a part of the text, and EAGLE-3 with other ropes. Every text is read up to the same
places, with more and more of what precedes them. An interrupted command goes on where it stopped.
Its last lines are the tables of the page, made from the files in --output: means over seeds, and
which parts of a text are told apart from all of it.
"""

import argparse
import multiprocessing
import re
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import rematch
import torch
import torch.nn.functional as F
from timing import DEVICE
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.utils import logging

from specdec import EagleDrafter, ModelDrafter, Recent, Sinks, SpeculativeGenerator, training, zoo
from specdec.drafters import Drafter, Visible
from specdec.lab.evaluation import Study, sweep
from specdec.lab.evaluation.intervals import Estimate, holm
from specdec.lab.show.table import Table
from specdec.lab.training.heads import with_layer
from specdec.lab.zoo import corpus
from specdec.targets import Target

K, NEW_TOKENS, POSITIONS = 4, 64, 8192
LENGTHS = (512, 1024, 2048, 4096, 8192)
"""Tokens of the texts, those that are written included."""
ZOO = {"EAGLE-3": "eagle3", "MTP": "mtp", "mask-token": "mask-token", "draft model": "model"}
KINDS = [kind for kind in rematch.CONTENDERS if kind != "Medusa"]
"""Those of `rematch.py` with keys and values."""
SEEN = {
    "": None,
    ", sees 4 + 508": Sinks(4) + Recent(508),
    ", sees 4 + 252": Sinks(4) + Recent(252),
    ", sees 512": Recent(512),
}
"""What drafters see of a text: all of it, or sinks and recent tokens."""


def ropes(trained: int) -> dict[str, dict]:
    """Ropes for as many positions as the target's of a head that was trained on fewer."""
    scaling = {"original_max_position_embeddings": trained, "factor": POSITIONS / trained}
    scaling |= {"rope_theta": 10000.0}
    return {name: scaling | {"rope_type": name} for name in ("yarn", "linear", "dynamic")}


def heldout_ids() -> Tensor:
    """The modules that nobody was trained on, end to end."""
    texts = map(corpus.read_source, corpus.heldout_files())
    documents = training.encode_texts(texts, zoo.load_tokenizer())
    return torch.cat([torch.from_numpy(ids.astype("int64")) for ids in documents])


@torch.inference_mode()
def say_loss() -> None:
    """Prints the target's nats per token by position, with YaRN and as it is."""
    windows = heldout_ids().to(DEVICE).unfold(0, POSITIONS + 1, POSITIONS)
    for name, positions in ("YaRN", POSITIONS), ("as it is", None):
        model = rematch.target_of(positions)
        nats = torch.stack(
            [
                F.cross_entropy(model(input_ids=w[None, :-1]).logits[0], w[1:], reduction="none")
                for w in windows
            ]
        ).mean(dim=0)
        parts = [f"{i}-{i + 511}: {nats[i : i + 512].mean():.2f}" for i in range(0, len(nats), 512)]
        print(f"target, {name}, nats by position: {', '.join(parts)}", flush=True)


def of_zoo(name: str, target: LlamaForCausalLM, visible: Visible | None = None) -> Drafter:
    """A drafter of the package; the draft model has as many positions as the target."""
    drafter = zoo.load_drafter(ZOO[name], target, num_draft_tokens=K, visible=visible)
    if name == "draft model":
        drafter.model.config.max_position_embeddings = POSITIONS
        drafter = ModelDrafter(drafter.model, K, visible=visible)
    return drafter.to(DEVICE)


def trained(job: rematch.Job, folder: Path, target: LlamaForCausalLM, visible=None) -> Drafter:
    """A drafter of `rematch.py`."""
    drafter = rematch.load(job, target, folder)
    if isinstance(drafter, ModelDrafter):
        return ModelDrafter(drafter.model, K, visible=visible)
    return type(drafter)(drafter.head, target, K, visible=visible)


def contenders(target: LlamaForCausalLM, options) -> Iterator[tuple[str, Drafter]]:
    """Drafters by name; a head of `rematch.py` is called by its kind and seed."""
    makers = {f"zoo: {name}": partial(of_zoo, name) for name in options.zoo}
    for kind, seed in product(KINDS, range(options.seeds if options.heads else 0)):
        makers[f"{kind}, {seed}"] = partial(trained, (kind, "soft_ce", seed), options.heads)
    for seen, visible in SEEN.items():
        for name, make in makers.items():
            yield name + seen, make(target, visible=visible)
    for name, make in makers.items():
        for rope, own in ropes(2048 if "zoo" in name else rematch.ROW_TOKENS).items():
            if "EAGLE-3" in name:
                head = with_layer(make(target).head, rope=own)
                yield f"{name}, {rope}", EagleDrafter(head, target, K)


def measure(length: int, options: argparse.Namespace) -> None:
    """One of the processes that measure the contenders after texts of one length."""
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    target = Target(rematch.target_of(POSITIONS))
    # Not captured: a graph for every contender and length would take longer than its steps. Nothing
    # is kept for later calls: all contenders together would fill the memory.
    ways = {
        name: SpeculativeGenerator(target, drafter, graphs=False, kept_bytes=0)
        for name, drafter in contenders(target.model, options)
    }
    ids = heldout_ids()
    ends = torch.linspace(POSITIONS - NEW_TOKENS, len(ids) - 1, options.prompts).long().tolist()
    prompts = [ids[end - (length - NEW_TOKENS) : end].tolist() for end in ends]
    sweep(
        target, prompts, drafters=ways, temperatures=options.temperatures, eos_token_id=[],
        max_new_tokens=NEW_TOKENS, batch_size=8, output=options.output / f"{length}",
    )  # fmt: skip


def page(output: Path, lengths: list[int], temperatures: list[float]) -> None:
    """Prints a table of each temperature, and what is told apart."""
    studies = {length: Study.load(output / f"{length}") for length in lengths}
    for temperature in temperatures:
        found: dict[str, dict[int, list[Estimate]]] = {}
        for length, study in studies.items():
            for cell, run in zip(study.cells, study.runs, strict=True):
                if cell["temperature"] == temperature:
                    kind = re.sub(r", \d(?=$|,)", "", cell["drafter"])
                    seeds = found.setdefault(kind, {}).setdefault(length, [])
                    seeds.append(run.estimates["acceptance_length"])
        rows = [
            [kind, *(mean_of(seeds[length]) if length in seeds else "" for length in lengths)]
            for kind, seeds in found.items()
        ]
        print(f"\nacceptance length, temperature {temperature:g}: means over seeds, of ends, too\n")
        print(Table(["head", *(f"{n} tokens" for n in lengths)], rows).markdown())
    print(told_apart(studies))


def mean_of(seeds: list[Estimate]) -> str:
    """The means of values and of ends of intervals."""
    value, low, high = (
        statistics.mean(getattr(each, end) for each in seeds) for end in ("value", "low", "high")
    )
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def told_apart(studies: dict[int, Study]) -> str:
    """Which drafters accept more or less where they see a part of a text, all pairs of one drafter
    judged together.
    """
    found = []
    for length, study in studies.items():
        names = {cell["drafter"] for cell in study.cells}
        for base, seen in product(sorted(names), [*SEEN][1:]):
            for test in (
                study.test({"drafter": base}, {"drafter": base + seen}).tests
                if base + seen in names
                else ()
            ):
                what = f"{base}{seen}, {length} tokens, T = {test.cell['temperature']:g}"
                found.append((test.p_value, test.difference.value, what))
    adjusted = holm([p for p, *_ in found])
    apart = [
        f"{gap:+.2f} {what}" for (_, gap, what), p in zip(found, adjusted, strict=True) if p <= 0.05
    ]
    header = f"\nA part of the text against all of it, {len(found)} pairs; told apart (Holm):"
    return "\n".join([header, *(apart or ["none"])])


def main() -> None:
    """As on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("long"))
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--heads", type=Path, metavar="FOLDER", help="of `rematch.py`")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--zoo", nargs="*", choices=[*ZOO], default=[*ZOO])
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--loss", action="store_true", help="the target's, by position, first")
    parser.add_argument("--page-only", action="store_true")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    if options.loss:
        say_loss()
    if not options.page_only:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.processes, spawn) as pool:
            jobs = [length for length in options.lengths for _ in range(options.processes)]
            for _ in pool.map(partial(measure, options=options), jobs):
                pass
    page(options.output, options.lengths, options.temperatures)


if __name__ == "__main__":
    main()
