"""What an `EagleDrafter` is made of (names, angles, borrowed tables), and what it refuses."""

from dataclasses import replace

import pytest
import torch
from architectures import build
from eagle_heads import (
    EAGLE3,
    VOCAB,
    WIRINGS,
    flagged,
    head_for,
    random_drafter,
    random_head,
    stand_in,
    tables_of,
)
from eagle_reference import draft_outputs
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec import EagleDrafter, SpeculativeGenerator, Target
from specdec.drafters import EagleHead
from specdec.heads.layers import attend_causally
from specdec.types import Context

CPU = torch.device("cpu")
_SCALED = {"rope_theta": 100.0, "factor": 4.0}
_FACTORS = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 4.0, 8.0]}
_ORIGINAL = {"original_max_position_embeddings": 16}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 100.0},
    "linear": _SCALED | {"rope_type": "linear"},
    "dynamic": _SCALED | {"rope_type": "dynamic"},
    "llama3": WIRINGS["rope llama3"].layer.rope,
    "yarn": _SCALED | _ORIGINAL | {"rope_type": "yarn"},
    "longrope": _SCALED | _ORIGINAL | _FACTORS | {"rope_type": "longrope"},
}


@pytest.mark.parametrize("name", ROPES)
def test_an_angle_is_that_of_hf_at_the_end_of_a_text_however_far_the_text_goes(name):
    layer = replace(EAGLE3.layer, rope=ROPES[name], max_position_embeddings=16)
    table = layer.rotary_table(40, dtype=torch.float64)
    for count in (1, 16, 17, 25):
        assert layer.rotary_table(count, dtype=torch.float64).equal(table[:count])
        hf = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=layer.num_heads * layer.head_dim,
                num_attention_heads=layer.num_heads,
                max_position_embeddings=16,
                rope_parameters=dict(layer.rope),
            )
        )
        cos, sin = (x[0, -1].double() for x in hf(torch.empty(0), torch.arange(count)[None]))
        mine_cos, mine_sin = table[count - 1].chunk(2)
        sign = torch.tensor([-1.0, -1, -1, 1, 1, 1])
        torch.testing.assert_close(mine_cos, cos, rtol=0, atol=1e-6)
        torch.testing.assert_close(mine_sin * sign, sin, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "three layers", "feedback norm", "no fc"])
@torch.no_grad()
def test_a_head_over_a_whole_text_with_a_causal_mask_is_the_reference(name):
    """What a training loss starts from: `EagleHead` by itself, without any cache."""
    config = WIRINGS[name]
    head, target = random_head(config), stand_in(config)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, VOCAB, (2, 8), generator=generator)
    shape = 2, 7, config.feature_width
    features = torch.randn(shape, generator=generator, dtype=torch.float64)
    drafter = EagleDrafter(head, target, 1)
    angles = config.layer.rotary_table(7, dtype=torch.float64)[None, None]
    out = head(drafter.embed(text[:, 1:]), head.fuse(features), angles, attend_causally)
    for b in range(2):
        for end in range(1, 8):
            seen = drafter.logits(out)[b, end - 1 : end], head.feedback(out)[b, end - 1 : end]
            expected = draft_outputs(
                config,
                *(head.state_dict(), tables_of(target)),
                *(text[b, : end + 1].tolist(), features[b, :end], [0]),
            )
            for mine, theirs in zip(seen, expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-10)


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
    expected = own.head.embed_tokens.weight[tokens]
    assert own.embed(tokens).equal(expected)


def test_embeddings_are_the_plain_table_where_the_target_scales_them():
    model = build("gemma3")
    drafter = EagleDrafter(head_for(model), model, 2)
    tokens = torch.tensor([[3, 5]])
    table = model.get_input_embeddings()
    assert drafter.embed(tokens).equal(table.weight[tokens])
    assert not table(tokens).equal(table.weight[tokens])


def test_a_target_may_be_given_as_model_or_wrapped():
    model = build("llama")
    head = head_for(model, has_lm_head=False)
    for target in (model, Target(model)):
        tokens = torch.tensor([[1]])
        assert EagleDrafter(head, target).embed(tokens).equal(model.get_input_embeddings()(tokens))


