"""Whisper whole: HF's own loop over the windows of a recording, through the hook, and one window
by a call of the generator.
"""

import pytest
import torch
import transformers as hf
from small_whisper import extractor, recordings, signal, tokenizer, whisper

from specdec import ModelDrafter, SpeculativeGenerator, Target

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


@pytest.mark.parametrize("options", [{}, {"return_timestamps": True}])
def test_the_pipeline_of_hf(options):
    """It searches with five beams, if nobody says otherwise."""
    model, own = whisper(), {"language": "en", "task": "transcribe", "max_new_tokens": 28}
    parts = {"tokenizer": tokenizer(), "feature_extractor": extractor()}
    pipe = hf.pipeline("automatic-speech-recognition", model=model, **parts)
    generator, sound = SpeculativeGenerator(Target(model), "lookup"), signal(0, 2.3)
    hear = lambda **more: pipe(sound.copy(), **options, generate_kwargs={**own, **more})  # noqa: E731
    expected = hear(num_beams=1)
    assert hear(num_beams=1, custom_generate=generator) == expected
    assert len(expected["text"]) > 5
    assert generator.last_result.stats.totals.accepted > 0
    with pytest.raises(ValueError, match="num_beams=5 is not supported"):
        hear(custom_generate=generator)
