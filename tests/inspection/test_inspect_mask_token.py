"""`specdec inspect` knows mask-token heads, and its parity check finds one that is read wrongly.

The heads are fitted to a random target's text under one reading and stored so that they are read in
another.
"""

import functools

import pytest
import torch
from checkpoint_parts import tiny_llama
from mask_checkpoints import pard, specforge_peagle, z_lab
from mask_heads import flagged, learned

from specdec import SpeculativeGenerator, Target
from specdec.checkpoints import survey_checkpoint
from specdec.checkpoints.mask_token import MASK_TOKEN
from specdec.cli import main
from specdec.drafters import MaskTokenDrafter, MaskTokenHead
from specdec.inspection import alternatives, table, try_readings

ROPE = {"rope_type": "default", "rope_theta": 100.0}
TARGET = tiny_llama(rope_parameters=ROPE)
WRAPPED = Target(TARGET)
PROMPTS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
NEW_TOKENS = 24


@functools.cache
def head_that_knows(name):
    """The greedy text after `PROMPTS`, by heart."""
    generator = SpeculativeGenerator(WRAPPED, None)
    text = generator.generate(PROMPTS, max_new_tokens=NEW_TOKENS, do_sample=False).sequences
    layers = {"p-eagle": (3, 5, 6), "pard": ()}.get(name, (3, 5))
    return learned(TARGET, name, 2, text, feature_layers=layers, rope=ROPE)


def misread(head, **changes):
    """The same weights under a configuration that says something else."""
    other = MaskTokenHead(flagged(head.config, **changes), head.target_ids)
    other.load_state_dict(head.state_dict())
    return other


def compare(head, folder, **options):
    MaskTokenDrafter(head, TARGET, 2).save_pretrained(folder, "speculators")
    survey = survey_checkpoint(folder, TARGET, families=(MASK_TOKEN,), **options)
    readings = alternatives(survey.load(TARGET), TARGET)
    options = {"max_new_tokens": NEW_TOKENS, "num_draft_tokens": 2}
    trials = try_readings(readings, MaskTokenDrafter, TARGET, PROMPTS, **options)
    return max(trials, key=lambda trial: trial.acceptance_length).reading, table(trials)


FAULTS = {
    "p-eagle, ids": (
        "p-eagle",
        {"feature_layers": (2, 4, 5)},
        "one layer higher: boundaries 3, 5, 6",
    ),
    "p-eagle, residual": (
        "p-eagle",
        {"norm_before_residual": True},
        "residual before the norm",
    ),
    "p-eagle, rope": (
        "p-eagle",
        {"rope": {"rope_type": "default", "rope_theta": 1e6}},
        "rope base 100, the target's",
    ),
    "dflash, ids": ("dflash", {"feature_layers": (4, 6)}, "one layer lower: boundaries 3, 5"),
    "dflash, rows": ("dflash", {"alignment": "next-token"}, "rows predict same position"),
    "dspark, rows": ("dspark", {"alignment": "same-position"}, "rows predict next token"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_parity_check_names_the_fault(fault, tmp_path):
    name, changes, expected = FAULTS[fault]
    best, shown = compare(misread(head_that_knows(name), **changes), tmp_path)
    assert best.name == expected, shown
    assert f"'{expected}' accepts more; to load the head so: {best.how}" in shown


@pytest.mark.parametrize("name", ["p-eagle", "dflash", "dspark"])
def test_the_parity_check_finds_no_fault_in_a_sound_head(name, tmp_path):
    best, shown = compare(head_that_knows(name), tmp_path)
    assert best.name == "as read", shown
    assert "no usual misreading accepts more" in shown


def test_a_causal_reading_of_a_block_is_noticed(tmp_path):
    best, shown = compare(head_that_knows("dflash"), tmp_path, is_causal=True)
    assert best.name == "bidirectional block", shown
    assert "to load the head so: is_causal=False" in shown


def test_the_command_shows_every_kind(tmp_path, capsys):
    shown = {}
    for name, files, options in (
        ("dflash", z_lab(), []),
        ("pard", pard(), ["--rope-theta", "7"]),
        ("p-eagle", specforge_peagle(), ["--mask-token-id", "5"]),
    ):
        assert main(["inspect", str(files.write(tmp_path / name)), *options]) == 0
        shown[name] = capsys.readouterr().out
    assert "block         6 rows, at most 5 draft tokens" in shown["dflash"]
    assert "boundaries 2, 5, 32 wide, joined by fc, as keys and values" in shown["dflash"]
    assert "none: a language model of its own" in shown["pard"]
    assert "rope_theta 7.0" in shown["pard"]
    assert "masks         token 5 and a learned feature" in shown["p-eagle"]


def test_the_command_says_what_is_missing(tmp_path, capsys):
    assert main(["inspect", str(specforge_peagle().write(tmp_path))]) == 2
    assert "names no id of a mask token; pass mask_token_id=" in capsys.readouterr().err
