"""Recordings for `specdec generate --audio`: what HF's own `generate` writes of a file, window by
window, with the steps of a generator.
"""

from __future__ import annotations

from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.io import wavfile
from scipy.signal import resample_poly

from specdec.hf.prompts import auto_class
from specdec.loading import find_pretrained, load_pretrained
from specdec.statistics import SpeculationStats

if TYPE_CHECKING:
    from specdec import SpeculativeGenerator


def read_recording(path: Path, rate: int) -> np.ndarray:
    """Samples `[n]` of a WAV file, float32 from -1 to 1: one channel, the mean of its own,
    resampled to so many per second.

    Raises:
        ValueError: there is no such file, or it is no recording that can be read.
    """
    if not path.is_file():
        raise ValueError(f"expected a recording, and there is no file {path}")
    try:
        own, samples = wavfile.read(path)
    except Exception as error:  # damaged files end in errors of any kind
        raise ValueError(
            f"expected a WAV file, and {path} is none that can be read ({error}); convert it "
            "(ffmpeg -i FILE out.wav)"
        ) from error
    if samples.dtype.kind in "iu":
        half = 2.0 ** (8 * samples.dtype.itemsize - 1)
        samples = samples / half - (samples.dtype.kind == "u")
    if samples.ndim > 1:
        samples = samples.mean(axis=1)
    if not len(samples):
        raise ValueError(f"expected a recording, and {path} has no samples")
    common = gcd(rate, own)
    return resample_poly(samples, rate // common, own // common).astype(np.float32)


def features_of(name: str, path: Path) -> dict[str, Any]:
    """What a model that hears reads of a recording of any length. No weights are loaded.

    Args:
        name: folder or Hugging Face id of the model.
        path: of the recording.

    Raises:
        ValueError: there is no such model, or it hears nothing; or as `read_recording`.
    """
    place = {} if name == "zoo" else {"local_files_only": find_pretrained(name)}
    kind = place and auto_class(load_pretrained("AutoConfig", name, **place))
    if kind != "AutoModelForSpeechSeq2Seq":
        raise ValueError(
            f"--audio needs a --target that hears (Whisper, Speech2Text), and {name} reads text; "
            "pass another one, or leave it out"
        )
    extractor = load_pretrained("AutoFeatureExtractor", name, **place)
    rate = extractor.sampling_rate
    samples = read_recording(path, rate)
    own = {"sampling_rate": rate, "return_tensors": "pt", "return_attention_mask": True}
    if len(samples) > rate * getattr(extractor, "chunk_length", float("inf")):
        own |= {"truncation": False, "padding": "longest"}
    return dict(extractor(samples, **own))


def transcribe(
    generator: SpeculativeGenerator, tokenizer: Any, features: dict[str, Any], **options: Any
) -> tuple[list[str], SpeculationStats]:
    """Lines of a transcript, with times where the target has timestamps, and the counts of all
    windows together.

    Args:
        generator, tokenizer: of the target.
        features: of `features_of`.
        options: of the target's own `generate`.
    """
    whole, windows = generator.target.model.whole, []
    inputs = {name: value.to(generator.target.device) for name, value in features.items()}
    inputs["input_features"] = inputs["input_features"].to(generator.target.dtype)
    if has_times := hasattr(whole.generation_config, "no_timestamps_token_id"):
        options |= {"return_timestamps": True, "return_segments": True}

    def decode(*given: Any, **own: Any) -> Any:
        text = generator(*given, **own)
        windows.append(generator.last_result.stats)
        return text

    found = whole.generate(**inputs, **options, custom_generate=decode)
    segments = found["segments"][0] if has_times else [{"tokens": found[0]}]
    return [_line(segment, tokenizer) for segment in segments], sum(windows)


def _line(segment: dict[str, Any], tokenizer: Any) -> str:
    """The text of a segment, behind its times where it has any."""
    text = tokenizer.decode(segment["tokens"], skip_special_tokens=True).strip()
    if "start" not in segment:
        return text
    start, end = (float(segment[name]) for name in ("start", "end"))
    return f"{start:7.2f} - {end:7.2f}  {text}"
