"""Checkpoints of Gemma 4's assistants, as HF writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from specdec.checkpoints.family import Family, Source, Translation
from specdec.checkpoints.files import CheckpointFolder
from specdec.checkpoints.hf_layers import known_keys, text_fields
from specdec.drafters.assistant import (
    CENTROIDS,
    EMBEDDINGS,
    AssistantConfig,
    AssistantDrafter,
    AssistantHead,
)
from specdec.drafters.head.sharing import check_target
from specdec.lab.show.text import one_line

KINDS = ("gemma4_assistant", "gemma4_unified_assistant")


def detect(folder: CheckpointFolder) -> Source | None:
    """The producer `"Google"`, by the `model_type`."""
    kind = folder.fields.get("model_type")
    return Source("Google", "Gemma 4 assistant", f"model_type {kind}") if kind in KINDS else None


def translate(
    folder: CheckpointFolder,
    source: Source,
    target: PreTrainedModel | None,
    options: Mapping[str, Any],
) -> Translation:
    """HF's class reads the configuration; see `Family`."""
    keys, text = folder.fields, text_fields(folder.fields)
    text.integer("num_hidden_layers")  # before anything is built
    try:
        hf = CONFIG_MAPPING[keys.get("model_type")].from_dict(dict(keys.raw))
        config = AssistantConfig.of(hf)
    except Exception as error:  # HF raises errors of many kinds for values it cannot take
        raise ValueError(f"{keys.origin}: {type(error).__name__}: {one_line(error)}") from error
    # HF's classes have read what they know.
    keys.accept({*known_keys(type(hf))} - {"text_config"})
    text.accept(known_keys(type(hf.get_text_config())))
    if target is not None:
        check_target(target, config.hidden_size, config.vocab_size, what=keys.origin)
    tensors = {name.removeprefix(CENTROIDS): tensor for name, tensor in folder.tensors().items()}
    if hf.tie_word_embeddings and EMBEDDINGS in tensors:
        tensors["lm_head.weight"] = tensors.pop(EMBEDDINGS)
    unused = {EMBEDDINGS: "the assistant reads the target's embeddings"}
    ids = frozenset({"token_ordering"})
    return Translation(config, tensors, keys, unused, exact=ids, ids=ids)


ASSISTANT = Family(
    name="Gemma 4 assistant",
    marks=f"model_type {' or '.join(KINDS)}",
    detect=detect,
    translate=translate,
    drafter=AssistantDrafter,
    head=AssistantHead,
)
"""Assistants of Gemma 4: E2B, E4B, 26B-A4B, 31B, and the unified models'."""
