"""Every kind of drafter, trained for one target on one text with one budget by several losses, and
measured in one loop.

    PYTHONPATH=. python benchmarks/rematch.py --output rematch
    PYTHONPATH=. python benchmarks/rematch.py --output rematch --page-only
    PYTHONPATH=. python benchmarks/rematch.py --output rematch --losses soft_ce lk_hybrid \\
        --steps 1000 --tokens-per-step 16384 --processes 14      # on a GPU

The target is the zoo's (`--positions 8192`: with YaRN, for `long_contexts.py`), the text the
standard library's sources. Each head sees the same tokens in the same order. Heads are trained side
by side, so what a step of training costs is measured alone, afterwards, and likewise ms per token.
An interrupted command goes on where it stopped. The last lines that it prints are the page's tables
and tests, made from the files in --output.
"""

import argparse
import json
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from timing import DEVICE, about, timed
from transformers import LlamaConfig, LlamaForCausalLM

from specdec import EagleDrafter, MaskTokenDrafter, ModelDrafter, MTPDrafter, training, zoo
from specdec.drafters.mask_token.correction import MarkovConfig
from specdec.drafters.medusa import MedusaDrafter
from specdec.lab.evaluation import Study, sweep
from specdec.lab.evaluation.intervals import holm
from specdec.lab.show.table import Table
from specdec.lab.training import blocks, eagle, losses, mask_token, medusa, mtp
from specdec.lab.training.divergences import find_loss
from specdec.lab.zoo import WEIGHTS_DIR, corpus

K = 4
TEXTS = {"within": 384, "beyond": 1024}
"""Tokens of the prompts: shorter than rows of training, and twice as long."""
ROW_TOKENS, NUM_NEW = 512, 64
TEMPERATURES = 0.0, 1.0
Job = tuple[str, str, int]
"""A kind of head, a loss and a seed."""


def target_of(positions: int | None = None) -> LlamaForCausalLM:
    """The zoo's target; of as many positions, by YaRN, as are asked for."""
    if positions is None:
        return zoo.load_target().to(DEVICE)
    folder = WEIGHTS_DIR / "target"
    config = LlamaConfig.from_pretrained(folder)
    known, config.max_position_embeddings = config.max_position_embeddings, positions
    scaling = {"factor": positions / known, "original_max_position_embeddings": known}
    config.rope_parameters = config.rope_parameters | {"rope_type": "yarn"} | scaling
    model = LlamaForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    return model.eval().to(DEVICE)


def draft_model(target, seed):
    """One layer of the target's width, from scratch."""
    config = type(target.config).from_dict({**target.config.to_dict(), "num_hidden_layers": 1})
    torch.manual_seed(seed)
    return type(target)(config)


def heads(make, drafter, objective):
    return lambda target, seed: drafter(make(target, seed), target, K), objective


CONTENDERS = {
    "EAGLE-1": heads(
        lambda m, s: eagle.new_head(m, "eagle1", seed=s), EagleDrafter, eagle.FeatureAndToken
    ),
    "EAGLE-3": heads(
        lambda m, s: eagle.new_head(m, "eagle3", seed=s), EagleDrafter, eagle.TrainingTimeTest
    ),
    "P-EAGLE": heads(
        lambda m, s: mask_token.new_head(m, seed=s), MaskTokenDrafter, mask_token.MaskRollouts
    ),
    "P-EAGLE, Markov": heads(
        lambda m, s: mask_token.new_head(m, correction=MarkovConfig(64), seed=s),
        MaskTokenDrafter,
        partial(mask_token.MaskRollouts, rolled_out=True),
    ),
    "DFlash": heads(
        lambda m, s: mask_token.new_head(m, block=("same-position", K + 1), seed=s),
        MaskTokenDrafter,
        blocks.BlockRollouts,
    ),
    "DSpark": heads(
        lambda m, s: mask_token.new_head(
            m, block=("next-token", K), correction=MarkovConfig(64), seed=s
        ),
        MaskTokenDrafter,
        partial(blocks.BlockRollouts, rolled_out=True),
    ),
    "MTP": heads(lambda m, s: mtp.new_head(m, K, seed=s), MTPDrafter, mtp.MultiTokenPrediction),
    "Medusa": heads(
        lambda m, s: medusa.new_head(m, K, seed=s), MedusaDrafter, medusa.EveryHead
    ),
    "draft LM": (
        lambda target, seed: ModelDrafter(draft_model(target, seed), K),
        lambda drafter, target, loss: losses.Distillation(drafter.model, target, loss),
    ),
}  # fmt: skip
"""(target, seed) -> drafter, and (drafter, target, loss=) -> objective."""


def title(job: Job) -> str:
    """The name of a drafter in studies."""
    return "{}, {}, {}".format(*job)


def stem(job: Job, folder: Path) -> Path:
    """Where a head and what its training took are kept."""
    return folder / title(job).replace(", ", "-").replace(" ", "-").replace(":", "=")


