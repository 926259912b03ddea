"""Files of every layout and flag of EAGLE checkpoints, each with what it must be read as.

The expectations are written out by hand: the configuration in the library's terms, and the head's
own names of the file's tensors.
"""

from architectures import VOCAB
from checkpoint_parts import (
    DRAFT_VOCAB,
    HIDDEN,
    biases,
    full_vocabulary,
    more_layers,
    narrower,
    noise,
    norms,
    rope,
)
from checkpoint_writer import (
    angelslim,
    deepspec,
    nvidia,
    safeailab_eagle1,
    safeailab_eagle3,
    specforge,
    speculators,
    speculators_eagle1,
    vllm,
)
from eagle_heads import flagged

from specdec.drafters import EagleConfig
from specdec.heads.layers import LayerConfig

EAGLE3 = EagleConfig(
    fusion="attention",
    layer=LayerConfig(32, 24, num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5),
    vocab_size=61,
    draft_vocab_size=20,
    feature_layers=(2, 4, 5),
    target_hidden_size=32,
)
EAGLE1 = flagged(
    EAGLE3,
    fusion="input",
    draft_vocab_size=61,
    feature_layers=("final",),
    output_norm=False,
    has_lm_head=False,
    fc_bias=True,
)
OWN = flagged(EAGLE3, has_embed_tokens=True)


SPECFORGE = flagged(OWN, rope=rope(1e6))
SPECULATORS = flagged(OWN, rope=rope(5e5), rms_norm_eps=1e-6)
DEEPSPEC = flagged(
    OWN,
    draft_vocab_size=61,
    feature_layers=(1, 2, 4, 6, 7),
    has_qk_norm=True,
    rope=rope(1e6),
)
ATTENTION_BIASES = {"attention_bias": True, "attention_output_bias": True}


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_FC_NORMS = {f"fc_norm.{i}.weight": 1 + 0.3 * noise(HIDDEN) for i in range(3)}
_AUX_NORMS = dict(zip(("low", "mid", "high"), _FC_NORMS.values(), strict=True))
_NO_AUX = {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []}

