"""What a head shares with its target: embeddings, the vocabulary head, token ids.

Legend: B rows, N tokens, H width of the head, V target vocabulary, Vd ids that the head can
propose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.arguments import shown
from specdec.drafters.head.config import HeadConfig

if TYPE_CHECKING:
    from specdec.targets import Target


def model_of(target: PreTrainedModel | Target) -> PreTrainedModel:
    """The HF model of a target that may be wrapped."""
    # By then somebody has a target; a head alone needs none.
    from specdec.targets import Target
    from specdec.targets.wrappers import unwrap

    return target.model if isinstance(target, Target) else unwrap(target)


class Borrowed(NamedTuple):
    """Modules of the target that a head without its own uses, by reference, and the folder or
    Hugging Face id that the target was loaded from (empty for others).

    It is no module itself, so a drafter that holds it neither trains nor saves those weights.
    """

    embeddings: nn.Module
    lm_head: nn.Module
    name: str
    num_layers: int


def borrow(config: HeadConfig, model: PreTrainedModel) -> Borrowed:
    """The target's embeddings and vocabulary head."""
    features_of = config.target_hidden_size if config.feature_layers else None
    check_target(model, features_of, config.vocab_size)
    embeddings, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    theirs, name = model.config.get_text_config(), getattr(model.config, "name_or_path", None)
    hidden_size = theirs.hidden_size
    for what, is_own, width in (
        ("embeddings", config.has_embed_tokens, embeddings.weight.shape[1]),
        ("vocabulary head", config.has_lm_head, hidden_size),
    ):
        if not is_own and width != config.hidden_size:
            raise ValueError(
                f"the head is {config.hidden_size} wide and has no {what} of its own; the target's "
                f"has a width of {width} and cannot be shared"
            )
    if not config.has_embed_tokens and embeddings.weight.is_meta:
        raise ValueError(
            "the head has no embeddings of its own, and the target's are offloaded, where no row "
            "of them can be read; keep the target's embeddings on a device (device_map), or use a "
            "head that has embeddings"
        )
    return Borrowed(embeddings, lm_head, str(name or ""), theirs.num_hidden_layers)


def check_target(
    model: PreTrainedModel, hidden_size: int | None, vocab_size: int, *, what: str = "the head"
) -> None:
    """Raises `ValueError`, naming both sides, if a head was made for a target of other sizes.
    `None` is a head that reads no hidden states.
    """
    theirs = model.config.get_text_config()
    for name, own, other in (
        ("hidden size", hidden_size, theirs.hidden_size),
        ("vocabulary", vocab_size, theirs.vocab_size),
    ):
        if own not in (None, other):
            raise ValueError(
                f"{what} was made for a target with a {name} of {own}, but {type(model).__name__} "
                f"has {other}"
            )


def check_target_ids(target_ids: Tensor | None, config: HeadConfig) -> Tensor | None:
    """The target's id of each id that a head can propose, `[Vd]` int64, absolute (checkpoint files
    store offsets `d2t`); `None` where they are the same.
    """
    count, vocab_size = config.draft_vocab_size, config.vocab_size
    if target_ids is None:
        if count != vocab_size:
            raise ValueError(
                f"a head of {count} ids for a target of {vocab_size} needs target_ids, the "
                "target's id of each"
            )
        return None
    if target_ids.shape != (count,) or target_ids.dtype != torch.long:
        raise ValueError(
            f"target_ids must be {count} int64 ids (draft_vocab_size), got {shown(target_ids)}"
        )
    ids = set(target_ids.tolist())
    if min(ids) < 0 or max(ids) >= vocab_size or len(ids) != count:
        raise ValueError(
            f"target_ids must be distinct ids in 0..{vocab_size - 1}, got {len(ids)} distinct ones "
            f"in {min(ids)}..{max(ids)}; checkpoints store offsets, id minus index"
        )
    return target_ids
