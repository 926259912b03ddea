"""Heads that were trained on short rows, and what keeps their acceptance in texts of eight times
that length.

    PYTHONPATH=. python benchmarks/long_contexts.py --output long
    PYTHONPATH=. python benchmarks/long_contexts.py --output long --page-only

The target is the zoo's, which knows 2 048 positions, with YaRN of factor 2 (`--loss` prints its
loss by position, with YaRN and without). The zoo's drafters, trained on rows of up to 2 048 tokens,
are measured as they are and where they see a part of the text (`--zoo` names some of them), the
EAGLE-3 head with another rope besides. Further heads are trained on the standard library in rows of
512 tokens (one in rows of 4 096), all from the same weights; the plain one is measured as it is,
with other ropes, and where it sees a part of the text, the others as they were trained.
`--heads` without a name trains none. A head of `rematch.py` is a plain one: its
`EAGLE-3-soft_ce-0.safetensors` and `.json` as `plain.safetensors` and `plain.json` in --output.
Every text is read up to the same places, with more and more of what precedes them. An interrupted
command goes on where it stopped. Its last lines are the tables of the page, made from the files in
--output.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from specdec import (
    EagleDrafter,
    ModelDrafter,
    Recent,
    Sinks,
    SpeculativeGenerator,
    training,
    zoo,
)
from specdec.drafters import Drafter, Visible
from specdec.lab.evaluation import Study, sweep
from specdec.lab.training import TrainingTimeTest, new_head
from specdec.lab.training.heads import with_layer
from specdec.lab.zoo import WEIGHTS_DIR, corpus
from specdec.targets import Target

K, NEW_TOKENS, TRAINED = 4, 64, 512
LENGTHS = (512, 1024, 2048, 4096)
"""Tokens of the texts, those that are written included."""
FACTOR = LENGTHS[-1] / TRAINED
SCALED = {"original_max_position_embeddings": TRAINED, "factor": FACTOR, "rope_theta": 10000.0}
ZOO_LENGTH = {"original_max_position_embeddings": 2048}
WINDOW = 256
PLAIN = "plain"
HEADS = {
    PLAIN: {},
    f"window of {WINDOW}": {"window": WINDOW},
    f"rows of {LENGTHS[-1]}": {"row_tokens": LENGTHS[-1]},
}
"""How heads are trained."""
CHANGED = {
    "YaRN": {"rope": SCALED | {"rope_type": "yarn"}},
    "linear": {"rope": SCALED | {"rope_type": "linear"}},
    "NTK (dynamic)": {"rope": SCALED | {"rope_type": "dynamic"}},
}
"""What is changed in the layer of the plain head after its training."""
ZOO = {"EAGLE-3": "eagle3", "MTP": "mtp", "mask-token": "mask-token", "draft model": "model"}
OF_ZOO = {"YaRN": {"rope": SCALED | {"rope_type": "yarn", "factor": 2.0, **ZOO_LENGTH}}}
"""The same of the zoo's EAGLE-3 head, which was trained on rows of up to 2 048 tokens."""
SEEN = {
    "512": Recent(512),
    "4 + 508": Sinks(4) + Recent(508),
    "4 + 252": Sinks(4) + Recent(252),
}
"""Sinks and recent tokens that a drafter sees."""
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def long_target() -> LlamaForCausalLM:
    """The zoo's, of 4 096 positions."""
    folder = WEIGHTS_DIR / "target"
    config = LlamaConfig.from_pretrained(folder)
    known, config.max_position_embeddings = config.max_position_embeddings, LENGTHS[-1]
    scaling = {"factor": LENGTHS[-1] / known, "original_max_position_embeddings": known}
    config.rope_parameters = config.rope_parameters | {"rope_type": "yarn"} | scaling
    model = LlamaForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    return model.eval().to(DEVICE)


def heldout_ids() -> Tensor:
    """The modules that nobody was trained on, end to end."""
    texts = map(corpus.read_source, corpus.heldout_files())
    documents = training.encode_texts(texts, zoo.load_tokenizer())
    return torch.cat([torch.from_numpy(ids.astype("int64")) for ids in documents])


@torch.inference_mode()
def say_loss(stride: int = 4096) -> None:
    """Prints the target's nats per token by position, with YaRN and as it is."""
    ids, models = heldout_ids().to(DEVICE), {"YaRN 2": long_target()}
    models["as it is"] = zoo.load_target().to(DEVICE)
    windows = ids.unfold(0, LENGTHS[-1] + 1, stride)
    for name, model in models.items():
        nats = torch.stack(
            [
                F.cross_entropy(model(input_ids=w[None, :-1]).logits[0], w[1:], reduction="none")
                for w in windows
            ]
        ).mean(dim=0)
        parts = [f"{i}-{i + 511}: {nats[i : i + 512].mean():.2f}" for i in range(0, len(nats), 512)]
        print(f"target, {name}, nats by position: {', '.join(parts)}", flush=True)


