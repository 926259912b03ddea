"""`MaskTokenConfig` refuses what contradicts itself, and a head's parts do what they say."""

from dataclasses import replace

import pytest
import torch
from eagle_heads import flagged
from eagle_reference import fused
from mask_heads import DFLASH, DSPARK, P_EAGLE, PARD, WIRINGS, random_head

CONTRADICTIONS = {
    "alignment must be 'shifted', 'unshifted'": (P_EAGLE, {"alignment": "late"}),
    "alignment='shifted' goes with context='input', got 'keys'": (P_EAGLE, {"context": "keys"}),
    "goes with context='keys', got 'input'": (DFLASH, {"context": "input"}),
    "goes with context='none', got 'keys'": (DFLASH, {"alignment": "unshifted"}),
    r"context='input' and feature_layers=\(\) contradict": (P_EAGLE, {"feature_layers": ()}),
    r"context='none' and feature_layers=\(2,\) contradict": (PARD, {"feature_layers": (2,)}),
    "norm_before_fc, fc_norm and norm_before_residual are of": (DFLASH, {"fc_norm": True}),
    "are of context='input'": (PARD, {"norm_before_residual": True}),
    "choose one": (P_EAGLE, {"fc_norm": True, "norm_before_fc": True}),
    "num_layers must be >= 1, got 0": (P_EAGLE, {"num_layers": 0}),
    "mask_token_id must be an id in 0..22, got 23": (P_EAGLE, {"mask_token_id": 23}),
    "ties_embeddings is about tables of the head's own": (P_EAGLE, {"ties_embeddings": True}),
    "block_size is of 'same-position' and 'next-token', not of 'shifted'": (
        P_EAGLE,
        {"block_size": 4},
    ),
    "need its block_size": (DFLASH, {"block_size": None}),
    "at least 2 rows, got 1": (DFLASH, {"block_size": 1}),
    "at least 1 rows, got 0": (DSPARK, {"block_size": 0}),
    "draft_vocab_size must be in 1..vocab_size = 23, got 24": (P_EAGLE, {"draft_vocab_size": 24}),
    "has_lm_head must be True": (DFLASH, {"draft_vocab_size": 9}),
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_a_configuration_that_contradicts_itself_is_refused(message):
    config, changes = CONTRADICTIONS[message]
    with pytest.raises(ValueError, match=message):
        replace(config, **changes)


@pytest.mark.parametrize(
    ("config", "rows", "limit"),
    [
        (P_EAGLE, [0, 1, 4], None),
        (PARD, [0, 1, 4], None),
        (DFLASH, [6, 6, 6], 5),
        (DSPARK, [6, 6, 6], 6),
        (WIRINGS["dflash, causal"], [2, 3, 6], None),
        (WIRINGS["dspark, causal"], [1, 2, 5], None),
    ],
)
def test_rows_after_the_committed_ones(config, rows, limit):
    assert [config.num_later(k) for k in (1, 2, 5)] == rows
    assert config.max_draft_tokens == limit


@pytest.mark.parametrize("name", [n for n, c in WIRINGS.items() if c.context == "input"])
@torch.no_grad()
def test_masks_take_the_way_of_real_features(name):
    head = random_head(WIRINGS[name])
    features = torch.randn(2, 3, head.config.feature_width, dtype=torch.float64)
    hidden = head.hidden_states(features, num_masks=4)
    assert hidden.shape == (2, 7, head.config.hidden_size)
    mask = fused(head.config, head.state_dict(), head.mask_hidden.reshape(1, -1))
    torch.testing.assert_close(hidden[:, 3:], mask.expand(2, 4, -1), rtol=0, atol=1e-12)
    torch.testing.assert_close(hidden[:, :3], head.hidden_states(features), rtol=0, atol=1e-12)
    features[0, 1] = torch.nan  # of a rejected token: it stays where it is
    poisoned = head.hidden_states(features, num_masks=4)
    assert poisoned[:, 3:].equal(hidden[:, 3:])
    assert poisoned[1].equal(hidden[1])


def test_a_context_brings_keys_and_values_and_asks_nothing():
    """Attention over a context equals attention over all rows, of which only the last ask."""
    head = random_head(flagged(PARD, num_layers=1))
    attention = head.layers[0].self_attn
    x, angles = torch.randn(1, 6, 16).double(), torch.randn(1, 1, 6, 12).double()
    seen = {}

    def attend(index, query, key, value):
        seen[query.shape[2]] = query, key, value
        return query

    attention(x, angles, attend)
    attention(x[:, 4:], angles, attend, x[:, :4])
    torch.testing.assert_close(seen[2][0], seen[6][0][:, :, 4:])
    for one, other in zip(seen[2][1:], seen[6][1:], strict=True):
        torch.testing.assert_close(one, other)
