"""A family that the library does not have loads, inspects, drafts and trains on the same rooms."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import toy_mask_token
from architectures import build
from checkpoint_files import TARGET
from checkpoint_layouts import safeailab_eagle3
from toy_mask_token import TOY
from training_runs import on_a_cpu

import specdec
from specdec.checkpoints import survey_checkpoint
from specdec.checkpoints.eagle import EAGLE


def test_it_goes_from_an_untrained_head_to_a_trained_one_through_files(tmp_path, capsys):
    with on_a_cpu():
        toy_mask_token.main(tmp_path)
    shown = capsys.readouterr().out
    assert "head          toy, 1 layer, width 32" in shown
    assert "one layer higher: hidden states 3" in shown


@pytest.mark.slow
def test_it_needs_nothing_of_another_family(tmp_path):
    """In a process of its own, which ends with a look at `sys.modules`."""
    root = str(Path(specdec.__file__).parent.parent)
    environment = os.environ | {"PYTHONPATH": root, "ACCELERATE_USE_CPU": "true"}
    subprocess.run([sys.executable, toy_mask_token.__file__, tmp_path], env=environment, check=True)


@pytest.mark.smoke
def test_the_family_that_recognises_a_checkpoint_reads_it(tmp_path):
    toy_mask_token.save(toy_mask_token.new_head(build("llama")), tmp_path / "toy")
    eagle3 = safeailab_eagle3().write(tmp_path / "eagle")
    families = TOY, EAGLE
    assert survey_checkpoint(tmp_path / "toy", families=families).family is TOY
    assert survey_checkpoint(eagle3, TARGET, families=families).family is EAGLE
    with pytest.raises(ValueError, match=r"nothing reads: .*toy_mask_token_id = "):
        survey_checkpoint(tmp_path / "toy", families=(EAGLE,)).load()
    with pytest.raises(ValueError, match=r"none of the families .*: toy \(key toy_mask_token_id"):
        survey_checkpoint(eagle3, families=(TOY,))


def test_its_tensors_are_those_of_the_head_and_its_options_are_its_own(tmp_path):
    target, head = build("llama"), toy_mask_token.new_head(build("llama"))
    toy_mask_token.save(head, tmp_path)
    survey = survey_checkpoint(tmp_path, target, families=(TOY,), feature_layers=(1,))
    assert survey.config.feature_layers == (1,)
    assert survey.expected == {k: tuple(t.shape) for k, t in head.state_dict().items()}
    assert survey.unread_keys == ()
