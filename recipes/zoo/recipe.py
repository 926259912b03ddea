"""Reproduce the zoo's weights: `python -m recipes.zoo.recipe`, or one stage of it by name.

The stages, in order: `tokenizer`; `target`; `text` (the target writes what its drafters train on,
beside the library's own sources); `draft`, `eagle3`, `mask-token` and `mtp`; `correction` (of the
mask-token head, whose other weights stay as they are; on text of its own, half an hour on one CPU
core); `measure` (acceptance on held-out text, into the drafters' cards). A training stage goes on
from its checkpoint in `--work-dir`; a finished run there is exported again at once. On one H200
`target` and `text` take five minutes, and the drafters, side by side, five more. The target's loss
is compiled, which needs a C++ compiler. On a CPU that has other work set `OMP_WAIT_POLICY=PASSIVE`:
threads that spin while they wait for a starved one have made training ten times slower.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.zoo import cards, models, sources
from recipes.zoo.owntext import continue_windows
from recipes.zoo.tokenizer import train_tokenizer
from specdec import zoo
from specdec.atomic import replacing, replacing_files, write_text
from specdec.drafters.eagle import EagleDrafter
from specdec.drafters.mask_token.correction import MarkovConfig
from specdec.drafters.mask_token.drafter import MaskTokenDrafter
from specdec.drafters.mtp.drafter import MTPDrafter
from specdec.lab.training import (
    Distillation,
    NextToken,
    ObjectiveArguments,
    ObjectiveTrainer,
    PackedStream,
)
from specdec.lab.training.eagle import TrainingTimeTest
from specdec.lab.training.mask_token import MaskRollouts, with_correction
from specdec.lab.training.mtp import MultiTokenPrediction
from specdec.lab.zoo import WEIGHTS_DIR, corpus

Plan = dict[str, Any]
"""Fields of `ObjectiveArguments`."""
# Every run ends on rows of the target's full length: what it has not seen in training it does not
# know, and a drafter's acceptance falls to nearly 1 there.
TARGET_PLAN: Plan = {
    "max_steps": 1400,
    "seed": 0,
    "tokens_per_step": 65536,
    "row_lengths": ((0.6, 512), (1.0, models.MAX_LENGTH)),
    "learning_rate": 8e-3,
    "lr_ratio": 3 / 8,
    "bf16": True,
    "torch_compile": True,
    "checkpoint_minutes": 4.0,
}
DRAFTER_PLAN: Plan = TARGET_PLAN | {
    "max_steps": 8_000,
    "seed": 1,
    "row_lengths": ((0.3, 512), (1.0, models.MAX_LENGTH)),
    "learning_rate": 7e-3,
    "lr_ratio": 3 / 7,
    "torch_compile": False,
}
TARGET_SHAPE = {"num_layers": 16, "mlp_width": 384}
# One layer, since a second costs more than the acceptance it buys; its MLP is wide, since width
# is almost free in latency at this size.
DRAFT_SHAPE = {"num_layers": 1, "mlp_width": 1024}
# Narrower MLPs, since there are three of them.
MTP_SHAPE = {"num_depths": 3, "mlp_width": 768}
LIBRARY_REPEATS = 2  # per epoch: the zoo is measured on the library
OWN_TEXT = (
    {"num_rows": 16_384, "prompt_tokens": 64, "new_tokens": 192, "batch_size": 4096},
    {"num_rows": 2048, "prompt_tokens": 1536, "new_tokens": 384, "batch_size": 1024},
)
"""The target's own text: many short rows, and rows that reach its full length."""
UNROLLED_STEPS = 5
# Three layers, since one pass must do the work of K.
MASK_TOKEN_SHAPE = {"num_layers": 3, "mlp_width": 768}
NUM_DEPTHS = 6  # draft tokens that masks learn
DEPTH_WEIGHT = 0.8
CORRECTION = MarkovConfig(44, "gated")  # the largest with which all weights fit into 16 MB
CORRECTION_PLAN: Plan = {
    "max_steps": 800,
    "seed": 2,
    "tokens_per_step": 1024,
    "row_lengths": ((1.0, 256),),
    "learning_rate": 2e-2,
    "lr_ratio": 0.5,
    "weight_decay": 0.01,
    "bf16": True,
    "checkpoint_minutes": 4.0,
}
CORRECTION_TEXT = ({"num_rows": 2048, "prompt_tokens": 64, "new_tokens": 192, "batch_size": 256},)
"""Own text that a CPU writes in a quarter of an hour."""
CORRECTION_DEPTHS = 7
CORRECTION_ANCHORS = 0.5  # of the positions: the first draft token needs no correction
CONTROL_RATE = 5e-4  # gentle: the weights have been trained to their end
VERIFIER = "specdec.lab.zoo"
OPTIMIZER = "Muon for the hidden matrices, AdamW for embedding, vocabulary head, norms and biases"


