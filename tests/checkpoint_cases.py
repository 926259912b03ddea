"""Files of every layout and flag of EAGLE and mask-token heads, each with what it must be read as.

The expectations are written out by hand: the configuration in the library's terms, and the head's
own names of the file's tensors.
"""

import re
from typing import NamedTuple

from architectures import VOCAB
from checkpoint_files import DRAFT_VOCAB, HIDDEN, Files, biases, full_vocabulary, plain_layers, rope
from checkpoint_layouts import (
    DFLASH2_KEYS,
    EMBEDDINGS,
    IDS,
    MASK,
    amazon,
    angelslim,
    deepspec,
    dflash2_shapes,
    domino,
    dspark,
    hf_assistant,
    lilicorr,
    markov_shapes,
    nvidia,
    pard,
    safeailab_eagle1,
    safeailab_eagle3,
    specforge,
    specforge_peagle,
    speculators,
    speculators_dflash,
    speculators_eagle1,
    speculators_peagle,
    torchspec,
    vllm,
    xpress_shapes,
    z_lab,
)
from eagle_heads import flagged

from specdec.drafters import EagleConfig, MaskTokenConfig
from specdec.drafters.head.layer_config import Convolution, LayerConfig
from specdec.drafters.mask_token.correction import (
    DominoConfig,
    MarkovConfig,
    SelectorConfig,
    XPressConfig,
)
from specdec.drafters.mask_token.lattice import LiLiCorrConfig

