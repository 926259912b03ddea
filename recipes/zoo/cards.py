"""The card beside each model's weights: how it was made, from what, and how good it is.

Legend: T tokens of a window, V vocabulary.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.zoo import sources
from specdec import zoo
from specdec.atomic import write_text
from specdec.generator import SpeculativeGenerator
from specdec.lab.evaluation.evaluate import evaluate
from specdec.lab.training.trainer import ObjectiveTrainer
from specdec.lab.zoo import corpus

NUM_PROMPTS = 32
NEW_TOKENS = 128
NUM_DRAFT_TOKENS = {"model": 4, "eagle3": 4, "mask-token": 4, "mtp": 3}
CONTEXTS = (64, 512, 1024, 1800)
"""Tokens before the text whose acceptance is measured."""
POSITIONS = (0, 64, 128, 256, 512, 1024, 1536, 2048)
"""Bounds of the ranges of positions whose loss is measured."""


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
def loss_by_position(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, stride: int = 512
) -> dict[str, float]:
    """Measure how a model's loss depends on the position, with the same text at all of them.

    Windows of the full length begin every `stride` tokens of the held-out modules, so each token
    is read at positions in every range.

    Args:
        model: The model in eval mode.
        tokenizer: Its tokenizer.
        stride: Tokens from one window to the next.

    Returns:
        Nats per token, by range of positions (`"64-127"`).
    """
    stream, length = _heldout_stream(tokenizer), POSITIONS[-1]
    windows = stream.unfold(0, length + 1, stride)
    total = torch.zeros(length, dtype=torch.float64)
    for ids in tqdm(windows.to(model.device), desc="loss by position"):
        logits = model(input_ids=ids[None, :-1]).logits[0]
        total += F.cross_entropy(logits.float(), ids[1:], reduction="none").double().cpu()
    mean = total / len(windows)
    bounds = itertools.pairwise(POSITIONS)
    return {f"{low}-{high - 1}": round(mean[low:high].mean().item(), 4) for low, high in bounds}


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
        `probability_overlap`: mean of sum_v min(target(v), draft(v)), the expected acceptance of
        one sampled draft token (Theorem 3.5, arXiv:2211.17192).
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
    plan: dict,
    progress: ObjectiveTrainer,
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
    logs = progress.state.log_history
    losses = [(log["step"], round(log["loss"], 4)) for log in logs if "loss" in log]
    card = {
        "model": _describe_model(model),
        "recipe": {**recipe, **plan},
        "run": {
            "num_steps": progress.state.global_step,
            "num_training_tokens": progress.state.global_step * plan["tokens_per_step"],
            "wall_s": round(progress.clock.wall_s),
            "final_training_loss": losses[-1][1] if losses else None,
            "loss_history": losses[::5],
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
    write_text(folder / "card.json", json.dumps(card, indent=2) + "\n")


def measure_acceptance(name: str) -> dict:
    """Generate from held-out prompts with one of the zoo's drafters and count.

    Args:
        name: The drafter, as `zoo.load_drafter` knows it.

    Returns:
        Per temperature the acceptance length and rate, and acceptance by position; conditions with
        them.
    """
    tokenizer, target = zoo.load_tokenizer(), zoo.load_target()
    num_draft_tokens = NUM_DRAFT_TOKENS[name]
    drafter = zoo.load_drafter(name, target, num_draft_tokens=num_draft_tokens)
    generator = SpeculativeGenerator(target, drafter)
    prompts = zoo.heldout_prompts(NUM_PROMPTS)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    text, measured = (inputs.input_ids, inputs.attention_mask), {}
    for temperature in tqdm((0.0, 1.0), desc=f"acceptance of {name}"):
        options = {"max_new_tokens": NEW_TOKENS, "temperature": temperature}
        stats = evaluate(generator, *text, **options).stats
        measured[f"temperature {temperature:g}"] = {
            "acceptance_length": round(stats.acceptance_length, 3),
            "acceptance_rate": round(stats.acceptance_rate, 3),
            "conditional_rates": [round(rate, 3) for rate in stats.conditional_rates],
            "joint_rates": [round(rate, 3) for rate in stats.joint_rates],
            "num_steps": sum(stats.steps),
        }
    stream, longest = _heldout_stream(tokenizer), max(CONTEXTS)
    ends = torch.linspace(longest, len(stream), 32).long().unique().tolist()
    prompts = torch.stack([stream[end - longest : end] for end in ends])
    lengths = {}
    for tokens in CONTEXTS:  # more and more of them, before the same places
        stats = evaluate(generator, prompts[:, -tokens:], max_new_tokens=64).stats
        lengths[str(tokens)] = round(stats.acceptance_length, 3)
    measured["acceptance_length by tokens of context, temperature 0"] = lengths
    conditions = {
        "num_draft_tokens": num_draft_tokens,
        "prompts": f"heldout_prompts({NUM_PROMPTS}), {NEW_TOKENS} new tokens each",
        "seeds": f"0..{NUM_PROMPTS - 1}, one per prompt",
        "command": "python -m recipes.zoo.recipe measure",
    }
    return {**measured, "conditions": conditions}


def write_acceptance(name: str, weights_dir: Path) -> None:
    """Measure a drafter of the package and enter the figures in its card.

    Args:
        name: The drafter, as `zoo.load_drafter` knows it.
        weights_dir: The folder that holds the folders of the zoo's models.
    """
    path = weights_dir / zoo.DRAFTERS[name] / "card.json"
    card = json.loads(path.read_text(encoding="utf-8"))
    card["acceptance"] = measure_acceptance(name)
    write_text(path, json.dumps(card, indent=2) + "\n")


def _describe_model(model: nn.Module) -> dict:
    """Say how large a model or a drafter's head is."""
    config = model.config
    is_head = hasattr(config, "layer")
    return {
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_layers": config.num_layers if is_head else config.num_hidden_layers,
        "width": config.hidden_size,
        "mlp_width": (config.layer if is_head else config).intermediate_size,
        "num_heads": config.layer.num_heads if is_head else config.num_attention_heads,
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
            "versions": {name: _version(name) for name in sources.PACKAGES},
            **_describe_files(tokenizer, sources.package_files()),
        },
    }


def _describe_files(tokenizer: PreTrainedTokenizerFast, files: list[Path]) -> dict:
    """Count files, bytes and tokens, and fingerprint the bytes."""
    return {
        "num_files": len(files),
        "num_bytes": sum(path.stat().st_size for path in files),
        "num_tokens": sum(len(ids) for ids in sources.encode_files(tokenizer, files)),
        "sha256": _fingerprint(files),
    }


def _fingerprint(files: list[Path]) -> str:
    """The SHA-256 over the bytes of `files`: equal digests mean equal corpora on two machines."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _heldout_stream(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return ids [T] of all held-out modules, one after the other."""
    documents = sources.encode_files(tokenizer, corpus.heldout_files())
    return torch.from_numpy(np.concatenate(documents).astype(np.int64))


def _heldout_windows(
    tokenizer: PreTrainedTokenizerFast, *, length: int = 1024
) -> Iterator[torch.Tensor]:
    """Yield ids [T + 1] that together cover each held-out module once, T at most `length`."""
    for ids in sources.encode_files(tokenizer, corpus.heldout_files()):
        # As in training, a document follows the end of another.
        document = torch.tensor([tokenizer.eos_token_id, *ids.tolist()])
        for start in range(0, len(document) - 1, length):
            yield document[start : start + length + 1]
