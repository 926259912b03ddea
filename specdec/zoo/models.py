"""The zoo's two Llama-architecture models and what each is trained on.

Legend: B rows of a batch, T tokens of a row, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    *,
    num_layers: int,
    mlp_width: int,
    seed: int,
    width: int = 128,
    num_heads: int = 4,
) -> LlamaForCausalLM:
    """Build an untrained Llama with tied embeddings and room for 2048 positions.

    Args:
        tokenizer: Gives the vocabulary size and the special ids.
        num_layers: Decoder layers; the target is deep and narrow, so that it costs many times a
            one-layer drafter, as real models do.
        mlp_width: Hidden width of the MLP.
        seed: Of the initialisation.
        width: Residual width.
        num_heads: Attention heads, each with its own keys and values.

    Returns:
        A float32 model.
    """
    torch.manual_seed(seed)
    special = {f"{name}_token_id": tokenizer.eos_token_id for name in ("bos", "eos", "pad")}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=mlp_width,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        **special,
    )
    model = LlamaForCausalLM(config)
    initialise(model)
    return model


def initialise(model: LlamaForCausalLM) -> None:
    """Draw the matrices for a narrow model, and shrink what writes into the residual stream.

    Each of the 2 * num_layers writes then adds 1 / (2 * num_layers) of the variance (GPT-2).
    """
    num_writes = 2 * model.config.num_hidden_layers
    for name, module in model.model.named_modules():
        if isinstance(module, nn.Linear):
            is_write = name.endswith(("o_proj", "down_proj"))
            nn.init.normal_(module.weight, std=0.05 / (math.sqrt(num_writes) if is_write else 1))


def next_token_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy in nats per token of ids [B, T + 1]."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits  # [B, T, V]
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def distillation_loss(
    target: LlamaForCausalLM, *, hard_weight: float
) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """Return a loss that pulls a draft LM to the target's distribution.

    Args:
        target: The trained teacher; left as it is.
        hard_weight: Share of the cross-entropy to the text itself, in [0, 1].

    Returns:
        A function of (draft, ids [B, T + 1]) whose value is the cross-entropy to the target's
        probabilities, thus KL(target || draft) plus the target's entropy, which has no gradient.
    """

    def loss(draft: nn.Module, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), torch.autocast(ids.device.type, dtype=torch.bfloat16):
            teacher = target(input_ids=ids[:, :-1], use_cache=False).logits  # [B, T, V]
        student = draft(input_ids=ids[:, :-1], use_cache=False).logits.float().flatten(0, 1)
        soft = F.cross_entropy(student, teacher.float().flatten(0, 1).softmax(-1))
        hard = F.cross_entropy(student, ids[:, 1:].flatten())
        return (1 - hard_weight) * soft + hard_weight * hard

    return loss
