"""Prompts that are more than text: what a model takes beside ids, which class loads it with its
towers, and which types of models are given text alone.
"""

from __future__ import annotations

import inspect

import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.hf.forward import CACHES, forward_arguments

_CONTROLS = {
    *("input_ids", "attention_mask", "position_ids", "cache_position", "labels", "self"),
    *("args", "kwargs"),
    *("use_cache", "logits_to_keep", "return_dict", "head_mask", "num_logits_to_keep"),
    *("next_sequence_length", "is_first_iteration", "output_router_logits", *CACHES),
}
_TEXT_INPUTS = {"inputs_embeds", "token_type_ids"}


def prompt_inputs(model: PreTrainedModel) -> set[str]:
    """Names of what a model's `generate` takes of a prompt beside ids and mask: pictures, sound,
    embeddings. Types of tokens are among them where there is more than one modality.
    """
    kind = type(model)
    taken = inspect.signature(kind.prepare_inputs_for_generation).parameters.keys()
    taken |= forward_arguments(model)
    found = {
        name
        for name in taken - _CONTROLS
        if not name.startswith(("output_", "encoder_", "decoder_", "cross_attn"))
    }
    return found - {"token_type_ids"} if found <= _TEXT_INPUTS else found


PROMPT_INPUTS = {
    *("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "image_sizes"),
    *("second_per_grid_ts", "image_position_ids", "input_features", "feature_attention_mask"),
    *("mm_token_type_ids", "inputs_embeds"),
}
"""The usual ones, by their names, for messages about models that do not take them."""

NOT_READ = {
    *("input_ids", "use_cache", "return_dict", "logits_to_keep", "cache_position", *CACHES),
}
"""Arguments of a text decoder that are no part of a prompt, or of which windows have their own."""

_CROSS = "its layers look at pictures by cross attention in every step, with masks of each token"
_OWN_STEPS = "its steps after the prompt read more than the ids of new tokens"
_OWN_MASK = "it masks the prompt by a rule of its own"
TEXT_ONLY = {
    **dict.fromkeys(("mllama", "idefics"), _CROSS),
    "voxtral_realtime": "it adds sound to the embedding of every new token",
    "phi4_multimodal": "it switches its rotary embeddings and drops its cache in mid-text",
    **dict.fromkeys(
        ("granite_speech", "granite_speech_plus", "granite_speech5"),
        "its generate() switches LoRA by the modality of the prompt",
    ),
    **dict.fromkeys(("deepseek_ocr2", "molmo2", "step3p7", "git"), _OWN_MASK),
    "llama4": "transformers 5.24 raises AttributeError for every call of this class (5.23 runs it)",
    "diffusion_gemma": _OWN_STEPS,
}
"""Of model types whose prompts must be text: why, as their modelling files show (5.24)."""


def why_not_read(model: PreTrainedModel) -> str | None:
    """Why prompts of a model of this type must be text; `None` if nothing is known against it."""
    return TEXT_ONLY.get(model.config.model_type)


def auto_class(config: PreTrainedConfig) -> str:
    """Name of the auto class that loads a model: with its towers or its encoder, where the
    configuration names such a class, or there is no other, but for types whose prompts must be
    text.
    """
    if getattr(config, "is_encoder_decoder", False):
        names = {"SPEECH_SEQ_2_SEQ": "SpeechSeq2Seq", "SEQ_TO_SEQ_CAUSAL_LM": "Seq2SeqLM"}
        for table, name in names.items():
            kind = getattr(transformers, f"MODEL_FOR_{table}_MAPPING").get(type(config), None)
            if kind is not None and kind.__name__ in (config.architectures or (kind.__name__,)):
                return f"AutoModelFor{name}"
    whole = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    has_other = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    is_named = whole is not None and whole.__name__ in (config.architectures or ())
    is_whole = is_named and config.model_type not in TEXT_ONLY if has_other else whole is not None
    return "AutoModelForImageTextToText" if is_whole else "AutoModelForCausalLM"
