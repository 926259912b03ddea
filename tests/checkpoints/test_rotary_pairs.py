"""Heads whose rope turns channels 2i and 2i + 1, against a rope of complex numbers."""

import pytest
import torch
from checkpoint_files import HEAD_DIM, HIDDEN, TARGET, biases, read, refuses
from checkpoint_layouts import (
    ROPE,
    dspark,
    nvidia,
    pard,
    safeailab_eagle1,
    speculators,
    vllm,
    z_lab,
)

from specdec import EagleDrafter
from specdec.checkpoints import load
from specdec.drafters.head.causal import attend_causally

LENGTH = 7
WORDS = {
    **{"rope_is_neox_style": False, "is_neox_style": False, "rope_traditional": True},
    **{"rope_interleaved": True, "rope_interleave": True},
}
PARTIAL = {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}
HEADS = {
    "EAGLE-3": vllm(rope_theta=1e4),
    "EAGLE-1": safeailab_eagle1(rope_theta=1e4),
    "biases": vllm(attention_bias=True, rope_theta=1e4).plus(biases("qkv")),
    "half of the channels": vllm(**PARTIAL),
    "norms per head": z_lab(),
    "DSpark": dspark(),
    "a language model": pard("qwen3"),
}


def complex_rope(x, base, width):
    """`[heads, N, D]`: channels 2i + 1 are imaginary parts of channels 2i."""
    frequencies = base ** -(torch.arange(0, width, 2).double() / width)
    angles = torch.arange(x.shape[1])[:, None] * frequencies
    pairs = torch.view_as_complex(x[..., :width].double().unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)
    return torch.cat([turned, x[..., width:].double()], dim=-1)


def expected_scores(files, x, layer):
    """Of a file's own tensors, by the complex rope: `[heads, N, N]`."""
    found = {key: t for key, t in files.tensors.items() if ".0.self_attn." in key}
    found |= {key: t for key, t in files.tensors.items() if "midlayer.self_attn." in key}
    parts = {key.partition("self_attn.")[2]: t for key, t in found.items()}
    rows = []
    for part in "qk":
        y = x @ parts[f"{part}_proj.weight"].T + parts.get(f"{part}_proj.bias", 0)
        y = y.unflatten(-1, (-1, HEAD_DIM)).transpose(0, 1)
        if (norm := parts.get(f"{part}_norm.weight")) is not None:
            y = norm * y / (y.pow(2).mean(-1, keepdim=True) + layer.rms_norm_eps).sqrt()
        rows.append(complex_rope(y, layer.rope["rope_theta"], layer.rotary_width))
    query, key = rows
    return query @ key.repeat_interleave(len(query) // len(key), dim=0).mT


def scores(head, x):
    """Of a head's first attention: `[heads, N, N]`."""
    (attention,) = [m for name, m in head.named_modules() if name.endswith("layers.0.self_attn")]
    seen = []

    def attend(index, query, key, value, *options):
        seen.append((query[0], key[0]))
        return attend_causally(index, query, key, value)

    angles = head.config.layer.rotary_table(len(x), dtype=torch.float32)[None, None]
    attention(x[None], angles, attend)
    query, key = seen[0]
    return (query @ key.repeat_interleave(len(query) // len(key), dim=0).mT).double()


def states(files):
    (weight,) = [
        t
        for name, t in files.tensors.items()
        if name.endswith(("layers.0.self_attn.q_proj.weight", "midlayer.self_attn.q_proj.weight"))
    ]
    return torch.randn(LENGTH, weight.shape[1], generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_a_rope_of_neighbours_is_the_complex_one(name, tmp_path):
    files = HEADS[name].but(rope_is_neox_style=False)
    checkpoint, x = read(files.write(tmp_path / "theirs")), states(HEADS[name])
    head = checkpoint.build()
    expected = expected_scores(files, x, head.config.layer)
    torch.testing.assert_close(scores(head, x), expected, rtol=1e-4, atol=1e-4)
    as_usual = read(HEADS[name].write(tmp_path / "usual")).build()
    assert (scores(as_usual, x) - expected).abs().max() > 0.05
    assert any("neighbours" in note for note in checkpoint.notes)
    turned = {n for n, t in as_usual.state_dict().items() if not t.equal(head.state_dict()[n])}
    assert {n.rpartition("self_attn.")[2][:2] for n in turned} == {"q_", "k_"}


SECTIONS = {
    **{f"{word}": vllm(**{word: value}) for word, value in WORDS.items()},
    **{f"dflash_config.{w}": z_lab(dflash={w: value}) for w, value in WORDS.items()},
    **{
        f"rope_parameters.{w}": nvidia(rope_scaling=None, rope_parameters=ROPE | {w: value})
        for w, value in WORDS.items()
    },
    **{f"rope_scaling.{w}": vllm(rope_scaling=ROPE | {w: v}) for w, v in WORDS.items()},
    **{f"layers.{w}": speculators(layers={w: value}) for w, value in WORDS.items()},
}


@pytest.mark.parametrize("place", SECTIONS)
@torch.no_grad()
def test_every_word_is_read_wherever_it_stands(place, tmp_path):
    files, x = SECTIONS[place], states(SECTIONS[place])
    head = read(files.write(tmp_path)).build()
    expected = expected_scores(files, x, head.config.layer)
    torch.testing.assert_close(scores(head, x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("word", WORDS)
def test_a_word_for_the_usual_pairs_changes_nothing(word, tmp_path):
    said = read(vllm(**{word: not WORDS[word]}).write(tmp_path / "said"))
    silent = read(vllm().write(tmp_path / "silent"))
    assert said.config == silent.config
    assert all(t.equal(silent.tensors[name]) for name, t in said.tensors.items())


def test_two_words_that_contradict_each_other_are_refused(tmp_path):
    files = vllm(rope_interleaved=True, is_neox_style=True)
    refuses(files.write(tmp_path), "says two things of rotary pairs: .. rope_interleaved")


@torch.no_grad()
def test_such_a_head_is_written_with_the_pairs_that_engines_read(tmp_path):
    x = torch.randn(LENGTH, 2 * HIDDEN)
    theirs = vllm(rope_theta=1e4, rope_is_neox_style=False).write(tmp_path / "theirs")
    drafter = load(theirs, TARGET, 3)
    drafter.save_pretrained(tmp_path / "ours")
    assert "neox" not in (tmp_path / "ours" / "config.json").read_text()
    again = EagleDrafter.from_pretrained(tmp_path / "ours", TARGET, 3)
    assert scores(again.head, x).equal(scores(drafter.head, x))
