"""The zoo's untrained models: deep and narrow Llamas, and heads for them."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec.drafters.eagle import EagleHead
from specdec.drafters.mask_token.head import MaskTokenHead
from specdec.drafters.mtp.head import MTPHead
from specdec.lab.training.eagle import eagle_config
from specdec.lab.training.mask_token import mask_token_config
from specdec.lab.training.mtp import mtp_config

MAX_LENGTH = 2048
"""Positions of every model of the zoo, and the longest rows that it is trained on."""


def build_model(
    tokenizer: PreTrainedTokenizerFast,
    *,
    num_layers: int,
    mlp_width: int,
    seed: int,
    width: int = 128,
    num_heads: int = 4,
) -> LlamaForCausalLM:
    """Build an untrained Llama with tied embeddings and room for `MAX_LENGTH` positions.

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
        max_position_embeddings=MAX_LENGTH,
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


def build_eagle3_head(target: LlamaForCausalLM, *, mlp_width: int, seed: int) -> EagleHead:
    """Build an untrained one-layer EAGLE-3 head over the target's whole vocabulary.

    Its output norm and vocabulary head start as the target's.

    Args:
        target: The model that it will draft for.
        mlp_width: Hidden width of the MLP.
        seed: Of the initialisation.

    Returns:
        A float32 head.
    """
    torch.manual_seed(seed)
    head = EagleHead(eagle_config(target, "eagle3", mlp_width=mlp_width))
    _initialise_head(head)
    head.norm.load_state_dict(target.model.norm.state_dict())
    head.lm_head.load_state_dict(target.lm_head.state_dict())
    return head


def build_mask_token_head(
    target: LlamaForCausalLM, *, num_layers: int, mlp_width: int, seed: int
) -> MaskTokenHead:
    """Build an untrained P-EAGLE head over the target's whole vocabulary.

    Its output norm and vocabulary head start as the target's; masks have the embedding of the
    token that ends a text, and a learned feature.

    Args:
        target: The model that it will draft for.
        num_layers: Decoder layers.
        mlp_width: Hidden width of the MLP.
        seed: Of the initialisation.

    Returns:
        A float32 head.
    """
    torch.manual_seed(seed)
    sizes = {"num_layers": num_layers, "mlp_width": mlp_width}
    head = MaskTokenHead(mask_token_config(target, **sizes))
    nn.init.normal_(head.mask_hidden)
    _initialise_head(head)
    head.norm.load_state_dict(target.model.norm.state_dict())
    head.lm_head.load_state_dict(target.lm_head.state_dict())
    return head


def build_mtp_head(
    target: LlamaForCausalLM, *, num_depths: int, mlp_width: int, seed: int
) -> MTPHead:
    """Build an untrained multi-token prediction head that shares the target's vocabulary head.

    The norm of every depth starts as the target's final norm.

    Args:
        target: The model that it will draft for.
        num_depths: Prediction modules, one per draft token.
        mlp_width: Hidden width of each module's MLP.
        seed: Of the initialisation.

    Returns:
        A float32 head.
    """
    torch.manual_seed(seed)
    head = MTPHead(mtp_config(target, num_depths, mlp_width=mlp_width))
    _initialise_head(head)
    for depth in head.layers:
        depth.norm.load_state_dict(target.model.norm.state_dict())
    return head


def _initialise_head(head: nn.Module) -> None:
    num_writes = 2 * head.config.num_layers
    for name, module in head.named_modules():
        if isinstance(module, nn.Linear):
            is_write = name.endswith(("o_proj", "down_proj"))
            nn.init.normal_(module.weight, std=0.05 / (math.sqrt(num_writes) if is_write else 1))