# What is read -> the files, and what they must be read as.
CASES = {
    "SafeAILab EAGLE-1": (safeailab_eagle1(), EAGLE1),
    "SafeAILab EAGLE-1, bias true": (safeailab_eagle1().but(bias=True), EAGLE1),
    "SafeAILab EAGLE-1, bias false": (
        safeailab_eagle1(bias=False).but(bias=False),
        flagged(EAGLE1, fc_bias=False),
    ),
    "SafeAILab EAGLE-1, no word of a bias": (
        safeailab_eagle1(bias=False),
        flagged(EAGLE1, fc_bias=False),
    ),
    "SafeAILab EAGLE-1, qkv_bias": (
        safeailab_eagle1(qkv_bias=True).plus(**biases("layers.0", "qkv")),
        flagged(EAGLE1, attention_bias=True),
    ),
    "SafeAILab EAGLE-1, own embeddings, rope_theta": (
        safeailab_eagle1(rope_theta=500000.0).plus(embed_tokens__weight=noise(VOCAB, HIDDEN)),
        flagged(EAGLE1, has_embed_tokens=True, rope=rope(5e5)),
    ),
    "SafeAILab EAGLE-1, layers behind the first": (
        more_layers(safeailab_eagle1(), num_hidden_layers=3),
        flagged(EAGLE1, num_layers=3),
    ),
    "speculators 0.1": (
        speculators_eagle1(),
        flagged(EAGLE1, fc_bias=False),
    ),
    "speculators 0.1, fusion_bias": (
        speculators_eagle1(bias=True),
        EAGLE1,
    ),
    "AngelSlim": (angelslim(), EAGLE3),
    "AngelSlim, other layers": (
        angelslim(ids=(0, 2, 6)),
        flagged(EAGLE3, feature_layers=(1, 3, 7)),
    ),
    "SafeAILab EAGLE-3": (safeailab_eagle3(), EAGLE3),
    "SafeAILab EAGLE-3, linear rope": (
        safeailab_eagle3(rope_scaling={"type": "linear", "factor": 2.0}),
        flagged(EAGLE3, rope=rope(10000, rope_type="linear", factor=2.0)),
    ),
    "SafeAILab EAGLE-3, narrower than its target": (
        narrower(),
        flagged(OWN, hidden_size=16),
    ),
    "SafeAILab EAGLE-3, full vocabulary": (
        full_vocabulary(safeailab_eagle3(), draft_vocab_size=VOCAB),
        flagged(EAGLE3, draft_vocab_size=VOCAB),
    ),
    "draft_vocab_size null": (
        full_vocabulary(safeailab_eagle3(), draft_vocab_size=None),
        flagged(EAGLE3, draft_vocab_size=VOCAB),
    ),
    "draft_vocab_size null, target's vocabulary head": (
        safeailab_eagle3().but("d2t", "t2d", "lm_head.weight", draft_vocab_size=None),
        flagged(EAGLE3, draft_vocab_size=VOCAB, has_lm_head=False),
    ),
    "truncated_vocab_size": (
        safeailab_eagle3().but(draft_vocab_size=..., truncated_vocab_size=DRAFT_VOCAB),
        EAGLE3,
    ),
    "SpecForge": (specforge(), SPECFORGE),
    "SpecForge, ids": (specforge(ids=[0, 2, 6]), flagged(SPECFORGE, feature_layers=(1, 3, 7))),
    "SpecForge, ids in no order": (
        specforge(ids=[6, 0, 2]),
        flagged(SPECFORGE, feature_layers=(1, 3, 7)),
    ),
    "SpecForge, fc_norm": (
        specforge(fc_norm=True).plus(**_FC_NORMS),
        flagged(SPECFORGE, fc_norm=True),
    ),
    "SGLang, use_aux_norm": (
        specforge(use_aux_norm=True).plus(
            **{f"aux_norm_{level}.weight": t for level, t in _AUX_NORMS.items()}
        ),
        flagged(SPECFORGE, fc_norm=True),
    ),
    "SpecForge, norm_output true": (specforge(norm_output=True), SPECFORGE),
    "SpecForge, norm_output false": (
        specforge(norm_output=False),
        flagged(SPECFORGE, output_norm=False),
    ),
    "SpecForge, llama3 rope": (
        specforge().but(rope_scaling={"rope_type": "llama3", **LLAMA3}),
        flagged(SPECFORGE, rope=rope(1e6, rope_type="llama3", **LLAMA3)),
    ),
    "SpecForge, mrope": (
        specforge().but(rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]}),
        SPECFORGE,
    ),
    "speculators": (speculators(), SPECULATORS),
    "speculators, Qwen3 layers": (
        speculators(kind="qwen3"),
        flagged(SPECULATORS, has_qk_norm=True, max_position_embeddings=32768),
    ),
    "speculators, ids": (
        speculators(ids=(0, 3, 7)),
        flagged(SPECULATORS, feature_layers=(0, 3, 7)),
    ),
    "speculators, ids null": (speculators(ids=None), SPECULATORS),
    "speculators, norm_before_residual": (
        speculators(norm_before_residual=True),
        flagged(SPECULATORS, norm_before_residual=True),
    ),
    "speculators, no word of norm_before_residual": (
        speculators().but(norm_before_residual=...),
        SPECULATORS,
    ),
    "speculators, norm_before_fc": (
        speculators(norm_before_fc=True).plus(**norms("input_norm", width=3 * HIDDEN)),
        flagged(SPECULATORS, norm_before_fc=True),
    ),
    "speculators, fc_norm": (
        speculators(fc_norm=True).plus(**_FC_NORMS),
        flagged(SPECULATORS, fc_norm=True),
    ),
    "speculators, norm_output": (
        speculators(norm_output=True),
        flagged(SPECULATORS, feedback_norm=True),
    ),
    "speculators, attention_bias": (
        speculators(layers={"attention_bias": True}).plus(**biases("layers.0", "qkvo")),
        flagged(SPECULATORS, **ATTENTION_BIASES),
    ),
    "speculators, old rope keys": (
        speculators(layers={"rope_parameters": ..., "rope_theta": 3000.0}),
        flagged(SPECULATORS, rope=rope(3000)),
    ),
    "speculators, layers behind the first": (
        more_layers(speculators(layers={"num_hidden_layers": 3})),
        flagged(SPECULATORS, num_layers=3),
    ),
    "speculators, SGLang's name of later norms": (
        more_layers(speculators(layers={"num_hidden_layers": 3}), norm="hidden_norm"),
        flagged(SPECULATORS, num_layers=3),
    ),
    "NVIDIA": (nvidia(), EAGLE3),
    "NVIDIA, without aux features": (
        nvidia(eagle=_NO_AUX).but("fc.weight"),
        flagged(EAGLE3, has_fc=False, feature_layers=("final",)),
    ),
    "NVIDIA, norm_before_fc": (
        nvidia(eagle={"norm_before_fc": True}).plus(**norms("input_norm", width=3 * HIDDEN)),
        flagged(EAGLE3, norm_before_fc=True),
    ),
    "NVIDIA, no last norm": (
        nvidia(eagle={"use_last_layernorm": False}).but("norm.weight"),
        flagged(EAGLE3, output_norm=False),
    ),
    "NVIDIA, attention_bias": (
        nvidia().but(attention_bias=True).plus(**biases("layers.0", "qkvo")),
        flagged(EAGLE3, **ATTENTION_BIASES),
    ),
    "NVIDIA, full vocabulary": (
        full_vocabulary(nvidia(), draft_vocab_size=VOCAB),
        flagged(EAGLE3, draft_vocab_size=VOCAB),
    ),
    "DeepSpec": (deepspec(ids=(0, 1, 3, 5, 6)), DEEPSPEC),
    "DeepSpec, embeddings as -1": (
        deepspec(ids=(-1, 1, 3)),
        flagged(DEEPSPEC, feature_layers=(0, 2, 4)),
    ),
    "vLLM": (vllm(), EAGLE3),
    "vLLM, norm_before_residual": (
        vllm(norm_before_residual=True),
        flagged(EAGLE3, norm_before_residual=True),
    ),
    "vLLM, norm_output": (vllm(norm_output=True), flagged(EAGLE3, feedback_norm=True)),
    "vLLM, logit_scale": (vllm(logit_scale=0.25), flagged(EAGLE3, logit_scale=0.25)),
    "vLLM, biases of q, k, v": (
        vllm(attention_bias=True).plus(**biases("layers.0", "qkv")),
        flagged(EAGLE3, attention_bias=True),
    ),
    "vLLM, fc bias": (
        vllm(bias=True).plus(fc__bias=noise(HIDDEN)),
        flagged(EAGLE3, fc_bias=True),
    ),
}
