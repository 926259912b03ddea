"""What an EAGLE head borrows from its target, and whether the two belong together."""

from __future__ import annotations

from typing import Protocol

from torch import nn
from transformers import PreTrainedModel

from specdec.drafters.eagle_config import EagleConfig


class HoldsModel(Protocol):
    """A `Target`, as far as a drafter may know it."""

    model: PreTrainedModel


def model_of(target: PreTrainedModel | HoldsModel) -> PreTrainedModel:
    """The HF model of a target that may be wrapped."""
    return target if isinstance(target, PreTrainedModel) else target.model


def borrow(config: EagleConfig, model: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """The target's embeddings and vocabulary head, for a head without its own.

    Args:
        config: of the head.
        model: of the target.

    Raises:
        ValueError: the head was made for another target; both sides are named.
    """
    embeddings, vocabulary = model.get_input_embeddings(), model.get_output_embeddings()
    theirs, width = model.config.get_text_config(), embeddings.weight.shape[1]
    check_vocabulary(config, theirs.vocab_size)
    if config.target_hidden_size != theirs.hidden_size:
        raise ValueError(
            f"the head reads features of width {config.target_hidden_size} and the target's hidden "
            f"size is {theirs.hidden_size}; it was made for another target"
        )
    if not config.has_embed_tokens and width != config.hidden_size:
        raise ValueError(
            f"the head is {config.hidden_size} wide and has no embeddings of its own; the target's "
            f"are {width} wide and cannot be shared"
        )
    if not config.has_lm_head and theirs.hidden_size != config.hidden_size:
        raise ValueError(
            f"the head is {config.hidden_size} wide and has no vocabulary head of its own; the "
            f"target's reads a width of {theirs.hidden_size} and cannot be shared"
        )
    return embeddings, vocabulary


def check_vocabulary(config: EagleConfig, vocab_size: int) -> None:
    """Raises `ValueError` if the head was made for another vocabulary than one of this size."""
    if config.vocab_size != vocab_size:
        raise ValueError(
            f"the head was made for a vocabulary of {config.vocab_size} and the target's is "
            f"{vocab_size}; it was made for another target"
        )