def made(job: Job, target: torch.nn.Module) -> tuple:
    """A new drafter, the module that is trained, and the objective."""
    name, loss, seed = job
    make, objective = CONTENDERS[name]
    drafter = make(target, seed)
    own = drafter.model if isinstance(drafter, ModelDrafter) else drafter.head
    own.to(DEVICE)
    return drafter, own, objective(drafter, target, loss=find_loss(loss))


def train(job: Job, documents: list, options: argparse.Namespace) -> str:
    """Trains one head, and writes its weights and card, the card last."""
    torch.set_num_threads(1)
    _, own, objective = made(job, target_of(options.positions))
    path = stem(job, options.output)
    sizes = {
        "tokens_per_step": options.tokens_per_step,
        "row_lengths": ((1.0, ROW_TOKENS),),
    }
    arguments = training.ObjectiveArguments(
        str(path), max_steps=options.steps, use_cpu=DEVICE == "cpu", bf16=DEVICE == "cuda",
        seed=job[2], report_to=[], save_strategy="no", disable_tqdm=True, **sizes,
    )  # fmt: skip
    stream = training.PackedStream(documents, seed=0)
    training.ObjectiveTrainer(objective, arguments, stream).train()
    save_model(own, f"{path}.safetensors")
    parameters = sum(p.numel() for p in own.parameters() if p.requires_grad)
    card = {"parameters": parameters, "tokens": options.steps * options.tokens_per_step}
    Path(f"{path}.json").write_text(json.dumps(card))
    return title(job)


def load(job: Job, target: torch.nn.Module, folder: Path):
    """A trained drafter."""
    drafter, own, _ = made(job, target)
    load_model(own, f"{stem(job, folder)}.safetensors")
    own.eval()
    return drafter


def prompts_of(length: int, options: argparse.Namespace) -> list[list[int]]:
    """Pieces of held-out files."""
    tokenizer = zoo.load_tokenizer()
    texts = map(corpus.read_source, corpus.heldout_files())
    whole = [tokenizer(text, verbose=False).input_ids for text in texts]
    starts = [ids[i : i + length] for ids in whole for i in range(0, len(ids), 2 * length)]
    return [ids for ids in starts if len(ids) == length][: options.prompts]


def measure(place: str, jobs: list[Job], options: argparse.Namespace, **timing) -> str:
    """A study of drafters after prompts of one length."""
    torch.set_num_threads(1)
    target = target_of(options.positions)
    drafters = {"none": "none"} | {title(job): load(job, target, options.output) for job in jobs}
    prompts = prompts_of(TEXTS.get(place, TEXTS["within"]), options)
    sweep(
        target, prompts, drafters=drafters, temperatures=TEMPERATURES, max_new_tokens=NUM_NEW,
        output=options.output / place, eos_token_id=[], **timing,
    )  # fmt: skip
    return place


