"""A small multimodal target and EAGLE-3 heads for it: `python -m recipes.pictures.recipe`.

The stages, in order: `target` (Llava's architecture, trained on drawn pictures of coloured shapes
until it captions them), `visible` and `hidden` (the same EAGLE-3 head, trained with the tokens of
pictures and without them), and `measure` (both on held-out pictures, as they were trained and the
other way round). A training stage goes on from its checkpoint; a finished one is exported again at
once. The folder of the target is what `from_pretrained` and `AutoProcessor` read. All of it takes
half an hour on one CPU core.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

from recipes.pictures.answers import Answered, AnsweredStream, AnswerTimeTest
from recipes.pictures.shapes import END, IMAGE, PATCH, SIZE, Captions, make_processor
from specdec import SpeculativeGenerator
from specdec.atomic import write_text
from specdec.drafters.eagle import EagleDrafter, EagleHead
from specdec.lab.evaluation import difference, evaluate
from specdec.lab.training import ObjectiveArguments, ObjectiveTrainer
from specdec.lab.training.eagle import eagle_config
from specdec.lab.training.heads import untrained

NUM_PICTURES = 100_000
HELD_OUT = 10_000_000
"""First seed of pictures that no training sees."""
ROW = 80
"""Tokens of the longest row."""
TARGET_PLAN: dict[str, Any] = {
    "max_steps": 1200,
    "seed": 0,
    "tokens_per_step": 24 * ROW,
    "row_lengths": ((1.0, ROW),),
    "learning_rate": 1e-2,
    "lr_ratio": 0.3,
    "logging_steps": 25,
    "checkpoint_minutes": 2.0,
}
WIDTH, LAYERS = 96, 8
HEAD_PLAN = TARGET_PLAN | {
    "max_steps": 400,
    "seed": 1,
    "tokens_per_step": 12 * ROW,
    "learning_rate": 7e-3,
    "lr_ratio": 3 / 7,
}
UNROLLED_STEPS = 5
NUM_DRAFT_TOKENS = 5
NUM_PROMPTS = 128


class NextOfAnswer(nn.Module):
    """Cross-entropy of the answers' tokens, by the model's own forward."""

    def __init__(self, model: LlavaForConditionalGeneration):
        super().__init__()
        self.model = model

    def forward(self, ids: Sequence[Answered]) -> Tensor:
        """Mean nats per token."""
        lines = [example.ids for example in ids]
        tokens = pad_sequence(lines, batch_first=True)
        labels = pad_sequence(
            [
                line.where(torch.arange(len(line)) >= e.num_prompt, -100)
                for line, e in zip(lines, ids, strict=True)
            ],
            batch_first=True,
            padding_value=-100,
        )
        mask = pad_sequence([torch.ones_like(line) for line in lines], batch_first=True)
        pixels = torch.cat([example.inputs["pixel_values"] for example in ids])
        inputs = {"input_ids": tokens, "attention_mask": mask, "pixel_values": pixels}
        return self.model(**inputs, labels=labels, use_cache=False).loss


def build_target(processor: LlavaProcessor, seed: int = 0) -> LlavaForConditionalGeneration:
    """An untrained Llava: two layers of CLIP over 16 patches, eight of Llama."""
    tokenizer = processor.tokenizer
    end, image = tokenizer.convert_tokens_to_ids([END, IMAGE])
    sizes = {"hidden_size": WIDTH, "num_attention_heads": 4}
    config = LlavaConfig(
        vision_config={
            "model_type": "clip_vision_model",
            **sizes,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": 2,
            "image_size": SIZE,
            "patch_size": PATCH,
            "projection_dim": WIDTH,
        },
        text_config={
            "model_type": "llama",
            **sizes,
            "intermediate_size": 256,
            "num_hidden_layers": LAYERS,
            "num_key_value_heads": 4,
            "vocab_size": len(tokenizer),
            "max_position_embeddings": 512,
            "bos_token_id": end,
            "eos_token_id": end,
            "pad_token_id": end,
            "tie_word_embeddings": False,
        },
        image_token_index=image,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=(SIZE // PATCH) ** 2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(config)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            is_write = name.endswith(("o_proj", "down_proj", "out_proj", "fc2"))
            nn.init.normal_(module.weight, std=0.05 / (4 if is_write else 1))
    return model


def train(objective: nn.Module, examples: Sequence[Answered], plan: dict, folder: Path) -> None:
    """Trains an objective, or goes on from its checkpoint."""
    args = ObjectiveArguments(str(folder), use_cpu=True, **plan)
    stream = AnsweredStream(examples, seed=plan["seed"])
    ObjectiveTrainer(objective, args, stream).train_or_resume()


def make_target(out: Path, plan: dict) -> None:
    """Trains the target on captions; writes it with its processor, as `from_pretrained` reads."""
    processor = make_processor()
    model = build_target(processor)
    train(NextOfAnswer(model), Captions(processor, NUM_PICTURES), plan, out / "runs" / "target")
    model.eval().save_pretrained(out / "target")
    processor.save_pretrained(out / "target")


def make_head(out: Path, name: str, plan: dict) -> None:
    """Trains an EAGLE-3 head that sees the tokens of pictures, or not; writes it."""
    target = load_target(out)
    config = replace(eagle_config(target, "eagle3"), sees_pictures=name == "visible")
    head = untrained(lambda: EagleHead(config), target, seed=plan["seed"])
    drafter = EagleDrafter(head, target)
    objective = AnswerTimeTest(drafter, target, UNROLLED_STEPS)
    pictures = Captions(make_processor(), NUM_PICTURES, first=NUM_PICTURES)
    train(objective, pictures, plan, out / "runs" / name)
    drafter.save_pretrained(out / name, verifier=str(out / "target"))


def load_target(out: Path) -> LlavaForConditionalGeneration:
    """In float32."""
    model = LlavaForConditionalGeneration.from_pretrained(out / "target", dtype=torch.float32)
    return model.eval()


def measure(out: Path, count: int = NUM_PROMPTS) -> dict[str, Any]:
    """Whether captions are right, and tokens per step at T=0 of the heads in both ways, on pictures
    that no training has seen; written to `measured.json`.
    """
    target, processor = load_target(out), make_processor()
    asked = [Captions(processor, count, first=HELD_OUT).prompt(i) for i in range(count)]
    prompts, runs = [inputs for inputs, _ in asked], {}
    options = {"max_new_tokens": ROW, "batch_size": 8}
    for trained in ("visible", "hidden"):
        for drafts in ("visible", "hidden"):
            own = {"sees_pictures": drafts == "visible"}
            drafter = EagleDrafter.from_pretrained(out / trained, target, NUM_DRAFT_TOKENS, **own)
            generator = SpeculativeGenerator(target, drafter)
            runs[trained, drafts] = evaluate(generator, prompts, **options)
    plain = evaluate(SpeculativeGenerator(target, None), prompts, **options)
    texts = [processor.tokenizer.decode(r.new_tokens, skip_special_tokens=True) for r in plain.rows]
    found: dict[str, Any] = {
        "pictures": count,
        "right": sum(text == caption for text, (_, caption) in zip(texts, asked, strict=True)),
        "equal": all(
            [row.new_tokens for row in run.rows] == [row.new_tokens for row in plain.rows]
            for run in runs.values()
        ),
    }
    for (trained, drafts), run in runs.items():
        found[f"trained {trained}, drafts {drafts}"] = str(run.estimates["acceptance_length"])
    own = runs["hidden", "hidden"], runs["visible", "visible"]
    found["visible - hidden"] = str(difference(*own))
    found["hidden head, shown - not shown"] = str(
        difference(runs["hidden", "hidden"], runs["hidden", "visible"])
    )
    write_text(out / "measured.json", json.dumps(found, indent=2) + "\n")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="*")
    parser.add_argument("--steps", type=int, help="of every training stage")
    parser.add_argument("--pictures", type=int, default=NUM_PROMPTS, help="that are measured")
    parser.add_argument("--out", type=Path, default=Path("pictures"))
    options = parser.parse_args(arguments)
    given = {} if options.steps is None else {"max_steps": options.steps}
    run = {
        "target": lambda: make_target(options.out, TARGET_PLAN | given),
        "visible": lambda: make_head(options.out, "visible", HEAD_PLAN | given),
        "hidden": lambda: make_head(options.out, "hidden", HEAD_PLAN | given),
        "measure": lambda: print(json.dumps(measure(options.out, options.pictures), indent=2)),
    }
    for stage in options.stages or run:
        run[stage]()


if __name__ == "__main__":
    main()