MISFITS = {
    "vocabulary": (EAGLE3, flagged(EAGLE3, vocab_size=29, draft_vocab_size=29), "23.*29"),
    "features": (EAGLE3, flagged(EAGLE3, target_hidden_size=20), "16.*20"),
    "embeddings": (
        flagged(EAGLE3, target_hidden_size=20),
        flagged(EAGLE3, target_hidden_size=20),
        "16 wide and has no embeddings.* width of 20",
    ),
    "vocabulary head": (
        flagged(EAGLE3, target_hidden_size=20, has_embed_tokens=True, has_lm_head=False),
        flagged(EAGLE3, target_hidden_size=20),
        "16 wide and has no vocabulary head.*width of 20",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_a_head_that_was_made_for_another_target_is_refused_naming_both_sides(case):
    config, other, message = MISFITS[case]
    with pytest.raises(ValueError, match=message):
        EagleDrafter(random_head(config), stand_in(other))


def test_a_drafter_is_refused_by_a_generator_with_another_target():
    drafter = random_drafter("eagle3")
    drafter.validate(vocab_size=VOCAB, device=CPU)
    with pytest.raises(ValueError, match="vocabulary of 23 and the target's is 61"):
        SpeculativeGenerator(build("llama"), drafter)
    with pytest.raises(ValueError, match=r"on cpu and the target on cuda.*drafter\.to\('cuda'\)"):
        drafter.validate(vocab_size=VOCAB, device=torch.device("cuda"))
    with pytest.raises(ValueError, match="num_draft_tokens must be an integer >= 0, got -1"):
        random_drafter("eagle3", -1)


def test_a_context_without_features_or_with_others_is_refused():
    drafter = random_drafter("eagle3")
    state = drafter.init_state(1, 30, vocab_size=VOCAB, device=CPU)
    tokens, start, new = torch.tensor([[1, 2]]), torch.tensor([0]), torch.tensor([1])
    for features, message in ((None, "brings none"), (torch.zeros(1, 1, 32), "48 in all.*32 wide")):
        context = Context(tokens, features, start, new, num_attended=2)
        with pytest.raises(ValueError, match=message):
            drafter.prefill(context, state)


ODD_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.2}
CONTRADICTIONS = [
    ({"fusion": "output"}, "'input' or 'attention', got 'output'"),
    ({"fusion": "input", "norm_before_fc": True}, "norm_before_fc, fc_norm .* have no meaning"),
    ({"fusion": "input", "norm_before_residual": True}, "norm_before_residual have no meaning"),
    ({"fusion": "input", "has_fc": False}, "has_fc must be True"),
    ({"fusion": "input"}, "48 wide in all and the head is 16 wide"),
    ({"has_fc": False}, "48 wide in all and the head is 16 wide"),
    ({"has_fc": False, "feature_layers": (1,), "fc_norm": True}, "need has_fc=True"),
    ({"norm_before_fc": True, "fc_norm": True}, "choose one"),
    ({"draft_vocab_size": 24}, r"1\.\.vocab_size = 23, got 24"),
    ({"draft_vocab_size": 9, "has_lm_head": False}, "9 ids cannot use the .* head of 23"),
    ({"num_heads": 3}, "3 heads and 2"),
    ({"num_layers": 0}, "num_layers must be >= 1, got 0"),
    ({"head_dim": 5}, "an even part of a head, got head_dim 5"),
    ({"rope": ODD_ROPE}, "an even part of a head.* 'partial_rotary_factor': 0.2"),
]


@pytest.mark.parametrize(("flags", "message"), CONTRADICTIONS, ids=str)
def test_flags_that_contradict_each_other_are_refused(flags, message):
    with pytest.raises(ValueError, match=message):
        flagged(EAGLE3, **flags)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (None, "9 ids for a target of 23 needs target_ids"),
        (torch.arange(8), "9 int64 ids"),
        (torch.arange(9).int(), "9 int64 ids"),
        (torch.arange(15, 24), r"0\.\.22"),
        (torch.arange(9) - 1, r"0\.\.22"),
        (torch.zeros(9, dtype=torch.long), "1 distinct"),
    ],
    ids=str,
)
def test_a_map_of_ids_that_cannot_be_right_is_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        EagleHead(WIRINGS["fewer ids"], ids)