def trained(name: str, options) -> EagleDrafter:
    """The drafter of a contender, from its file where it has one."""
    target, how = long_target(), dict(HEADS[name])
    row_tokens = how.pop("row_tokens", TRAINED)
    head = new_head(target, "eagle3", seed=0, **how).to(DEVICE)
    drafter = EagleDrafter(head, target, K)
    stem = options.output / name.replace(" ", "-")
    weights, card = stem.with_suffix(".safetensors"), stem.with_suffix(".json")
    if not card.exists():
        texts = map(corpus.read_source, corpus.library_files())
        stream = training.PackedStream(training.encode_texts(texts, zoo.load_tokenizer()), seed=0)
        sizes = {"tokens_per_step": options.tokens_per_step, "row_lengths": ((1.0, row_tokens),)}
        arguments = training.ObjectiveArguments(
            str(stem), max_steps=options.steps, use_cpu=DEVICE == "cpu", seed=0, report_to=[],
            save_strategy="no", disable_tqdm=True, bf16=DEVICE == "cuda", **sizes,
        )  # fmt: skip
        objective = TrainingTimeTest(drafter, target)
        clock = time.process_time if DEVICE == "cpu" else time.perf_counter
        started_s = clock()
        training.ObjectiveTrainer(objective, arguments, stream).train()
        tokens = options.steps * options.tokens_per_step
        save_model(head, str(weights))
        card.write_text(json.dumps({"seconds": clock() - started_s, "tokens": tokens}))
    load_model(head, str(weights))
    print(f"{name}: {card.read_text()}", flush=True)
    return drafter.eval()


def of_zoo(name: str, target: LlamaForCausalLM, visible: Visible | None = None) -> Drafter:
    """A drafter of the package; the draft model has as many positions as the target."""
    drafter = zoo.load_drafter(ZOO[name], target, num_draft_tokens=K, visible=visible)
    if name == "draft model":
        drafter.model.config.max_position_embeddings = LENGTHS[-1]
        drafter = ModelDrafter(drafter.model, K, visible=visible)
    return drafter


def contenders(target: LlamaForCausalLM, options) -> dict[str, Drafter]:
    """Drafters by name."""
    found = {name: trained(name, options) for name in options.heads}
    plain = found.get(PLAIN)
    for name in options.zoo:
        found |= {f"{name}": of_zoo(name, target)}
        found |= {f"{name}, sees {seen}": of_zoo(name, target, SEEN[seen]) for seen in SEEN}
    if plain is not None:
        found |= {
            f"{PLAIN}, sees {s}": EagleDrafter(plain.head, target, K, visible=SEEN[s]) for s in SEEN
        }
    for base, changes in (("EAGLE-3", OF_ZOO), (PLAIN, CHANGED)):
        for name, own in changes.items() if base in found else ():
            head = with_layer(found[base].head, **own)
            found[f"{base}, {name}"] = EagleDrafter(head, target, K)
    return found


def page(output: Path, temperatures: list[float]) -> None:
    """Prints a table of each temperature."""
    for temperature in temperatures:
        cells = {}
        for length in LENGTHS:
            study = Study.load(output / f"{length}")
            for cell, run in zip(study.cells, study.runs, strict=True):
                if cell["temperature"] == temperature:
                    found = run.estimates["acceptance_length"]
                    cells.setdefault(cell["drafter"], []).append(format(found, ".2f"))
        print(f"\nacceptance length, temperature {temperature:g}\n")
        print(f"| head | {' | '.join(f'{n} tokens' for n in LENGTHS)} |")
        print(f"|---|{'---:|' * len(LENGTHS)}")
        for name, row in cells.items():
            print(f"| {name} | {' | '.join(row)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("long"))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--heads", nargs="*", metavar="HEAD", default=[*HEADS])
    parser.add_argument("--zoo", nargs="*", choices=[*ZOO], default=[*ZOO])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--loss", action="store_true", help="the target's, by position, first")
    parser.add_argument("--page-only", action="store_true")
    options = parser.parse_args()
    if unknown := {*options.heads} - {*HEADS}:
        parser.error(f"unknown heads {sorted(unknown)}, expected some of {[*HEADS]}")
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    options.output.mkdir(parents=True, exist_ok=True)
    if not options.page_only:
        if options.loss:
            say_loss()
        target = Target(long_target())
        drafters = contenders(target.model, options)
        # Not captured: a graph for every contender and length would take longer than its steps.
        ways = {n: SpeculativeGenerator(target, d, graphs=False) for n, d in drafters.items()}
        ids, longest = heldout_ids(), LENGTHS[-1] - NEW_TOKENS
        ends = torch.linspace(longest, len(ids) - 1, options.prompts).long().tolist()
        for length in LENGTHS:
            prompts = [ids[end - (length - NEW_TOKENS) : end].tolist() for end in ends]
            sweep(
                target, prompts, drafters=ways, temperatures=options.temperatures, eos_token_id=[],
                max_new_tokens=NEW_TOKENS, batch_size=8, output=options.output / f"{length}",
            )  # fmt: skip
            print(f"{length} tokens: measured", flush=True)
    page(options.output, options.temperatures)


if __name__ == "__main__":
    main()
