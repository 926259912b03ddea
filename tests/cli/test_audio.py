"""Recordings on the command line: what is written is HF's own transcript of the same file."""

import wave

import numpy as np
import pytest
import torch
from scipy.io import wavfile
from small_whisper import extractor, signal, tokenizer, whisper

from specdec import zoo
from specdec.lab.cli import main
from specdec.lab.cli.audio import read_recording

OWN = {"max_new_tokens": 28, "do_sample": False}


@pytest.fixture(name="folder", scope="module")
def _folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    for part in (whisper(), tokenizer(), extractor()):
        part.save_pretrained(folder)
    return folder


@pytest.fixture(name="run")
def _run(capsys):
    """Runs a command; its exit code, output and errors."""

    def run(*arguments):
        code = main(["generate", *map(str, arguments)])
        shown = capsys.readouterr()
        return code, shown.out, [line for line in shown.err.splitlines() if "specdec: " in line]

    return run


@pytest.mark.parametrize("seconds", [0.8, pytest.param(2.3, marks=pytest.mark.swept)])
def test_a_transcript_is_that_of_hf(seconds, folder, run, tmp_path):
    samples, file = signal(0, seconds), tmp_path / "tone.wav"
    wavfile.write(file, 16000, samples)
    command = "--target", folder, "--audio", file, "--max-new-tokens", 28
    code, out, errors = run(*command, "--dtype", "float32")
    assert (code, errors) == (0, [])
    long = {"truncation": False, "padding": "longest"} if seconds > 1 else {}
    parts = {"sampling_rate": 16000, "return_tensors": "pt", "return_attention_mask": True}
    own = {**extractor()(samples, **parts, **long), **OWN, "return_timestamps": True}
    segments = whisper().generate(**own, return_segments=True)["segments"][0]
    assert len(segments) > 1
    lines = [line for line in out.splitlines() if " - " in line]
    for line, segment in zip(lines, segments, strict=True):
        times, text = line[:17], line[19:]
        assert [float(x) for x in times.split(" - ")] == pytest.approx(
            [float(segment["start"]), float(segment["end"])], abs=0.01
        )
        assert text == tokenizer().decode(segment["tokens"], skip_special_tokens=True).strip()
    assert "acceptance length" in out


def write_pcm(file, samples, width, rate):
    """By the standard library; of 8 bits WAV has no signs."""
    whole = np.round(samples * (2 ** (8 * width - 1) - 1)).astype(np.int64)
    whole += 128 if width == 1 else 0
    data = whole.astype("<i8").view(np.uint8).reshape(*whole.shape, 8)[..., :width]
    with wave.open(str(file), "wb") as out:
        out.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        out.setsampwidth(width)
        out.setframerate(rate)
        out.writeframes(data.tobytes())


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("rate", [16000, 44100])
def test_samples_of_every_width_and_rate(width, rate, tmp_path):
    """A tone of 300 Hz on two channels, of which one is silent."""
    tone = np.sin(2 * np.pi * 300 * np.arange(rate) / rate)
    write_pcm(tmp_path / "tone.wav", np.stack([tone, 0 * tone], axis=1), width, rate)
    found = read_recording(tmp_path / "tone.wav", 16000)
    assert (found.dtype, len(found)) == (np.float32, 16000)
    expected = 0.5 * np.sin(2 * np.pi * 300 * np.arange(16000) / 16000)
    inner = slice(200, -200)  # a filter has ends
    assert np.abs(found - expected)[inner].max() < (0.01 if width == 1 else 0.002)


def test_what_is_no_recording_is_refused_in_one_line(folder, run, tmp_path):
    def said(*arguments):
        code, _, (error,) = run(*arguments)
        assert code == 2
        return error

    sound, other = tmp_path / "tone.wav", tmp_path / "tone.mp3"
    wavfile.write(sound, 16000, signal(0, 0.5))
    other.write_bytes(b"ID3")
    hears = "--target", folder, "--audio"
    assert "there is no file none.wav" in said(*hears, "none.wav")
    assert "expected a WAV file, and" in said(*hears, other)
    wavfile.write(other, 16000, np.zeros(0, dtype=np.float32))
    assert "tone.mp3 has no samples" in said(*hears, other)
    assert "--audio needs a --target that hears" in said("--target", "zoo", "--audio", sound)
    assert "pass one" in said("--target", "zoo")
    assert "pass one" in said("--target", "zoo", "--audio", sound, "--prompt", "a")
    assert "--temperature belongs to prompts" in said(*hears, sound, "--temperature", 1)
    assert "--trace belongs to prompts" in said(*hears, sound, "--trace", "a.html")


def test_text_goes_through_an_encoder_too(run, tmp_path):
    """Of a model whose configuration names a class with an encoder."""
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {"vocab_size": 2048, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    torch.manual_seed(0)
    model = BartForConditionalGeneration(BartConfig(**sizes, **ids, forced_eos_token_id=None))
    model.save_pretrained(tmp_path)
    zoo.load_tokenizer().save_pretrained(tmp_path)
    code, _, errors = run("--target", tmp_path, "--prompt", "def f(", "--max-new-tokens", 4)
    assert (code, errors) == (0, [])