LAYER = LayerConfig(32, 24, num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5)
EAGLE3 = EagleConfig("attention", LAYER, VOCAB, DRAFT_VOCAB, (2, 4, 5), HIDDEN)
EAGLE1 = flagged(
    EAGLE3,
    **{"fusion": "input", "draft_vocab_size": VOCAB, "feature_layers": ("final",)},
    **{"output_norm": False, "has_lm_head": False, "fc_bias": True},
)
OWN = flagged(EAGLE3, has_embed_tokens=True)
SPECFORGE = flagged(OWN, rope=rope(1e6))
SPECULATORS = flagged(OWN, rope=rope(5e5), rms_norm_eps=1e-6)
DEEPSPEC = flagged(
    SPECFORGE, draft_vocab_size=VOCAB, feature_layers=(1, 2, 4, 6, 7), has_qk_norm=True
)
SIZES = {
    **{"layer": LAYER, "vocab_size": VOCAB, "target_hidden_size": HIDDEN, "num_layers": 2},
    **{"mask_token_id": MASK, "draft_vocab_size": VOCAB},
}
P_EAGLE = flagged(
    MaskTokenConfig("shifted", "input", feature_layers=(2, 4, 5), **SIZES),
    draft_vocab_size=DRAFT_VOCAB,
)
DFLASH = flagged(
    MaskTokenConfig(
        *("same-position", "keys"),
        **{"feature_layers": (2, 5), "block_size": 6, "is_causal": False, "has_lm_head": False},
        **SIZES,
    ),
    has_qk_norm=True,
    rope=rope(1e6),
)
PARD = flagged(
    MaskTokenConfig(
        *("unshifted", "none"),
        feature_layers=(),
        has_embed_tokens=True,
        max_positions=2048,
        **SIZES,
    ),
    num_layers=3,
    rope=rope(5e5),
)
DSPARK = flagged(
    DFLASH,
    **{"alignment": "next-token", "feature_layers": (0, 2, 6), "block_size": 7},
    **{"has_embed_tokens": True, "has_lm_head": True},
)
LONG = {"rope": rope(5e5), "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
SPECULATORS_DFLASH = flagged(DFLASH, block_size=5, **LONG)
SPECULATORS_FEW = flagged(SPECULATORS_DFLASH, draft_vocab_size=DRAFT_VOCAB, has_lm_head=True)


class Case(NamedTuple):
    """The files of a checkpoint, and the configuration that they must be read as."""

    files: Files
    config: EagleConfig | MaskTokenConfig
    changes: dict

    def __str__(self):
        return f"{self.files.config['architectures'][0]}, {self.changes or 'as usual'}"


def case(files, base, **changes):
    """What the files must be read as is a usual configuration but for some flags."""
    return Case(files, flagged(base, **changes), changes)


BIASES = {"attention_bias": True, "attention_output_bias": True}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
FC_NORMS = {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}
AUX_NORMS = {f"aux_norm_{level}.weight": (HIDDEN,) for level in ("low", "mid", "high")}
INPUT_NORM = {"input_norm.weight": (3 * HIDDEN,)}
NO_AUX = {"use_aux_hidden_state": False, IDS: []}
THREE_LAYERS = {"num_hidden_layers": 3}
LATER_NORMS = plain_layers([1, 2], norm="hidden_norm")

EAGLE_CASES = [
    case(safeailab_eagle1(), EAGLE1),
    case(safeailab_eagle1().but(bias=True), EAGLE1),
    case(safeailab_eagle1(bias=False).but(bias=False), EAGLE1, fc_bias=False),
    case(safeailab_eagle1(bias=False), EAGLE1, fc_bias=False),
    case(safeailab_eagle1(qkv_bias=True).plus(biases("qkv")), EAGLE1, attention_bias=True),
    case(
        safeailab_eagle1(rope_theta=500000.0).plus(EMBEDDINGS),
        EAGLE1,
        has_embed_tokens=True,
        rope=rope(5e5),
    ),
    case(safeailab_eagle1(**THREE_LAYERS).plus(plain_layers([1, 2])), EAGLE1, num_layers=3),
    case(speculators_eagle1(), EAGLE1, fc_bias=False),
    case(speculators_eagle1(bias=True), EAGLE1),
    case(angelslim(), EAGLE3),
    case(angelslim(ids=(0, 2, 6)), EAGLE3, feature_layers=(1, 3, 7)),
    case(safeailab_eagle3(), EAGLE3),
    case(
        safeailab_eagle3(rope_scaling={"type": "linear", "factor": 2.0}),
        EAGLE3,
        rope=rope(10000, rope_type="linear", factor=2.0),
    ),
    case(safeailab_eagle3(hidden=16), OWN, hidden_size=16),
    case(
        full_vocabulary(safeailab_eagle3(), draft_vocab_size=VOCAB), EAGLE3, draft_vocab_size=VOCAB
    ),
    case(
        full_vocabulary(safeailab_eagle3(), draft_vocab_size=None), EAGLE3, draft_vocab_size=VOCAB
    ),
    case(
        safeailab_eagle3().but("d2t", "t2d", "lm_head.weight", draft_vocab_size=None),
        EAGLE3,
        draft_vocab_size=VOCAB,
        has_lm_head=False,
    ),
    case(safeailab_eagle3(draft_vocab_size=..., truncated_vocab_size=DRAFT_VOCAB), EAGLE3),
    case(specforge(), SPECFORGE),
    case(specforge(ids=[0, 2, 6]), SPECFORGE, feature_layers=(1, 3, 7)),
    case(specforge(ids=[6, 0, 2]), SPECFORGE, feature_layers=(1, 3, 7)),
    case(specforge(fc_norm=True).plus(FC_NORMS), SPECFORGE, fc_norm=True),
    case(specforge(use_aux_norm=True).plus(AUX_NORMS), SPECFORGE, fc_norm=True),
    case(specforge(norm_output=True), SPECFORGE),
    case(specforge(norm_output=False), SPECFORGE, output_norm=False),
    case(
        specforge(rope_scaling={"rope_type": "llama3", **LLAMA3}),
        SPECFORGE,
        rope=rope(1e6, rope_type="llama3", **LLAMA3),
    ),
    case(speculators(), SPECULATORS),
    case(speculators(kind="qwen3"), SPECULATORS, has_qk_norm=True, max_position_embeddings=32768),
    case(speculators(ids=(0, 3, 7)), SPECULATORS, feature_layers=(0, 3, 7)),
    case(speculators(ids=None), SPECULATORS),
    case(speculators(norm_before_residual=True), SPECULATORS, norm_before_residual=True),
    case(speculators(norm_before_residual=...), SPECULATORS),
    case(speculators(norm_before_fc=True).plus(INPUT_NORM), SPECULATORS, norm_before_fc=True),
    case(speculators(fc_norm=True).plus(FC_NORMS), SPECULATORS, fc_norm=True),
    case(speculators(norm_output=True), SPECULATORS, feedback_norm=True),
    case(speculators(layers={"attention_bias": True}).plus(biases("qkvo")), SPECULATORS, **BIASES),
    case(
        speculators(layers={"rope_parameters": ..., "rope_theta": 3000.0}),
        SPECULATORS,
        rope=rope(3000),
    ),
    case(speculators(layers=THREE_LAYERS).plus(plain_layers([1, 2])), SPECULATORS, num_layers=3),
    case(speculators(layers=THREE_LAYERS).plus(LATER_NORMS), SPECULATORS, num_layers=3),
    case(nvidia(), EAGLE3),
    case(nvidia(eagle=NO_AUX).but("fc.weight"), EAGLE3, has_fc=False, feature_layers=("final",)),
    case(nvidia(eagle={"norm_before_fc": True}).plus(INPUT_NORM), EAGLE3, norm_before_fc=True),
    case(nvidia(eagle={"use_last_layernorm": False}).but("norm.weight"), EAGLE3, output_norm=False),
    case(nvidia(attention_bias=True).plus(biases("qkvo")), EAGLE3, **BIASES),
    case(full_vocabulary(nvidia(), draft_vocab_size=VOCAB), EAGLE3, draft_vocab_size=VOCAB),
    case(deepspec(ids=(0, 1, 3, 5, 6)), DEEPSPEC),
    case(deepspec(ids=(-1, 1, 3)), DEEPSPEC, feature_layers=(0, 2, 4)),
    case(vllm(), EAGLE3),
    case(vllm(norm_before_residual=True), EAGLE3, norm_before_residual=True),
    case(vllm(norm_output=True), EAGLE3, feedback_norm=True),
    case(vllm(logit_scale=0.25), EAGLE3, logit_scale=0.25),
    case(vllm(attention_bias=True).plus(biases("qkv")), EAGLE3, attention_bias=True),
    case(vllm(bias=True).plus({"fc.bias": (HIDDEN,)}), EAGLE3, fc_bias=True),
    case(vllm(architectures=["LlamaEagle3DraftModel"]), EAGLE3),  # NeMo's
    case(safeailab_eagle1(architectures=["Qwen2ForCausalLMEagle"]), EAGLE1),  # SGLang's
]

SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}
HALF_SLIDING = {"layer_types": ["sliding_attention", "full_attention"]}
SWA = {"use_swa": True, "swa_window_size": 7}
BOTH_WAYS = {"windows": (8, 8), "is_window_causal": False}
SINKS = {f"layers.{i}.self_attn.attention_sink_bias": (4,) for i in range(2)}
GATED = {"projector_type": "dspark", "attention_mode": "gqa", "markov_rank": 4}
GATED |= {"markov_head_type": "gated", "enable_confidence_head": True, "confidence_head_alpha": 1.0}
SELECTOR = {"convolution": Convolution(3, 4), "correction": SelectorConfig(4, 5)}
LATTICE = {"correction": LiLiCorrConfig(4, 6, 2, 3, 1.5, 5, 1e-4, 7.5)}
CONVOLUTIONS = {n: shape for n, shape in dflash2_shapes().items() if "_conv." in n}
MASK_CASES = [
    case(amazon(), P_EAGLE),
    case(amazon().plus({"mask_hidden": (3 * HIDDEN,)}), P_EAGLE),
    case(amazon(ids=[1, 3], layers=1), P_EAGLE, num_layers=1, feature_layers=(1, 3)),
    case(amazon(norm_before_residual=True), P_EAGLE, norm_before_residual=True),
    case(speculators_peagle(), P_EAGLE, rope=rope(5e5), rms_norm_eps=1e-6, has_embed_tokens=True),
    case(specforge_peagle(mask_token_id=MASK), P_EAGLE, rope=rope(1e6)),
    case(pard(), PARD),
    case(pard(tied=True), PARD, ties_embeddings=True),
    case(pard("qwen2"), PARD, attention_bias=True),
    case(pard("qwen3"), PARD, has_qk_norm=True),
    case(z_lab(), DFLASH),
    case(z_lab(dflash={"block_size": 4}, block_size=...), DFLASH, block_size=4),
    case(z_lab(ids=None, layers=3), DFLASH, num_layers=3, feature_layers=(2, 4, 6)),
    case(z_lab(ids=None, layers=1), DFLASH, num_layers=1, feature_layers=(5,)),
    case(torchspec(), DFLASH, num_layers=1, feature_layers=(2, 4, 6), has_embed_tokens=True),
    case(hf_assistant(), DFLASH),
    case(speculators_dflash(), SPECULATORS_FEW),
    case(
        speculators_dflash(full=True, sample_from_anchor=True),
        SPECULATORS_DFLASH,
        alignment="next-token",
    ),
    case(dspark(), DSPARK),
    case(
        dspark(markov_rank=4, markov_head_type="vanilla").plus(markov_shapes()),
        DSPARK,
        correction=MarkovConfig(4),
    ),
    case(
        dspark(
            **{"enable_confidence_head": True, "confidence_head_with_markov": True},
            **{"markov_rank": 3, "markov_head_type": "rnn"},
        ).plus(markov_shapes(3, "rnn", confidence=HIDDEN + 3)),
        DSPARK,
        correction=MarkovConfig(3, "rnn"),
        confidence="markov",
    ),
    case(
        z_lab(dflash=GATED, architectures=["DSparkDraftModel"]).plus(
            markov_shapes(kind="gated", confidence=HIDDEN)
        ),
        DFLASH,
        alignment="next-token",
        correction=MarkovConfig(4, "gated"),
        confidence="hidden",
    ),
    case(domino(), DFLASH, correction=DominoConfig(5, 6, first=1)),
    case(
        domino(first=0, shift_label=True),
        DFLASH,
        alignment="next-token",
        correction=DominoConfig(5, 6),
    ),
    case(
        z_lab(dflash=DFLASH2_KEYS, architectures=["DFlash2DraftModel"]).plus(
            dflash2_shapes(suffix=".weight")
        ),
        DFLASH,
        **SELECTOR,
    ),
    case(
        speculators_dflash(full=True, speculators_model_type="dflash2", **DFLASH2_KEYS).plus(
            dflash2_shapes()
        ),
        SPECULATORS_DFLASH,
        **SELECTOR,
    ),
    case(lilicorr(), DFLASH, **LATTICE),
    case(lilicorr(named=True, architectures=["Qwen3ForCausalLM"]), DFLASH, **LATTICE),
    case(
        lilicorr(dflash={"conv_kernel_size": 3, "conv_group_size": 4}).plus(CONVOLUTIONS),
        DFLASH,
        **LATTICE,
        convolution=Convolution(3, 4),
    ),
    case(
        lilicorr(
            width=0,
            layers=(1, 4),
            dflash={"projector_type": None, "conv_kernel_size": 0, "conv_group_size": 0},
            has_own_lm_head=True,
        ).plus({"lm_head.weight": (VOCAB, HIDDEN)}),
        DFLASH,
        correction=LiLiCorrConfig(4, 0, 1, 4, 1.5, 5, 1e-4, 7.5),
        has_lm_head=True,
    ),
    case(
        speculators_dflash(
            speculators_model_type="dspark", sample_from_anchor=None, markov_rank=4
        ).plus(markov_shapes(ids=DRAFT_VOCAB)),
        SPECULATORS_FEW,
        alignment="next-token",
        correction=MarkovConfig(4),
    ),
    case(
        speculators_dflash(full=True, speculators_model_type="dspark", markov_rank=4).plus(
            markov_shapes()
        ),
        SPECULATORS_DFLASH,
        correction=MarkovConfig(4),
    ),
    case(
        speculators_dflash(
            full=True, speculators_model_type="xpress", xpress_rank=3, num_jacobi_passes=6
        ).plus(xpress_shapes()),
        SPECULATORS_DFLASH,
        correction=XPressConfig(3),
    ),
    case(
        z_lab(**HALF_SLIDING, use_sliding_window=True, sliding_window=8), DFLASH, windows=(8, None)
    ),
    case(z_lab(**SLIDING, dflash={"causal": False}), DFLASH, **BOTH_WAYS),
    case(
        z_lab(dflash=SWA | {"attention_sink_bias": True}).plus(SINKS),
        DFLASH,
        **{"windows": (7, 7), "is_window_causal": False, "has_sinks": True},
    ),
    case(z_lab(dflash={"causal": True}), DFLASH, is_causal=True),
    case(z_lab(is_causal=True), DFLASH, is_causal=True),
    case(z_lab(**SLIDING, is_causal=False), DFLASH, **BOTH_WAYS),
    case(speculators_dflash(architectures=["DFlashSpeculator"]), SPECULATORS_FEW),
    # JetSpec says it in words of its own.
    case(z_lab(dflash={"causal_head": True, "target_hidden_size": HIDDEN}), DFLASH, is_causal=True),
    case(z_lab(**SLIDING, dflash={"causal_head": False}), DFLASH, **BOTH_WAYS),
    case(z_lab(architectures=["JetSpecDraftModel"]), DFLASH, is_causal=True),
    case(z_lab(head_type="bidirectional"), DFLASH),
    case(hf_assistant(architectures=["DFlashMuseGlimmerAssistantModel"]), DFLASH),
    # Qwen3-Omni's, as vLLM reads it: ids of layers twice, by both conventions.
    case(dspark(architectures=["Qwen3OmniDSparkModel"], **{IDS: [0, 2, 6]}), DSPARK),
    case(
        domino(shift_label=True).but(shift_label=True),
        DFLASH,
        alignment="next-token",
        correction=DominoConfig(5, 6, first=1),
    ),
    case(
        z_lab(dflash=SWA, use_sliding_window=False),
        DFLASH,
        **{"windows": (7, 7), "is_window_causal": False},
    ),
    case(
        speculators_dflash(
            full=True, layers=SLIDING | {"sliding_window": 6, "use_sliding_window": True}
        ),
        SPECULATORS_DFLASH,
        windows=(6, 6),
    ),
    case(hf_assistant(**HALF_SLIDING), DFLASH, windows=(2049, None), is_window_causal=False),
    case(
        z_lab(dflash={"mask_token_id": None}).plus({"mask_embedding": (HIDDEN,)}),
        DFLASH,
        mask_token_id=None,
    ),
]

