"""Multi-token prediction heads by themselves: contradictions are refused, weights have the names of
the library's own layout, and norms centred at 0 keep their precision.
"""

import pytest
import torch
from mtp_heads import PLAIN, WIRINGS, flagged, random_head

from specdec.drafters import MTPHead
from specdec.heads.mtp import CentredRMSNorm


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_layers": 0}, "num_layers must be an integer >= 1, got 0"),
        ({"semantics": "shifted"}, "semantics must be 'chain' or 'target', got 'shifted'"),
        ({"output_norm": False}, "feedback_norm feeds the output of the norm back"),
        ({"lm_head_per_depth": True}, "lm_head_per_depth needs has_lm_head=True"),
    ],
)
def test_contradictions_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        flagged(PLAIN, **flags)


def test_a_reduced_vocabulary_is_refused():
    with pytest.raises(ValueError, match="proposes all ids"):
        MTPHead(PLAIN, torch.arange(3))


def test_features_of_another_width_are_refused():
    with pytest.raises(ValueError, match="one feature of width 16, and the target's are 5 wide"):
        random_head(PLAIN).fuse(torch.zeros(1, 2, 5))


def test_depths_have_weights_of_their_own_and_share_what_the_flags_say():
    names = {name: set(random_head(config).state_dict()) for name, config in WIRINGS.items()}
    assert "layers.2.block.self_attn.q_proj.weight" in names["chain"]
    assert names["own head"] - names["chain"] == {"lm_head.weight"}
    per_depth = {f"layers.{depth}.lm_head.weight" for depth in range(3)} | {"embed_tokens.weight"}
    assert names["own heads"] - names["chain"] == per_depth
    norms = {f"layers.{depth}.norm.weight" for depth in range(3)}
    assert names["chain"] - names["no norms after layers"] == norms
    biases = {f"layers.{depth}.eh_proj.bias" for depth in range(3)}
    assert names["projection bias"] - names["chain"] == biases


def test_a_centred_norm_in_half_precision_adds_one_after_it_has_read_the_weight():
    """A weight of 0.001 would be lost if 1.001 were stored in bfloat16."""
    norm = CentredRMSNorm(4, 1e-6).bfloat16()
    with torch.no_grad():
        norm.weight.fill_(0.001)
    x = torch.full((1, 4), 200.0, dtype=torch.bfloat16)
    assert norm(x).dtype == torch.bfloat16
    exact = CentredRMSNorm(4, 1e-6).double()
    with torch.no_grad():
        exact.weight.copy_(norm.weight)
    torch.testing.assert_close(norm(x), exact(x.double()).bfloat16(), rtol=0, atol=0)
    assert exact(x.double())[0, 0] > 1.0009
