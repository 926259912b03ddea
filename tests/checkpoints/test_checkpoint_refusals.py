"""What cannot be read for sure is refused by name, before anything is made of it.

One table: files, options of the reading, and pieces of the error. A checkpoint is of another kind,
has a wiring that the library does not have, contradicts itself, or holds tensors and numbers that
cannot be right; or a caller asks for what makes no sense.
"""

import pytest
import torch
from checkpoint_cases import CONVOLUTIONS, EAGLE_CASES
from checkpoint_files import DRAFT_VOCAB, HIDDEN, Files, refuses, tiny_llama
from checkpoint_layouts import (
    EMBEDDINGS,
    IDS,
    LILICORR_KEYS,
    amazon,
    deepspec,
    domino,
    dspark,
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
    vllm,
    z_lab,
)

from specdec import EagleDrafter
from specdec.checkpoints.eagle import EAGLE
from specdec.checkpoints.mask_token import MASK_TOKEN
from specdec.checkpoints.mtp import MTP


def experts(prefix):
    return {f"{prefix}.0.mlp.experts.0.up_proj.weight": (2,)}


def with_tensor(name, change):
    """A sound file in which one tensor is another."""
    files = safeailab_eagle3()
    return files.plus({name: change(files.tensors[name].clone())})


UNSUPPORTED = {  # Every line begins with "not supported".
    "keys .. nothing reads .. kv_lora_rank = 16": nvidia(kv_lora_rank=16),
    "kv_lora_rank = 16": amazon(kv_lora_rank=16),
    "parallel_draft_step = 2": nvidia(eagle={"parallel_draft_step": 2}),
    "use_mtp_layernorm = True": nvidia(eagle={"use_mtp_layernorm": True}),
    "first_layer = False": nvidia(eagle={"use_input_layernorm_in_first_layer": False}),
    "next_layer_regular = False": nvidia(eagle={"next_layer_regular": False}),
    "mlp_bias = True": vllm(mlp_bias=True),
    " mlp_bias = True": pard(mlp_bias=True),
    "quantization_config.quant_method = 'fp8'": vllm(quantization_config={"quant_method": "fp8"}),
    "quantization_config.bits = 4": z_lab(quantization_config={"bits": 4}),
    "layernorms = True": speculators_eagle1(layernorms=True),
    "transformer_layer_architecture = 'MistralDecoderLayer'": speculators_eagle1(
        transformer_layer_architecture="MistralDecoderLayer"
    ),
    "model_type 'qwen3_next'": speculators(kind="qwen3_next"),
    "model_type 'gpt_neox'": pard("gpt_neox"),
    "layer_types .. chunked_attention": speculators(
        kind="qwen3", layers={"layer_types": ["chunked_attention"]}
    ),
    "layer_types .. 'linear_attention'": z_lab(layer_types=["linear_attention"] * 2),
    "architectures ['Gemma4Eagle3Model']": deepspec(architectures=["Gemma4Eagle3Model"]),
    "pard2_target_layers = [1, 2]": pard(pard2_target_layers=[1, 2]),
    "dflash_config.attention_value_scale = 2": z_lab(dflash={"attention_value_scale": 2}),
    "final_logit_softcapping = 30.0": z_lab(dflash={"final_logit_softcapping": 30.0}),
    "a DFlare head .. architecture QwenDFlare": z_lab(architectures=["QwenDFlareDraftModel"]),
    "(attention_mode 'mla') .. latents": z_lab(dflash={"attention_mode": "mla"}),
    "latents .. architecture K3DSparkModel": dspark(architectures=["K3DSparkModel"]),
    "KDA layers .. attention_modes": z_lab(dflash={"attention_modes": ["kda", "gqa"]}),
    "a DSpine head .. architecture": z_lab(architectures=["DSpineDraftModel"]),
    "a DFlash head of Laguna .. g_proj": z_lab(architectures=["DFlashLagunaForCausalLM"]),
    "a JetSpec head of speculators": speculators_dflash(speculators_model_type="jetspec"),
    "a DSpark head of Gemma 4": dspark(architectures=["Gemma4DSparkModel"]),
    "a DSpark head of DeepSeek-V4": dspark(model_type="deepseek_v4"),
    "prediction modules of Inkling": vllm().plus(
        {"model.mtp.layers.0.transformer_block.attn.wq_du.weight": (2,)}
    ),
    "with DeepSeek's layers .. latents": vllm(architectures=["Eagle3DeepseekV2ForCausalLM"]),
    "EAGLE head with its target's": safeailab_eagle1(architectures=["EagleCohereForCausalLM"]),
    # Names that nobody has read yet.
    "architectures ['DFlashNewForCausalLM'] .. a DFlashDraftModel": z_lab(
        architectures=["DFlashNewForCausalLM"]
    ),
    "architectures ['NewModel'] .. no wiring": dspark(architectures=["NewModel"]),
    "architectures ['Eagle3NewForCausalLM']": vllm(architectures=["Eagle3NewForCausalLM"]),
    "architectures ['GemmaForCausalLM']": vllm(architectures=["GemmaForCausalLM"]),
    "model_type 'gemma3_text', of whose EAGLE": vllm(model_type="gemma3_text"),
    "architectures ['VispecDraftModel']": vllm(architectures=["VispecDraftModel"]),
    "architectures ['LlamaEagleDraftModel']": safeailab_eagle1(
        architectures=["LlamaEagleDraftModel"]  # NeMo's, with a norm before and after the layer
    ),
    "architectures ['PEagleNew']": specforge_peagle(mask_token_id=3, architectures=["PEagleNew"]),
    "model_type 'laguna'": z_lab(model_type="laguna"),
    "no rope_theta .. pass rope_theta=": z_lab(rope_theta=...),
    "use_sliding_window = True": amazon(use_sliding_window=True),
    "use_aux_hidden_state = False": z_lab(dflash={"use_aux_hidden_state": False}),
    "attention_sink_bias = True": z_lab(
        dflash={"attention_sink_bias": False}, attention_sink_bias=True
    ),
    "projector_type = 'other'": z_lab(dflash={"projector_type": "other"}),
    "spd_type = 'other'": pard(spd_type="other"),
    "LiLiCorr beside embeddings of its own": lilicorr().plus(EMBEDDINGS),
    "dflash_config.lilicorr_enabled = False": lilicorr(dflash={"lilicorr_enabled": False}),
    "has_own_lm_head = True": lilicorr(has_own_lm_head=True),
    "quantization_config.quant_algo = 'NVFP4'": lilicorr(
        quantization_config={"quant_algo": "NVFP4"}
    ),
}
OTHER_KINDS = {  # Heads of a block, where only EAGLE is asked for.
    "ptd_token_id = 5": vllm(ptd_token_id=5),
    "mask_token_id = 5": vllm(mask_token_id=5),
    "dflash_config.mask_token_id = 3": vllm(dflash_config={"mask_token_id": 3}),
    "speculators_model_type = 'peagle'": speculators(speculators_model_type="peagle"),
}
QWEN_LAYERS = speculators(kind="qwen3").config["transformer_layer_config"]
CONTRADICTIONS = {
    # EAGLE.
    "names layers more than once .. eagle_config": specforge(ids=[1, 3, 4], **{IDS: [1, 3, 4]}),
    "leads to 2 features .. joins, at width 32, 3": specforge(ids=[1, 3]),
    "leads to 4 features": vllm(ids=[1, 2, 3, 4]),
    "leads to 3 features .. 5; pass feature_layers=": safeailab_eagle3().plus(
        {"fc.weight": (HIDDEN, 5 * HIDDEN)}
    ),
    "num_aux_hidden_states is 5": vllm(num_aux_hidden_states=5),
    f"{IDS} must be a list of layer numbers, got 3": vllm(**{IDS: 3}),
    "got ['1', '2', '3']": vllm(ids=["1", "2", "3"]),
    "names a layer twice": vllm(ids=[2, 2, 5]),
    "hidden states -1..4 outside of 0..8": vllm(ids=[-1, 2, 4]),
    "hidden states 2..9 outside of 0..8 of the target's 8": vllm(ids=[2, 4, 9]),
    "read as outputs of layers (from 0), names hidden states 1..9": specforge(ids=[0, 4, 8]),
    "outputs of layers (from 0), names hidden states 0..5": specforge(ids=[-1, 3, 4]),
    "norm_before_fc is one norm over all": speculators(norm_before_fc=True, fc_norm=True),
    "norm_before_fc, fc_norm and fc_bias need has_fc=True": nvidia(
        eagle={"use_aux_hidden_state": False}, fc_norm=True
    ),
    "unexpected fc.weight": nvidia(eagle={"use_aux_hidden_state": False}),
    "unexpected norm.weight": nvidia(eagle={"use_last_layernorm": False}),
    "norm_output is set, but the tensors are": safeailab_eagle1(norm_output=True),
    f"{IDS} is [1, 2, 3], but .. EAGLE-1": safeailab_eagle1(**{IDS: [1, 2, 3]}),
    "missing fc.bias": safeailab_eagle1(bias=False).but(bias=True),
    "unexpected fc.bias": safeailab_eagle1().but(bias=False),
    "unexpected layers.0.input_layernorm.weight": safeailab_eagle1().plus(
        {"layers.0.input_layernorm.weight": (HIDDEN,)}
    ),
    "missing layers.0.self_attn.k_proj.bias": vllm(attention_bias=True),
    "missing .. layers.0.self_attn.q_proj.bias": safeailab_eagle1(qkv_bias=True),
    "missing fc_norm.0.weight": specforge(fc_norm=True),
    "missing input_norm.weight": speculators(norm_before_fc=True),
    "missing layers.1.input_layernorm.weight": vllm(num_hidden_layers=2),
    "missing layers.0.self_attn.k_norm.weight": speculators(transformer_layer_config=QWEN_LAYERS),
    "missing embed_tokens.weight": safeailab_eagle3(hidden=16).but("embed_tokens.weight"),
    "none of the families .. EAGLE .. It has model.layers.0.x": Files(
        vllm().config, {"model.layers.0.x": torch.ones(2)}
    ),
    # Mask-token heads.
    **{
        f"lacks {key}": lilicorr(dflash={key: None})
        for key in LILICORR_KEYS
        if key.startswith("lilicorr_") and key != "lilicorr_enabled"
    },
    "lilicorr_mlp_ratio must be a positive number, got '2'": lilicorr(
        dflash={"lilicorr_mlp_ratio": "2"}
    ),
    "num_heads must divide the width 6, got 4": lilicorr(dflash={"lilicorr_num_heads": 4}),
    "a lattice .. alignment='same-position'": lilicorr(dflash={"sample_from_anchor": True}),
    "a lattice of 4 candidates needs the target's whole vocabulary of 61 ids": lilicorr(
        draft_vocab_size=DRAFT_VOCAB
    ).plus({"lm_head.weight": (DRAFT_VOCAB, HIDDEN)}),
    "unexpected layers.0.attention_conv.base_kernel": lilicorr().plus(CONVOLUTIONS),
    "missing layers.0.attention_conv.base_kernel": lilicorr(
        dflash={"conv_kernel_size": 3, "conv_group_size": 4}
    ),
    "unexpected .. context_proj.weight_scale .. is stored as U8": lilicorr().plus(
        {
            "lilicorr.context_proj.weight": torch.zeros(6, HIDDEN // 2, dtype=torch.uint8),
            "lilicorr.context_proj.weight_scale": (6, 2),
        }
    ),
    "names two values of markov_rank": dspark(markov_rank=4, dflash_config={"markov_rank": 3}).plus(
        markov_shapes()
    ),
    "markov_head_type must be a string": dspark(markov_rank=4, markov_head_type=3),
    "MarkovConfig.kind must be 'vanilla'": dspark(markov_rank=4, markov_head_type="lstm"),
    "layer_types names 1 of 2 layers": z_lab(layer_types=["full_attention"]),
    "use_sliding_window needs": z_lab(layer_types=None, use_sliding_window=True),
    "sliding layers need sliding_window, a number of positions, got None": z_lab(
        layer_types=["sliding_attention"] * 2
    ),
    "no id of a mask token; pass mask_token_id= .. --mask-token-id": specforge_peagle(),
    "names no id of a mask token but the text '<|MASK|>'": z_lab(
        dflash={"mask_token_id": None, "mask_token": "<|MASK|>"}
    ),
    "names more than one mask token: .. 'mask_token_id': 3": amazon(mask_token_id=3),
    "ptd_token_id must be an id in 0..60, got True": amazon(ptd_token_id=True),
    "lacks block_size": z_lab(block_size=...),
    "block_size must be an integer in 1..1024, got 0": z_lab(block_size=0),
    "two values of block_size: 6 at the top and 4 as": z_lab(dflash={"block_size": 4}),
    "of sample_from_anchor: True at the top and False": z_lab(
        dflash={"sample_from_anchor": False}, sample_from_anchor=True
    ),
    "of shift_label: True at the top and False": domino(shift_label=False).but(shift_label=True),
    "of is_causal: True at the top and False": z_lab(dflash={"causal": False}, is_causal=True),
    "is_causal must be true or false, got 1": z_lab(is_causal=1),
    "says two things of whether blocks are causal": z_lab(
        dflash={"causal_head": True, "causal": False}
    ),
    "of whether blocks are causal: {'causal_head': False": z_lab(
        dflash={"causal_head": False}, architectures=["JetSpecDraftModel"]
    ),
    "head_type must be 'bidirectional' or 'causal', got 'tree'": z_lab(head_type="tree"),
    "use_sliding_window is false; set it to true": z_lab(
        layer_types=["sliding_attention"] * 2, sliding_window=8, use_sliding_window=False
    ),
    "use_swa), and use_sliding_window is false": z_lab(
        dflash={"use_swa": True}, sliding_window=8, use_sliding_window=False
    ),
    "at least 2 rows, got 1": z_lab(block_size=1),
    "a target of 12 layers, but LlamaForCausalLM has 8": z_lab(num_target_layers=12),
    "leads to 3 features": z_lab(dflash={"target_layer_ids": [1, 2, 4]}),
    "names layers more than once": z_lab(target_layer_ids=[1, 3]),
    "names no layers of features": speculators_dflash(aux_hidden_state_layer_ids=None),
    "made for a target with a vocabulary of 70": z_lab(vocab_size=70),
    "vocabulary of 2061 and the target's is 61; they must sh": pard(vocab_size=2061),
    "missing hidden_norm.weight": z_lab().but("hidden_norm.weight"),
    "missing mask_hidden": amazon().but("mask_hidden"),
    "mask_hidden has shape [1, 1, 64]": amazon().plus({"mask_hidden": (1, 2 * HIDDEN)}),
    "missing lm_head.weight": pard().but("lm_head.weight"),
    "missing .. layers.0.self_attn.q_proj.bias (mask)": pard(attention_bias=True),
    "unexpected layers.3": pard(layers=4).but(num_hidden_layers=3),
    "num_hidden_layers must be an integer in 1..1": deepspec(
        num_hidden_layers=2, layer_types=["full_attention"] * 2
    ),
    # Tensors.
    "unexpected layers.0.self_attn.kv_a_proj": nvidia().plus(
        {"layers.0.self_attn.kv_a_proj_with_mqa.weight": (2,)}
    ),
    "unexpected layers.0.mlp.experts": nvidia().plus(experts("layers")),
    "unexpected layers.0.mlp.experts.0.up_proj.weight": pard().plus(experts("model.layers")),
    "unexpected parallel_draft_heads": nvidia().plus(
        {"parallel_draft_heads.0.medusa_layers.0.linear.weight": (2,)}
    ),
    "missing fc.weight, layers.0.hidden_norm.weight": safeailab_eagle3().but(
        "fc.weight", "midlayer.hidden_norm.weight"
    ),
    "must bring the map d2t": safeailab_eagle3().but("d2t"),
    "midlayer.hidden_norm.weight .. two names for one tensor": safeailab_eagle3().plus(
        {"layers.0.hidden_norm.weight": (HIDDEN,)}
    ),
    # vLLM takes one of the two for the norm of a later layer, SGLang the other.
    "unexpected layers.1.hidden_norm.weight": vllm(num_hidden_layers=2).plus(
        {f"layers.1.{n}.weight": (HIDDEN,) for n in ("hidden_norm", "input_layernorm")}
    ),
    "unexpected extra.weight, layers.0.input_norm.bias": vllm().plus(
        {"extra.weight": (3,), "layers.0.input_norm.bias": (3,)}
    ),
    "norm.weight has shape [33], not [32]": safeailab_eagle3().plus({"norm.weight": (HIDDEN + 1,)}),
    "NaN or infinity in layers.0.mlp.up_proj.weight": with_tensor(
        "midlayer.mlp.up_proj.weight", lambda t: t / 0 * 0
    ),
    "fc.weight .. is stored as I8": with_tensor("fc.weight", lambda t: t.to(torch.int8)),
    "d2t is stored as F32": with_tensor("d2t", lambda t: t.float()),
    "outside of 0..60": with_tensor("d2t", lambda t: t + 1000),
    "t2d contradicts d2t in 2 ids": with_tensor("d2t", lambda t: t + (torch.arange(20) == 4)),
    # Numbers.
    "hidden_size must be an integer in 1..8388608, got 1099511627776": vllm(hidden_size=2**40),
    "hidden_size must be an integer": vllm(hidden_size=True),
    " hidden_size must be an integer": speculators(layers={"hidden_size": 10**10}),
    "lacks hidden_size": vllm(hidden_size=None),
    "num_hidden_layers must be an integer in 1..4096": safeailab_eagle3(num_hidden_layers=10**9),
    "62 draft ids are more than the vocabulary's 61": vllm(draft_vocab_size=62),
    "draft_vocab_size and truncated_vocab_size differ": vllm(truncated_vocab_size=19),
    "do not divide evenly": vllm(num_key_value_heads=3),
    "rms_norm_eps must be a positive number": vllm(rms_norm_eps=0),
    "norm_before_residual must be true or false": vllm(norm_before_residual=1),
    "hidden_act 'no such' is not one of HF's": vllm(hidden_act="no such"),
    "eagle_config must be an object": vllm(eagle_config=[1]),
    "architectures must be a list of strings": vllm(architectures="LlamaForCausalLM"),
    "lacks factor": vllm(rope_scaling={"type": "linear"}),
    "factor must be a number": vllm(rope_scaling={"type": "linear", "factor": "2"}),
    "rope_theta must be a positive number": vllm(rope_theta=-1.0),
}
NEW_OPTIONS = "unknown option rope; expected feature_layers, feed"
MISTAKEN = [
    (vllm(), {"layer_convention": "layers"}, "'hidden_state' or 'layer_output', got 'layers'"),
    (vllm(), {"feature_layers": (1, 2, 9)}, "must be hidden states 0..8 or 'final'"),
    (vllm(), {"feature_layers": (1, 2, 2)}, "none twice"),
    (vllm(), {"feature_layers": (1, 2)}, "leads to 2 features"),
    (vllm(), {"feature_layers": ("last", 1, 2)}, "must be hidden states 0..8 or 'final'"),
    (vllm(), {"feature_layers": 5}, "feature_layers"),
    (vllm(), {"rope_theta": 0}, "rope_theta must be a number > 0, got 0"),
    (vllm(), {"rope_theta": float("inf")}, "rope_theta"),
    (vllm(), {"norm_before_residual": "false"}, "norm_before_residual"),
    (safeailab_eagle1(), {"rope": 3}, NEW_OPTIONS),
    (safeailab_eagle1(), {"feedback_norm": True}, "feedback_norm: EAGLE-1 heads have none"),
    (safeailab_eagle1(), {"feature_layers": (1, 2)}, "the head reads one feature"),
    (pard(), {"feature_layers": (1,)}, "feature_layers: PARD heads have none; drop it"),
    (z_lab(), {"norm_before_residual": True}, "norm_before_residual: DFlash heads have none"),
    (z_lab(), {"mask_token_id": 99}, "mask_token_id (asked for) must be an id in 0..60"),
    (z_lab(), {"alignment": "unshifted"}, "goes with context='none', got 'keys'"),
    (z_lab(), {"layer": {"window": 3}}, "layer must be a dict of fields of LayerConfig"),
    (z_lab(), {"layer": 3}, "layer must be a dict of fields of LayerConfig, got 3"),
    (z_lab(), {"feedback_norm": True}, "unknown option feedback_norm; expected alignment"),
    (
        vllm().plus({"mask_hidden": (1, 1, 3 * HIDDEN)}),
        {"families": (EAGLE,)},
        "unexpected mask_hidden",
    ),
    (vllm(), {"ignore_keys": "mlp_bias"}, "ignore_keys must be a list of keys, got 'mlp_bias'"),
    (specforge(), {"families": (MASK_TOKEN,)}, "none of the families .. mask token (keys ptd_tok"),
    *((files, {"families": (EAGLE,)}, f"not supported .. {m}") for m, files in OTHER_KINDS.items()),
]
REFUSED = [
    *((files, {}, f"not supported .. {message}") for message, files in UNSUPPORTED.items()),
    *((files, {}, message.removesuffix(" (mask)")) for message, files in CONTRADICTIONS.items()),
    *MISTAKEN,
]


@pytest.mark.parametrize(("files", "options", "message"), REFUSED)
def test_what_cannot_be_read_for_sure_is_refused_by_name(files, options, message, tmp_path):
    refuses(files.write(tmp_path), message, **options)


SMALL, SHORT = {"hidden_size": 16}, {"num_layers": 6}
OTHER_TARGETS = [
    (nvidia(), SMALL, "hidden size of 32, but LlamaForCausalLM has 16"),
    (speculators(ids=(2, 4, 7)), SHORT, "hidden states 2..7 outside of 0..6 of the target's 6"),
    (safeailab_eagle3(), {"num_layers": 4}, "default .. coincide for a target of N = 4"),
]


@pytest.mark.parametrize(("files", "changes", "message"), OTHER_TARGETS)
def test_a_head_for_another_target_is_refused_naming_both(files, changes, message, tmp_path):
    refuses(files.write(tmp_path), message, tiny_llama(**changes))


def test_weights_that_overflow_the_targets_type_are_refused(tmp_path):
    files = safeailab_eagle3()
    files.tensors["norm.weight"][0] = 1e5
    with pytest.raises(ValueError, match=r"infinity in norm.weight, read as torch.float16"):
        EagleDrafter.from_pretrained(files.write(tmp_path), tiny_llama().half())


@pytest.mark.parametrize("name", ["warp_model.bin", "pard_warp_model", "mask_embedding.pt"])
def test_files_beside_a_checkpoint_that_change_it_are_refused_by_name(name, tmp_path):
    files, named = (z_lab(), name) if name == "mask_embedding.pt" else (pard(), "PARD-2")
    (files.write(tmp_path) / name).write_bytes(b"")
    refuses(tmp_path, f"not supported .. {named}")


SIZES_OF_CORRECTIONS = {
    "markov_rank": dspark(markov_rank=...),
    **dict.fromkeys(("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len"), domino()),
    **dict.fromkeys(
        ("selector_rank", "selector_top_k", "conv_kernel_size", "conv_group_size"),
        z_lab(architectures=["DFlash2DraftModel"]),
    ),
    **dict.fromkeys(
        ("xpress_rank", "xpress_mlp_ratio"), speculators_dflash(speculators_model_type="xpress")
    ),
}
ODD = [[4], {"a": 1}, "4"]


@pytest.mark.parametrize(
    ("key", "value"), [(key, ODD[i % 3]) for i, key in enumerate(SIZES_OF_CORRECTIONS)]
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_size_of_a_correction_is_an_integer(key, value, nested, tmp_path):
    files = SIZES_OF_CORRECTIONS[key]
    flash = {k: v for k, v in files.config.get("dflash_config", {}).items() if k != key}
    keys = {"dflash_config": flash | {key: value}, key: ...}
    keys = keys if nested else {"dflash_config": flash, key: value}
    refuses(
        files.but(**keys).write(tmp_path), f"config.json: {key} must be an integer in .. , got "
    )


@pytest.mark.parametrize("families", [(EAGLE, MASK_TOKEN, MTP), (MTP, MASK_TOKEN, EAGLE)])
def test_two_families_or_none_that_reads_a_file_say_so_in_any_order(families, tmp_path):
    """Of Medusa's key beside EAGLE's tensors, the one family that claims the files says why not."""
    refuses(
        z_lab(specdec_mtp={}).write(tmp_path / "two"),
        "marks of several families: .. MTP .. specdec_mtp",
        families=families,
    )
    medusa = EAGLE_CASES[0].files.but(medusa_num_heads=3).write(tmp_path / "none")
    refuses(medusa, "not supported .. medusa_num_heads = 3", families=families)
