"""Which family a checkpoint is of depends on its files, not on the order in which families ask."""

import pytest
from checkpoint_cases import CASES as EAGLE_CASES
from mask_checkpoints import (
    amazon,
    deepspec,
    hf_assistant,
    pard,
    specforge_peagle,
    speculators_dflash,
    speculators_peagle,
    torchspec,
    z_lab,
)
from mtp_checkpoints import write_numbered

from specdec.checkpoints import files as checkpoint_files
from specdec.checkpoints import survey_checkpoint
from specdec.checkpoints.eagle import EAGLE
from specdec.checkpoints.mask_token import MASK_TOKEN
from specdec.checkpoints.mtp import MTP
from specdec.checkpoints.survey import family_of

ORDERS = (EAGLE, MASK_TOKEN, MTP), (MTP, MASK_TOKEN, EAGLE)
MASK_TOKEN_WRITERS = (
    *(amazon, deepspec, hf_assistant, pard, speculators_dflash),
    *(speculators_peagle, specforge_peagle, torchspec, z_lab),
)


@pytest.mark.parametrize("name", EAGLE_CASES)
def test_a_sequential_head_is_eagles_in_any_order(name, tmp_path):
    folder = EAGLE_CASES[name][0].write(tmp_path)
    assert {family_of(folder, families=order) for order in ORDERS} == {EAGLE}


@pytest.mark.parametrize("write", MASK_TOKEN_WRITERS)
def test_a_parallel_head_is_a_mask_token_head_in_any_order(write, tmp_path):
    folder = write().write(tmp_path)
    assert {family_of(folder, families=order) for order in ORDERS} == {MASK_TOKEN}


def test_modules_among_more_tensors_than_are_read_are_found_in_any_order(tmp_path, monkeypatch):
    _, tensors = write_numbered(tmp_path, "DeepseekV3", num_depths=1)
    of_modules = sum("layers.3." in name for name in tensors)
    monkeypatch.setattr(checkpoint_files, "MAX_TENSORS", of_modules)
    assert {family_of(tmp_path, families=order) for order in ORDERS} == {MTP}


def test_marks_of_two_families_are_an_error_that_names_both(tmp_path):
    folder = z_lab(specdec_mtp={}).write(tmp_path)
    for order in ORDERS:
        with pytest.raises(ValueError, match=r"marks of several families: .*MTP .*specdec_mtp"):
            survey_checkpoint(folder, families=order)


def test_what_no_family_reads_is_refused_with_the_reason(tmp_path):
    """Medusa's key beside EAGLE's tensors: the one family that claims the files says why not."""
    folder = next(iter(EAGLE_CASES.values()))[0].but(medusa_num_heads=3).write(tmp_path)
    for order in ORDERS:
        with pytest.raises(ValueError, match="medusa_num_heads: a block or Medusa drafter"):
            survey_checkpoint(folder, families=order)