def step_ms(name: str, options: argparse.Namespace) -> float:
    """Milliseconds of an objective's forward and backward pass, alone on the device."""
    target = target_of(options.positions)
    _, _, objective = made((name, "soft_ce", 0), target)
    rows = max(1, options.tokens_per_step // ROW_TOKENS)
    ids = torch.randint(0, target.config.vocab_size, (rows, ROW_TOKENS + 1)).to(DEVICE)

    def run() -> None:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
            loss = objective(ids)
        loss.backward()

    return statistics.median(timed(run)[0] for _ in range(9 if DEVICE == "cuda" else 3))


def page(options: argparse.Namespace) -> str:
    """The tables and what is best, from the files."""
    steps = json.loads((options.output / "steps.json").read_text())
    cards = {p.stem: json.loads(p.read_text()) for p in options.output.glob("*-?.json")}
    kinds = [name for name in CONTENDERS if name in steps]
    lines = [steps["about"]]
    for place, temperature in product(TEXTS, TEMPERATURES):
        study, rows = Study.load(options.output / place), []
        runs = {
            cell["drafter"]: run.estimates["acceptance_length"]
            for cell, run in zip(study.cells, study.runs, strict=True)
            if cell["temperature"] == temperature
        }
        for name in kinds:
            seeds = [[(name, loss, s) for s in range(options.seeds)] for loss in options.losses]
            means = [
                statistics.mean(runs[title(job)].value for job in jobs if title(job) in runs)
                for jobs in seeds
            ]
            rows.append([name, *(f"{mean:.2f}" for mean in means)])
        lines.append(f"Acceptance length, prompts of {TEXTS[place]} tokens, T = {temperature:g}")
        lines.append(Table(["head", *options.losses], rows).markdown())
        best = study.best(of="acceptance_length", temperature=temperature)
        kept = [cell["drafter"] for cell in best.cells]
        half = statistics.mean((e.high - e.low) / 2 for e in runs.values())
        lines.append(f"An interval is {half:.2f} to either side. Best, and not told apart: {kept}")
    lines += [losses_told_apart(loss, kinds, options) for loss in options.losses[1:]]
    times, rows = Study.load(options.output / "times"), []
    for name in ["none", *kinds]:
        job = name, options.losses[0], 0
        found = [
            format(run.estimates["ms_per_token"].value, ".2f")
            for cell, run in zip(times.cells, times.runs, strict=True)
            if cell["drafter"] == (title(job) if name in steps else name)
        ]
        about_head = ["", ""]
        if name in steps:
            parameters = cards[stem(job, options.output).name]["parameters"]
            about_head = [f"{parameters / 1e6:.2f} M", f"{steps[name]:.0f}"]
        rows.append([name, *about_head, *found])
    header = ["head", "parameters", "ms of a training step", "ms per token, T = 0", "T = 1"]
    lines.append(Table(header, rows).markdown())
    return "\n\n".join(lines)


def losses_told_apart(loss: str, kinds: list[str], options: argparse.Namespace) -> str:
    """Whether heads by another loss accept more or less than those by the first one, all pairs of
    the same kind, seed, prompts and temperature judged together.
    """
    first, found = options.losses[0], []
    for place, name, seed in product(TEXTS, kinds, range(options.seeds)):
        both = [{"drafter": title((name, each, seed))} for each in (first, loss)]
        for test in Study.load(options.output / place).test(*both).tests:
            about_pair = f"{name}, seed {seed}, {place}, T = {test.cell['temperature']:g}"
            found.append((test.p_value, test.difference.value, about_pair))
    adjusted = holm([p for p, *_ in found])
    apart = [
        f"{pair} ({gap:+.2f})"
        for (_, gap, pair), p in zip(found, adjusted, strict=True)
        if p <= 0.05
    ]
    less = sum(gap < 0 for _, gap, _ in found)
    return (
        f"{loss} against {first}: less in {less} of {len(found)} pairs; told apart, of all "
        f"together (Holm): {', '.join(apart) or 'none'}"
    )


def draw(options: argparse.Namespace) -> None:
    """The picture: each kind by its first loss, a mark for each seed, with its interval."""
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "specdec", "font.size": 9}
    figure, panels = plt.subplots(1, 2, figsize=(8.2, 3.2), layout="constrained", sharey=True)
    kinds = options.kinds[::-1]
    for place, colour in zip(TEXTS, ("#3b6fb6", "#d98c3f"), strict=True):
        study = Study.load(options.output / place)
        for cell, run in zip(study.cells, study.runs, strict=True):
            job = cell["drafter"].rsplit(", ", 2)
            if job[0] not in kinds or job[1] != options.losses[0]:
                continue
            found = run.estimates["acceptance_length"]
            shift = 0.2 * (place == "within") - 0.1 + 0.06 * int(job[2])
            ends = [[found.value - found.low], [found.high - found.value]]
            panels[TEMPERATURES.index(cell["temperature"])].errorbar(
                found.value, kinds.index(job[0]) + shift, xerr=ends, fmt=".", color=colour,
                label=f"{TEXTS[place]} tokens",
            )  # fmt: skip
    for ax, temperature in zip(panels, TEMPERATURES, strict=True):
        ax.set(title=f"T = {temperature:g}", xlabel="acceptance length")
        ax.set_yticks(range(len(kinds)), kinds)
    handles, labels = panels[1].get_legend_handles_labels()
    one_of_each = dict(zip(labels, handles, strict=True))
    panels[1].legend(one_of_each.values(), one_of_each.keys(), frameon=False, loc="lower right")
    figure.savefig(options.output / "rematch.svg")


def main() -> None:
    """As on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("rematch"))
    parser.add_argument("--kinds", nargs="+", default=list(CONTENDERS), choices=list(CONTENDERS))
    parser.add_argument("--losses", nargs="+", default=["soft_ce"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--tokens-per-step", type=int, default=1024)
    parser.add_argument("--positions", type=int)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--page-only", action="store_true")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    jobs = list(product(options.kinds, options.losses, range(options.seeds)))
    if not options.page_only:
        run(jobs, options)
    if not options.train_only:
        text = page(options)
        (options.output / "rematch.md").write_text(text + "\n")
        print(text)
        draw(options)


def run(jobs: list[Job], options: argparse.Namespace) -> None:
    """Trains what is not trained yet, and measures all."""
    tokenizer = zoo.load_tokenizer()
    texts = map(corpus.read_source, corpus.library_files())
    documents = training.encode_texts(texts, tokenizer)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, spawn) as pool:
        new = [job for job in jobs if not Path(f"{stem(job, options.output)}.json").exists()]
        new.sort(key=lambda job: job[2])  # a whole seed first
        for done in pool.map(partial(train, documents=documents, options=options), new):
            print(done, flush=True)
        if options.train_only:
            return
        batch = {"batch_size": options.prompts}
        for place in pool.map(partial(measure, jobs=jobs, options=options, **batch), TEXTS):
            print(place, flush=True)
    alone = [(name, options.losses[0], 0) for name in options.kinds]
    measure("times", alone, options, timed=True, batch_size=1, limit=8)
    steps = {"about": about()} | {name: step_ms(name, options) for name in options.kinds}
    (options.output / "steps.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    main()
