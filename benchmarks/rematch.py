"""Every kind of drafter, trained for one target on one text with one budget, measured in one loop.

    PYTHONPATH=. python benchmarks/rematch.py --output rematch
    PYTHONPATH=. python benchmarks/rematch.py --output rematch --page-only

The target is the zoo's, the text the standard library's sources. Each head sees the same tokens in
the same order; its seconds are those of its own process (one thread), which other programs do not
lengthen. An interrupted command goes on where it stopped. The last lines that it prints are the
page's table and tests, made from the files in --output; beside them lies the picture.
"""

import argparse
import json
import time
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model

from specdec import EagleDrafter, MaskTokenDrafter, ModelDrafter, MTPDrafter, training, zoo
from specdec.drafters.mask_token.correction import MarkovConfig
from specdec.drafters.medusa import MedusaDrafter
from specdec.evaluation import Study, sweep
from specdec.training import blocks, eagle, losses, mask_token, medusa, mtp
from specdec.zoo import corpus

K = 4
TEXTS = {"within": 384, "beyond": 1024}
"""Tokens of the prompts: shorter than rows of training, and twice as long."""
ROW_TOKENS = 512


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
        lambda drafter, target: mask_token.MaskRollouts(drafter, target, rolled_out=True),
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
        lambda drafter, target: blocks.BlockRollouts(drafter, target, rolled_out=True),
    ),
    "MTP": heads(lambda m, s: mtp.new_head(m, K, seed=s), MTPDrafter, mtp.MultiTokenPrediction),
    "Medusa": heads(
        lambda m, s: medusa.new_head(m, K, seed=s), MedusaDrafter, medusa.EveryHead
    ),
    "draft LM": (
        lambda target, seed: ModelDrafter(draft_model(target, seed), K),
        lambda drafter, target: losses.Distillation(drafter.model, target),
    ),
}  # fmt: skip
"""(target, seed) -> drafter, and (drafter, target) -> objective."""


def trained(name: str, seed: int, stream, options) -> tuple:
    """A drafter, and what its training took; from its file where it has one."""
    target = zoo.load_target()
    make, objective = CONTENDERS[name]
    drafter = make(target, seed)
    own = drafter.model if isinstance(drafter, ModelDrafter) else drafter.head
    stem = options.output / f"{name.replace(' ', '-')}-{seed}"
    weights, card = stem.with_suffix(".safetensors"), stem.with_suffix(".json")
    if not card.exists():
        sizes = {"tokens_per_step": options.tokens_per_step, "row_lengths": ((1.0, ROW_TOKENS),)}
        arguments = training.ObjectiveArguments(
            str(stem), max_steps=options.steps, use_cpu=True, seed=seed, report_to=[],
            save_strategy="no", disable_tqdm=True, **sizes,
        )  # fmt: skip
        started_s = time.process_time()
        training.ObjectiveTrainer(objective(drafter, target), arguments, stream).train()
        seconds = time.process_time() - started_s
        save_model(own, str(weights))
        parameters = sum(p.numel() for p in own.parameters() if p.requires_grad)
        tokens = options.steps * options.tokens_per_step
        about = {"parameters": parameters, "seconds": seconds, "tokens": tokens}
        card.write_text(json.dumps(about))
    load_model(own, str(weights))
    return drafter.eval(), json.loads(card.read_text())


def page(output: Path) -> None:
    """Prints the table and the tests, and draws the picture."""
    cards = {p.stem: json.loads(p.read_text()) for p in sorted(output.glob("*-?.json"))}
    for place in TEXTS:
        study = Study.load(output / place)
        for temperature in (0.0, 1.0):
            own = {"temperature": temperature}
            print(f"\n{place} the trained length, temperature {temperature:g}\n")
            print("| head | seed | parameters | seconds | acceptance length | ms per token |")
            print("|---|---:|---:|---:|---:|---:|")
            for cell, run in zip(study.cells, study.runs, strict=True):
                if cell["temperature"] != temperature:
                    continue
                name, _, seed = cell["drafter"].rpartition(" ")
                card = cards.get(f"{name.replace(' ', '-')}-{seed}", {})
                size = f"{card['parameters'] / 1e6:.2f} M" if card else ""
                cells = [name or cell["drafter"], seed if name else "", size]
                cells += [f"{card['seconds']:.0f}" if card else ""]
                cells += [
                    format(run.estimates[n], ".2f") for n in ("acceptance_length", "ms_per_token")
                ]
                print("| " + " | ".join(cells) + " |")
            print(f"\nbest: {study.best(of='ms_per_token', **own)}")
    figure = Study.load(output / "within").plot()
    if figure is not None:
        figure.savefig(output / "rematch.svg")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("rematch"))
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--tokens-per-step", type=int, default=1024)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--page-only", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.output.mkdir(parents=True, exist_ok=True)
    if not options.page_only:
        tokenizer, drafters = zoo.load_tokenizer(), {"none": "none"}
        texts = map(corpus.read_source, corpus.library_files())
        stream = training.PackedStream(training.encode_texts(texts, tokenizer), seed=0)
        for seed in range(options.seeds):
            for name in CONTENDERS:
                drafters[f"{name} {seed}"], card = trained(name, seed, stream, options)
                print(f"{name} {seed}: {card}", flush=True)
        texts = map(corpus.read_source, corpus.heldout_files())
        whole = [tokenizer(text, verbose=False).input_ids for text in texts]
        for place, length in TEXTS.items():
            starts = [ids[i : i + length] for ids in whole for i in range(0, len(ids), 2 * length)]
            prompts = [ids for ids in starts if len(ids) == length][: options.prompts]
            sweep(
                zoo.load_target(), prompts, drafters=drafters, temperatures=[0.0, 1.0],
                max_new_tokens=64, batch_size=4, timed=True, output=options.output / place,
                eos_token_id=[],
            )  # fmt: skip
    page(options.output)


if __name__ == "__main__":
    main()
