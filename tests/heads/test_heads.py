"""What heads are made of: names, angles, borrowed tables, and what each part computes by itself."""

from dataclasses import replace

import mask_heads
import mtp_heads
import pytest
import torch
from architectures import build
from eagle_heads import EAGLE3, VOCAB, WIRINGS, flagged, head_for, random_head, stand_in, tables_of
from eagle_reference import draft_outputs, fused
from mask_heads import DFLASH, DSPARK, P_EAGLE, PARD
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec import EagleDrafter, Target
from specdec.drafters.head.causal import attend_causally
from specdec.drafters.mtp.head import CentredRMSNorm

_SCALED = {"rope_theta": 100.0, "factor": 4.0}
_FACTORS = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 4.0, 8.0]}
_ORIGINAL = {"original_max_position_embeddings": 16}
ROPES = [
    {"rope_type": "default", "rope_theta": 100.0},
    _SCALED | {"rope_type": "linear"},
    _SCALED | {"rope_type": "dynamic"},
    WIRINGS["rope llama3"].layer.rope,
    _SCALED | _ORIGINAL | {"rope_type": "yarn"},
    _SCALED | _ORIGINAL | _FACTORS | {"rope_type": "longrope"},
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_an_angle_is_that_of_hf_at_the_end_of_a_text_however_far_the_text_goes(rope):
    layer = replace(EAGLE3.layer, rope=rope, max_position_embeddings=16)
    table = layer.rotary_table(40, dtype=torch.float64)
    sizes = {"hidden_size": layer.num_heads * layer.head_dim, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, max_position_embeddings=16, rope_parameters=dict(rope))
    for count in (1, 16, 17, 25):
        assert layer.rotary_table(count, dtype=torch.float64).equal(table[:count])
        hf = LlamaRotaryEmbedding(config)
        cos, sin = (x[0, -1].double() for x in hf(torch.empty(0), torch.arange(count)[None]))
        sign = torch.tensor([-1.0, -1, -1, 1, 1, 1])
        expected = torch.cat([cos, sin * sign])
        torch.testing.assert_close(table[count - 1], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "three layers", "feedback norm", "no fc"])
@torch.no_grad()
def test_a_head_over_a_whole_text_with_a_causal_mask_is_the_reference(name):
    """What a training loss starts from: `EagleHead` by itself, without any cache."""
    config = WIRINGS[name]
    head, target = random_head(config), stand_in(config)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, VOCAB, (2, 8), generator=generator)
    features = torch.randn(2, 7, config.feature_width, generator=generator, dtype=torch.float64)
    drafter = EagleDrafter(head, target, 1)
    angles = config.layer.rotary_table(7, dtype=torch.float64)[None, None]
    out = head(drafter.embed(text[:, 1:]), head.fuse(features), angles, attend_causally)
    seen = drafter.logits(out), head.feedback(out)
    case = config, head.state_dict(), tables_of(target)
    for b, end in ((b, end) for b in range(2) for end in range(1, 8)):
        expected = draft_outputs(*case, text[b, : end + 1].tolist(), features[b, :end], [0])
        for mine, theirs in zip(seen, expected, strict=True):
            torch.testing.assert_close(mine[b, end - 1 : end], theirs, rtol=0, atol=1e-10)


def test_a_drafter_owns_the_heads_weights_and_borrows_the_targets_by_reference():
    config = flagged(EAGLE3, has_lm_head=False)
    target = stand_in(config)
    drafter = EagleDrafter(random_head(config), target, 2)
    assert {name.split(".")[0] for name in drafter.state_dict()} == {"head"}
    assert len(list(drafter.parameters())) == len(list(drafter.head.parameters()))
    tokens, out = torch.tensor([[3, 5]]), torch.randn(1, 2, 16, dtype=torch.float64)
    before = drafter.embed(tokens), drafter.logits(out)
    with torch.no_grad():
        target.get_input_embeddings().weight *= 2
        target.get_output_embeddings().weight *= 3
    torch.testing.assert_close(drafter.embed(tokens), 2 * before[0])
    torch.testing.assert_close(drafter.logits(out), 3 * before[1])
    own = EagleDrafter(random_head(WIRINGS["own embeddings"]), target, 2)
    assert own.embed(tokens).equal(own.head.embed_tokens.weight[tokens])


