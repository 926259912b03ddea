"""Reproduce the zoo's weights: `python -m specdec.zoo.recipe`, or one stage of it by name.

The stages are `tokenizer`, `target`, `draft` and `measure` (acceptance on held-out text, into the
drafter's card), in this order. A training stage goes on from its checkpoint in `--work-dir`; a
finished run there is exported again at once. The compiled loss needs a C++
compiler. On a machine that has other work set `OMP_WAIT_POLICY=PASSIVE`: threads that spin while
they wait for a starved one have made training ten times slower.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.zoo import WEIGHTS_DIR, cards, corpus, models, packing
from specdec.zoo.acceptance import write_acceptance
from specdec.zoo.training import TrainingPlan, train

STAGES = ("tokenizer", "target", "draft", "measure")
TARGET_PLAN = TrainingPlan(steps=1753)
# More and smaller steps: one layer is quick to update.
DRAFT_PLAN = TrainingPlan(
    steps=1523, seed=1, tokens_per_step=4096, lengths=((0.85, 256), (1.0, 1024))
)
TARGET_SHAPE = {"num_layers": 16, "mlp_width": 384}
# One layer, since a second costs more than the acceptance it buys; its MLP is wide, since width
# is almost free in latency at this size.
DRAFT_SHAPE = {"num_layers": 1, "mlp_width": 1024}
LIBRARY_REPEATS = 2  # per epoch: the zoo is measured on the library
HARD_WEIGHT = 0.0  # the text's own tokens only add noise to the target's distribution
OPTIMIZER = "Muon for the hidden matrices, AdamW for the embedding and the norms"


def make_tokenizer(out_dir: Path) -> None:
    """Train the tokenizer on the standard library and save it beside the target's weights."""
    texts = (corpus.read_source(path) for path in corpus.library_files())
    packing.train_tokenizer(texts).save_pretrained(out_dir / "target")


def make_target(out_dir: Path, work_dir: Path, plan: TrainingPlan) -> None:
    """Train the target on next tokens; write its weights and card."""
    tokenizer, stream = _tokenizer_and_stream(out_dir, plan)
    model = models.build_model(tokenizer, seed=plan.seed, **TARGET_SHAPE)
    progress = train(model, stream, models.next_token_loss, plan=plan, work_dir=work_dir / "target")
    model = _export(model, out_dir / "target")
    cards.write_card(
        out_dir / "target",
        model=model,
        tokenizer=tokenizer,
        plan=plan,
        progress=progress,
        heldout=cards.heldout_loss(model, tokenizer),
        recipe={
            "command": "python -m specdec.zoo.recipe target",
            "loss": "cross-entropy of the next token",
            "optimizer": OPTIMIZER,
        },
    )


def make_draft(out_dir: Path, work_dir: Path, plan: TrainingPlan) -> None:
    """Distil the draft LM from the exported target; write its weights and card."""
    tokenizer, stream = _tokenizer_and_stream(out_dir, plan)
    target = LlamaForCausalLM.from_pretrained(out_dir / "target", dtype=torch.float32).eval()
    model = models.build_model(tokenizer, seed=plan.seed, **DRAFT_SHAPE)
    model.get_input_embeddings().load_state_dict(target.get_input_embeddings().state_dict())
    teacher = target.to(PartialState().device)
    loss_fn = models.distillation_loss(teacher, hard_weight=HARD_WEIGHT)
    progress = train(model, stream, loss_fn, plan=plan, work_dir=work_dir / "draft")
    model, target = _export(model, out_dir / "draft"), teacher.cpu()
    heldout = cards.heldout_loss(model, tokenizer)
    cards.write_card(
        out_dir / "draft",
        model=model,
        tokenizer=tokenizer,
        plan=plan,
        progress=progress,
        heldout={**heldout, **cards.heldout_agreement(model, target, tokenizer)},
        recipe={
            "command": "python -m specdec.zoo.recipe draft",
            "loss": "cross-entropy to the target's distribution (KL(target || draft) + constant)",
            "hard_label_weight": HARD_WEIGHT,
            "initialisation": "the embedding starts as the target's",
            "optimizer": OPTIMIZER,
        },
    )


def _tokenizer_and_stream(
    out_dir: Path, plan: TrainingPlan
) -> tuple[PreTrainedTokenizerFast, packing.PackedStream]:
    """Load the tokenizer of the first stage and pack the corpus with it."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out_dir / "target")
    library = packing.encode_files(tokenizer, corpus.library_files())
    packages = packing.encode_files(tokenizer, corpus.package_files())
    documents = LIBRARY_REPEATS * library + packages
    return tokenizer, packing.PackedStream(documents, seed=plan.seed)


def _export(model: LlamaForCausalLM, folder: Path) -> LlamaForCausalLM:
    """Save the weights in bfloat16, and return what a user will load, in float32."""
    model.to("cpu", torch.bfloat16).save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def main(arguments: list[str] | None = None) -> None:
    """Run the stages named on the command line, all of them by default."""
    parser = argparse.ArgumentParser(prog="python -m specdec.zoo.recipe", description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="stage", help=f"of {STAGES}; default: all")
    parser.add_argument("--minutes", type=float, help="wall-clock minutes of a training stage")
    parser.add_argument("--steps", type=int, help="optimiser steps, instead of minutes")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--out-dir", type=Path, default=WEIGHTS_DIR)
    scratch = Path(tempfile.gettempdir()) / "specdec_zoo"
    parser.add_argument("--work-dir", type=Path, default=scratch, help="for checkpoints")
    options = parser.parse_args(arguments)
    if unknown := set(options.stages) - set(STAGES):
        parser.error(f"unknown stages {sorted(unknown)}, expected some of {STAGES}")
    torch.set_num_threads(options.threads)
    given = {}
    if options.minutes is not None or options.steps is not None:
        given = {"minutes": options.minutes, "steps": options.steps}
    for stage in options.stages or STAGES:
        if stage == "tokenizer":
            make_tokenizer(options.out_dir)
        elif stage == "target":
            make_target(options.out_dir, options.work_dir, replace(TARGET_PLAN, **given))
        elif stage == "measure":
            write_acceptance("model", options.out_dir / "draft")
        else:
            make_draft(options.out_dir, options.work_dir, replace(DRAFT_PLAN, **given))


if __name__ == "__main__":
    main()
