"""Untrained EAGLE heads for any target."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.drafters.eagle_config import EagleConfig
from specdec.drafters.eagle_head import EagleHead

HeadKind = Literal["eagle1", "eagle3"]


def eagle_config(
    target: PreTrainedModel, kind: HeadKind, *, mlp_width: int | None = None
) -> EagleConfig:
    """The usual one-layer head for a target: its width and its attention heads.

    The rotary base is 10000 whatever the target's, as that is what some engines assume.

    Args:
        target: an HF causal LM.
        kind: `"eagle1"`, or `"eagle3"` with the usual features (boundaries 2, L / 2 and L - 3 of L
            layers; nearer together where L < 7).
        mlp_width: of the head's MLP; `None` is the target's own.

    Raises:
        ValueError: another kind, or a target of too few layers for EAGLE-3.

    Example:
        >>> from specdec import zoo
        >>> eagle_config(zoo.load_target(), "eagle3").feature_layers
        (2, 8, 13)
    """
    if kind not in ("eagle1", "eagle3"):
        raise ValueError(f"kind must be 'eagle1' or 'eagle3', got {kind!r}")
    theirs, is_first = target.config.get_text_config(), kind == "eagle1"
    heads, count = theirs.num_attention_heads, theirs.num_hidden_layers
    if not is_first and count < 3:
        raise ValueError(
            f"an EAGLE-3 head reads three hidden states and the target has {count} layers; "
            "train 'eagle1'"
        )
    boundaries = (2, count // 2, count - 3) if count >= 7 else (1, 2, max(3, count - 1))
    own_width = getattr(theirs, "intermediate_size", None) or 4 * theirs.hidden_size
    return EagleConfig(
        fusion="input" if is_first else "attention",
        hidden_size=theirs.hidden_size,
        intermediate_size=mlp_width or own_width,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=getattr(theirs, "num_key_value_heads", None) or heads,
        head_dim=getattr(theirs, "head_dim", None) or theirs.hidden_size // heads,
        vocab_size=theirs.vocab_size,
        draft_vocab_size=theirs.vocab_size,
        feature_layers=("final",) if is_first else boundaries,
        target_hidden_size=theirs.hidden_size,
        fc_bias=is_first,
        output_norm=not is_first,
        has_lm_head=not is_first,
        rms_norm_eps=getattr(theirs, "rms_norm_eps", 1e-6),
        max_position_embeddings=getattr(theirs, "max_position_embeddings", None) or 2048,
    )


def new_head(
    target: PreTrainedModel, kind: HeadKind, *, mlp_width: int | None = None, seed: int = 0
) -> EagleHead:
    """An untrained head in float32, on the CPU.

    A vocabulary head of its own starts as the target's.

    Args:
        target, kind, mlp_width: as `eagle_config`.
        seed: of the weights.

    Raises:
        ValueError: as `eagle_config`.

    Example:
        >>> from specdec import zoo
        >>> from specdec.drafters import EagleDrafter
        >>> target = zoo.load_target()
        >>> drafter = EagleDrafter(new_head(target, "eagle1"), target)
    """
    config = eagle_config(target, kind, mlp_width=mlp_width)
    with torch.random.fork_rng([]):  # torch's own initialisation draws from the global generator
        head = EagleHead(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, module in head.named_modules():
            if isinstance(module, nn.Linear):
                is_write = name.endswith(("o_proj", "down_proj"))  # into the residual stream
                std = 0.02 if is_write else module.in_features**-0.5
                module.weight.normal_(std=std, generator=generator)
                if module.bias is not None:
                    module.bias.zero_()
        if head.config.has_lm_head:
            head.lm_head.weight.copy_(target.get_output_embeddings().weight)
    return head