def test_embeddings_are_the_plain_table_where_the_target_scales_them():
    model, tokens = build("gemma3"), torch.tensor([[3, 5]])
    table = model.get_input_embeddings()
    for target in (model, Target(model)):
        assert EagleDrafter(head_for(model), target, 2).embed(tokens).equal(table.weight[tokens])
    assert not table(tokens).equal(table.weight[tokens])


# Prediction modules.


def test_depths_have_weights_of_their_own_and_share_what_the_flags_say():
    names = {
        name: set(mtp_heads.random_head(config).state_dict())
        for name, config in mtp_heads.WIRINGS.items()
    }
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
    norm, exact = CentredRMSNorm(4, 1e-6).bfloat16(), CentredRMSNorm(4, 1e-6).double()
    with torch.no_grad():
        norm.weight.fill_(0.001)
        exact.weight.copy_(norm.weight)
    x = torch.full((1, 4), 200.0, dtype=torch.bfloat16)
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x), exact(x.double()).bfloat16(), rtol=0, atol=0)
    assert exact(x.double())[0, 0] > 1.0009


# Mask-token heads.


@pytest.mark.parametrize(
    ("config", "rows", "limit"),
    [
        (P_EAGLE, [0, 1, 4], None),
        (PARD, [0, 1, 4], None),
        (DFLASH, [6, 6, 6], 5),
        (DSPARK, [6, 6, 6], 6),
        (mask_heads.WIRINGS["dflash, causal"], [2, 3, 6], None),
        (mask_heads.WIRINGS["dspark, causal"], [1, 2, 5], None),
    ],
)
def test_rows_after_the_committed_ones(config, rows, limit):
    assert [config.num_later(k) for k in (1, 2, 5)] == rows
    assert config.max_draft_tokens == limit


OF_FEATURES = {n: c for n, c in mask_heads.WIRINGS.items() if c.context == "input"}


@pytest.mark.parametrize("name", OF_FEATURES)
@torch.no_grad()
def test_masks_take_the_way_of_real_features(name):
    head = mask_heads.random_head(OF_FEATURES[name])
    features = torch.randn(2, 3, head.config.feature_width, dtype=torch.float64)
    hidden = head.hidden_states(features, num_masks=4)
    assert hidden.shape == (2, 7, head.config.hidden_size)
    mask = fused(head.config, head.state_dict(), head.mask_hidden.reshape(1, -1))
    expected = torch.cat([head.hidden_states(features), mask.expand(2, 4, -1)], dim=1)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-12)
    features[0, 1] = torch.nan  # of a rejected token: it stays where it is
    poisoned = head.hidden_states(features, num_masks=4)
    assert poisoned[:, 3:].equal(hidden[:, 3:])
    assert poisoned[1].equal(hidden[1])


def test_a_context_brings_keys_and_values_and_asks_nothing():
    """Attention over a context equals attention over all rows, of which only the last ask."""
    attention = mask_heads.random_head(flagged(PARD, num_layers=1)).layers[0].self_attn
    x, angles, seen = torch.randn(1, 6, 16).double(), torch.randn(1, 1, 6, 12).double(), {}

    def attend(index, query, key, value):
        seen[query.shape[2]] = query, key, value
        return query

    attention(x, angles, attend)
    attention(x[:, 4:], angles, attend, x[:, :4])
    torch.testing.assert_close(seen[2][0], seen[6][0][:, :, 4:])
    for one, other in zip(seen[2][1:], seen[6][1:], strict=True):
        torch.testing.assert_close(one, other)
