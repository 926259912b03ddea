"""What cannot be read for sure is refused by name: other kinds of drafters, wirings that the
library does not have, and files that contradict themselves.
"""

import pytest
import torch
from checkpoint_parts import HIDDEN, TARGET, Files, read_checkpoint, refuses, survey_checkpoint
from checkpoint_writer import (
    deepspec,
    nvidia,
    safeailab_eagle1,
    safeailab_eagle3,
    specforge,
    speculators,
    speculators_eagle1,
    vllm,
)

ONES = torch.ones(2)
IDS = "eagle_aux_hidden_state_layer_ids"


def eagle(**keys):
    return nvidia(eagle=keys)


UNSUPPORTED = {
    "a drafter with multi-head latent attention": nvidia(kv_lora_rank=16),
    "kv_lora_rank: ": nvidia().plus(layers__0__self_attn__kv_a_proj_with_mqa__weight=ONES),
    "tensors \\*.experts.*mixture-of-experts": nvidia().plus(
        layers__0__mlp__experts__0__up_proj__weight=ONES
    ),
    "parallel_draft_step > 1: parallel draft heads": eagle(parallel_draft_step=2),
    "tensors parallel_draft_heads": nvidia().plus(
        parallel_draft_heads__0__medusa_layers__0__linear__weight=ONES
    ),
    "use_mtp_layernorm": eagle(use_mtp_layernorm=True),
    "use_input_layernorm_in_first_layer: false": eagle(use_input_layernorm_in_first_layer=False),
    "next_layer_regular: false": eagle(next_layer_regular=False),
    "mlp_bias": vllm(mlp_bias=True),
    "quantization_config: quantised weights": vllm(quantization_config={"quant_method": "fp8"}),
    "ptd_token_id: a parallel": vllm(ptd_token_id=5),
    "mask_token_id: a parallel": vllm(mask_token_id=5),
    "tensor mask_hidden: a parallel": vllm().plus(mask_hidden=torch.ones(1, 1, 3 * HIDDEN)),
    "dflash_config: a block": vllm(dflash_config={"mask_token_id": 3}),
    "speculators_model_type 'peagle'": speculators().but(speculators_model_type="peagle"),
    "layernorms: norms of the embedding": speculators_eagle1(layernorms=True),
    "transformer_layer_architecture 'MistralDecoderLayer'": speculators_eagle1(
        transformer_layer_architecture="MistralDecoderLayer"
    ),
    "model_type 'qwen3_next'": speculators(kind="qwen3_next"),
    "layer_types .*chunked_attention": speculators(
        kind="qwen3", layers={"layer_types": ["chunked_attention"]}
    ),
    "architectures \\['Gemma4Eagle3Model'\\]": deepspec().but(architectures=["Gemma4Eagle3Model"]),
    "DeepSpec's layers all read the embedding": deepspec().but(num_hidden_layers=2),
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_what_the_library_does_not_have_is_refused_by_name(reason, tmp_path):
    refuses(UNSUPPORTED[reason].write(tmp_path), f"not supported: .*{reason}")


CONTRADICTIONS = {
    "names layers more than once .*eagle_config": specforge(ids=[1, 3, 4]).but(**{IDS: [1, 3, 4]}),
    "leads to 2 features .* joins, at width 32, 3": specforge(ids=[1, 3]),
    "leads to 4 features": vllm(ids=[1, 2, 3, 4]),
    "num_aux_hidden_states is 5": vllm(num_aux_hidden_states=5),
    f"{IDS} must be a list of layer numbers, got 3": vllm().but(**{IDS: 3}),
    "got \\['1', '2', '3'\\]": vllm(ids=["1", "2", "3"]),
    "names a layer twice": vllm(ids=[2, 2, 5]),
    "boundaries -1..4 outside of 0..8": vllm(ids=[-1, 2, 4]),
    "boundaries 2..9 outside of 0..8 of the target's 8": vllm(ids=[2, 4, 9]),
    "read as outputs of layers .from 0., names boundaries 1..9": specforge(ids=[0, 4, 8]),
    "outputs of layers .from 0., names boundaries 0..5": specforge(ids=[-1, 3, 4]),
    "norm_before_fc is one norm over all features": speculators(norm_before_fc=True, fc_norm=True),
    "norm_before_fc, fc_norm and fc_bias need has_fc=True": nvidia(
        eagle={"use_aux_hidden_state": False}, fc_norm=True
    ),
    "unexpected fc.weight": nvidia(eagle={"use_aux_hidden_state": False}),
    "unexpected norm.weight": nvidia(eagle={"use_last_layernorm": False}),
    "norm_output is set, but the tensors are those of an EAGLE-1": safeailab_eagle1(
        norm_output=True
    ),
    f"{IDS} is .1, 2, 3., but .* EAGLE-1": safeailab_eagle1(**{IDS: [1, 2, 3]}),
    "missing fc.bias": safeailab_eagle1(bias=False).but(bias=True),
    "unexpected fc.bias": safeailab_eagle1().but(bias=False),
    "unexpected layers.0.input_layernorm.weight": safeailab_eagle1().plus(
        layers__0__input_layernorm__weight=torch.ones(HIDDEN)
    ),
    "missing layers.0.self_attn.k_proj.bias": vllm(attention_bias=True),
    "missing .*layers.0.self_attn.q_proj.bias": safeailab_eagle1(qkv_bias=True),
    "missing fc_norm.0.weight": specforge(fc_norm=True),
    "missing input_norm.weight": speculators(norm_before_fc=True),
    "missing layers.1.input_layernorm.weight": vllm(num_hidden_layers=2),
    "missing layers.0.self_attn.k_norm.weight": speculators().but(
        transformer_layer_config=speculators(kind="qwen3").config["transformer_layer_config"]
    ),
    "missing embed_tokens.weight": safeailab_eagle3(target_hidden_size=32).but(
        hidden_size=16, head_dim=8
    ),
    "head of none of the families .*: EAGLE .*It has model.layers.0.x": Files(
        vllm().config, {"model.layers.0.x": ONES}
    ),
}


@pytest.mark.parametrize("reason", CONTRADICTIONS)
def test_a_checkpoint_that_contradicts_itself_is_refused(reason, tmp_path):
    refuses(CONTRADICTIONS[reason].write(tmp_path), reason)


def test_a_head_of_other_features_than_the_default_needs_their_layers(tmp_path):
    """Five features and no ids: the default would be a guess, and a wrong one."""
    files = safeailab_eagle3()
    wide = {"fc.weight": torch.randn(HIDDEN, 5 * HIDDEN)}
    folder = Files(files.config, files.tensors | wide).write(tmp_path)
    with pytest.raises(ValueError, match=r"leads to 3 features .* 5; pass feature_layers="):
        read_checkpoint(folder, TARGET)
    checkpoint = read_checkpoint(folder, TARGET, feature_layers=(0, 2, 4, 6, 8))
    assert checkpoint.config.feature_layers == (0, 2, 4, 6, 8)


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        (vllm(), {"layer_convention": "layers"}, "'boundary' or 'layer_output', got 'layers'"),
        (vllm(), {"feature_layers": (1, 2, 9)}, "must be boundaries 0..8 or 'final'"),
        (vllm(), {"feature_layers": (1, 2, 2)}, "none twice"),
        (vllm(), {"feature_layers": (1, 2)}, "leads to 2 features"),
        (vllm(), {"feature_layers": ("last", 1, 2)}, "must be boundaries 0..8 or 'final'"),
        (vllm(), {"rope_theta": 0}, "rope_theta must be a number > 0, got 0"),
        (safeailab_eagle1(), {"rope": 3}, "unknown option rope; expected feature_layers, feed"),
        (safeailab_eagle1(), {"feedback_norm": True}, "of EAGLE-3; drop them"),
        (safeailab_eagle1(), {"feature_layers": (1, 2)}, "the head reads one feature"),
    ],
)
def test_options_that_cannot_be_right_are_refused(files, options, message, tmp_path):
    with pytest.raises((ValueError, TypeError), match=message):
        survey_checkpoint(files.write(tmp_path), TARGET, **options)