RENAMED = [
    *(
        (r"^model\.", ""),
        (r"^(midlayer|transformer)\.", "layers.0."),
        ("codebook.weight", "codebook"),
    ),
    *((r"^(fusion_fc|context_proj|encoder\.fc)\.", "fc."), (r"^final_norm\.", "norm.")),
    (r"^(context_norm|encoder\.output_norm_enc)\.", "hidden_norm."),
    *((f"aux_norm_{level}", f"fc_norm.{i}") for i, level in enumerate(("low", "mid", "high"))),
    (r"^layers\.([12])\.hidden_norm", r"layers.\1.input_layernorm"),
    (r"^(markov_head|refiner_head|candidate_selector|lilicorr)\.", "correction."),
    *((r"feature_mlp\.0\.", "feature_norm."), (r"feature_mlp\.3\.", "feature_mlp.down_proj.")),
    *((r"mlp\.[01]\.", "mlp.up_proj."), (r"mlp\.2\.", "mlp.down_proj.")),
    (r"^(prefix_gru|embed_proj)\.", r"correction.\1."),
    *((r"^confidence_head\.proj\.", "confidence_head."), ("attention_sink_bias", "sinks")),
]


def own_names(files, config):
    """The file's tensors by the head's names, the renaming that the formats describe, and offsets
    of ids; vectors of masks are shaped alike.
    """
    renamed = {}
    for name, tensor in files.tensors.items():
        for theirs, ours in RENAMED:
            name = re.sub(theirs, ours, name)
        is_vector = name in ("mask_hidden", "mask_embedding")
        renamed[name] = tensor.reshape(1, 1, -1) if is_vector else tensor
    if isinstance(config, EagleConfig) and not config.output_norm and not config.feedback_norm:
        renamed.pop("norm.weight", None)
    renamed.pop("t2d", None)
    return renamed, renamed.pop("d2t", None)
