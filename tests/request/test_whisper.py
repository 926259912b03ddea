"""Whisper whole: HF's own loop over the windows of a recording, through the hook, and one window
by a call of the generator.
"""

import functools

import pytest
import torch
import transformers as hf

from specdec import ModelDrafter, SpeculativeGenerator, Target

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


def recordings(*seconds: float) -> dict[str, torch.Tensor]:
    """Log-mel features of tones that rise, fall and pause, with a mask where there are several."""
    signals = []
    for number, length in enumerate(seconds):
        t = torch.arange(int(16000 * length)) / 16000
        noise = torch.randn(len(t), generator=torch.Generator().manual_seed(number))
        tone = torch.sin(2 * torch.pi * (200 + 50 * torch.sin(t + number)) * t)
        signals.append((tone * (torch.sin(7 * t) > 0) + 0.05 * noise).numpy())
    options = {"sampling_rate": 16000, "return_tensors": "pt", "padding": "longest"}
    options |= {"truncation": False, "return_attention_mask": len(seconds) > 1}
    return dict(hf.WhisperFeatureExtractor()(signals, **options))


OPTIONS = {"return_timestamps": True, "language": "en", "task": "transcribe", "max_new_tokens": 28}
CONDITIONED = {"condition_on_prev_tokens": True, "temperature": (0.0,), "logprob_threshold": -1.0}
CONDITIONED |= {"compression_ratio_threshold": 1.35, "no_speech_threshold": 0.6}


def check_equal(found: dict, expected: dict) -> None:
    assert found["sequences"].equal(expected["sequences"])
    assert sum(map(len, expected["segments"])) > 2
    for row, own in zip(found["segments"], expected["segments"], strict=True):
        for one, other in zip(row, own, strict=True):
            assert (one["start"], one["end"]) == (other["start"], other["end"])
            assert one["tokens"].equal(other["tokens"])


@pytest.mark.parametrize(
    ("window", "seconds", "options"),
    [
        (100, (2.3,), {}),
        pytest.param(100, (2.3, 1.7, 0.6), CONDITIONED, marks=pytest.mark.swept),
        pytest.param(3000, (70.0,), {}, marks=pytest.mark.swept),
        pytest.param(3000, (70.0, 41.0, 12.5), CONDITIONED, marks=pytest.mark.swept),
    ],
)
def test_segments_timestamps_and_text_of_a_recording_are_those_of_hf(window, seconds, options):
    model, inputs = whisper(window), recordings(*seconds)
    own = {**inputs, **OPTIONS, **options, "return_segments": True}
    expected = model.generate(**own)
    generator = SpeculativeGenerator(Target(model), "lookup")
    check_equal(model.generate(**own, custom_generate=generator), expected)


def test_one_window_by_a_call_of_the_generator():
    model = whisper()
    inputs = {"input_features": torch.stack([*recordings(2.0)["input_features"][0].split(100, 1)])}
    drafter = ModelDrafter(model, 3)
    generator = SpeculativeGenerator(Target(model), drafter)
    options = {"language": "en", "task": "translate", "max_new_tokens": 12}
    found = generator.generate(**inputs, **options)
    assert found.sequences[:, :4].tolist() == [[51, 52, 54, 58]] * 2
    model.generation_config.force_unique_generate_call = True
    expected = model.generate(**inputs, **options)
    del model.generation_config.force_unique_generate_call
    assert found.sequences.equal(expected)
    assert found.stats.acceptance_length > 3
