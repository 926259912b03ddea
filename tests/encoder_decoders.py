"""Small random encoder-decoders of every type that is tested, and sources for them."""

from __future__ import annotations

import functools

import torch
import transformers as hf
from torch import Tensor

VOCAB = 99
_SIZES = {"vocab_size": VOCAB, "d_model": 32}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
_LAYERS = {"encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
_HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
_BART = {**_SIZES, **_IDS, **_LAYERS, **_HEADS, "tie_word_embeddings": False}
_T5 = {**_SIZES, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4, **_IDS}
_UNTIED = {"tie_word_embeddings": False}
_OF_BART = {
    "bart": (hf.BartConfig, hf.BartForConditionalGeneration, {}),
    "mbart": (hf.MBartConfig, hf.MBartForConditionalGeneration, {}),
    "marian": (hf.MarianConfig, hf.MarianMTModel, {}),
    "pegasus": (hf.PegasusConfig, hf.PegasusForConditionalGeneration, {}),
    "plbart": (hf.PLBartConfig, hf.PLBartForConditionalGeneration, {}),
    "mvp": (hf.MvpConfig, hf.MvpForConditionalGeneration, {}),
    "blenderbot": (hf.BlenderbotConfig, hf.BlenderbotForConditionalGeneration, {}),
    "blenderbot_small": (hf.BlenderbotSmallConfig, hf.BlenderbotSmallForConditionalGeneration, {}),
    "bigbird_pegasus": (
        hf.BigBirdPegasusConfig,
        hf.BigBirdPegasusForConditionalGeneration,
        {"attention_type": "original_full"},
    ),
    "m2m_100": (hf.M2M100Config, hf.M2M100ForConditionalGeneration, {}),
}
_OF_T5 = {
    "t5": (hf.T5Config, hf.T5ForConditionalGeneration, {"tie_word_embeddings": True}),
    "t5_gated": (
        hf.T5Config,
        hf.T5ForConditionalGeneration,
        {"feed_forward_proj": "gated-gelu", **_UNTIED},
    ),
    "mt5": (hf.MT5Config, hf.MT5ForConditionalGeneration, _UNTIED),
    "longt5": (hf.LongT5Config, hf.LongT5ForConditionalGeneration, _UNTIED),
}
_NORMED_BEHIND = "bart", "marian", "plbart", "mvp", "blenderbot_small"
"""Types whose layers end in a norm, which repeat one token where weights are large."""
TYPES = [*_OF_BART, *_OF_T5, "whisper", "speech_to_text", "trocr"]


def _made(name: str) -> hf.PreTrainedModel:
    if name in _OF_BART:
        config, kind, own = _OF_BART[name]
        return kind(config(**_BART, max_position_embeddings=120, forced_eos_token_id=None, **own))
    if name in _OF_T5:
        config, kind, own = _OF_T5[name]
        return kind(config(**_T5, **own))
    if name == "whisper":
        sizes = {"max_source_positions": 50, "max_target_positions": 120, "num_mel_bins": 16}
        none = {"suppress_tokens": None, "begin_suppress_tokens": None}
        return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**_BART, **sizes, **none))
    if name == "speech_to_text":
        sizes = {"max_source_positions": 60, "max_target_positions": 120, "conv_channels": 32}
        config = hf.Speech2TextConfig(**_BART, **sizes, input_feat_per_channel=16)
        return hf.Speech2TextForConditionalGeneration(config)
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    encoder = hf.ViTConfig(**sizes, intermediate_size=24, image_size=16, patch_size=4)
    own = {"is_decoder": True, "add_cross_attention": True, "max_position_embeddings": 120}
    sizes = {n: v for n, v in _BART.items() if not n.startswith("encoder")}
    decoder = hf.TrOCRForCausalLM(hf.TrOCRConfig(**sizes, **own))
    return hf.VisionEncoderDecoderModel(encoder=hf.ViTModel(encoder), decoder=decoder)


def build_whole(
    name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> hf.PreTrainedModel:
    """A model of a type, whose texts do not repeat one token."""
    torch.manual_seed(seed)
    model, generator = _made(name).eval(), torch.Generator().manual_seed(seed)
    spread = 0.15 if name in _NORMED_BEHIND else 0.5
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, spread, generator=generator)
    model.generation_config = hf.GenerationConfig(**_IDS)
    return model.to(dtype)


@functools.cache
def kept_whole(name: str) -> hf.PreTrainedModel:
    """The same in float32, made once; nobody may change it."""
    return build_whole(name)


def noisy(model: hf.PreTrainedModel, name: str, scale: float = 0.02) -> hf.PreTrainedModel:
    """A draft model with an encoder of its own, that often agrees with a model of `build_whole`."""
    other, generator = build_whole(name, dtype=model.dtype), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_((scale * noise).to(parameter.dtype))
    return other


def sources(
    model: hf.PreTrainedModel, *lengths: int, seed: int = 7
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """A batch of sources of these lengths, and each row of it alone: texts with masks, or sound and
    pictures, which have one length.
    """
    generator, rows = torch.Generator().manual_seed(seed), len(lengths)
    shapes = {"input_features": (rows, 16, 100), "pixel_values": (rows, 3, 16, 16)}
    if model.config.model_type == "speech_to_text":
        shapes["input_features"] = rows, 100, 16
    if model.main_input_name in shapes:
        shape = shapes[model.main_input_name]
        states = torch.randn(shape, generator=generator).to(model.dtype)
        alone = [{model.main_input_name: row[None]} for row in states]
        return {model.main_input_name: states}, alone
    ids = torch.zeros(rows, max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(3, 90, (length,), generator=generator)
        mask[row, :length] = 1
    batch = {"input_ids": ids, "attention_mask": mask}
    alone = [
        {n: v[row : row + 1, :length] for n, v in batch.items()}
        for row, length in enumerate(lengths)
    ]
    return batch, alone