def make_tokenizer(out_dir: Path) -> None:
    """Train the tokenizer on the standard library and save it beside the target's weights."""
    texts = (corpus.read_source(path) for path in corpus.library_files())
    with replacing_files(out_dir / "target") as new:
        train_tokenizer(texts).save_pretrained(new)


def make_target(out_dir: Path, work_dir: Path, plan: Plan) -> None:
    """Train the target on next tokens; write its weights and card."""
    tokenizer = _tokenizer(out_dir)
    library = sources.encode_files(tokenizer, corpus.library_files())
    packages = sources.encode_files(tokenizer, sources.package_files())
    stream = PackedStream(LIBRARY_REPEATS * library + packages, seed=plan["seed"])
    model = models.build_model(tokenizer, seed=plan["seed"], **TARGET_SHAPE)
    progress = _train(NextToken(model), stream, plan, work_dir / "target")
    model = _export(model, out_dir / "target")
    heldout = cards.heldout_loss(model, tokenizer)
    heldout["nats_by_position"] = cards.loss_by_position(model, tokenizer)
    loss = "cross-entropy of the next token"
    _write_card(out_dir, "target", "target", model, plan, progress, heldout, loss)


def make_text(
    out_dir: Path, work_dir: Path, *, windows: Sequence[dict] = OWN_TEXT, name: str = "text"
) -> None:
    """Let the target continue windows of the corpus; kept in the scratch folder."""
    tokenizer, device = _tokenizer(out_dir), PartialState().device
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    target = LlamaForCausalLM.from_pretrained(out_dir / "target", dtype=dtype).eval().to(device)
    library = sources.encode_files(tokenizer, corpus.library_files())
    packages = sources.encode_files(tokenizer, sources.package_files())
    documents = 3 * library + packages[::4]
    made = [continue_windows(target, documents, **options) for options in windows]
    rows = [row for rows in made for row in rows]
    work_dir.mkdir(parents=True, exist_ok=True)
    ends = np.cumsum([len(row) for row in rows])[:-1]
    with replacing(work_dir / f"{name}.npz") as file:
        np.savez_compressed(file, tokens=np.concatenate(rows), ends=ends)


def make_draft(out_dir: Path, work_dir: Path, plan: Plan) -> None:
    """Distil the draft LM from the exported target; write its weights and card."""
    tokenizer, target = _tokenizer(out_dir), _load_target(out_dir)
    model = models.build_model(tokenizer, seed=plan["seed"], **DRAFT_SHAPE)
    model.get_input_embeddings().load_state_dict(target.get_input_embeddings().state_dict())
    stream = _drafters_stream(tokenizer, work_dir, plan)
    progress = _train(Distillation(model, target), stream, plan, work_dir / "draft")
    model, target = _export(model, out_dir / "draft"), target.cpu()
    heldout = cards.heldout_loss(model, tokenizer)
    heldout["nats_by_position"] = cards.loss_by_position(model, tokenizer)
    heldout |= cards.heldout_agreement(model, target, tokenizer)
    loss = "cross-entropy to the target's distribution (KL(target || draft) + constant)"
    _write_card(out_dir, "draft", "draft", model, plan, progress, heldout, loss)


def make_eagle3(out_dir: Path, work_dir: Path, plan: Plan) -> None:
    """Train the EAGLE-3 head by training-time test; write its weights and card."""
    tokenizer, device = _tokenizer(out_dir), PartialState().device
    target = _load_target(out_dir).to(device)
    head = models.build_eagle3_head(target, mlp_width=DRAFT_SHAPE["mlp_width"], seed=plan["seed"])
    drafter = EagleDrafter(head.to(device), target)
    stream = _drafters_stream(tokenizer, work_dir, plan)
    objective = TrainingTimeTest(drafter, target, UNROLLED_STEPS)
    progress = _train(objective, stream, plan, work_dir / "eagle3")
    target.cpu()
    head.to("cpu", torch.bfloat16)
    drafter.save_pretrained(out_dir / "eagle3")
    loss = f"training-time test, {UNROLLED_STEPS} steps, each weighing 0.8 of the one before"
    _write_card(out_dir, "eagle3", "eagle3", head, plan, progress, {}, loss)


