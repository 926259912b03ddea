"""What the tables of families and kinds hold is what the command line says and takes."""

import inspect

import pytest

from specdec import zoo
from specdec.checkpoints.families import FAMILIES
from specdec.lab.cli import options, training_options
from specdec.lab.cli.training_options import Run
from specdec.lab.training.kinds import KINDS
from specdec.lab.training.losses import HeadObjective
from specdec.loading import NAMES, find_drafter


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_a_name_of_drafters_that_the_pages_of_help_list(name):
    assert f"{name}:PATH" in options.DRAFTER
    assert f"{name}:PATH" in NAMES
    with pytest.raises(ValueError, match=f"write .*{name}:PATH"):
        find_drafter(name)


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_makes_a_head_of_its_family_by_options_that_the_command_has(name):
    kind, fields = KINDS[name], Run.__dataclass_fields__
    assert name in training_options.KINDS
    assert set(kind.options) <= fields.keys()
    drafter, objective = kind.new(zoo.load_target(), 3, seed=1)
    assert isinstance(objective, HeadObjective)
    assert isinstance(drafter, FAMILIES[kind.family].drafter)
    assert drafter.num_draft_tokens == 3
    if "step_weights" in kind.options:
        assert kind.weights in inspect.signature(type(objective)).parameters
