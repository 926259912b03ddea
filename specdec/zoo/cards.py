"""The card beside each model's weights: how it was made, from what, and how good it is.

Legend: T tokens of a window, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.training.plan import TrainingPlan, TrainingProgress
from specdec.zoo import corpus
from specdec.zoo.packing import encode_files


@torch.inference_mode()
def heldout_loss(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict:
    """Measure a model on the modules that no training saw, in windows of 1024 tokens.

    Args:
        model: The model in eval mode.
        tokenizer: Its tokenizer.

    Returns:
        `nats_per_token` and `bits_per_byte`.
    """
    total_nats, num_tokens = 0.0, 0
    for ids in _heldout_windows(tokenizer):
        logits = model(input_ids=ids[None, :-1]).logits[0]  # [T, V]
        total_nats += F.cross_entropy(logits.float(), ids[1:], reduction="sum").item()
        num_tokens += len(ids) - 1
    num_bytes = sum(len(corpus.read_source(f).encode()) for f in corpus.heldout_files())
    return {
        "nats_per_token": round(total_nats / num_tokens, 4),
        "bits_per_byte": round(total_nats / num_bytes / math.log(2), 4),
        "num_tokens": num_tokens,
    }


@torch.inference_mode()
def heldout_agreement(
    draft: LlamaForCausalLM, target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> dict:
    """Measure how near a draft LM is to its target on held-out text, position by position.

    Args:
        draft: The draft LM in eval mode.
        target: The target in eval mode.
        tokenizer: Their tokenizer.

    Returns:
        `top1_agreement`: share of positions where both prefer the same token.
        `probability_overlap`: mean of sum_v min(p(v), q(v)), the expected acceptance of one
        sampled draft token (Theorem 3.5, arXiv:2211.17192).
    """
    agreement, overlap, num_positions = 0.0, 0.0, 0
    for ids in _heldout_windows(tokenizer):
        p, q = (model(input_ids=ids[None, :-1]).logits[0].softmax(-1) for model in (target, draft))
        agreement += (p.argmax(-1) == q.argmax(-1)).sum().item()
        overlap += torch.minimum(p, q).sum().item()
        num_positions += len(p)
    return {
        "top1_agreement": round(agreement / num_positions, 4),
        "probability_overlap": round(overlap / num_positions, 4),
    }


def write_card(
    folder: Path,
    *,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerFast,
    plan: TrainingPlan,
    progress: TrainingProgress,
    heldout: dict,
    recipe: dict,
) -> None:
    """Write `card.json` beside the weights in `folder`.

    Args:
        folder: Where the model's weights are.
        model: The trained model, for its shape.
        tokenizer: Its tokenizer, to count the corpus's tokens.
        plan: How it was trained.
        progress: What the run did.
        heldout: Its measures on held-out text.
        recipe: What else made it: the command, the initialisation, the loss.
    """
    card = {
        "model": _describe_model(model),
        "recipe": {**recipe, **dataclasses.asdict(plan)},
        "run": {
            "num_steps": progress.num_steps,
            "num_training_tokens": progress.num_tokens,
            "wall_s": round(progress.wall_s),
            "final_training_loss": round(progress.loss, 4),
            "loss_history": progress.history[::5],
        },
        "data": _describe_data(tokenizer),
        "heldout": heldout,
        "acceptance": None,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    (folder / "card.json").write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


def _describe_model(model: nn.Module) -> dict:
    """Say how large a model or a drafter's head is; both name their sizes alike."""
    config = model.config
    layers = getattr(config, "num_hidden_layers", None) or config.num_layers
    heads = getattr(config, "num_attention_heads", None) or config.num_heads
    return {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_layers": layers,
        "width": config.hidden_size,
        "mlp_width": config.intermediate_size,
        "num_heads": heads,
        "vocab_size": config.vocab_size,
    }


def _describe_data(tokenizer: PreTrainedTokenizerFast) -> dict:
    """Say which corpus this was, so that another machine's can be told apart."""
    return {
        "standard library": {
            "licence": "PSF License Version 2",
            "python": platform.python_version(),
            **_describe_files(tokenizer, corpus.library_files()),
            "held_out": list(corpus.HELD_OUT),
        },
        "packages": {
            "versions": {name: _version(name) for name in corpus.PACKAGES},
            **_describe_files(tokenizer, corpus.package_files()),
        },
    }


def _describe_files(tokenizer: PreTrainedTokenizerFast, files: list[Path]) -> dict:
    """Count files, bytes and tokens, and fingerprint the bytes."""
    return {
        "num_files": len(files),
        "num_bytes": sum(path.stat().st_size for path in files),
        "num_tokens": sum(len(ids) for ids in encode_files(tokenizer, files)),
        "sha256": corpus.fingerprint(files),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _heldout_windows(
    tokenizer: PreTrainedTokenizerFast, *, length: int = 1024
) -> Iterator[torch.Tensor]:
    """Yield ids [T + 1] that together cover each held-out module once, T at most `length`."""
    for ids in encode_files(tokenizer, corpus.heldout_files()):
        # As in training, a document follows the end of another.
        document = torch.tensor([tokenizer.eos_token_id, *ids.tolist()])
        for start in range(0, len(document) - 1, length):
            yield document[start : start + length + 1]