def make_mask_token(out_dir: Path, work_dir: Path, plan: Plan) -> None:
    """Train the mask-token head by rollouts of masks; write its weights and card."""
    tokenizer, device = _tokenizer(out_dir), PartialState().device
    target = _load_target(out_dir).to(device)
    head = models.build_mask_token_head(target, **MASK_TOKEN_SHAPE, seed=plan["seed"])
    drafter = MaskTokenDrafter(head.to(device), target)
    stream = _drafters_stream(tokenizer, work_dir, plan)
    objective = MaskRollouts(drafter, target, NUM_DEPTHS)
    progress = _train(objective, stream, plan, work_dir / "mask_token")
    target.cpu()
    head.to("cpu", torch.bfloat16)
    (out_dir / "mask_token" / "model.safetensors").unlink(missing_ok=True)  # with a correction
    drafter.save_pretrained(out_dir / "mask_token")
    rate = objective.step_weights.rate
    loss = f"rollouts of masks, {NUM_DEPTHS} depths, each weighing {rate} of the one before"
    _write_card(out_dir, "mask_token", "mask-token", head, plan, progress, {}, loss)


def make_correction(out_dir: Path, work_dir: Path, plan: Plan, *, control: bool = False) -> None:
    """Give the mask-token head a correction and train it alone; write weights and card.

    Args:
        out_dir, work_dir, plan: As for the other stages.
        control: Train all weights of the head instead, with no correction, and save it in
            `work_dir / "control"`: what as many steps are worth by themselves.
    """
    device, target = PartialState().device, _load_target(out_dir)
    target = target.to(device)
    folder, name = out_dir / "mask_token", "correction_text"
    if control:
        plan = plan | {"learning_rate": CONTROL_RATE}
    plain = MaskTokenDrafter.from_pretrained(folder, target).head.float().cpu()
    head = with_correction(plain, None if control else CORRECTION, seed=plan["seed"])
    if not control:
        head.requires_grad_(False).correction.requires_grad_(True)
    drafter = MaskTokenDrafter(head.to(device), target)
    if not (work_dir / f"{name}.npz").exists():
        make_text(out_dir, work_dir, windows=CORRECTION_TEXT, name=name)
    stream = _drafters_stream(_tokenizer(out_dir), work_dir, plan, name=name, repeats=(4, 1))
    objective = MaskRollouts(drafter, target, CORRECTION_DEPTHS, CORRECTION_ANCHORS)
    run = "control_run" if control else "correction"
    progress = _train(objective, stream, plan, work_dir / run)
    target.cpu()
    head.to("cpu", torch.bfloat16)
    if control:
        drafter.save_pretrained(work_dir / "control", verifier=VERIFIER)
        return
    (folder / "model.safetensors").unlink()  # a head of other tensors is not replaced
    drafter.save_pretrained(folder, verifier=VERIFIER)
    before = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    rate = objective.step_weights.rate
    loss = (
        f"rollouts of masks, {CORRECTION_DEPTHS} depths, each weighing {rate} of the one before; "
    )
    loss += "the other weights stay as they are"
    made = {"own_text": CORRECTION_TEXT}
    _write_card(out_dir, "mask_token", "correction", head, plan, progress, {}, loss, **made)
    card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
    parts = ("recipe", "run", "data", "versions")
    card["plain head"] = before.get("plain head", {part: before[part] for part in parts})
    write_text(folder / "card.json", json.dumps(card, indent=2) + "\n")


def make_mtp(out_dir: Path, work_dir: Path, plan: Plan) -> None:
    """Train the prediction modules, all depths at once; write their weights and card."""
    device, target = PartialState().device, _load_target(out_dir)
    target = target.to(device)
    head = models.build_mtp_head(target, seed=plan["seed"], **MTP_SHAPE).to(device)
    drafter = MTPDrafter(head, target, MTP_SHAPE["num_depths"])
    stream = _drafters_stream(_tokenizer(out_dir), work_dir, plan)
    objective = MultiTokenPrediction(drafter, target, DEPTH_WEIGHT)
    progress = _train(objective, stream, plan, work_dir / "mtp")
    target.cpu()
    head.to("cpu", torch.bfloat16)
    drafter.save_pretrained(out_dir / "mtp")
    loss = "cross-entropy to the target's distribution at every depth, each depth weighing "
    loss += f"{DEPTH_WEIGHT} of the one before"
    _write_card(out_dir, "mtp", "mtp", head, plan, progress, {}, loss)


