"""Both saved layouts through the `speculators` package itself: what it loads, saves and converts is
the same head. It is not among the package's dependencies; install it to run this
(`pip install speculators`).
"""

import pytest
import torch
from checkpoint_files import tiny_llama
from eagle_heads import head_for

from specdec.drafters import EagleDrafter

FLAGS = {"draft_vocab_size": 20, "feature_layers": (1, 4, 7), "head_dim": 8}
NEWER = {"norm_before_residual": True, "fc_norm": True, "feedback_norm": True, "num_layers": 2}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target on disk: the package reads its configuration and some of its weights."""
    folder = tmp_path_factory.mktemp("target")
    tiny_llama().save_pretrained(folder)
    return type(tiny_llama()).from_pretrained(folder).eval()


def drafter_of(target, **flags):
    head = head_for(target, **FLAGS | flags)
    head.target_ids.copy_(head.target_ids.sort().values)
    return EagleDrafter(head, target)


def assert_same(loaded, drafter):
    assert loaded.config == drafter.config
    assert loaded.head.target_ids.equal(drafter.head.target_ids)
    for name, tensor in drafter.head.state_dict().items():
        assert loaded.head.state_dict()[name].equal(tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, NEWER], ids=["plain", "newer"])
def test_the_package_reads_and_writes_the_speculators_layout(flags, target, tmp_path):
    speculators = pytest.importorskip("speculators")
    drafter = drafter_of(target, **flags)
    drafter.save_pretrained(tmp_path / "ours", "speculators")
    theirs = speculators.SpeculatorModel.from_pretrained(str(tmp_path / "ours"))
    state = theirs.state_dict()
    assert all(tensor.isfinite().all() for tensor in state.values())
    assert state["embed_tokens.weight"].equal(target.get_input_embeddings().weight)
    for name, tensor in drafter.head.state_dict().items():
        assert state[name].equal(tensor), name
    theirs.save_pretrained(tmp_path / "theirs")
    assert_same(EagleDrafter.from_pretrained(tmp_path / "theirs", target), drafter)


@pytest.mark.slow
def test_the_package_converts_the_safeailab_layout(target, tmp_path):
    pytest.importorskip("speculators")
    from speculators.convert.entrypoints import convert_model

    drafter = drafter_of(target)
    drafter.save_pretrained(tmp_path / "ours")
    convert_model(
        str(tmp_path / "ours"),
        target.config._name_or_path,
        "eagle3",
        str(tmp_path / "theirs"),
        eagle_aux_hidden_state_layer_ids=[1, 4, 7],
    )
    converted = EagleDrafter.from_pretrained(tmp_path / "theirs", target)
    for name, tensor in drafter.head.state_dict().items():
        torch.testing.assert_close(converted.head.state_dict()[name], tensor, rtol=0, atol=0)
    assert converted.feature_layers == (1, 4, 7)
