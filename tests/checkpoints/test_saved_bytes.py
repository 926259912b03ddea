"""Heads are written byte for byte as before the rooms `heads` and `checkpoints` were built.

The hashes are those of files that the code of commit 24c56ff wrote; configurations have since got
the keys `producer` and `num_aux_hidden_states`. Weights are exact multiples of 1/64, so they depend
on no random generator.
"""

import hashlib
from dataclasses import replace

import pytest
import torch
import transformers
from checkpoint_parts import TARGET
from eagle_heads import flagged

from specdec.drafters import EagleConfig, EagleDrafter, EagleHead
from specdec.heads.config import LayerConfig

EAGLE3 = EagleConfig("attention", LayerConfig(32, 24, 4, 2, 8), 61, 20, (2, 4, 5), 32)
EAGLE1 = replace(
    EAGLE3,
    fusion="input",
    draft_vocab_size=61,
    feature_layers=("final",),
    output_norm=False,
    has_lm_head=False,
    fc_bias=True,
)
NEWER = flagged(EAGLE3, has_qk_norm=True, norm_before_residual=True, has_embed_tokens=True)
HEADS = {
    "safeailab, EAGLE-3": (
        EAGLE3,
        "safeailab",
        "1f4a169187b4bde935055330ffab19c3de2b15887cda001f44c6fd9e0630f267",
        "8f5c26a90826f11f39d86e25f4d9c124c23a30adc6b639388fbaa44c42677ac5",
    ),
    "speculators, EAGLE-3": (
        NEWER,
        "speculators",
        "ff5d2a2c1858099bfff79ef986b3ef19ad2e3202bf1ae6648df9a744bd26eee2",
        "604d0eaaddf90c776f27d45cab65d686d6becccbaa3b346574adb7fa4e4b020c",
    ),
    "safeailab, EAGLE-1": (
        EAGLE1,
        "safeailab",
        "de5964a08b061fced46739fd0d3119fc2254531238a3dd6e9e782838e4aeae20",
        "a2cfc343036ac744b7f1c1fa94bb804c00052144d562733d40c3c9c0457d0eaa",
    ),
}
WRITER = "5.23.0"
"""Version of transformers behind the hashes; a speculators file names it."""


def filled(config):
    """A head whose weights follow from their place; its draft ids are in descending order."""
    ids = torch.arange(1, 60, 3).flip(0) if config.draft_vocab_size == 20 else None
    head = EagleHead(config, ids)
    for i, (_, weight) in enumerate(sorted(head.named_parameters())):
        values = (torch.arange(weight.numel()) * 37 + 11 * i) % 64 - 32
        weight.data.copy_((values / 64).view(weight.shape))
    return head


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", HEADS)
def test_a_saved_head_has_the_bytes_that_it_always_had(name, tmp_path):
    config, layout, weights, keys = HEADS[name]
    EagleDrafter(filled(config), TARGET, 5).save_pretrained(tmp_path, layout, verifier="a/b")
    assert sha256(tmp_path / "model.safetensors") == weights
    if layout != "speculators" or transformers.__version__ == WRITER:
        assert sha256(tmp_path / "config.json") == keys