def _train(
    objective: torch.nn.Module, stream: PackedStream, plan: Plan, work_dir: Path
) -> ObjectiveTrainer:
    """Train an objective, or go on from its checkpoint."""
    args = ObjectiveArguments(str(work_dir), use_cpu=PartialState().device.type == "cpu", **plan)
    trainer = ObjectiveTrainer(objective, args, stream)
    trainer.train_or_resume()
    return trainer


def _tokenizer(out_dir: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(out_dir / "target")


def _load_target(out_dir: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(out_dir / "target", dtype=torch.float32).eval()


def _drafters_stream(
    tokenizer: PreTrainedTokenizerFast,
    work_dir: Path,
    plan: Plan,
    *,
    name: str = "text",
    repeats: tuple[int, int] = (2, 2),
) -> PackedStream:
    """The target's own text and the library, so many times each."""
    with np.load(work_dir / f"{name}.npz") as kept:
        own = np.split(kept["tokens"], kept["ends"])
    library = sources.encode_files(tokenizer, corpus.library_files())
    return PackedStream(repeats[0] * own + repeats[1] * library, seed=plan["seed"])


def _export(model: LlamaForCausalLM, folder: Path) -> LlamaForCausalLM:
    """Save the weights in bfloat16, and return what a user will load, in float32."""
    with replacing_files(folder) as new:
        model.to("cpu", torch.bfloat16).save_pretrained(new)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _write_card(
    out_dir: Path,
    name: str,
    stage: str,
    model: torch.nn.Module,
    plan: Plan,
    progress: ObjectiveTrainer,
    heldout: dict,
    loss: str,
    own_text: Sequence[dict] = OWN_TEXT,
) -> None:
    recipe = {
        "command": f"python -m recipes.zoo.recipe {stage}",
        "loss": loss,
        "optimizer": OPTIMIZER,
    }
    if name != "target":
        recipe["own_text"] = own_text
    cards.write_card(
        out_dir / name,
        model=model,
        tokenizer=_tokenizer(out_dir),
        plan=plan,
        progress=progress,
        heldout=heldout,
        recipe=recipe,
    )


STAGES = ("tokenizer", "target", "text", "draft", "eagle3", "mask-token", "correction", "mtp")
STAGES += ("measure",)
CONTROL = "correction-control"
"""A stage that has to be named: it makes nothing of the zoo."""


def main(arguments: list[str] | None = None) -> None:
    """Run the stages named on the command line, all of them by default."""
    parser = argparse.ArgumentParser(prog="python -m recipes.zoo.recipe", description=__doc__)
    parser.add_argument("stages", nargs="*", metavar="stage", help=f"of {STAGES}; default: all")
    parser.add_argument("--minutes", type=float, help="wall-clock minutes of a training stage")
    parser.add_argument("--steps", type=int, help="optimiser steps, instead of minutes")
    parser.add_argument("--threads", type=int, default=2, help="of torch")
    parser.add_argument("--out-dir", type=Path, default=WEIGHTS_DIR)
    scratch = Path(tempfile.gettempdir()) / "specdec_zoo"
    parser.add_argument("--work-dir", type=Path, default=scratch, help="for checkpoints")
    options = parser.parse_args(arguments)
    if unknown := set(options.stages) - {*STAGES, CONTROL}:
        parser.error(f"unknown stages {sorted(unknown)}, expected some of {STAGES}")
    torch.set_num_threads(options.threads)
    given = {}
    if options.minutes is not None or options.steps is not None:
        steps = -1 if options.steps is None else options.steps
        given = {"minutes": options.minutes, "max_steps": steps}
    out, work = options.out_dir, options.work_dir
    run = {
        "tokenizer": lambda: make_tokenizer(out),
        "target": lambda: make_target(out, work, TARGET_PLAN | given),
        "text": lambda: make_text(out, work),
        "draft": lambda: make_draft(out, work, DRAFTER_PLAN | given),
        "eagle3": lambda: make_eagle3(out, work, DRAFTER_PLAN | given),
        "mask-token": lambda: make_mask_token(out, work, DRAFTER_PLAN | given),
        "correction": lambda: make_correction(out, work, CORRECTION_PLAN | given),
        CONTROL: lambda: make_correction(out, work, CORRECTION_PLAN | given, control=True),
        "mtp": lambda: make_mtp(out, work, DRAFTER_PLAN | given),
        "measure": lambda: [cards.write_acceptance(name, out) for name in zoo.DRAFTERS],
    }
    for stage in options.stages or STAGES:
        run[stage]()


if __name__ == "__main__":
    main()
