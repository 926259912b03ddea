"""A small translator and a draft model distilled from it: `python -m recipes.translator.recipe`.

The stages, in order: `target` (Marian's architecture with four decoder layers, trained on generated
sentences), `draft` (its encoder and one layer of its decoder, trained on the target's own
translations as distil-whisper is), and `measure` (tokens per step on sentences that no training has
seen). All of it takes a quarter of an hour on one CPU core. `weights/` beside this file has what it
wrote, in bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, MarianConfig, MarianMTModel

from recipes.translator.sentences import VOCABULARY, batch, decode, sentence
from specdec import FirstMatch, ModelDrafter, SourceLookupDrafter, SpeculativeGenerator
from specdec.atomic import write_text
from specdec.lab.evaluation import evaluate

WEIGHTS = Path(__file__).parent / "weights"
HELD_OUT = 10_000_000
"""First seed of sentences that no training sees."""
ROWS = 32
NUM_SENTENCES = 256
LONGEST = 64


def build(seed: int = 0) -> MarianMTModel:
    """An untrained translator."""
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    layers = {"encoder_layers": 2, "decoder_layers": 4, "d_model": 64}
    ids = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = MarianConfig(
        vocab_size=len(VOCABULARY),
        **(heads | layers | ids),
        **{"encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 128},
        **{"dropout": 0.0, "scale_embedding": True, "forced_eos_token_id": None},
        decoder_vocab_size=len(VOCABULARY),
    )
    torch.manual_seed(seed)
    model = MarianMTModel(config)
    model.generation_config = GenerationConfig(**ids)
    return model


def train(model: nn.Module, loss_of: Callable[[int], Tensor], steps: int, peak: float) -> None:
    """AdamW with a cosine schedule over the losses of steps."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    for step in range(steps):
        warm = min(1.0, (step + 1) / (0.1 * steps))
        rate = peak * warm * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step}: {loss.item():.3f}", flush=True)


def shifted(model: MarianMTModel, labels: Tensor) -> Tensor:
    """What the decoder reads to predict labels `[B, T]`."""
    start = model.config.decoder_start_token_id
    return F.pad(labels, (1, 0), value=start)[:, :-1]


def make_target(out: Path, steps: int) -> None:
    """Trains the translator; writes it as `from_pretrained` reads."""
    model = build()

    def loss_of(step: int) -> Tensor:
        pairs = [sentence(step * ROWS + row) for row in range(ROWS)]
        (ids, mask), (labels, _) = (batch(texts) for texts in zip(*pairs, strict=True))
        logits = model(ids, mask, decoder_input_ids=shifted(model, labels)).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)

    train(model.train(), loss_of, steps, 3e-3)
    save(model, out / "target")


def make_draft(out: Path, steps: int) -> None:
    """Distils the draft model: the target's encoder, which stays as it is, and one layer of its
    decoder, by the target's probabilities over its own greedy translations.
    """
    target = load(out / "target")
    config = copy.deepcopy(target.config)
    config.decoder_layers, last = 1, f"decoder.layers.{config.decoder_layers - 1}."
    draft, own = MarianMTModel(config), target.state_dict()
    draft.load_state_dict(
        {name.replace(last, "decoder.layers.0."): own[name] for name in own}, False
    )
    draft.generation_config = target.generation_config
    for parameter in draft.get_encoder().parameters():
        parameter.requires_grad_(False)

    def loss_of(step: int) -> Tensor:
        rows = range(step * ROWS, (step + 1) * ROWS)
        ids, mask = batch([sentence(row)[0] for row in rows])
        with torch.no_grad():
            made = target.get_encoder()(ids, mask)
            labels = target.generate(ids, attention_mask=mask, max_new_tokens=LONGEST)[:, 1:]
            read = {"encoder_outputs": made, "attention_mask": mask}
            read["decoder_input_ids"] = shifted(target, labels)
            wanted = target(**read).logits.log_softmax(-1)
        found = draft(**read).logits.log_softmax(-1)
        each = F.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
        return each[labels != 0].mean()

    train(draft, loss_of, steps, 3e-3)
    save(draft, out / "draft")


def save(model: MarianMTModel, folder: Path) -> None:
    """In bfloat16."""
    copy.deepcopy(model).to(torch.bfloat16).eval().save_pretrained(folder)


def load(folder: Path) -> MarianMTModel:
    """In float32."""
    return MarianMTModel.from_pretrained(folder, dtype=torch.float32).eval()


def drafters(out: Path, num_draft_tokens: int = 4) -> dict[str, Any]:
    """Drafters for the translator, by name; the draft model has the target's encoder."""
    draft = ModelDrafter(load(out / "draft"), num_draft_tokens)
    lookup = SourceLookupDrafter(num_draft_tokens)
    return {
        "source lookup": lookup,
        "distilled": draft,
        "source lookup, else distilled": FirstMatch(lookup, draft),
    }


def measure(out: Path, count: int = NUM_SENTENCES) -> dict[str, Any]:
    """How many translations are right, whether all drafters write the target's own, and tokens per
    step at T = 0, on held-out sentences; written to `measured.json`.
    """
    target, pairs = load(out / "target"), [sentence(HELD_OUT + i) for i in range(count)]
    prompts = [batch([english])[0][0].tolist() for english, _ in pairs]
    options = {"max_new_tokens": LONGEST, "batch_size": 32}
    plain = evaluate(SpeculativeGenerator(target, None), prompts, **options)
    texts = [row.new_tokens for row in plain.rows]
    right = sum(decode(t) == german for t, (_, german) in zip(texts, pairs, strict=True))
    found: dict[str, Any] = {"sentences": count, "right": right}
    for name, drafter in drafters(out).items():
        run = evaluate(SpeculativeGenerator(target, drafter), prompts, **options)
        found[name] = str(run.estimates["acceptance_length"])
        found[f"{name}: equal"] = [row.new_tokens for row in run.rows] == texts
    write_text(out / "measured.json", json.dumps(found, indent=2) + "\n")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="*")
    parser.add_argument("--steps", type=int, help="of every training stage")
    parser.add_argument("--sentences", type=int, default=NUM_SENTENCES, help="that are measured")
    parser.add_argument("--out", type=Path, default=Path("translator"))
    options = parser.parse_args(arguments)
    run = {
        "target": lambda: make_target(options.out, options.steps or 2500),
        "draft": lambda: make_draft(options.out, options.steps or 400),
        "measure": lambda: print(json.dumps(measure(options.out, options.sentences), indent=2)),
    }
    for stage in options.stages or run:
        run[stage]()


if __name__ == "__main__":
    main()
