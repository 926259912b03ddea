"""A small random Whisper, its tokenizer and feature extractor, and recordings."""

import functools

import numpy as np
import torch
import transformers as hf

FIRST = 59
"""Of the timestamps."""


@functools.cache
def whisper(window: int = 100) -> hf.WhisperForConditionalGeneration:
    """Random, with Whisper's special tokens, for windows of so many frames of 10 ms."""
    torch.manual_seed(0)
    layers = {"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 48}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 48}
    ids = {"pad_token_id": 50, "bos_token_id": 50, "eos_token_id": 50, "decoder_start_token_id": 51}
    positions = {"max_source_positions": window // 2, "max_target_positions": 64}
    sizes = {"vocab_size": FIRST + window // 2 + 1, "num_mel_bins": 80, "d_model": 32}
    config = hf.WhisperConfig(**sizes, **layers, **heads, **ids, **positions)
    model = hf.WhisperForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.5, generator=generator)
    languages = {"lang_to_id": {"<|en|>": 52}, "task_to_id": {"transcribe": 53, "translate": 54}}
    own = {"no_timestamps_token_id": 58, "prev_sot_token_id": 56, "is_multilingual": True}
    own |= {"suppress_tokens": [3, 4], "begin_suppress_tokens": [5, 50]}
    model.generation_config = hf.GenerationConfig(**ids, **languages, **own)
    return model


def tokenizer() -> hf.WhisperTokenizer:
    """A letter for each id of text, and Whisper's special tokens."""
    names = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWX", "<|endoftext|>"]
    special = (
        "startoftranscript en transcribe translate startoflm startofprev nospeech notimestamps"
    )
    names += [f"<|{name}|>" for name in special.split()]
    names += [f"<|{0.02 * i:.2f}|>" for i in range(whisper().config.vocab_size - FIRST)]
    found = hf.WhisperTokenizer(vocab={name: i for i, name in enumerate(names)}, merges=[])
    found.add_special_tokens({"additional_special_tokens": names[51:FIRST]})
    return found


def extractor(seconds: int = 1) -> hf.WhisperFeatureExtractor:
    """Of windows of so many seconds."""
    return hf.WhisperFeatureExtractor(chunk_length=seconds)


def signal(number: int, seconds: float) -> np.ndarray:
    """16 000 samples a second of a tone that rises, falls and pauses."""
    t = torch.arange(int(16000 * seconds)) / 16000
    noise = torch.randn(len(t), generator=torch.Generator().manual_seed(number))
    tone = torch.sin(2 * torch.pi * (200 + 50 * torch.sin(t + number)) * t)
    return (tone * (torch.sin(7 * t) > 0) + 0.05 * noise).numpy()


def recordings(*seconds: float) -> dict[str, torch.Tensor]:
    """Log-mel features of tones that rise, fall and pause, with a mask where there are several."""
    signals = [signal(number, length) for number, length in enumerate(seconds)]
    options = {"sampling_rate": 16000, "return_tensors": "pt", "padding": "longest"}
    options |= {"truncation": False, "return_attention_mask": len(seconds) > 1}
    return dict(hf.WhisperFeatureExtractor()(signals, **options))
